"""
A hang is found within the timeout and one second, whenever each node notices it, with one question
or two.
"""

from __future__ import annotations

import random

import pytest

from tests.lib.tiers import by_tier

from .hang_scene import HangScene

BOUND = 1.0
"""Seconds beyond the timeout."""
EARLY = 0.45
"""What was used of a CPU in the last moments may be too little to count as work."""


def draw_times(seed: int, nodes: int, spread: float) -> list[list[float]]:
    """For each worker of each node the time until which it works."""
    rng = random.Random(seed)
    return [[3.0 + rng.random() * spread for _ in range(2)] for _ in range(nodes)]


@pytest.mark.parametrize(
    ("nodes", "timeout", "spread"),
    [
        (1000, 6.0, 0.3),  # a collective: all are idle within a moment
        (by_tier(100, 1000), 10.0, 25.0),  # one after another, over more than two timeouts
        (2, 6.0, 0.3),
        (2, 600.0, 900.0),
        (30, 60.0, 1.5),
    ],
)
@pytest.mark.parametrize("seed", range(by_tier(1, 8)))
def test_the_bound_holds_for_any_number_of_nodes(
    nodes: int, timeout: float, spread: float, seed: int
) -> None:
    times = draw_times(seed, nodes, spread)
    last = max(map(max, times))
    scene = HangScene(seed, timeout, times)
    scene.play(last + 3 * timeout)
    assert scene.found_at is not None
    assert timeout - EARLY <= scene.found_at - last <= timeout + BOUND
    assert scene.asked <= 2 * nodes


def test_nobody_hangs_while_one_of_two_thousand_workers_is_at_work() -> None:
    times = draw_times(5, by_tier(200, 1000), 4.0)
    times[77][1] = float("inf")
    scene = HangScene(5, 3.0, times)
    scene.play(40.0)
    assert scene.found_at is None
    assert scene.asked == len(times)  # once: then the report of that one is awaited
