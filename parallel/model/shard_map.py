"""
The shards of every weight on every rank of the axes that hold parts of weights (stages, ep and
tensor axes).

Ranks exchange the ranges of their shards once. Each rank derives from them:

* who sends a shard when a full weight is assembled;
* which of several equal shards counts in a norm and is saved;
* which weights several stages share (tied ones).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.model.shards import Ranges
from pdrun.parallel.model.weights import API_NAME, Weight

WeightRegion = tuple[Ranges, ...]
"""The ranges of each dim."""


@dataclass(frozen=True)
class WeightInfo:
    """A weight of the full model, before it is sharded."""

    name: str
    """The first of its names."""
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    unsynced: bool
    keep_dtype: bool = False
    opts_out: bool = False


class WeightCatalogue:
    """
    The weights of the full model.

    Args:
        model: before it is sharded.
        weights: its weights (`collect_weights`).
    """

    def __init__(self, model: nn.Module, weights: Iterable[Weight]) -> None:
        self.weights = [
            WeightInfo(
                w.name,
                w.index,
                w.shape,
                w.dtype,
                w.is_trained,
                w.unsynced,
                w.keep_dtype,
                w.opts_out,
            )
            for w in weights
        ]
        first: dict[int, str] = {}
        self._first = {
            name: first.setdefault(id(param), name)
            for name, param in model.named_parameters(remove_duplicate=False)
        }
        self._by_name = {entry.name: entry for entry in self.weights}

    def find_weight(self, name: str) -> WeightInfo | None:
        """Return the weight with a name, which can be one of several names."""
        return self._by_name.get(self._first.get(name, ""))

    def collect_weights(self, model: nn.Module) -> list[Weight]:
        """
        Return the weights of the model that this rank runs, as shards of the full model's weights.

        Raises:
            UsageError: a weight that the full model does not have, or has in another shape or type.
        """
        found: dict[int, Weight] = {}
        for name, param in model.named_parameters():
            entry = self.find_weight(name)
            if entry is None:
                raise UsageError(f"{name} is not a weight of the given model", where=API_NAME)
            if entry.index in found:
                raise UsageError(
                    f"{name} and {found[entry.index].name} were tied, and no longer are",
                    where=API_NAME,
                )
            own = entry.dtype, entry.is_trained, entry.unsynced, entry.keep_dtype
            made = Weight(entry.name, param, entry.index, tuple(param.shape), *own)
            made.opts_out = entry.opts_out
            if made.shard.shape != entry.shape or param.dtype != entry.dtype:
                what = (
                    f"{name} must be a shard of {list(entry.shape)} {entry.dtype},"
                    f" got a shard of {list(made.shard.shape)} {param.dtype}"
                )
                raise UsageError(
                    what,
                    where=API_NAME,
                    hint="set_shard notes which part of the weight it is",
                )
            if entry.unsynced and (made.shard.sum_axes or not made.shard.is_full):
                raise UsageError(
                    f"layerwise weight {name} is cut over {made.shard.layout.axes}", where=API_NAME
                )
            found[entry.index] = made
            param.requires_grad_(entry.is_trained)
        return [found[index] for index in sorted(found)]


class ShardMap:
    """
    The shards of each rank along the model axes.

    Args:
        axis: pp, ep and the tensor axes, pp the major one.
        stages: degree of pp.
        parts: by index on the axis and index of a weight.
        experts: degree of ep.
    """

    def __init__(
        self,
        axis: AxisGroup,
        stages: int,
        parts: Sequence[dict[int, WeightRegion]],
        experts: int = 1,
    ) -> None:
        self.axis = axis
        self.regions = parts
        self._per_stage = axis.size // stages
        self._per_expert_part = self._per_stage // experts

    def stages_of(self, index: int) -> tuple[int, ...]:
        """Return the stages that have a weight."""
        return tuple(
            dict.fromkeys(
                place // self._per_stage for place, part in enumerate(self.regions) if index in part
            )
        )

    def replicas_of(self, index: int) -> list[int]:
        """
        Return the indices with the same shard of a weight as this rank, and the same place on ep.

        Along ep ranks have other data, too: sums over the data axes count them.
        """
        mine = self.regions[self.axis.index][index]
        here = self._expert_part(self.axis.index)
        return [
            place
            for place, part in enumerate(self.regions)
            if part.get(index) == mine and self._expert_part(place) == here
        ]

    def _expert_part(self, place: int) -> int:
        return place % self._per_stage // self._per_expert_part

    def source_shards(self, index: int) -> list[tuple[int, WeightRegion]]:
        """Return the shards of a full weight, each with the first index that has it."""
        found: dict[WeightRegion, int] = {}
        for place, part in enumerate(self.regions):
            if index in part:
                found.setdefault(part[index], place)
        return [(place, box) for box, place in found.items()]

    def is_replicated(self, index: int) -> bool:
        """Whether all ranks of the model axes have the same shard of a weight."""
        return len(self.source_shards(index)) == 1 and all(index in part for part in self.regions)

    def is_first_shard(self, index: int) -> bool:
        """Whether this rank's shard is the first of the full weight."""
        return self.regions[self.axis.index][index] == self.source_shards(index)[0][1]

    def check_shards(self, catalogue: WeightCatalogue) -> None:
        """
        Check the shards against the weights.

        Raises:
            UsageError: shards that do not make a full weight, or a weight that stages shard
            differently.
        """
        for entry in catalogue.weights:
            held = sum(count_elements(box) for _, box in self.source_shards(entry.index))
            if held != prod(entry.shape):
                what = f"the ranks have {held} of {prod(entry.shape)} elements of {entry.name}"
                raise UsageError(
                    what,
                    where=API_NAME,
                    hint="every weight belongs to a stage, and its tiles to one whole",
                )
            stages = self.stages_of(entry.index)
            for inner in range(self._per_stage):
                boxes = {
                    self.regions[stage * self._per_stage + inner].get(entry.index)
                    for stage in stages
                }
                if len(boxes) > 1:
                    raise UsageError(
                        f"stages {stages} share {entry.name} and cut it differently", where=API_NAME
                    )


def count_elements(box: WeightRegion) -> int:
    """Return the number of elements of a region."""
    return prod(sum(high - low for low, high in ranges) for ranges in box)


def exchange_shards(
    axis: AxisGroup, stages: int, weights: Sequence[Weight], experts: int = 1
) -> ShardMap:
    """Exchange the ranges of shards between all ranks of pp, ep and the tensor axes."""
    mine = {weight.index: weight.shard.ranges for weight in weights}
    if axis.size == 1:
        return ShardMap(axis, stages, [mine])
    numbers = [number for index, box in mine.items() for number in _encode_region(index, box)]
    own = torch.tensor(numbers, dtype=torch.int64, device=axis.device)
    length = int(axis.all_reduce(torch.tensor([len(numbers)], device=axis.device), "max"))
    padded = torch.cat([own, own.new_full((length - len(numbers),), -1)])
    rows = axis.all_gather(padded.unsqueeze(0), 0).tolist()
    return ShardMap(axis, stages, [_decode_regions(row) for row in rows], experts)


def _encode_region(index: int, box: WeightRegion) -> list[int]:
    """Return index, number of dims, then for each dim the number of ranges and their bounds."""
    dims = [[len(ranges), *(bound for pair in ranges for bound in pair)] for ranges in box]
    return [index, len(box), *(number for dim in dims for number in dim)]


def _decode_regions(row: list[int]) -> dict[int, WeightRegion]:
    found: dict[int, WeightRegion] = {}
    at = 0
    while at < len(row) and row[at] >= 0:
        index = row[at]
        dims = row[at + 1]
        at = at + 2
        box = []
        for _ in range(dims):
            bounds = row[at + 1 : at + 1 + 2 * row[at]]
            box.append(tuple(zip(bounds[::2], bounds[1::2], strict=True)))
            at += 1 + 2 * row[at]
        found[index] = tuple(box)
    return found
