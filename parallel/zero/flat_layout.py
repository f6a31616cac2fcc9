"""
Weights stored end to end in one flat buffer, which is cut into equal shards: integers only.

Every weight starts at a multiple of ALIGN_ELEMENTS and every shard ends at one. A cut never falls
inside a vector register's worth of a weight: elementwise kernels give each element the same bits,
for any number of shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

ALIGN_ELEMENTS = 64
"""At least what a vectorised loop of torch takes at a time (4 registers of 16 floats)."""


@dataclass(frozen=True)
class FlatSlot:
    """The place of one weight."""

    name: str
    shape: tuple[int, ...]
    start: int
    """First element in the buffer."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """One past its last element in the buffer."""
        return self.start + self.numel


@dataclass(frozen=True)
class FlatSegment:
    """The part of a weight in one shard."""

    slot: int
    """Index of its weight."""
    start: int
    """First element, counted inside the flattened weight."""
    stop: int
    offset: int
    """Its start in the shard."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """Slots in a buffer of ``shards`` equal parts; the rest is padding."""

    slots: tuple[FlatSlot, ...]
    shards: int
    shard_numel: int
    """Elements of one shard."""

    @property
    def numel(self) -> int:
        """Elements of the full buffer, padding included."""
        return self.shards * self.shard_numel

    @cached_property
    def slot_extents(self) -> tuple[tuple[int, int], ...]:
        """The first and one past the last element of each slot: what is not padding."""
        return tuple((slot.start, slot.stop) for slot in self.slots)

    @cached_property
    def padding_extents(self) -> tuple[tuple[int, int], ...]:
        """The first and one past the last element of each run of padding."""
        ends = [0, *(stop for _, stop in self.slot_extents)]
        starts = [*(start for start, _ in self.slot_extents), self.numel]
        return tuple((low, high) for low, high in zip(ends, starts, strict=True) if low < high)

    def segments_of(self, shard: int) -> list[FlatSegment]:
        """Return the segments in a shard, in order."""
        low = shard * self.shard_numel
        high = (shard + 1) * self.shard_numel
        found = []
        for index, slot in enumerate(self.slots):
            start = max(slot.start, low)
            stop = min(slot.stop, high)
            if start < stop:
                found.append(FlatSegment(index, start - slot.start, stop - slot.start, start - low))
        return found


def make_flat_layout(
    weights: Sequence[tuple[str, Sequence[int]]], shards: int, ranks: int
) -> FlatLayout:
    """
    Return the layout of named shapes, in order.

    Args:
        shards: parts of the buffer.
        ranks: a multiple of ``shards``. The buffer is divisible by it, so that every rank can sum
            an equal part.
    """
    slots = []
    start = 0
    for name, shape in weights:
        slots.append(FlatSlot(name, tuple(shape), start))
        start += _round_up(prod(shape), ALIGN_ELEMENTS)
    return FlatLayout(
        tuple(slots), shards, _round_up(max(start, 1), ranks * ALIGN_ELEMENTS) // shards
    )


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
