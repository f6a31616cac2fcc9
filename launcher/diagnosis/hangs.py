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

IDLE = 0.02
"""Share of one CPU up to which a process does nothing: threads that look around now and then."""
TICKS = 0.02
"""CPU seconds beyond that, at any time: the kernel may count in hundredths."""
TRACEBACK = 60.0
"""
Seconds after which a worker that printed a traceback, and did nothing since, is on its way out and
stuck.
"""
SLOWEST = 5.0
QUICKEST = 0.2
"""Seconds between two looks."""
_NOTES = {"D": "; it waits in the kernel, uninterruptibly", "T": "; it is stopped by a signal"}


@dataclass(frozen=True)
class Seen:
    """One look at one worker."""

    step: int | None = None
    """The last step that it reported."""
    saved: int | None = None
    heard: float = 0.0
    """Monotonic seconds of its last output."""
    cpu: float | None = None
    """CPU seconds of its process tree; None: not known."""
    letter: str = "S"
    """Its state, as in /proc."""
    traced: bool = False
    """Whether a debugger holds it."""
    traceback: bool = False
    """Whether a traceback was its last word, and nothing tells that it went on."""


@dataclass(frozen=True)
class Suspicion:
    """Why a worker seems to hang."""

    why: str
    waits: bool = False
    """It is only quiet: it may be waiting for a worker that is at work."""
    ended: bool = False
    """Holds only where its stacks show that the program's code has ended."""


class Watch:
    """One worker of one generation."""

    def __init__(self, timeout: float | None, now: float) -> None:
        """``timeout``: the user's ``--hang-timeout`` in seconds, or None."""
        self._timeout = timeout
        self.every = min(SLOWEST, max(QUICKEST, (timeout or TRACEBACK) / 10))
        """Seconds between two looks."""
        self._last = now
        self._seen = Seen()
        self.quiet = 0.0
        """Seconds without output, CPU time or progress."""
        self.stuck = 0.0
        """Seconds without progress."""
        self._spent: float | None = None
        """CPU seconds that it had used when it was last active."""

    def look(self, seen: Seen, now: float) -> Suspicion | None:
        """Take what is seen now; return the suspicion, if there is one."""
        before = self._seen
        self._seen = seen
        passed = min(now - self._last, 2 * self.every)
        self._last = now
        moved = (seen.step, seen.saved) != (before.step, before.saved)
        # measured over all of the quiet time: the kernel counts in ticks, and one now and then is
        # no work
        if (
            seen.cpu is not None and self._spent is not None
        ):  # a child that has ended takes its time along
            self._spent = min(self._spent, seen.cpu)
        spent = None if seen.cpu is None or self._spent is None else seen.cpu - self._spent
        worked = spent is None or spent > IDLE * (self.quiet + passed) + TICKS
        first = before.cpu is None  # the start of the process counts as work
        self.stuck = 0.0 if moved or seen.traced else self.stuck + passed
        active = moved or worked or first or seen.traced or seen.heard > before.heard
        self.quiet = 0.0 if active else self.quiet + passed
        if active:
            self._spent = seen.cpu
        return self._judge(seen)

    def _judge(self, seen: Seen) -> Suspicion | None:
        limit = self._timeout
        note = _NOTES.get(seen.letter, "")
        if limit is not None and seen.step is not None and self.stuck >= limit:
            return Suspicion(f"no progress for {self.stuck:.0f} s (step {seen.step}){note}")
        if limit is not None and seen.step is None and self.quiet >= limit:
            return Suspicion(
                f"no output and no CPU time for {self.quiet:.0f} s{note}", waits=not note
            )
        if seen.traceback and self.quiet >= TRACEBACK:
            return Suspicion(
                f"it printed a traceback and is still there {self.quiet:.0f} s later", ended=True
            )
        return None
