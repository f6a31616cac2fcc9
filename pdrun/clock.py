"""Clocks as arguments: the system clock, and a clock that tests advance."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """
    Two readings of time.

    Durations and deadlines use ``monotonic`` only. ``wall`` is for display. No decision depends on
    another host's clock.
    """

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never decreases."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch; may jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never decreases."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch; may jump."""
        return time.time()


class FakeClock:
    """A clock that changes only when ``advance`` is called."""

    def __init__(self, monotonic: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never decreases."""
        return self._monotonic

    def wall(self) -> float:
        """Seconds since the epoch."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Move both readings ``seconds`` forward."""
        if seconds < 0:
            raise ValueError(f"seconds must not be negative, got {seconds}")
        self._monotonic += seconds
        self._wall += seconds
