"""
Layouts on another grid than the mesh: MindSpore's two forms, and its tensor maps.

    Layout((2, 2, 2), ("dp", "sp", "mp"))("dp", "None", ("sp", "mp"))  names of a device matrix
    layout_from_counts((4, 2), devices=8)                              4 shards of dim 0, 2 of dim 1
    match_counts((4, 2), grid)                                         the same, by axes of a mesh

A layout names the axes of each dim. A tensor map has numbers instead: the position of the axis from
the right, -1 for none. Devices that the counts leave unused repeat the calculation; the axis of the
repeats is the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pdrun.errors import UsageError
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.rank_order import order_axes
from pdrun.parallel.layouts.view import VIRTUAL_AXIS, View

UNSHARDED_NAME = "None"
"""The name of a dim that is not sharded, in a layout by names."""
REPEAT_AXIS = "repeat"
"""Name of the axis along which devices repeat the calculation."""
TensorMap = tuple[int | tuple[int, ...], ...]


@dataclass(frozen=True)
class DeviceMatrixLayout:
    """A layout with its grid, for tensors of any shape; ``virtual``: parts along `VIRTUAL_AXIS`."""

    grid: Grid
    layout: L
    virtual: int = 1

    def view_of(self, shape: tuple[int, ...]) -> View:
        """Return the view of a tensor of ``shape``."""
        return View(self.grid, self.layout, shape, self.virtual)

    def parts_along(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks' shards that some axes make together."""
        return self.grid.group_size(tuple(axis for axis in axes if axis != VIRTUAL_AXIS))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """All axes, the virtual one last."""
        return (*self.grid.names, VIRTUAL_AXIS) if self.virtual > 1 else self.grid.names

    @property
    def tensor_map(self) -> TensorMap:
        """The layout as a tensor map."""
        return to_tensor_map(self.layout, self.axis_names)


class Layout:
    """
    A device matrix with names. Call it with a name, a tuple of names (major first) or "None" per
    dim.

    Args:
        device_matrix: number of devices along each axis, outer to inner.
        alias_name: names of the axes; "interleaved_parallel" can be the last one and has no
            devices.
        rank_list: the rank at each place of the device matrix, the last axis fastest; default: in
            order. See `pdrun.parallel.layouts.rank_order`.

    Raises:
        UsageError: no tuples, different lengths, counts below 1, names that are empty, used twice
        or
            reserved, or a rank list that is no order of the axes.
    """

    def __init__(
        self,
        device_matrix: tuple[int, ...],
        alias_name: tuple[str, ...],
        rank_list: Sequence[int] | None = None,
    ) -> None:
        where = "Layout"
        if not isinstance(device_matrix, tuple) or not isinstance(alias_name, tuple):
            raise UsageError("device_matrix and alias_name must be tuples", where=where)
        if len(device_matrix) != len(alias_name) or not device_matrix:
            what = f"{len(device_matrix)} axes of the device matrix have {len(alias_name)} names"
            raise UsageError(what, where=where, hint="give one name to each axis")
        for count in device_matrix:
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise UsageError(
                    f"{count!r} in device_matrix is not a count of at least 1", where=where
                )
        for name in alias_name:
            if not isinstance(name, str) or not name:
                raise UsageError(f"{name!r} in alias_name is not a name", where=where)
            if name == UNSHARDED_NAME:
                raise UsageError(
                    f'the name "{UNSHARDED_NAME}" is reserved for dims that are whole', where=where
                )
            if alias_name.count(name) > 1:
                raise UsageError(f"the name {name!r} is given twice", where=where)
        if VIRTUAL_AXIS in alias_name[:-1]:
            raise UsageError(f"{VIRTUAL_AXIS!r} must be the last axis", where=where)
        self.alias_name = alias_name
        self.device_matrix = device_matrix
        real = len(alias_name) - (alias_name[-1] == VIRTUAL_AXIS)
        self.grid = Grid(alias_name[:real], device_matrix[:real])
        self.virtual = device_matrix[-1] if real < len(alias_name) else 1
        self.rank_list = None if rank_list is None else tuple(rank_list)
        self._parts: dict[str, tuple[str, ...]] = {name: (name,) for name in alias_name}
        if rank_list is not None:
            self.grid, parts = order_axes(self.grid, rank_list)
            self._parts |= parts

    def __call__(self, *tensor_map: str | tuple[str, ...]) -> DeviceMatrixLayout:
        """
        Return the layout of a tensor.

        Raises:
            UsageError: an argument is neither a name nor a tuple of names, or a name is unknown or
            used
                twice.
        """
        dims: list[tuple[str, ...]] = []
        for entry in tensor_map:
            names = (entry,) if isinstance(entry, str) else entry
            if (
                not isinstance(names, tuple)
                or not names
                or not all(isinstance(name, str) for name in names)
            ):
                what = f"{entry!r} is neither a name nor a tuple of names"
                raise UsageError(
                    what, where="Layout", hint=f'"{UNSHARDED_NAME}" means a dim without shards'
                )
            if names == (UNSHARDED_NAME,):
                dims.append(())
                continue
            for name in names:
                if name not in self.alias_name:
                    hint = f"the axes are {', '.join(self.alias_name)}"
                    raise UsageError(f"there is no axis {name!r}", where="Layout", hint=hint)
            dims.append(names)
        L(*dims)  # refuses a name that is used twice
        ordered = [tuple(part for name in dim for part in self._parts[name]) for dim in dims]
        return DeviceMatrixLayout(self.grid, L(*ordered), self.virtual)


def to_tensor_map(layout: L, names: tuple[str, ...]) -> TensorMap:
    """
    Return for each dim the position of its axis from the right; several as a tuple, -1 for none.
    """
    places = {name: len(names) - 1 - at for at, name in enumerate(names)}
    found: list[int | tuple[int, ...]] = []
    for dim in layout.dims:
        numbers = tuple(places[axis] for axis in dim)
        if not numbers:
            found.append(-1)
        elif len(numbers) == 1:
            found.append(numbers[0])
        else:
            found.append(numbers)
    return tuple(found)


def from_tensor_map(tensor_map: TensorMap, names: tuple[str, ...]) -> L:
    """
    Return the layout of a tensor map.

    Raises:
        UsageError: a number is neither -1 nor the position of an axis.
    """
    dims = []
    for entry in tensor_map:
        numbers = (entry,) if isinstance(entry, int) else tuple(entry)
        for number in numbers:
            if not -1 <= number < len(names):
                what = f"{number} in the tensor map {tensor_map} is no axis of {len(names)}"
                raise UsageError(
                    what, where="Layout", hint=f"0 to {len(names) - 1}, or -1 for none"
                )
        dims.append(tuple(names[len(names) - 1 - number] for number in numbers if number >= 0))
    return L(*dims)


def is_counts(value: Any) -> bool:
    """Return whether a value is a layout as counts: a tuple of whole numbers."""
    return isinstance(value, tuple) and all(
        isinstance(one, int) and not isinstance(one, bool) for one in value
    )


def layout_from_counts(cuts: tuple[int, ...], devices: int) -> DeviceMatrixLayout:
    """
    Return the layout that shards each dim into a number of shards, on the grid of these numbers.

    The grid has one axis per dim, ``d0``, ``d1`` and so on. If the counts use fewer than all
    devices, the axis `REPEAT_AXIS` is last: ``(2, 1)`` on 8 devices puts the first half on ranks 0
    to 3.

    Raises:
        UsageError: a count below 1, or a product that does not divide the number of devices.
    """
    _check_counts(cuts)
    used = math.prod(cuts)
    if devices % used:
        what = f"{cuts} cuts into {used} parts, which does not divide {devices} devices"
        raise UsageError(what, where="layout by counts")
    names = tuple(f"d{dim}" for dim in range(len(cuts)))
    layout = L(*[name if count > 1 else None for name, count in zip(names, cuts, strict=True)])
    repeats = devices // used
    return DeviceMatrixLayout(
        Grid((*names, REPEAT_AXIS), (*cuts, repeats)) if repeats > 1 else Grid(names, cuts), layout
    )


def match_counts(
    cuts: tuple[int, ...],
    grid: Grid,
    axes: tuple[str, ...] | None = None,
    *,
    takes_outer: bool = False,
) -> L:
    """
    Return the layout by the axes of a grid that shards each dim into a number of shards.

    Args:
        axes: axes that may be used; default: all.
        takes_outer: of several choices take the one with the outer axes, as MindSpore does.

    Raises:
        UsageError: a count below 1, no axes with these counts, or more than one choice of axes.
    """
    _check_counts(cuts)
    usable = [name for name in axes or grid.names if grid.degree(name) > 1]
    found = list(_matching_layouts(cuts, usable, grid))
    shown = (
        ", ".join(f"{name}={grid.degree(name)}" for name in usable)
        or "none of more than one device"
    )
    if not found:
        raise UsageError(
            f"no axes make the counts {cuts}",
            where="layout by counts",
            hint=f"the axes are {shown}",
        )
    if len(found) > 1 and not takes_outer:
        what = f"the counts {cuts} can be {found[0]} or {found[1]}"
        raise UsageError(what, where="layout by counts", hint=f"name the axes; they are {shown}")
    return found[0]


def has_counts(cuts: tuple[int, ...], grid: Grid, axes: tuple[str, ...]) -> bool:
    """Return whether some of the axes make these counts."""
    usable = [name for name in axes if grid.degree(name) > 1]
    return next(_matching_layouts(cuts, usable, grid), None) is not None


def _check_counts(cuts: tuple[int, ...]) -> None:
    for count in cuts:
        if not isinstance(count, int) or count < 1:
            raise UsageError(
                f"{count!r} in {cuts!r} is not a count of at least 1", where="layout by counts"
            )


def _matching_layouts(cuts: tuple[int, ...], usable: list[str], grid: Grid) -> Iterator[L]:
    """Yield every layout with these counts; the axes of a dim are in the order of the grid."""

    def fill(dim: int, free: list[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
        if dim == len(cuts):
            yield ()
            return
        for chosen in _axis_choices(cuts[dim], free, grid):
            rest = [name for name in free if name not in chosen]
            for others in fill(dim + 1, rest):
                yield (chosen, *others)

    return (L(*dims) for dims in fill(0, usable))


def _axis_choices(wanted: int, names: list[str], grid: Grid) -> Iterator[tuple[str, ...]]:
    """Yield every choice of names, in order, whose degrees multiply to ``wanted``."""
    if wanted == 1:
        yield ()
        return
    for at, name in enumerate(names):
        if wanted % grid.degree(name) == 0:
            for rest in _axis_choices(wanted // grid.degree(name), names[at + 1 :], grid):
                yield (name, *rest)


def to_mesh_layout(bound: DeviceMatrixLayout, grid: Grid) -> L:
    """
    Return a layout by the axes of another grid over the same ranks.

    Raises:
        UsageError: other ranks, a virtual axis, or an axis that is no run of full axes of the grid.
    """
    if bound.grid.size != grid.size:
        raise UsageError(
            f"({bound.grid}) has {bound.grid.size} devices, ({grid}) {grid.size}", where="Layout"
        )
    if VIRTUAL_AXIS in bound.layout.axes:
        what = f"{VIRTUAL_AXIS!r} is no axis of the mesh ({grid})"
        hint = "leave it out; the inputs of an operator of pdrun.Operators can be in parts"
        raise UsageError(what, where="Layout", hint=hint)
    named = {
        axis: _axes_within(bound.grid, axis, grid)
        for axis in (*bound.layout.axes, *bound.layout.sums)
    }
    dims = [tuple(name for axis in dim for name in named[axis]) for dim in bound.layout.dims]
    return L(*dims, sums=tuple(name for axis in bound.layout.sums for name in named[axis]))


def _axes_within(own: Grid, axis: str, grid: Grid) -> tuple[str, ...]:
    place = own.names.index(axis)
    low = math.prod(own.sizes[place + 1 :])
    high = low * own.degree(axis)
    found = []
    stride = 1
    for name, size in zip(reversed(grid.names), reversed(grid.sizes), strict=True):
        if size > 1 and low <= stride and stride * size <= high:
            found.append(name)
        stride *= size
    if math.prod(grid.degree(name) for name in found) != own.degree(axis):
        what = f"the axis {axis!r} of ({own}) is made of no whole axes of the mesh ({grid})"
        raise UsageError(
            what, where="Layout", hint="redistribute between two views, or choose a finer mesh"
        )
    return tuple(reversed(found))


def as_layout(value: Any, grid: Grid, axes: tuple[str, ...] | None = None) -> L:
    """
    Return a user's layout (`L`, `DeviceMatrixLayout` or counts) by the axes of a grid.

    Args:
        axes: axes that counts may use; default: all.

    Raises:
        UsageError: none of these forms, or the axes of the grid cannot express it.
    """
    if isinstance(value, L):
        for axis in (*value.axes, *value.sums):
            grid.degree(axis)
        return value
    if isinstance(value, DeviceMatrixLayout):
        return to_mesh_layout(value, grid)
    if is_counts(value):
        return match_counts(value, grid, axes)
    what = f"a layout must be an L, a Layout(...)(...) or counts, got {value!r}"
    raise UsageError(
        what, where="Layout", hint='L("dp", None), Layout(...)(...) or counts such as (4, 2)'
    )
