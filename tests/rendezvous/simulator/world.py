"""
Virtual time: a queue of things to do, one random source, nothing else.

Equal seeds give equal lives, event by event: ties are broken by the order in which things were
planned.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

Act = Callable[..., Any]


class World:
    """
    Implements `pdrun.clock.Clock`: virtual monotonic seconds, and a wall clock that is off by a
    day.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Act, tuple[Any, ...]]] = []
        self._planned = 0

    def monotonic(self) -> float:
        """Seconds since an arbitrary start."""
        return 5000.0 + self.now

    def wall(self) -> float:
        """Never used for a decision, so it may be anything."""
        return 86400.0 - self.now

    def after(self, delay: float, act: Act, *arguments: Any) -> None:
        """Plan ``act`` for ``delay`` virtual seconds from now."""
        self._planned += 1
        heapq.heappush(self._queue, (self.now + max(0.0, delay), self._planned, act, arguments))

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Let time pass until ``done``, until nothing is planned, or until ``until``."""
        while self._queue and not done():
            at, _, act, arguments = heapq.heappop(self._queue)
            if at > until:
                self.now = until
                return
            self.now = at
            self.events += 1
            act(*arguments)
