"""
The grid: devices as a box with named axes, outer to inner.

Ranks are numbered so that the last axis changes first: on ``Grid(("dp", "tp"), (2, 4))`` rank 5 is
(dp=1, tp=1).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from pdrun.errors import UsageError


@dataclass(frozen=True)
class Grid:
    """Named axes, outer to inner, and how many devices lie along each."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise UsageError(f"{len(self.names)} axes have {len(self.sizes)} sizes", where="Grid")
        if len(set(self.names)) != len(self.names):
            raise UsageError(f"an axis is named twice in {self.names}", where="Grid")
        if any(not isinstance(size, int) or size < 1 for size in self.sizes):
            raise UsageError(f"sizes {self.sizes} are not all at least 1", where="Grid")

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    def degree(self, axis: str) -> int:
        """
        Return the number of devices along an axis.

        Raises:
            UsageError: the grid has no such axis.
        """
        return self.sizes[self._axis_place(axis)]

    def group_size(self, axes: tuple[str, ...]) -> int:
        """Return the number of shards that some axes make together."""
        return math.prod(self.degree(axis) for axis in axes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the position of a rank along each axis."""
        if not 0 <= rank < self.size:
            raise UsageError(
                f"there is no rank {rank} on ({self})", where="Grid", hint=f"0 to {self.size - 1}"
            )
        found = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.names}

    def rank_at(self, coordinate: dict[str, int]) -> int:
        """Return the rank at a coordinate; a missing axis is at 0."""
        total = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            total = total * size + coordinate.get(name, 0)
        return total

    def group_ranks(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """
        Return the ranks that differ from ``rank`` along ``axes`` only, in the order of
        `group_index`.

        The first of ``axes`` is the major one, independent of its place in the grid.
        """
        here = self.coordinate(rank)
        spans = [range(self.degree(axis)) for axis in axes]
        return tuple(
            self.rank_at({**here, **dict(zip(axes, at, strict=True))})
            for at in itertools.product(*spans)
        )

    def group_index(self, axes: tuple[str, ...], rank: int) -> int:
        """Return the index of a rank among `group_ranks`."""
        here = self.coordinate(rank)
        total = 0
        for axis in axes:
            total = total * self.degree(axis) + here[axis]
        return total

    def _axis_place(self, axis: str) -> int:
        if axis not in self.names:
            raise UsageError(
                f"there is no axis {axis!r}",
                where="Grid",
                hint=f"the axes are {', '.join(self.names)}",
            )
        return self.names.index(axis)

    def __str__(self) -> str:
        return ", ".join(
            f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True)
        )
