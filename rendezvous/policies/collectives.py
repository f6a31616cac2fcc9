"""
Which rank is missing in a collective that others wait in. Pure.

Ranks that use CPU time while they wait hang only if somebody is missing. If all members of a group
are in the same collective, a long kernel may run before it, or the network may be slow: that is
left to the timeout of the collective itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pdrun.quick_dataclass import dataclass
from pdrun.rendezvous.protocol.messages import CollectiveReport

MAX_SHOWN_COLLECTIVES = 4
_PAIRWISE = ("send", "recv", "isend", "irecv", "wait")
"""Calls of which two ranks make different ones, or of which nothing is known."""


@dataclass(frozen=True)
class MissingRanks:
    """A collective in which some ranks wait for others."""

    state: CollectiveReport
    """Of the ranks that wait."""
    missing: tuple[int, ...]


def describe_collective(state: CollectiveReport) -> str:
    """Return ``all_reduce (sequence 101, group 0 (default_pg))``."""
    if not state.group:
        return state.operation
    return f"{state.operation} (sequence {state.sequence}, group {state.group})"


def find_missing(
    states: Sequence[CollectiveReport], ranks: Collection[int], active: Collection[int] = ()
) -> list[MissingRanks]:
    """
    Return the collectives in which ranks wait for others that are not there.

    Args:
        states: where ranks are; those of one rank are by their groups.
        ranks: all ranks whose state or absence is known.
        active: ranks that work: they may still come.
    """
    reached = _find_reached(states)
    waiting = {
        rank: state.operation for state in states if state.is_waiting for rank in state.ranks
    }
    found = []
    for state in states:
        if not state.is_waiting:
            continue
        members = set(state.members) & set(ranks) if state.members else set(ranks)
        missing = set()
        for rank in members - set(state.ranks) - set(active):
            here = reached.get((state.group, rank))
            if not state.group or here is None:
                is_missing = _is_elsewhere(state.operation, waiting.get(rank))
            else:
                is_missing = here < (state.sequence, state.operation)
                if here[0] == state.sequence:
                    is_missing = here[1] != state.operation
            if is_missing:
                missing.add(rank)
        if missing:
            found.append(MissingRanks(state, tuple(sorted(missing))))
    return found


def _is_elsewhere(operation: str, other: str | None) -> bool:
    """
    Whether a rank cannot be in the same collective as one that waits in ``operation``.

    Without the sequence numbers of both only the names tell.
    """
    if other is None:
        return True
    if operation.startswith(_PAIRWISE) or other.startswith(_PAIRWISE):
        return False
    return operation != other


def _find_reached(
    states: Sequence[CollectiveReport],
) -> Mapping[tuple[str, int], tuple[int, str]]:
    """Return sequence and operation of the last collective of each group and rank."""
    return {
        (state.group, rank): (state.sequence, state.operation)
        for state in states
        if state.group
        for rank in state.ranks
    }
