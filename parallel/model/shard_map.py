"""
Who holds which part of which weight over the model axes (stages and tensor axes): known to every
rank, once.

Ranks tell each other the ranges of their tiles as whole numbers. From that follows, alike on all
ranks: who sends a part when a whole weight is put together, which of several equal parts counts in
a norm and is saved, and which weights several stages share (tied ones).
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
    """A weight of the whole model, before anything is cut."""

    name: str
    """The first of its names."""
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    unsynced: bool
    keep_dtype: bool = False


class WeightCatalogue:
    """
    The weights of the whole model.

    Args:
        model: before it is cut.
        weights: its weights (`collect`).
    """

    def __init__(self, model: nn.Module, weights: Iterable[Weight]) -> None:
        self.weights = [
            WeightInfo(w.name, w.index, w.shape, w.dtype, w.is_trained, w.unsynced, w.keep_dtype)
            for w in weights
        ]
        first: dict[int, str] = {}
        self._first = {
            name: first.setdefault(id(param), name)
            for name, param in model.named_parameters(remove_duplicate=False)
        }
        self._by_name = {entry.name: entry for entry in self.weights}

    def find_weight(self, name: str) -> WeightInfo | None:
        """Return the weight that has a name, as one of several perhaps."""
        return self._by_name.get(self._first.get(name, ""))

    def collect_weights(self, model: nn.Module) -> list[Weight]:
        """
        Return the weights of what this rank runs, as parts of those of the whole model and in their
        order.

        Raises:
            UsageError: one that the whole model doesn't have, or has in another shape or type.
        """
        found: dict[int, Weight] = {}
        for name, param in model.named_parameters():
            entry = self.find_weight(name)
            if entry is None:
                raise UsageError(f"{name} is no weight of the model that was given", where=API_NAME)
            if entry.index in found:
                raise UsageError(
                    f"{name} and {found[entry.index].name} were tied, and no longer are",
                    where=API_NAME,
                )
            own = entry.dtype, entry.is_trained, entry.unsynced, entry.keep_dtype
            made = Weight(entry.name, param, entry.index, tuple(param.shape), *own)
            if made.shard.shape != entry.shape or param.dtype != entry.dtype:
                what = f"{list(made.shard.shape)} {param.dtype}, the model's is {list(entry.shape)} {entry.dtype}"
                raise UsageError(
                    f"{name} is a part of {what}",
                    where=API_NAME,
                    hint="set_shard says which part it is",
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
    What each rank along the model axes holds.

    Args:
        axis: pp and the tensor axes, pp the major one.
        stages: degree of pp.
        parts: by place on the axis and index of a weight.
    """

    def __init__(
        self, axis: AxisGroup, stages: int, parts: Sequence[dict[int, WeightRegion]]
    ) -> None:
        self.axis = axis
        self.regions = parts
        self._per_stage = axis.size // stages

    def stages_of(self, index: int) -> tuple[int, ...]:
        """Return the stages that hold a weight."""
        return tuple(
            dict.fromkeys(
                place // self._per_stage for place, part in enumerate(self.regions) if index in part
            )
        )

    def replicas_of(self, index: int) -> list[int]:
        """Return the places that hold the same part of a weight as this rank."""
        mine = self.regions[self.axis.index][index]
        return [place for place, part in enumerate(self.regions) if part.get(index) == mine]

    def source_shards(self, index: int) -> list[tuple[int, WeightRegion]]:
        """
        Return the parts of which a weight is put together, each with the first place that holds it.
        """
        found: dict[WeightRegion, int] = {}
        for place, part in enumerate(self.regions):
            if index in part:
                found.setdefault(part[index], place)
        return [(place, box) for box, place in found.items()]

    def is_replicated(self, index: int) -> bool:
        """Whether all ranks of the model axes hold a weight, or the same part of it."""
        return len(self.source_shards(index)) == 1 and all(index in part for part in self.regions)

    def is_first_shard(self, index: int) -> bool:
        """
        Whether this rank's part of a weight is the first of those of which it is put together.
        """
        return self.regions[self.axis.index][index] == self.source_shards(index)[0][1]

    def check_shards(self, catalogue: WeightCatalogue) -> None:
        """
        Hold the parts against the weights.

        Raises:
            UsageError: parts that do not make a whole, or a weight shared by stages that cut it
                differently.
        """
        for entry in catalogue.weights:
            held = sum(count_elements(box) for _, box in self.source_shards(entry.index))
            if held != prod(entry.shape):
                what = f"the ranks hold {held} of {prod(entry.shape)} elements of {entry.name}"
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
    """Return the number of elements of a box."""
    return prod(sum(high - low for low, high in ranges) for ranges in box)


def exchange_shards(axis: AxisGroup, stages: int, weights: Sequence[Weight]) -> ShardMap:
    """Have all ranks of the model axes tell each other what they hold."""
    mine = {weight.index: weight.shard.ranges for weight in weights}
    if axis.size == 1:
        return ShardMap(axis, stages, [mine])
    numbers = [number for index, box in mine.items() for number in _encode_region(index, box)]
    told = torch.tensor(numbers, dtype=torch.int64, device=axis.device)
    length = int(axis.all_reduce(torch.tensor([len(numbers)], device=axis.device), "max"))
    padded = torch.cat([told, told.new_full((length - len(numbers),), -1)])
    rows = axis.all_gather(padded.unsqueeze(0), 0).tolist()
    return ShardMap(axis, stages, [_decode_regions(row) for row in rows])


def _encode_region(index: int, box: WeightRegion) -> list[int]:
    """Return index, dims, then for each dim how many ranges there are and their bounds."""
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
