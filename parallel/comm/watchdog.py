"""
A collective that does not end in time becomes an error with the position of every rank.

After four fifths of the time limit a thread of the waiting process writes a question into torch's
store. The threads of all processes read it once per second. Each answers with its position: the
collective that it waits for, or the line of the user's program that it executes.

* On a CPU the wait ends with DeadlineExceeded and all answers.
* On an accelerator a wait does not block the process, and torch's own watchdog ends it. The answers
  are printed on stderr before that.

The threads end before the interpreter does. A thread that returned from torch's store while Python
shuts down would unwind frames of C++, which ends the process with SIGABRT after its work is done.
"""

from __future__ import annotations

import atexit
import itertools
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from pdrun.errors import DeadlineExceeded, PeerLost, UsageError

POLL_SECONDS = 1.0
"""Time between two reads of the store."""
ANSWER_SECONDS = 5.0
"""Time that the other ranks have for an answer."""
ASK_FRACTION = 0.8
"""Fraction of the limit after which the other ranks are asked."""
MEET_FRACTION = 0.75
"""Fraction of the limit that ranks have to meet: others may wait in a collective for that long."""
REPORT_SECONDS = 5.0
"""Time after which a rank that waits for others to meet prints so."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.0002, 0.05
"""Time between two looks at who has met."""
QUESTION_KEY = "pdrun/watch/question"
_PEER_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|ncclRemoteError"
)
"""How gloo and NCCL report a rank whose process has ended."""
PACKAGE_ROOT = str(Path(__file__).parents[1])


CLOSE_SECONDS = 5.0
"""Time that a thread has to return from the store at the end of the process."""

_running_watchdogs: set[CollectiveWatchdog] = set()
"""Watchdogs whose threads have not ended."""
_questions = itertools.count()
"""Questions of this process, of all its watchdogs."""
_meetings: Counter[tuple[str, str]] = Counter()
"""Meetings so far, by their ranks and label."""
_newest: CollectiveWatchdog | None = None
"""The watchdog of this process's newest run; earlier ones are closed."""


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
    """Close all watchdogs before the interpreter ends."""
    for watch in list(_running_watchdogs):
        watch.close(CLOSE_SECONDS)


def find_user_frame(frame: FrameType | None) -> FrameType | None:
    """
    Return the innermost frame that is neither torch's nor pdrun's, outside of installed packages if
    there is one.

    Args:
        frame: where to start.
    """
    found = None
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and not file.startswith((PACKAGE_ROOT, "<")):
            if "-packages/" not in file:
                return frame
            found = found or frame
        frame = frame.f_back
    return found


class CollectiveWatchdog:
    """
    Bounded waits for collectives.

    Args:
        seconds: limit of a wait.
        rank, world: of the job.
        store: torch's store of the job; None for a single process.
        blocking: whether waits block the process.
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
        Ask the thread to end and wait ``wait`` seconds for it; a store that does not answer does
        not block.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(wait)

    def enter_phase(self, place: str) -> None:
        """Note a phase of the program; errors name it."""
        self._phase, self._phase_start = place, time.monotonic()

    @property
    def is_in_phase(self) -> bool:
        """Whether a phase has begun and not ended."""
        return self._phase_start is not None

    def leave_phase(self) -> None:
        """Note the end of the phase."""
        self._phase_start = None
        self._report = ""

    def wait(self, work: Any, label: str) -> None:
        """
        Wait for a collective of torch.

        Raises:
            DeadlineExceeded: it has not ended in time; names the position of every rank.
            PeerLost: it cannot end because the process of another rank has ended.
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
                what = f"{label} cannot end: {PeerLost.SIGN} ({gone[0]})"
                raise PeerLost(
                    what,
                    where=self._phase if self._phase_start is not None else "pdrun.parallelize",
                ) from error
            raise  # another error: tensors of different sizes, for example
        self._wait_label = ""
        self._wait_start = None

    def meet(self, label: str, ranks: Sequence[int], what: str) -> None:
        """
        Wait until all of some ranks have called this with the same label, without a collective.

        For what a script may do on some ranks only: a collective would pair with another one.

        Args:
            ranks: of the job, this one among them.
            what: is described in the error.

        Raises:
            UsageError: some ranks have not called it within most of the time limit.
        """
        if self._store is None or len(ranks) == 1:
            return
        place = "-".join(map(str, ranks))
        _meetings[place, label] += 1
        key = f"pdrun/meet/{place}/{label}/{_meetings[place, label]}"
        keys = {rank: f"{key}/{rank}" for rank in ranks}
        self._store.set(keys[self.rank], "1")
        begin = time.monotonic()
        end = begin + MEET_FRACTION * self.seconds
        pause = MIN_PAUSE_SECONDS
        is_reported = False
        while not self._store.check(list(keys.values())):
            if not is_reported and time.monotonic() > begin + REPORT_SECONDS:
                is_reported = True
                print(
                    f"pdrun: {self._user_line()}: {what}, and rank {self.rank} has waited"
                    f" {REPORT_SECONDS:g} s for the other ranks: every rank must do so",
                    file=sys.stderr,
                    flush=True,
                )
            if time.monotonic() > end:
                missing = [rank for rank, each in keys.items() if not self._store.check([each])]
                if not missing:
                    break
                self._store.delete_key(keys[self.rank])
                _meetings[place, label] -= 1
                who = " and ".join(f"rank {rank}" for rank in missing)
                raise UsageError(
                    f"{what}, but {who} did not do so in {MEET_FRACTION * self.seconds:.0f} s",
                    where=self._user_line(),
                    hint="do it on every rank, equally often",
                )
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
        if self._store.add(f"{key}/left", 1) == len(ranks):  # the last one cleans up
            for each in (*keys.values(), f"{key}/left"):
                self._store.delete_key(each)

    def _deadline_error(self, report: str) -> DeadlineExceeded:
        hint = "every rank must take part in every step, in the same order"
        return DeadlineExceeded(
            f"no end after {self.seconds:g} s: {report}", where="pdrun.parallelize", hint=hint
        )

    def _ask_ranks(self, label: str) -> str:
        """
        Return the position of every rank.

        The thread and the main thread can both ask; the second gets the first one's answer.
        """
        with self._lock:
            if self._report:
                return self._report
            answers = {self.rank: f"waits for {label}{self._phase_text()}"}
            try:
                question = self._read_question()
                if not question or question in self._answered:
                    self._store.set(QUESTION_KEY, f"{self.rank}-{next(_questions)}")
                self._collect_answers(answers)
            except RuntimeError:
                pass  # the store has ended with rank 0
            self._report = "; ".join(
                f"rank {r} {answers.get(r, 'does not answer')}" for r in range(self.world)
            )
            return self._report

    def _collect_answers(self, answers: dict[int, str]) -> None:
        """
        Wait for the answers of the others to the newest question, which another rank may have
        asked.
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

    def _describe_position(self) -> str:
        """
        Return what this process waits for, or its line.

        A run and the user's own groups have watchdogs of their own, and each answers: all of them
        give the same answer, so that none overwrites the one of the watchdog that waits.
        """
        watchdogs = sorted(_running_watchdogs | {self}, key=lambda each: not each._wait_label)
        phases = [each._phase_text() for each in watchdogs]
        label = watchdogs[0]._wait_label
        place = f"waits for {label}" if label else f"is at {self._user_line()}"
        return place + next(filter(None, phases), "")

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
        """Answer questions, and ask one if this process has waited for long."""
        while not self._stop.wait(min(POLL_SECONDS, self.seconds / 10)):
            try:
                question = self._read_question()
                if question and question not in self._answered:
                    self._answered.add(question)
                    self._store.set(
                        f"{QUESTION_KEY}/{question}/{self.rank}", self._describe_position()
                    )
            except RuntimeError:
                return  # the store has ended with rank 0
            since = self._wait_start if self.blocking else self._phase_start
            if (
                since is not None
                and time.monotonic() - since > ASK_FRACTION * self.seconds
                and not self._report
            ):
                report = self._ask_ranks(
                    self._wait_label if self.blocking else f"its device at {self._user_line()}"
                )
                if not self.blocking:
                    print(f"pdrun: {self._deadline_error(report)}", file=sys.stderr, flush=True)

    def _user_line(self) -> str:
        """
        Return the innermost line of the main thread that is neither torch's nor pdrun's, outside of
        installed packages if there is one.
        """
        frame = find_user_frame(sys._current_frames().get(self._main))
        if frame is None:
            return "an unknown line"
        code = frame.f_code
        return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
