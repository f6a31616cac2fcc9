"""
A layout: the axes of the grid that shard each dim of a tensor.

    L("dp", None, "tp")             dim 0 over dp, dim 2 over tp; replicated over all other axes
    L(("dp", "cp"), None)           dim 0 over dp, and each shard over cp
    L("dp", None).partial("tp")     the tensor is the sum of the ranks' tensors along tp

Dims are sharded as evenly as possible, axis after axis, the first shards one longer: 6 over
(a=2, b=2) gives 2, 1, 2, 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdrun.errors import UsageError
from pdrun.parallel.layouts.grid import Grid

Dim = str | tuple[str, ...] | None
API_NAME = "Layout"


def shard_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """
    Return (low, high) of shard ``index`` of ``parts`` of a dim; the first ``size % parts`` are one
    longer.
    """
    # No divmod: the sizes of a compiler can be symbols.
    base = size // parts
    extra = size % parts
    low = index * base + min(index, extra)
    return low, low + base + (index < extra)


def _axes_of(dim: Dim) -> tuple[str, ...]:
    """Return the axes of a dim as a tuple."""
    if dim is None:
        return ()
    if isinstance(dim, str):
        return (dim,)
    return tuple(dim)


@dataclass(frozen=True, init=False)
class L:
    """
    A layout by axis names.

    Attributes:
        dims: for each dim of the tensor the axes that shard it, major first; empty: none.
        sums: axes of a partial sum: the tensor is the sum of the ranks' tensors.
    """

    dims: tuple[tuple[str, ...], ...]
    sums: tuple[str, ...] = ()

    def __init__(self, *dims: Dim, sums: tuple[str, ...] = ()) -> None:
        for dim in dims:
            if dim is not None and not isinstance(dim, (str, tuple, list)):
                what = f"{dim!r} is neither an axis, several of them, nor None"
                raise UsageError(what, where=API_NAME, hint='L("dp", ("x", "y"), None)')
        plain = tuple(_axes_of(dim) for dim in dims)
        used = [axis for dim in plain for axis in dim] + list(sums)
        for axis in used:
            if not isinstance(axis, str) or not axis:
                raise UsageError(f"{axis!r} is not the name of an axis", where=API_NAME)
            if used.count(axis) > 1:
                raise UsageError(
                    f"the axis {axis!r} is used twice", where=API_NAME, hint="an axis cuts one dim"
                )
        object.__setattr__(self, "dims", plain)
        object.__setattr__(self, "sums", tuple(sums))

    def partial(self, *axes: str) -> L:
        """Return the same layout with partial sums over some axes."""
        return L(*self.dims, sums=(*self.sums, *axes))

    def whole(self) -> L:
        """Return the same layout without partial sums."""
        return L(*self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that cut a dim."""
        return tuple(axis for dim in self.dims for axis in dim)

    def check(self, grid: Grid, shape: tuple[int, ...]) -> None:
        """
        Check the layout against a grid and the shape of a tensor.

        Raises:
            UsageError: an axis that the grid lacks, or another number of dims.
        """
        if len(self.dims) != len(shape):
            raise UsageError(
                f"{self} is for {len(self.dims)} dims, the tensor is {list(shape)}", where=API_NAME
            )
        for axis in (*self.axes, *self.sums):
            grid.degree(axis)

    def box(self, grid: Grid, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, int], ...]:
        """Return (low, high) of each dim of a rank's shard of a tensor of ``shape``."""
        if len(self.dims) != len(shape):
            self.check(grid, shape)
        here = grid.coordinate(rank)
        found = []
        for dim, size in zip(self.dims, shape, strict=True):
            low = 0
            high = size
            for axis in dim:
                start, stop = shard_range(high - low, grid.degree(axis), here[axis])
                low, high = low + start, low + stop
            found.append((low, high))
        return tuple(found)

    def ranges(
        self,
        grid: Grid,
        shape: tuple[int, ...],
        rank: int,
        blocks: Mapping[int, tuple[int, ...]] | None = None,
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """
        Return for each dim the (low, high) ranges of a rank's shard of a tensor of ``shape``, in
        order.

        Args:
            blocks: dims with several matrices side by side, each of which is sharded; with their
                sizes.

        Raises:
            UsageError: the layout does not fit, or the blocks of a dim do not add up to it.
        """
        self.check(grid, shape)
        found = []
        for dim, size in enumerate(shape):
            sizes = (blocks or {}).get(dim, (size,))
            if sum(sizes) != size:
                raise UsageError(
                    f"blocks {sizes} of dim {dim} do not add up to {size}", where=API_NAME
                )
            held = []
            start = 0
            for block in sizes:
                ((low, high),) = L(self.dims[dim]).box(grid, (block,), rank)
                held.append((start + low, start + high))
                start += block
            found.append(tuple(held) if self.dims[dim] else ((0, size),))
        return tuple(found)

    def local_shape(self, grid: Grid, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard of a tensor of ``shape``."""
        return tuple(high - low for low, high in self.box(grid, shape, rank))

    def __str__(self) -> str:
        def show(dim: tuple[str, ...]) -> str:
            if not dim:
                return "None"
            if len(dim) == 1:
                return repr(dim[0])
            return repr(dim)

        text = f"L({', '.join(show(dim) for dim in self.dims)})"
        if self.sums:
            return f"{text}.partial({', '.join(map(repr, self.sums))})"
        return text

    __repr__ = __str__
