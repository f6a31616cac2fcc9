"""Time as an argument: a clock that runs, and one that a test turns by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """
    Two readings. Durations and deadlines use ``monotonic`` only; ``wall`` is for showing to people.

    No decision is ever taken on another host's clock.
    """

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch; may jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch; may jump."""
        return time.time()


class FakeClock:
    """A clock that stands still until ``advance`` is called."""

    def __init__(self, monotonic: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        return self._monotonic

    def wall(self) -> float:
        """Seconds since the epoch."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Move both readings ``seconds`` forward."""
        if seconds < 0:
            raise ValueError(f"time does not go back ({seconds} s)")
        self._monotonic += seconds
        self._wall += seconds
