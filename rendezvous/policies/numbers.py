"""
The numbers that scripts report with their steps (`pdrun.progress`): summed over the workers of a
node by its agent, over the nodes by the scheduler. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdrun.rendezvous.protocol.messages import NodeNumber

MAX_NAMES = 64
"""Names that the record of a job has; a rank's own are fewer."""


def sum_numbers(
    reports: Mapping[int, Mapping[str, float | None]],
    bad_steps: Mapping[int, Mapping[str, int]] | None = None,
) -> tuple[NodeNumber, ...]:
    """
    Return one entry per name, sorted by name.

    Args:
        reports: rank -> name -> value; None: the value is not finite.
        bad_steps: rank -> name -> first step with such a value, where it is known.
    """
    found: dict[str, NodeNumber] = {}
    for rank, numbers in sorted(reports.items()):
        for name, value in numbers.items():
            if value is None:
                step = (bad_steps or {}).get(rank, {}).get(name, -1)
                one = NodeNumber(name, bad_rank=rank, bad_step=step)
            else:
                one = NodeNumber(name, 1, float(value), value, value, rank)
            found[name] = add_numbers(found[name], one) if name in found else one
    return tuple(found[name] for name in sorted(found)[:MAX_NAMES])


def add_numbers(one: NodeNumber, other: NodeNumber) -> NodeNumber:
    """Return two entries of one name as one. The first worker with the largest value is kept."""
    bad = min((entry for entry in (one, other) if entry.bad_rank >= 0), key=_bad_order, default=one)
    if not one.count or not other.count:
        full = one if one.count else other
        return NodeNumber(
            one.name,
            full.count,
            full.sum,
            full.least,
            full.most,
            full.rank,
            bad.bad_rank,
            bad.bad_step,
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
        bad.bad_rank,
        bad.bad_step,
    )


def _bad_order(one: NodeNumber) -> tuple[bool, int, int]:
    """Put the earliest step first: a bad value spreads with the next gradients."""
    return one.bad_step < 0, one.bad_step, one.bad_rank


def describe_numbers(
    nodes: Iterable[tuple[NodeNumber, ...]],
) -> dict[str, list[float | int | None]]:
    """
    Return what a ``progress`` event says: name -> [mean, least, most, rank of the most, bad rank].

    The last is the first worker whose value is not finite, or -1. Without a finite value, the first
    three are None.
    """
    found = _merge(nodes)
    values: dict[str, list[float | int | None]] = {}
    for name in sorted(found)[:MAX_NAMES]:
        one = found[name]
        if one.count:
            mean = one.sum / one.count
            values[name] = [mean, one.least, one.most, one.rank, one.bad_rank]
        else:
            values[name] = [None, None, None, -1, one.bad_rank]
    return values


def find_bad_steps(nodes: Iterable[tuple[NodeNumber, ...]]) -> dict[str, int]:
    """Return what ``bad`` of a ``progress`` event says: name -> first step, of bad numbers only."""
    found = _merge(nodes)
    names = sorted(found)[:MAX_NAMES]
    return {name: found[name].bad_step for name in names if found[name].bad_step >= 0}


def _merge(nodes: Iterable[tuple[NodeNumber, ...]]) -> dict[str, NodeNumber]:
    """Return the entries of all nodes, by name."""
    found: dict[str, NodeNumber] = {}
    for numbers in nodes:
        for one in numbers:
            found[one.name] = add_numbers(found[one.name], one) if one.name in found else one
    return found
