"""
Does a worker hang? Judged from what can be seen from outside; pure: each look at it is an argument,
as is the time.

    it reports progress      no new step, none newly saved, for the timeout: whatever its CPU does (collectives spin)
    it does not (yet)        no output and no CPU time of its whole process tree for the timeout
    its last word is a traceback, and it lives on idle for TRACEBACK seconds: without a timeout, too, but only
                             where its stacks show that the program's own code has ended

Time counts as it is seen: between two looks at most two intervals pass, so that a stall of the
agent, or of the whole machine, makes nobody hang. A worker in a debugger is left alone. One that
somebody stopped (SIGSTOP) does hang.

Limits. A worker that waits for others is as quiet as one that hangs: see `Reports` for who must be
quiet as well. Work that needs no CPU (a long kernel on a device, waited for without spinning)
counts as none: let such programs report progress.
"""

from __future__ import annotations

from dataclasses import dataclass

IDLE_CPU_SHARE = 0.02
"""Share of one CPU up to which a process does nothing: threads that look around now and then."""
CPU_TICK_SECONDS = 0.02
"""CPU seconds beyond that, at any time: the kernel may count in hundredths."""
TRACEBACK_SECONDS = 60.0
"""
Seconds after which a worker that printed a traceback, and did nothing since, is on its way out and
stuck.
"""
MAX_INTERVAL_SECONDS = 5.0
MIN_INTERVAL_SECONDS = 0.2
"""Seconds between two looks."""
_STATE_NOTES = {
    "D": "; it waits in the kernel, uninterruptibly",
    "T": "; it is stopped by a signal",
}


@dataclass(frozen=True)
class WorkerSample:
    """One look at one worker."""

    step: int | None = None
    """The last step that it reported."""
    saved: int | None = None
    output_at: float = 0.0
    """Monotonic seconds of its last output."""
    cpu_seconds: float | None = None
    """CPU seconds of its process tree; None: not known."""
    letter: str = "S"
    """Its state, as in /proc."""
    is_traced: bool = False
    """Whether a debugger holds it."""
    has_traceback: bool = False
    """Whether a traceback was its last word, and nothing tells that it went on."""


@dataclass(frozen=True)
class HangSuspicion:
    """Why a worker seems to hang."""

    reason: str
    may_be_waiting: bool = False
    """It is only quiet: it may be waiting for a worker that is at work."""
    only_if_ended: bool = False
    """Holds only where its stacks show that the program's code has ended."""


class HangDetector:
    """One worker of one generation."""

    def __init__(self, timeout: float | None, now: float) -> None:
        """``timeout``: the user's ``--hang-timeout`` in seconds, or None."""
        self._timeout = timeout
        self.interval = min(
            MAX_INTERVAL_SECONDS, max(MIN_INTERVAL_SECONDS, (timeout or TRACEBACK_SECONDS) / 10)
        )
        """Seconds between two looks."""
        self._last_at = now
        self._last_sample = WorkerSample()
        self.idle_seconds = 0.0
        """Seconds without output, CPU time or progress."""
        self.stuck_seconds = 0.0
        """Seconds without progress."""
        self._active_cpu_seconds: float | None = None
        """CPU seconds that it had used when it was last active."""

    def add_sample(self, seen: WorkerSample, now: float) -> HangSuspicion | None:
        """Take what is seen now; return the suspicion, if there is one."""
        before = self._last_sample
        self._last_sample = seen
        passed = min(now - self._last_at, 2 * self.interval)
        self._last_at = now
        moved = (seen.step, seen.saved) != (before.step, before.saved)
        # measured over all of the quiet time: the kernel counts in ticks, and one now and then is
        # no work
        if (
            seen.cpu_seconds is not None and self._active_cpu_seconds is not None
        ):  # a child that has ended takes its time along
            self._active_cpu_seconds = min(self._active_cpu_seconds, seen.cpu_seconds)
        spent = (
            None
            if seen.cpu_seconds is None or self._active_cpu_seconds is None
            else seen.cpu_seconds - self._active_cpu_seconds
        )
        worked = (
            spent is None
            or spent > IDLE_CPU_SHARE * (self.idle_seconds + passed) + CPU_TICK_SECONDS
        )
        first = before.cpu_seconds is None  # the start of the process counts as work
        self.stuck_seconds = 0.0 if moved or seen.is_traced else self.stuck_seconds + passed
        active = moved or worked or first or seen.is_traced or seen.output_at > before.output_at
        self.idle_seconds = 0.0 if active else self.idle_seconds + passed
        if active:
            self._active_cpu_seconds = seen.cpu_seconds
        return self._judge_sample(seen)

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
                f"it printed a traceback and is still there {self.idle_seconds:.0f} s later",
                only_if_ended=True,
            )
        return None
