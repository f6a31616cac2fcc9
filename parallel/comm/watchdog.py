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

POLL_SECONDS = 1.0
"""Seconds between two looks at the store."""
ANSWER_SECONDS = 5.0
"""Seconds that the others have for an answer."""
ASK_FRACTION = 0.8
"""Part of the limit after which the others are asked."""
QUESTION_KEY = "pdrun/watch/question"
_PEER_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|ncclRemoteError"
)
"""What gloo and NCCL say of a rank whose process has ended."""
PACKAGE_ROOT = str(Path(__file__).parents[1])


CLOSE_SECONDS = 5.0
"""Seconds at the end of the process in which a thread may come back from the store."""

_running_watchdogs: set[CollectiveWatchdog] = set()
"""Watches whose threads have not ended."""
_newest: CollectiveWatchdog | None = None
"""The watch of this process's newest run; an earlier one has nothing to watch any more."""


def start_watchdog(
    seconds: float, rank: int, world: int, store: Any, blocking: bool
) -> CollectiveWatchdog:
    """Return a new watch and end the one before."""
    global _newest
    if _newest is not None:
        _newest.close()
    _newest = CollectiveWatchdog(seconds, rank, world, store, blocking)
    return _newest


@atexit.register
def _close_all() -> None:
    """Come before the interpreter's end."""
    for watch in list(_running_watchdogs):
        watch.close(CLOSE_SECONDS)


class CollectiveWatchdog:
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
        self._phase = ""
        self._phase_start: float | None = None
        self._wait_label = ""
        self._wait_start: float | None = None
        self._report = ""
        """What the others have answered."""
        self._main = threading.main_thread().ident or 0
        self._store = store
        self._answered: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None and world > 1:
            self._thread = threading.Thread(
                target=self._run_thread, name="pdrun-watch", daemon=True
            )
            _running_watchdogs.add(self)
            self._thread.start()

    def close(self, wait: float = 0.0) -> None:
        """
        Have the thread end, and wait for that so many seconds: a store that does not answer must
        not hold us up.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(wait)

    def enter_phase(self, place: str) -> None:
        """Note what begins; it is named where it doesn't end."""
        self._phase, self._phase_start = place, time.monotonic()

    def leave_phase(self) -> None:
        """Note that it has ended."""
        self._phase_start = None
        self._report = ""

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
        self._wait_label, self._wait_start = label, time.monotonic()
        begin = self._wait_start
        try:
            work.wait(timedelta(seconds=self.seconds))
        except RuntimeError as error:
            if (
                time.monotonic() - begin >= self.seconds * 0.9
            ):  # the first whose time is over leaves the others, too
                raise self._deadline_error(self._ask_ranks(label)) from error
            if gone := _PEER_GONE.search(str(error)):
                what = f"{label} cannot come: {PeerLost.SIGN} ({gone[0]})"
                raise PeerLost(
                    what,
                    where=self._phase if self._phase_start is not None else "pdrun.parallelize",
                ) from error
            raise  # something else: the tensors differ, say
        self._wait_label = ""
        self._wait_start = None

    def _deadline_error(self, told: str) -> DeadlineExceeded:
        hint = "every rank must take part in every step, in the same order"
        return DeadlineExceeded(
            f"no end after {self.seconds:g} s: {told}", where="pdrun.parallelize", hint=hint
        )

    def _ask_ranks(self, label: str) -> str:
        """
        Return where every rank is; the thread and the process itself may both ask, the second gets
        the first's answer.
        """
        with self._lock:
            if self._report:
                return self._report
            answers = {self.rank: f"waits for {label}{self._phase_text()}"}
            try:
                question = self._read_question()
                if not question or question in self._answered:
                    self._store.set(QUESTION_KEY, f"{self.rank}-{len(self._answered)}")
                self._collect_answers(answers)
            except RuntimeError:
                pass  # the store went with rank 0
            self._report = "; ".join(
                f"rank {r} {answers.get(r, 'does not answer')}" for r in range(self.world)
            )
            return self._report

    def _collect_answers(self, answers: dict[int, str]) -> None:
        """
        Wait for the others' answers to the newest question, which may be another's that came a
        moment later.
        """
        end = time.monotonic() + ANSWER_SECONDS
        while len(answers) < self.world and time.monotonic() < end and not self._stop.is_set():
            question = self._read_question()
            if question not in self._answered:
                self._answered.add(question)
                self._store.set(f"{QUESTION_KEY}/{question}/{self.rank}", answers[self.rank])
            for rank in set(range(self.world)) - set(answers):
                key = f"{QUESTION_KEY}/{question}/{rank}"
                if self._store.check([key]):
                    answers[rank] = self._store.get(key).decode()
            time.sleep(0.05)

    def _read_question(self) -> str:
        if self._store.check([QUESTION_KEY]):
            return str(self._store.get(QUESTION_KEY).decode())
        return ""

    def _phase_text(self) -> str:
        if self._phase and self._phase_start is not None:
            return f" in {self._phase}"
        return ""

    def _run_thread(self) -> None:
        try:
            self._answer_questions()
        finally:
            _running_watchdogs.discard(self)

    def _answer_questions(self) -> None:
        """Answer questions; ask one where this process has waited for long."""
        while not self._stop.wait(min(POLL_SECONDS, self.seconds / 10)):
            try:
                question = self._read_question()
                if question and question not in self._answered:
                    self._answered.add(question)
                    label = self._wait_label
                    place = f"waits for {label}" if label else f"is at {self._user_line()}"
                    self._store.set(
                        f"{QUESTION_KEY}/{question}/{self.rank}", place + self._phase_text()
                    )
            except RuntimeError:
                return  # the store is gone: there is nobody to answer
            since = self._wait_start if self.blocking else self._phase_start
            if (
                since is not None
                and time.monotonic() - since > ASK_FRACTION * self.seconds
                and not self._report
            ):
                told = self._ask_ranks(
                    self._wait_label if self.blocking else f"its device at {self._user_line()}"
                )
                if not self.blocking:
                    print(f"pdrun: {self._deadline_error(told)}", file=sys.stderr, flush=True)

    def _user_line(self) -> str:
        """Return the innermost line of the main thread that is neither torch's nor pdrun's."""
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            file = frame.f_code.co_filename
            if "/torch/" not in file and not file.startswith((PACKAGE_ROOT, "<")):
                return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back
        return "an unknown line"
