"""
Detect workers that hang, from observations at given times. Pure.

A worker hangs if

* it has reported progress, and then neither a new step nor a newly saved step for the timeout. CPU
  time does not matter, because collectives spin;
* it has not reported progress yet, and there was neither output nor CPU time of its process tree
  for the timeout;
* its last output is a traceback, and it was idle for TRACEBACK_SECONDS. This needs no timeout, but
  only counts if its stacks show that the program's code has ended.

The time between two samples counts up to a limit, so that a stall of the agent or of the machine
makes no worker hang. A worker in a debugger never hangs. A stopped worker (SIGSTOP) hangs.

Limits: a worker that waits for others is as idle as one that hangs. `WorkerMonitor` decides which
others must be idle, too. Work without CPU time (a long kernel on a device, waited for without
spinning) is not seen: such programs should report progress.
"""

from __future__ import annotations

from pdrun.quick_dataclass import dataclass

IDLE_CPU_SHARE = 0.02
"""A process below this share of one CPU is idle: its threads only poll."""
CPU_TICK_SECONDS = 0.02
"""Additional CPU time that is ignored: the kernel may count in hundredths of a second."""
TRACEBACK_SECONDS = 60.0
"""A worker that was idle for this time after a traceback is stuck in its exit."""
TRACEBACK_INTERVAL_SECONDS = 5.0
"""Time between two samples without a timeout."""
MAX_INTERVAL_SECONDS = 0.4
MIN_INTERVAL_SECONDS = 0.1
"""
Limits of the time between two samples. A hang begins between two samples, so the longest interval
is what its detection may take beyond the timeout.
"""
MAX_GAP_SECONDS = 2.0
"""Time that counts at most between two samples; less for a short timeout."""
_STATE_NOTES = {
    "D": "; it is in uninterruptible sleep in the kernel",
    "T": "; it is stopped by a signal",
}


@dataclass(frozen=True)
class WorkerSample:
    """An observation of a worker."""

    step: int | None = None
    """Last step that it has reported."""
    saved: int | None = None
    output_at: float = 0.0
    """Time of its last output (monotonic)."""
    cpu_seconds: float | None = None
    """CPU time of its process tree; None: unknown."""
    letter: str = "S"
    """Process state, as in /proc."""
    is_traced: bool = False
    """Whether a debugger traces it."""
    has_traceback: bool = False
    """Whether its last output is a traceback, and nothing shows that it has continued."""


@dataclass(frozen=True)
class HangSuspicion:
    """Why a worker seems to hang."""

    reason: str
    may_be_waiting: bool = False
    """It is idle only: it may be waiting for a worker that is busy."""
    only_if_ended: bool = False
    """Counts only if its stacks show that the program's code has ended."""


class HangDetector:
    """Judges one worker of one generation."""

    def __init__(self, timeout: float | None, now: float) -> None:
        """``timeout``: the user's ``--hang-timeout`` in seconds, or None."""
        self._timeout = timeout
        self.interval = TRACEBACK_INTERVAL_SECONDS
        if timeout is not None:
            self.interval = min(MAX_INTERVAL_SECONDS, max(MIN_INTERVAL_SECONDS, timeout / 10))
        """Time between two samples."""
        self._max_gap = max(2 * self.interval, min(MAX_GAP_SECONDS, (timeout or 0.0) / 5))
        self._last_at = now
        self._last_sample = WorkerSample()
        self.idle_seconds = 0.0
        """Time without output, CPU time or progress."""
        self.stuck_seconds = 0.0
        """Time without progress."""
        self._active_cpu_seconds: float | None = None
        """CPU time that it had used when it was last active."""

    def add_sample(self, seen: WorkerSample, now: float) -> HangSuspicion | None:
        """Add an observation; return a suspicion, or None."""
        before = self._last_sample
        self._last_sample = seen
        passed = min(now - self._last_at, self._max_gap)
        self._last_at = now
        has_moved = (seen.step, seen.saved) != (before.step, before.saved)
        # CPU time is measured over the whole idle time, because a tick now and then is no work. It
        # decreases when a child ends that is not reaped yet.
        if seen.cpu_seconds is not None and self._active_cpu_seconds is not None:
            self._active_cpu_seconds = min(self._active_cpu_seconds, seen.cpu_seconds)
        has_worked = True
        if seen.cpu_seconds is not None and self._active_cpu_seconds is not None:
            spent = seen.cpu_seconds - self._active_cpu_seconds
            idle_share = IDLE_CPU_SHARE * (self.idle_seconds + passed)
            has_worked = spent > idle_share + CPU_TICK_SECONDS
        is_first = before.cpu_seconds is None  # the start of the process counts as work
        has_output = seen.output_at > before.output_at
        self.stuck_seconds += passed
        if has_moved or seen.is_traced:
            self.stuck_seconds = 0.0
        self.idle_seconds += passed
        if has_moved or has_worked or is_first or seen.is_traced or has_output:
            self.idle_seconds = 0.0
            self._active_cpu_seconds = seen.cpu_seconds
        return self._judge_sample(seen)

    def seconds_to_limit(self) -> float:
        """Return the seconds until the timeout if nothing more happens."""
        if self._timeout is None:
            return TRACEBACK_SECONDS - self.idle_seconds
        has_step = self._last_sample.step is not None
        return self._timeout - (self.stuck_seconds if has_step else self.idle_seconds)

    def _judge_sample(self, seen: WorkerSample) -> HangSuspicion | None:
        limit = self._timeout
        note = _STATE_NOTES.get(seen.letter, "")
        if limit is not None and seen.step is not None and self.stuck_seconds >= limit:
            return HangSuspicion(
                f"no progress for {self.stuck_seconds:.0f} s (step {seen.step}){note}"
            )
        if limit is not None and seen.step is None and self.idle_seconds >= limit:
            return HangSuspicion(
                f"no output and no CPU time for {self.idle_seconds:.0f} s{note}",
                may_be_waiting=not note,
            )
        if seen.has_traceback and self.idle_seconds >= TRACEBACK_SECONDS:
            return HangSuspicion(
                f"it printed a traceback and is still running {self.idle_seconds:.0f} s later",
                only_if_ended=True,
            )
        return None
