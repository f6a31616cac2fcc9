"""
The numbers that scripts report with their steps (`pdrun.progress`): summed over the workers of a
node by its agent, over the nodes by the scheduler. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdrun.rendezvous.protocol.messages import NodeNumber

MAX_NAMES = 64
"""Names that the record of a job has; a rank's own are fewer."""


def sum_numbers(reports: Mapping[int, Mapping[str, float | None]]) -> tuple[NodeNumber, ...]:
    """
    Return one entry per name, sorted by name.

    Args:
        reports: rank -> name -> value; None: the value is not finite.
    """
    found: dict[str, NodeNumber] = {}
    for rank, numbers in sorted(reports.items()):
        for name, value in numbers.items():
            if value is None:
                one = NodeNumber(name, bad_rank=rank)
            else:
                one = NodeNumber(name, 1, float(value), value, value, rank)
            found[name] = add_numbers(found[name], one) if name in found else one
    return tuple(found[name] for name in sorted(found)[:MAX_NAMES])


def add_numbers(one: NodeNumber, other: NodeNumber) -> NodeNumber:
    """Return two entries of one name as one. The first worker with the largest value is kept."""
    bad = [rank for rank in (one.bad_rank, other.bad_rank) if rank >= 0]
    bad_rank = min(bad, default=-1)
    if not one.count or not other.count:
        full = one if one.count else other
        return NodeNumber(
            one.name, full.count, full.sum, full.least, full.most, full.rank, bad_rank
        )
    total = one.sum + other.sum
    larger = other if (other.most, -other.rank) > (one.most, -one.rank) else one
    return NodeNumber(
        one.name,
        one.count + other.count,
        total,
        min(one.least, other.least),
        larger.most,
        larger.rank,
        bad_rank,
    )


def describe_numbers(
    nodes: Iterable[tuple[NodeNumber, ...]],
) -> dict[str, list[float | int | None]]:
    """
    Return what a ``progress`` event says: name -> [mean, least, most, rank of the most, bad rank].

    The last is the first worker whose value is not finite, or -1. Without a finite value, the first
    three are None.
    """
    found: dict[str, NodeNumber] = {}
    for numbers in nodes:
        for one in numbers:
            found[one.name] = add_numbers(found[one.name], one) if one.name in found else one
    values: dict[str, list[float | int | None]] = {}
    for name in sorted(found)[:MAX_NAMES]:
        one = found[name]
        if one.count:
            mean = one.sum / one.count
            values[name] = [mean, one.least, one.most, one.rank, one.bad_rank]
        else:
            values[name] = [None, None, None, -1, one.bad_rank]
    return values
