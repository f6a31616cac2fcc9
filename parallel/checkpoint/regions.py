"""
Regions: parts of tensors that are sharded along any dims, and the elements that two regions share.
Integers only.

A region is what a rank has of a tensor: ranges of each dim (see
`pdrun.parallel.model.shards.Shard`), in row-major order, and of that, flattened, the elements
``start`` to ``stop`` (a ZeRO shard). In the full tensor, flattened too, the elements of a region
are *spans*: runs without a gap. Spans of a region are in ascending order in both. One pass over the
spans of two regions finds what they share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from pdrun.errors import ConfigError

MAX_ROWS = 1 << 27
"""Rows of a region that is not contiguous. Each of them costs a step of Python."""
DimRanges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Region:
    """
    A part of a tensor.

    Attributes:
        shape: of the full tensor.
        ranges: for each dim the (low, high) ranges, ascending.
        start, stop: the range of elements, counted in the flattened ranges.
    """

    shape: tuple[int, ...]
    ranges: tuple[DimRanges, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements from ``start`` to ``stop``."""
        return self.stop - self.start


@dataclass(frozen=True)
class Span:
    """Consecutive elements, in the region and in the full tensor."""

    region_offset: int
    """First element, counted in the flattened region."""
    tensor_offset: int
    """First element, counted in the flattened full tensor."""
    count: int


def full_region(shape: Sequence[int]) -> Region:
    """Return the region that covers a tensor."""
    return Region(tuple(shape), tuple(((0, size),) for size in shape), 0, prod(shape))


def count_elements(ranges: Sequence[DimRanges]) -> int:
    """Return the number of elements in the ranges of all dims."""
    return prod(sum(high - low for low, high in dim) for dim in ranges)


def iter_spans(region: Region) -> Iterator[Span]:
    """Yield the spans of a region, in order."""
    # dims from `inner` on are complete: the rows of a span follow each other
    inner = len(region.shape)
    while inner and region.ranges[inner - 1] == ((0, region.shape[inner - 1]),):
        inner -= 1
    below = prod(region.shape[inner:])
    if not inner:
        if region.numel:
            yield Span(region.start, region.start, region.numel)
        return
    last = [
        ((low * below), (high - low) * below)
        for low, high in region.ranges[inner - 1]
        if high > low
    ]
    row = sum(count for _, count in last)
    if not row or region.numel <= 0:
        return
    rows_count = prod(sum(high - low for low, high in dim) for dim in region.ranges[: inner - 1])
    if rows_count > MAX_ROWS:
        raise ConfigError(f"a tensor of shape {region.shape} has too many rows for a layout")
    outer = [
        [place for low, high in dim for place in range(low, high)]
        for dim in region.ranges[: inner - 1]
    ]
    strides = [prod(region.shape[dim + 1 :]) for dim in range(inner - 1)]
    rows = itertools.islice(itertools.product(*outer), region.start // row, -(-region.stop // row))
    at = region.start // row * row
    for places in rows:
        base = sum(place * stride for place, stride in zip(places, strides, strict=True))
        for low, count in last:
            first = max(at, region.start)
            end = min(at + count, region.stop)
            if first < end:
                yield Span(first, base + low + first - at, end - first)
            at += count


@dataclass(frozen=True)
class SpanCopy:
    """Elements that two regions share; both offsets count in the flattened region."""

    source: int
    target: int
    count: int


def find_overlap(source: Region, target: Region) -> list[SpanCopy]:
    """
    Return the elements of ``source`` that are elements of ``target``, in order; neighbours are
    merged.

    Both are regions of tensors of one shape.
    """
    if not _may_overlap(source, target):
        return []
    found: list[SpanCopy] = []
    here = iter_spans(source)
    there = iter_spans(target)
    a = next(here, None)
    b = next(there, None)
    while a is not None and b is not None:
        low = max(a.tensor_offset, b.tensor_offset)
        high = min(a.tensor_offset + a.count, b.tensor_offset + b.count)
        if low < high:
            made = SpanCopy(
                a.region_offset + low - a.tensor_offset,
                b.region_offset + low - b.tensor_offset,
                high - low,
            )
            last = found[-1] if found else None
            if (
                last
                and last.source + last.count == made.source
                and last.target + last.count == made.target
            ):
                found[-1] = SpanCopy(last.source, last.target, last.count + made.count)
            else:
                found.append(made)
        if a.tensor_offset + a.count <= b.tensor_offset + b.count:
            a = next(here, None)
        else:
            b = next(there, None)
    return found


def _may_overlap(a: Region, b: Region) -> bool:
    """Whether the ranges of two regions overlap in every dim."""
    return (
        a.numel > 0
        and b.numel > 0
        and all(
            any(max(l1, l2) < min(h1, h2) for l1, h1 in mine for l2, h2 in theirs)
            for mine, theirs in zip(a.ranges, b.ranges, strict=True)
        )
    )
