"""Splitting a sequence of units with costs into consecutive parts, by number or by cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from pdrun.errors import UsageError

API_NAME = "pdrun.Pipeline"


def split_evenly(count: int, parts: int) -> list[range]:
    """
    Return ``parts`` consecutive ranges of 0..count-1; sizes differ by at most one, longer ones
    first.
    """
    _check_counts(count, parts)
    base, extra = divmod(count, parts)
    bounds = [part * base + min(part, extra) for part in range(parts + 1)]
    return [range(bounds[part], bounds[part + 1]) for part in range(parts)]


def split_by_cost(costs: Sequence[float], parts: int) -> list[range]:
    """
    Return ``parts`` consecutive, non-empty ranges with the smallest possible largest sum.

    Exact, by dynamic programming in O(parts * n**2): best(k, n) = min over i of max(best(k - 1, i),
    sum of i..n). Ties are broken by the least sum of squares, then by the longest first parts.
    """
    _check_counts(len(costs), parts)
    total = [0.0, *accumulate(costs)]
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [(float("inf"), 0.0)] * len(costs)
    cuts: list[list[int]] = []
    for part in range(1, parts + 1):
        fresh = [(float("inf"), 0.0)] * (len(costs) + 1)
        chosen = [0] * (len(costs) + 1)
        for end in range(part, len(costs) + 1):
            for start in range(part - 1, end):
                mine = total[end] - total[start]
                value = (max(best[start][0], mine), best[start][1] + mine * mine)
                if value <= fresh[end]:
                    fresh[end], chosen[end] = value, start
        best = fresh
        cuts.append(chosen)
    found = list[range]()
    end = len(costs)
    for chosen in reversed(cuts):
        found.append(range(chosen[end], end))
        end = chosen[end]
    return found[::-1]


def _check_counts(count: int, parts: int) -> None:
    if count < parts:
        what = f"{count} layer{'s' * (count != 1)} cannot be split into {parts} stages"
        raise UsageError(
            what, where=API_NAME, hint="fewer stages (pp times chunks), or stages={glob: stage}"
        )
