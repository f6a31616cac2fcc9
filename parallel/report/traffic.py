"""
The traffic of a step over the data axes, computed: calls of each collective, and its input bytes.

With P passes per step (micro-batches, or groups of copies), for every bucket of weights

    gathers of weights   levels 1 and 2: 1. Level 3: 1 if weights stay for a step and for weights
                         outside of units; 2 P for a unit that is gathered for each pass
    sums of gradients    P if every micro-batch is summed (`ReductionPolicy.reduce_each`), else 1

Transfers between stages and collectives of tensor axes are counted by `MeshGroups.counts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdrun.parallel.zero.gradients import GradientBucket
from pdrun.parallel.zero.shards import ShardedBucket

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState

MIB = 1024 * 1024


@dataclass(frozen=True)
class TrafficVolume:
    """Collectives of one kind in a step."""

    calls: int = 0
    nbytes: int = 0
    """Input bytes of this rank."""

    def __add__(self, other: TrafficVolume) -> TrafficVolume:
        """Return the sum of both."""
        return TrafficVolume(self.calls + other.calls, self.nbytes + other.nbytes)


def count_traffic(state: RunState) -> dict[str, TrafficVolume]:
    """
    Return what a step sends over the data axes, by the names in `ShardedGroup.calls` and
    `ShardedGroup.nbytes`.
    """
    found: dict[str, TrafficVolume] = {}
    passes = state.settings.accumulate // state.copies
    for cut in state.engine.sharded_buckets:
        if cut.comm.shards > 1:
            times = (
                2 * passes
                if cut.frees_full and cut.weights[0].unit and not state.settings.keep_for_step
                else 1
            )
            _add_volume(found, "all_gather", times, _shard_bytes(cut))
    for part in state.engine.gradient_buckets:
        if part.comm.world > 1:
            _count_sums(found, part, passes if part.reduces_each else 1)
    return found


def describe_traffic(state: RunState) -> str:
    """Return the traffic as text; empty if the data axes have one rank."""
    kinds = [
        f"{one.calls} x {name} of {one.nbytes / MIB:,.1f} MiB"
        for name, one in sorted(count_traffic(state).items())
    ]
    if kinds:
        return f"a step sends over the data axes, from this rank: {', '.join(kinds)}"
    return ""


def _shard_bytes(cut: ShardedBucket) -> int:
    return cut.layout.shard_numel * int(cut.compute_dtype.itemsize)


def _count_sums(found: dict[str, TrafficVolume], part: GradientBucket, times: int) -> None:
    numel = part.layout.numel
    wire = part.policy.wire_dtype or part.dtype
    if part.is_ordered:
        name = "all_to_all"
    elif part.comm.shards == 1:
        name = "all_reduce"
    else:
        name = "reduce_scatter"
    _add_volume(found, name, times, numel * wire.itemsize)
    if part.is_ordered and part.comm.replicas > 1:
        _add_volume(found, "join", 1, numel // part.comm.world * part.dtype.itemsize)


def _add_volume(found: dict[str, TrafficVolume], name: str, times: int, nbytes: int) -> None:
    found[name] = found.get(name, TrafficVolume()) + TrafficVolume(times, times * nbytes)
