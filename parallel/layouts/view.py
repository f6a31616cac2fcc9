"""
A view: a tensor of a shape with a layout on a grid.

Ranks can be seen as several grids: 8 ranks as (dp=2, tp=4), as (4, 2), or as one axis. The elements
of a tensor can be seen in several shapes. A view is a grid, a shape and a layout.

A layout can name the *virtual axis* `VIRTUAL_AXIS`, MindSpore's "interleaved_parallel". The parts
along it are on the same device, so that the communication of one overlaps with the computation of
another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pdrun.errors import UsageError
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import API_NAME, L, shard_range

VIRTUAL_AXIS = "interleaved_parallel"
"""Name of the axis whose parts are on one device."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class View:
    """
    A tensor over ranks.

    Attributes:
        grid: the ranks.
        layout: of the tensor on the grid.
        shape: of the full tensor.
        virtual: number of parts along `VIRTUAL_AXIS`.

    Raises:
        UsageError: the layout does not fit grid or shape, or a dim over `VIRTUAL_AXIS` is not
        sharded
            evenly.
    """

    grid: Grid
    layout: L
    shape: tuple[int, ...]
    virtual: int = 1

    def __post_init__(self) -> None:
        dims = [tuple(axis for axis in dim if axis != VIRTUAL_AXIS) for dim in self.layout.dims]
        L(*dims, sums=self.layout.sums).check(self.grid, self.shape)
        for dim, size in zip(self.layout.dims, self.shape, strict=True):
            if VIRTUAL_AXIS in dim and (size == 0 or size % self.parts_along(dim)):
                what = (
                    f"a dim of {size} is not cut evenly over {dim}, {self.parts_along(dim)} parts"
                )
                raise UsageError(what, where=API_NAME, hint=f"{VIRTUAL_AXIS!r} needs equal parts")

    def degree(self, axis: str) -> int:
        """Return the number of shards along an axis of the grid or the virtual one."""
        return self.virtual if axis == VIRTUAL_AXIS else self.grid.degree(axis)

    def parts_along(self, axes: tuple[str, ...]) -> int:
        """Return the number of shards that some axes make together."""
        return math.prod(self.degree(axis) for axis in axes)

    def ranges_of(self, rank: int) -> tuple[Ranges, ...]:
        """
        Return for each dim the (low, high) ranges of a rank, in order; one range without
        `VIRTUAL_AXIS`.
        """
        here = self.grid.coordinate(rank)
        found = []
        for dim, size in zip(self.layout.dims, self.shape, strict=True):
            held = [(0, size)]
            for axis in dim:
                places = range(self.virtual) if axis == VIRTUAL_AXIS else (here[axis],)
                held = [
                    (low + start, low + stop)
                    for low, high in held
                    for start, stop in (
                        shard_range(high - low, self.degree(axis), place) for place in places
                    )
                ]
            found.append(join_neighbours(held))
        return tuple(found)

    def local_shape(self, rank: int = 0) -> tuple[int, ...]:
        """Return the shape of a rank's shard; the one of rank 0 is the largest."""
        return tuple(sum(high - low for low, high in ranges) for ranges in self.ranges_of(rank))

    def local_elements(self, rank: int = 0) -> int:
        """Return the number of elements of a rank's shard."""
        return math.prod(self.local_shape(rank))

    def __str__(self) -> str:
        return f"{self.layout} of {list(self.shape)} on ({self.grid})"


def join_neighbours(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges with touching ones joined."""
    found: list[tuple[int, int]] = []
    for low, high in ranges:
        if found and found[-1][1] == low:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return tuple(found)
