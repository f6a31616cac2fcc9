"""
No hang without a name: when a collective does not end in time, say where every rank is.

Each process publishes nothing while all goes well. When a wait has lasted for four fifths of the
limit, a thread of the waiting process asks in torch's store, at which the threads of all processes
look every second; each answers with its place: the collective that it waits in, or the line of the
user's program that it executes. On a CPU the wait then ends with DeadlineExceeded and all answers;
on an accelerator, where a wait doesn't hold the process up and torch's own watchdog ends it, they
are told on stderr before that happens.

The threads end before the interpreter does: one that came back from torch's store while Python is
taken down would have to leave through frames of C++, which end the process with SIGABRT, after all
its work is done.
"""

from __future__ import annotations

import atexit
import re
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from pdrun.errors import DeadlineExceeded, PeerLost

POLL = 1.0
"""Seconds between two looks at the store."""
ANSWER = 5.0
"""Seconds that the others have for an answer."""
ASK = 0.8
"""Part of the limit after which the others are asked."""
QUESTION = "pdrun/watch/question"
_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|ncclRemoteError"
)
"""What gloo and NCCL say of a rank whose process has ended."""
OURS = str(Path(__file__).parents[1])


LEAVE = 5.0
"""Seconds at the end of the process in which a thread may come back from the store."""

_running: set[Watch] = set()
"""Watches whose threads have not ended."""
_last: Watch | None = None
"""The watch of this process's newest run; an earlier one has nothing to watch any more."""


def start(seconds: float, rank: int, world: int, store: Any, blocking: bool) -> Watch:
    """Return a new watch and end the one before."""
    global _last
    if _last is not None:
        _last.close()
    _last = Watch(seconds, rank, world, store, blocking)
    return _last


@atexit.register
def _close_all() -> None:
    """Come before the interpreter's end."""
    for watch in list(_running):
        watch.close(LEAVE)


class Watch:
    """
    Bounded waits for collectives.

    Args:
        seconds: what a wait may last.
        rank, world: place on the axis.
        store: torch's store of the job, or None in a world of one.
        blocking: whether waits hold the process up.
    """

    def __init__(
        self,
        seconds: float,
        rank: int = 0,
        world: int = 1,
        store: Any = None,
        blocking: bool = True,
    ) -> None:
        self.seconds = seconds
        self.rank = rank
        self.world = world
        self.blocking = blocking
        self._place = ""
        self._since: float | None = None
        self._waiting = ""
        self._waits_since: float | None = None
        self._told = ""
        """What the others have answered."""
        self._main = threading.main_thread().ident or 0
        self._store = store
        self._answered: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None and world > 1:
            self._thread = threading.Thread(target=self._serve, name="pdrun-watch", daemon=True)
            _running.add(self)
            self._thread.start()

    def close(self, wait: float = 0.0) -> None:
        """
        Have the thread end, and wait for that so many seconds: a store that does not answer must
        not hold us up.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(wait)

    def enter(self, place: str) -> None:
        """Note what begins; it is named where it doesn't end."""
        self._place, self._since = place, time.monotonic()

    def leave(self) -> None:
        """Note that it has ended."""
        self._since = None
        self._told = ""

    def wait(self, work: Any, label: str) -> None:
        """
        Wait for a collective of torch.

        Raises:
            DeadlineExceeded: it has not ended in time; names where every rank is.
            PeerLost: it cannot end, since a rank has.
        """
        if work is None:
            return
        if self._store is None or not self.blocking:
            work.wait()
            return
        self._waiting, self._waits_since = label, time.monotonic()
        begin = self._waits_since
        try:
            work.wait(timedelta(seconds=self.seconds))
        except RuntimeError as error:
            if (
                time.monotonic() - begin >= self.seconds * 0.9
            ):  # the first whose time is over leaves the others, too
                raise self._error(self._ask(label)) from error
            if gone := _GONE.search(str(error)):
                what = f"{label} cannot come: {PeerLost.SIGN} ({gone[0]})"
                raise PeerLost(
                    what, where=self._place if self._since is not None else "pdrun.parallelize"
                ) from error
            raise  # something else: the tensors differ, say
        self._waiting = ""
        self._waits_since = None

    def _error(self, told: str) -> DeadlineExceeded:
        hint = "every rank must take part in every step, in the same order"
        return DeadlineExceeded(
            f"no end after {self.seconds:g} s: {told}", where="pdrun.parallelize", hint=hint
        )

    def _ask(self, label: str) -> str:
        """
        Return where every rank is; the thread and the process itself may both ask, the second gets
        the first's answer.
        """
        with self._lock:
            if self._told:
                return self._told
            answers = {self.rank: f"waits for {label}{self._where()}"}
            try:
                question = self._question()
                if not question or question in self._answered:
                    self._store.set(QUESTION, f"{self.rank}-{len(self._answered)}")
                self._collect(answers)
            except RuntimeError:
                pass  # the store went with rank 0
            self._told = "; ".join(
                f"rank {r} {answers.get(r, 'does not answer')}" for r in range(self.world)
            )
            return self._told

    def _collect(self, answers: dict[int, str]) -> None:
        """
        Wait for the others' answers to the newest question, which may be another's that came a
        moment later.
        """
        end = time.monotonic() + ANSWER
        while len(answers) < self.world and time.monotonic() < end and not self._stop.is_set():
            question = self._question()
            if question not in self._answered:
                self._answered.add(question)
                self._store.set(f"{QUESTION}/{question}/{self.rank}", answers[self.rank])
            for rank in set(range(self.world)) - set(answers):
                key = f"{QUESTION}/{question}/{rank}"
                if self._store.check([key]):
                    answers[rank] = self._store.get(key).decode()
            time.sleep(0.05)

    def _question(self) -> str:
        if self._store.check([QUESTION]):
            return str(self._store.get(QUESTION).decode())
        return ""

    def _where(self) -> str:
        if self._place and self._since is not None:
            return f" in {self._place}"
        return ""

    def _serve(self) -> None:
        try:
            self._answer()
        finally:
            _running.discard(self)

    def _answer(self) -> None:
        """Answer questions; ask one where this process has waited for long."""
        while not self._stop.wait(min(POLL, self.seconds / 10)):
            try:
                question = self._question()
                if question and question not in self._answered:
                    self._answered.add(question)
                    label = self._waiting
                    place = f"waits for {label}" if label else f"is at {self._line()}"
                    self._store.set(f"{QUESTION}/{question}/{self.rank}", place + self._where())
            except RuntimeError:
                return  # the store is gone: there is nobody to answer
            since = self._waits_since if self.blocking else self._since
            if (
                since is not None
                and time.monotonic() - since > ASK * self.seconds
                and not self._told
            ):
                told = self._ask(
                    self._waiting if self.blocking else f"its device at {self._line()}"
                )
                if not self.blocking:
                    print(f"pdrun: {self._error(told)}", file=sys.stderr, flush=True)

    def _line(self) -> str:
        """Return the innermost line of the main thread that is neither torch's nor pdrun's."""
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            file = frame.f_code.co_filename
            if "/torch/" not in file and not file.startswith((OURS, "<")):
                return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back
        return "an unknown line"
