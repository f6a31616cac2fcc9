"""
Workers that use CPU time but only wait in a collective.

A rank that waits for others on a device spins, so its CPU time shows nothing. Such a rank waits if

* it has printed nothing and reported no step for the hang timeout;
* its main thread has never slept in all looks since: it spins;
* torch's flight recorder has a collective that it entered before that time and that is not
  complete, and none that it called since. Or, without a flight recorder, its Python stack was the
  same in all looks, and the innermost call is a collective.

A rank in a long kernel, a compilation or a checkpoint has no such collective, so it works. Whether
the waiting ranks wait for somebody who will not come is decided by the scheduler
(`pdrun.rendezvous.policies.collectives`), which knows all ranks.

Nothing is looked at while a worker of the node prints. Most looks only read /proc. A worker is
asked for its stack only if it has no flight recorder and its main thread spins: faulthandler reads
the stacks of all threads while they run, which is not safe in a process that compiles, for example.
The flight recorder is asked only if the main thread spins, too: torch prints a line for each dump.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdrun.launcher.common import procfs
from pdrun.launcher.diagnosis.flight_recorder import CollectiveRecord, DumpRequest
from pdrun.launcher.diagnosis.stack_collector import StackRequest
from pdrun.launcher.diagnosis.stacks import find_collective_call
from pdrun.rendezvous.protocol.messages import CollectiveReport

LOOKS_PER_TIMEOUT = 4
POLL_SECONDS = 0.1
MAX_LOOK_SECONDS = 60.0
"""Longest time between two looks."""
REPEAT_TIMEOUTS = 4
"""Timeouts after which a worker that stays the same is asked for a dump again."""
MAX_SWITCHES = 3
"""Times that a spinning main thread may sleep between two looks: it writes its stack."""
DUMP_NOISE_SECONDS = 1.0
"""Output of a worker within this time of a dump may be torch's line about it."""
TOLERANCE_SECONDS = 1.0
"""A collective is entered a moment after the last output, and clocks are read one after another."""

Worker = tuple[int, int, int]
"""Rank, slot and pid."""


@dataclass
class RankLooks:
    """What the looks at one worker have shown."""

    same_since: float
    """Time of the first of the looks between which its main thread has not slept."""
    count: int = 0
    """Number of these looks."""
    switches: int = 0
    stack: str = ""
    stack_count: int = 0
    """Number of these looks with this stack."""
    has_recorder: bool = False
    record: CollectiveRecord | None = None
    """What its flight recorder said last."""
    record_at: float = float("-inf")
    record_ns: int = 0
    """The same on the wall clock, in nanoseconds, to which the record's times belong."""
    due_at: float = float("inf")
    """Time at which the last collective of `record` is older than the timeout, if it lasts."""
    ask_at: float = 0.0
    """Time from which its flight recorder may be asked."""
    request: DumpRequest | None = None
    dump_windows: list[tuple[float, float]] = field(default_factory=list)
    """Times in which torch may have printed a line about a dump."""

    @property
    def needs_stack(self) -> bool:
        """
        Whether only its stack can tell where it is: without a flight recorder, or if that has
        nothing. torch records a call only when its communicator is ready.
        """
        if self.request is not None:
            return False
        if not self.has_recorder or self.record is None:
            return True
        return self.record.waiting is None and self.record_at >= self.same_since

    def reset(self, now: float) -> None:
        """The worker works: the looks so far show nothing."""
        self.same_since = now
        self.count = 0
        self.stack_count = 0

    def add_switches(self, switches: int, now: float) -> None:
        """Add a look at how often the main thread has slept."""
        if not self.count or not 0 <= switches - self.switches <= MAX_SWITCHES:
            self.reset(now)
        self.count += 1
        self.switches = switches

    def add_stack(self, stack: str, now: float) -> None:
        """Add a look at the stack."""
        if self.stack_count and stack != self.stack:
            self.reset(now)
        self.stack = stack
        self.stack_count += 1


def _stack_state(stack: str) -> CollectiveReport | None:
    """Return the collective of a stack, whose group and sequence number are not known."""
    call = find_collective_call(stack)
    return CollectiveReport((), "", 0, call, True) if call else None


class SpinWatch:
    """Looks at the workers of one node. One per generation."""

    def __init__(self, timeout: float, folder: Path, signal: Callable[[int, int], None]) -> None:
        """
        Args:
            timeout: the hang timeout in seconds.
            folder: the agent's folder.
            signal: sends a signal (number) to a worker (slot).
        """
        self._timeout = timeout
        self._folder = folder
        self._signal = signal
        self._interval = min(timeout / LOOKS_PER_TIMEOUT, MAX_LOOK_SECONDS)
        self._next_look = 0.0
        self._poll_at = 0.0
        """Time of the next look for dumps."""
        self._request: StackRequest | None = None
        self._pids: dict[int, int] = {}
        self._looks: dict[int, RankLooks] = {}
        self._output_at: dict[int, float] = {}

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which `run_once` is due, or None."""
        times = [] if self._request is None else [self._request.deadline]
        if any(looks.request is not None for looks in self._looks.values()):
            times.append(self._poll_at)
        return min(times, default=None)

    def close(self) -> None:
        """Cancel a look: its stacks are not read."""
        if self._request is not None:
            self._request.close()
            self._request = None

    def filter_output(self, rank: int, at: float) -> float:
        """Return the time of a worker's last output, apart from torch's line about a dump."""
        looks = self._looks.get(rank)
        before = self._output_at.get(rank, 0.0)
        if looks is None or not any(low <= at <= high for low, high in looks.dump_windows):
            self._output_at[rank] = before = at
        return before

    def run_once(
        self,
        workers: Sequence[Worker],
        idle: Collection[int],
        quiet_seconds: float,
        now: float,
        *,
        may_look: bool = True,
    ) -> None:
        """
        Look at the workers if that is due.

        Args:
            workers: those that are alive.
            idle: ranks that use no CPU time.
            quiet_seconds: time for which none of them has printed or reported anything.
            may_look: no other part collects their stacks.
        """
        self._poll_at = now + POLL_SECONDS
        self._read_stacks(now)
        self._read_dumps(now)
        if quiet_seconds < self._interval:
            for looks in self._looks.values():
                looks.reset(now)
            return
        spinning = [one for one in workers if self._is_spinning(one[0], idle)]
        if spinning and quiet_seconds >= self._timeout:
            for rank in (*(one[0] for one in spinning), *idle):
                self._ask_recorder(rank, now, now - quiet_seconds + self._timeout)
        if self._request is not None or not may_look or now < self._next_look:
            return
        self._next_look = now + self._interval
        for rank, _, pid in workers:
            looks = self._looks.setdefault(rank, RankLooks(now))
            looks.add_switches(procfs.read_voluntary_switches(pid) or 0, now)
        spinning = [one for one in workers if self._is_spinning(one[0], idle)]
        if not spinning:
            return
        # soon, because the first dump takes seconds
        for rank in (*(one[0] for one in spinning), *idle):
            self._ask_recorder(rank, now, self._looks[rank].same_since)
        unclear = [one for one in spinning if self._looks[one[0]].needs_stack]
        if unclear:
            self._request = StackRequest(
                unclear, self._folder, self._signal, now, uses_py_spy=False
            )

    def _is_spinning(self, rank: int, idle: Collection[int]) -> bool:
        looks = self._looks.get(rank)
        return looks is not None and looks.count >= 2 and rank not in idle

    def find_wait(self, rank: int, now: float) -> CollectiveReport | None:
        """
        Return the collective in which a worker has waited for the timeout; None: it may work.

        The caller has checked that it was silent for the timeout, and uses CPU time.
        """
        looks = self._looks.get(rank)
        # the first look comes a quarter of the timeout after the last output
        shown = self._timeout - 2 * self._interval
        if looks is None or looks.count < 2 or now - looks.same_since < shown:
            return None
        record = looks.record
        by_stack = _stack_state(looks.stack) if looks.stack_count >= 2 else None
        if record is None or not looks.has_recorder:
            return by_stack if looks.request is None else None
        # as of the dump: the worker may have gone on since
        since = looks.record_ns - int((self._timeout - TOLERANCE_SECONDS) * 1e9)
        is_old = record.waiting_since_ns <= since and record.newest_ns <= since
        if not is_old or looks.record_at < looks.same_since:
            return None
        return record.waiting or by_stack

    def collective_states(self, stacks: Mapping[int, str]) -> tuple[CollectiveReport, ...]:
        """Return where ranks are: by their flight recorders, otherwise by their ``stacks``."""
        found: dict[CollectiveReport, list[int]] = {}
        for rank, stack in stacks.items():
            looks = self._looks.get(rank)
            states = looks.record.states if looks is not None and looks.record is not None else ()
            by_stack = _stack_state(stack)
            if by_stack is not None and not any(state.is_waiting for state in states):
                states = (*states, by_stack)
            for state in states:
                found.setdefault(state, []).append(rank)
        order = sorted(found.items(), key=lambda item: (not item[0].is_waiting, item[1]))
        return tuple(replace(state, ranks=tuple(which)) for state, which in order)

    def _read_stacks(self, now: float) -> None:
        request = self._request
        if request is None or now < request.deadline or not request.poll_workers(now):
            return
        self._request = None
        for rank, stack in request.take_python_stacks().items():
            self._looks[rank].add_stack(stack, now)
        request.close()

    def _ask_recorder(self, rank: int, now: float, since: float) -> None:
        """
        Ask a worker for a dump, unless there is one that is younger than ``since``.

        Later it is asked again now and then, if nothing followed from the dump.
        """
        looks = self._looks.get(rank)
        if looks is None or looks.request is not None or now < looks.ask_at:
            return
        repeat_at = min(looks.due_at, looks.record_at + REPEAT_TIMEOUTS * self._timeout)
        if looks.record_at >= since and now < repeat_at:
            return
        request = DumpRequest(self._folder, rank, now)
        looks.has_recorder = request.was_asked
        if request.was_asked:
            looks.request = request
            looks.dump_windows = [*looks.dump_windows[-3:], (now, float("inf"))]

    def _read_dumps(self, now: float) -> None:
        for looks in self._looks.values():
            if looks.request is None:
                continue
            record = looks.request.poll(now)
            if record is not None:
                looks.record = record
                looks.record_at = now
                looks.record_ns = time.time_ns()
                age = (looks.record_ns - record.newest_ns) / 1e9
                left = self._timeout - TOLERANCE_SECONDS - age
                looks.due_at = now + left + POLL_SECONDS if left > 0 else float("inf")
                if age < self._interval:
                    # it calls collectives, always in the same line
                    looks.reset(now)
                    looks.ask_at = now + self._timeout - max(0.0, age)
            if looks.request.is_over:
                looks.request = None
                start, _ = looks.dump_windows[-1]
                looks.dump_windows[-1] = (start, now + DUMP_NOISE_SECONDS)
