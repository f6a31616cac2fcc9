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
from pdrun.parallel.model.weights import WHERE, Weight

Box = tuple[Ranges, ...]
"""The ranges of each dim."""


@dataclass(frozen=True)
class Entry:
    """A weight of the whole model, before anything is cut."""

    name: str
    """The first of its names."""
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    alone: bool
    wide: bool = False


class Catalogue:
    """
    The weights of the whole model.

    Args:
        model: before it is cut.
        weights: its weights (`collect`).
    """

    def __init__(self, model: nn.Module, weights: Iterable[Weight]) -> None:
        self.entries = [
            Entry(w.name, w.index, w.shape, w.dtype, w.trained, w.alone, w.wide) for w in weights
        ]
        first: dict[int, str] = {}
        self._first = {
            name: first.setdefault(id(param), name)
            for name, param in model.named_parameters(remove_duplicate=False)
        }
        self._by_name = {entry.name: entry for entry in self.entries}

    def find(self, name: str) -> Entry | None:
        """Return the weight that has a name, as one of several perhaps."""
        return self._by_name.get(self._first.get(name, ""))

    def collect(self, model: nn.Module) -> list[Weight]:
        """
        Return the weights of what this rank runs, as parts of those of the whole model and in their
        order.

        Raises:
            UsageError: one that the whole model doesn't have, or has in another shape or type.
        """
        found: dict[int, Weight] = {}
        for name, param in model.named_parameters():
            entry = self.find(name)
            if entry is None:
                raise UsageError(f"{name} is no weight of the model that was given", where=WHERE)
            if entry.index in found:
                raise UsageError(
                    f"{name} and {found[entry.index].name} were tied, and no longer are",
                    where=WHERE,
                )
            own = entry.dtype, entry.trained, entry.alone, entry.wide
            made = Weight(entry.name, param, entry.index, tuple(param.shape), *own)
            if made.tile.shape != entry.shape or param.dtype != entry.dtype:
                what = f"{list(made.tile.shape)} {param.dtype}, the model's is {list(entry.shape)} {entry.dtype}"
                raise UsageError(
                    f"{name} is a part of {what}",
                    where=WHERE,
                    hint="set_tile tells what a part is of",
                )
            if entry.alone and (made.tile.sums or not made.tile.is_whole):
                raise UsageError(
                    f"layerwise weight {name} is cut over {made.tile.layout.axes}", where=WHERE
                )
            found[entry.index] = made
            param.requires_grad_(entry.trained)
        return [found[index] for index in sorted(found)]


class Holders:
    """
    What each rank along the model axes holds.

    Args:
        axis: pp and the tensor axes, pp the major one.
        stages: degree of pp.
        parts: by place on the axis and index of a weight.
    """

    def __init__(self, axis: AxisGroup, stages: int, parts: Sequence[dict[int, Box]]) -> None:
        self.axis = axis
        self.parts = parts
        self._per_stage = axis.size // stages

    def stages_of(self, index: int) -> tuple[int, ...]:
        """Return the stages that hold a weight."""
        return tuple(
            dict.fromkeys(
                place // self._per_stage for place, part in enumerate(self.parts) if index in part
            )
        )

    def alike(self, index: int) -> list[int]:
        """Return the places that hold the same part of a weight as this rank."""
        mine = self.parts[self.axis.index][index]
        return [place for place, part in enumerate(self.parts) if part.get(index) == mine]

    def sources(self, index: int) -> list[tuple[int, Box]]:
        """
        Return the parts of which a weight is put together, each with the first place that holds it.
        """
        found: dict[Box, int] = {}
        for place, part in enumerate(self.parts):
            if index in part:
                found.setdefault(part[index], place)
        return [(place, box) for box, place in found.items()]

    def everywhere(self, index: int) -> bool:
        """Whether all ranks of the model axes hold a weight, or the same part of it."""
        return len(self.sources(index)) == 1 and all(index in part for part in self.parts)

    def leads(self, index: int) -> bool:
        """
        Whether this rank's part of a weight is the first of those of which it is put together.
        """
        return self.parts[self.axis.index][index] == self.sources(index)[0][1]

    def check(self, catalogue: Catalogue) -> None:
        """
        Hold the parts against the weights.

        Raises:
            UsageError: parts that do not make a whole, or a weight shared by stages that cut it
                differently.
        """
        for entry in catalogue.entries:
            held = sum(volume(box) for _, box in self.sources(entry.index))
            if held != prod(entry.shape):
                what = f"the ranks hold {held} of {prod(entry.shape)} elements of {entry.name}"
                raise UsageError(
                    what,
                    where=WHERE,
                    hint="every weight belongs to a stage, and its tiles to one whole",
                )
            stages = self.stages_of(entry.index)
            for inner in range(self._per_stage):
                boxes = {
                    self.parts[stage * self._per_stage + inner].get(entry.index) for stage in stages
                }
                if len(boxes) > 1:
                    raise UsageError(
                        f"stages {stages} share {entry.name} and cut it differently", where=WHERE
                    )


def volume(box: Box) -> int:
    """Return the number of elements of a box."""
    return prod(sum(high - low for low, high in ranges) for ranges in box)


def tell(axis: AxisGroup, stages: int, weights: Sequence[Weight]) -> Holders:
    """Have all ranks of the model axes tell each other what they hold."""
    mine = {weight.index: weight.tile.ranges for weight in weights}
    if axis.size == 1:
        return Holders(axis, stages, [mine])
    numbers = [number for index, box in mine.items() for number in _encode(index, box)]
    told = torch.tensor(numbers, dtype=torch.int64, device=axis.device)
    length = int(axis.all_reduce(torch.tensor([len(numbers)], device=axis.device), "max"))
    padded = torch.cat([told, told.new_full((length - len(numbers),), -1)])
    rows = axis.all_gather(padded.unsqueeze(0), 0).tolist()
    return Holders(axis, stages, [_decode(row) for row in rows])


def _encode(index: int, box: Box) -> list[int]:
    """Return index, dims, then for each dim how many ranges there are and their bounds."""
    dims = [[len(ranges), *(bound for pair in ranges for bound in pair)] for ranges in box]
    return [index, len(box), *(number for dim in dims for number in dim)]


def _decode(row: list[int]) -> dict[int, Box]:
    found: dict[int, Box] = {}
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
