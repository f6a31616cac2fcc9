"""
When a process that is asked for signs of life counts as one that stands still. Pure.

Unanswered pings are counted instead of time, so that a stall of the process that asks proves
nothing.
"""

from __future__ import annotations

PING_SECONDS = 1.0
MAX_UNANSWERED_PINGS = 6
"""As for the supervisor. A turn that waits for the journal's disk takes up to five seconds."""
NODES_PER_PING = 2500
"""In a large job a turn may take longer: one more ping per so many nodes."""
HURRIED_PINGS = 2
"""Unanswered pings of a process that a stop waits for."""


class PingCounter:
    """The pings to one process. Call `on_answer` before `is_frozen`."""

    def __init__(self, nodes: int) -> None:
        self._limit = MAX_UNANSWERED_PINGS + nodes // NODES_PER_PING
        self._unanswered = 0
        self.next_ping = 0.0
        """Monotonic time of the next ping."""

    def reset(self) -> None:
        """Another process is started: it owes no answers."""
        self._unanswered = 0
        self.next_ping = 0.0

    def on_ping(self, now: float) -> None:
        """A ping is sent."""
        self._unanswered += 1
        self.next_ping = now + PING_SECONDS

    def on_answer(self) -> None:
        """The process has answered: it runs."""
        self._unanswered = 0

    def is_frozen(self, *, is_hurried: bool = False) -> bool:
        """Return whether too many pings are unanswered; a few are enough if a stop waits."""
        return self._unanswered >= (HURRIED_PINGS if is_hurried else self._limit)

    @property
    def silence(self) -> float:
        """Seconds without an answer, as far as pings show."""
        return self._unanswered * PING_SECONDS
