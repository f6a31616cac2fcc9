"""
Bounds on time that hold on a loaded machine: an act is measured beside a neighbour that the load
slows as well.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

Seconds = Callable[[], float]
"""Does something and returns how long it took."""

ROUNDS = 5


def compared(act: Seconds, neighbour: Seconds, enough: float, rounds: int = ROUNDS) -> float:
    """
    Return how many times as long as its neighbour an act takes: the quickest of each, taken in
    turn.

    It ends early once that is below ``enough``; the neighbour goes twice a round, so that no hiccup
    of it is taken for its time.
    """
    beside = took = float("inf")
    for _ in range(rounds):
        beside = min(beside, neighbour())
        took = min(took, act())
        beside = min(beside, neighbour())
        if took < enough * beside:
            break
    return took / beside


def bare_start() -> float:
    """Seconds from the start to the end of an interpreter that does nothing."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True, stdin=subprocess.DEVNULL)
    return time.monotonic() - begin


def in_starts(act: Seconds, enough: float) -> float:
    """
    Return how many starts of a bare interpreter an act costs (15 ms each, where nothing else runs).
    """
    return compared(act, bare_start, enough)
