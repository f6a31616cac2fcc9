"""
No hang without a name: when a collective does not end in time, say where every rank is.

Each process publishes nothing while all goes well. When a wait has lasted longer than the limit, the waiting rank asks in
torch's store; a thread in every process looks for the question every second and answers with its place: the
collective that it waits in, or the line of the user's program that it executes. The first to run out of time
raises DeadlineExceeded with all answers; a rank that doesn't answer is named as such.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from pdrun.errors import DeadlineExceeded

POLL = 1.0
"""Seconds between two looks at the store."""
ANSWER = 5.0
"""Seconds that the others have for an answer."""
OURS = str(Path(__file__).parent)


_last: Watch | None = None
"""The watch of this process's newest run; an earlier one has nothing to watch any more."""


def start(seconds: float, rank: int, world: int, store: Any, blocking: bool) -> Watch:
    """Return a new watch and end the one before."""
    global _last
    if _last is not None:
        _last.close()
    _last = Watch(seconds, rank, world, store, blocking)
    return _last


class Watch:
    """
    Bounded waits for collectives.

    On an accelerator a wait doesn't hold the process up, and torch's own watchdog ends it. There the thread looks whether a step
    has taken four fifths of the limit, and then tells where every rank is on stderr, before the watchdog acts.

    Args:
        seconds: what a wait may last.
        rank, world: place on the axis.
        store: torch's store of the job, or None in a world of one.
        blocking: whether waits hold the process up.
    """

    def __init__(self, seconds: float, rank: int = 0, world: int = 1, store: Any = None, blocking: bool = True) -> None:
        self.seconds, self.rank, self.world, self.blocking = seconds, rank, world, blocking
        self._place = ""
        self._since: float | None = None
        self._waiting = ""
        self._main = threading.main_thread().ident or 0
        self._store = store
        self._stop = threading.Event()
        if store is not None and world > 1:
            self._thread = threading.Thread(target=self._serve, name="pdrun-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()

    def enter(self, place: str) -> None:
        """Note what begins; it is named where it doesn't end."""
        self._place, self._since = place, time.monotonic()

    def leave(self) -> None:
        """Note that it has ended."""
        self._since = None

    def wait(self, work: Any, label: str) -> None:
        """
        Wait for a collective of torch.

        Raises:
            DeadlineExceeded: it has not ended in time; names where every rank is.
        """
        if work is None:
            return
        if self._store is None or not self.blocking:
            work.wait()
            return
        self._waiting, begin = label, time.monotonic()
        try:
            work.wait(timedelta(seconds=self.seconds))
        except RuntimeError as error:
            if time.monotonic() - begin < self.seconds * 0.9:
                raise  # something else than time: a peer is gone, or the tensors differ
            raise self._explain(label) from error
        self._waiting = ""

    def _explain(self, label: str) -> DeadlineExceeded:
        """Ask the others where they are."""
        answers = {self.rank: f"waits for {label}{self._where()}"}
        try:
            self._store.set("pdrun/watch/question", "?")
            end = time.monotonic() + ANSWER
            for rank in range(self.world):
                while rank not in answers and time.monotonic() < end:
                    if self._store.check([f"pdrun/watch/{rank}"]):
                        answers[rank] = self._store.get(f"pdrun/watch/{rank}").decode()
                    else:
                        time.sleep(0.05)
        except RuntimeError:
            pass  # the store went with rank 0
        told = "; ".join(f"rank {rank} {answers.get(rank, 'does not answer')}" for rank in range(self.world))
        hint = "every rank must take part in every step, in the same order"
        return DeadlineExceeded(f"no end after {self.seconds:g} s: {told}", where="pdrun.parallelize", hint=hint)

    def _where(self) -> str:
        return f" in {self._place}" if self._place and self._since is not None else ""

    def _serve(self) -> None:
        """Look for the question, answer it once; on an accelerator, ask it."""
        while not self._stop.wait(min(POLL, self.seconds / 4)):
            try:
                if self._store.check(["pdrun/watch/question"]):
                    label = self._waiting
                    place = f"waits for {label}" if label else f"is at {self._line()}"
                    self._store.set(f"pdrun/watch/{self.rank}", place + self._where())
                    return
            except RuntimeError:
                return  # the store is gone: there is nobody to answer
            since = self._since
            if not self.blocking and since is not None and time.monotonic() - since > 0.8 * self.seconds:
                print(f"pdrun: {self._explain(f'its device at {self._line()}')}", file=sys.stderr, flush=True)
                return

    def _line(self) -> str:
        """Return the innermost line of the main thread that is neither torch's nor pdrun's."""
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            file = frame.f_code.co_filename
            if "/torch/" not in file and not file.startswith((OURS, "<")):
                return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back
        return "an unknown line"
