"""
A view: one tensor, laid over the ranks in one way.

Ranks may be seen through several grids: 8 of them as (dp=2, tp=4), as (4, 2), or as one axis; and
the elements of a tensor through several shapes. A view is a grid, a shape and the layout that joins
them.

A layout may name the *virtual axis* `VIRTUAL`, MindSpore's "interleaved_parallel": the parts along
it lie on the same device, so that one part's communication can run beside the other's computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pdrun.errors import UsageError
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import WHERE, L, shard_range

VIRTUAL_AXIS = "interleaved_parallel"
"""Name of the axis whose parts lie on one device."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class View:
    """
    A tensor over ranks.

    Attributes:
        grid: the ranks.
        layout: how the tensor lies over them.
        shape: of the whole tensor.
        virtual: number of parts along `VIRTUAL`.

    Raises:
        UsageError: the layout fits neither grid nor shape, or a dim that is cut over `VIRTUAL`
            isn't cut evenly.
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
                raise UsageError(what, where=WHERE, hint=f"{VIRTUAL_AXIS!r} needs equal parts")

    def degree(self, axis: str) -> int:
        """Return the number of parts along an axis of the grid or the virtual one."""
        return self.virtual if axis == VIRTUAL_AXIS else self.grid.degree(axis)

    def parts_along(self, axes: tuple[str, ...]) -> int:
        """Return how many parts some axes make together."""
        return math.prod(self.degree(axis) for axis in axes)

    def ranges_of(self, rank: int) -> tuple[Ranges, ...]:
        """
        Return for each dim the (low, high) ranges that a rank holds, in order; one each without
        `VIRTUAL`.
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
        """Return the shape of what a rank holds; rank 0 holds most."""
        return tuple(sum(high - low for low, high in ranges) for ranges in self.ranges_of(rank))

    def local_elements(self, rank: int = 0) -> int:
        """Return the number of elements that a rank holds."""
        return math.prod(self.local_shape(rank))

    def __str__(self) -> str:
        return f"{self.layout} of {list(self.shape)} on ({self.grid})"


def join_neighbours(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges with neighbours made one."""
    found: list[tuple[int, int]] = []
    for low, high in ranges:
        if found and found[-1][1] == low:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return tuple(found)
