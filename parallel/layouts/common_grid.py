"""
One grid and one shape for two views of the same ranks and elements.

Grids: take the products of sizes from the right, of both grids, sorted. If each divides the next,
they are the strides of a grid that refines both, and an axis of either is a run of its axes.

Shapes: the same. A dim that several axes shard is first written as several dims with one axis each:
8 over ("sp", "dp") of 2 and 2 becomes (2, 4) over "sp" and "dp". A sharded dim that is split into
several keeps its axis if the sizes allow it, which can refine the grid once more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L, shard_range
from pdrun.parallel.layouts.view import VIRTUAL_AXIS, View

AxisStack = tuple[str, ...]
AxisSplits = dict[str, AxisStack]
DimPieces = list[tuple[int, AxisStack]]
"""Dims as (size, axes that shard it)."""


@dataclass(frozen=True)
class ViewPair:
    """
    Two views on one grid and one shape, with the same elements in the same order as the given
    views.
    """

    source: View
    target: View


class _AxisSplitNeeded(Exception):
    """An axis must be split into two, the first of ``major`` devices."""

    def __init__(self, axis: str, major: int) -> None:
        super().__init__(axis, major)
        self.axis = axis
        self.major = major


class _NoCommonForm(Exception):
    """The views have no common form."""


def unify_views(source: View, target: View, expand: bool = True) -> ViewPair | None:
    """
    Return both views in one form; None if they have no common form.

    Args:
        expand: write dims that several axes shard as several dims. Without it, shapes must be
            equal.
    """
    joined = find_common_grid(source.grid, target.grid)
    if joined is None or (not expand and source.shape != target.shape):
        return None
    grid, first, second = joined
    while True:
        try:
            here = _on_common_grid(source, first, grid)
            there = _on_common_grid(target, second, grid)
            dims = _common_dims(here, there, grid, (source.virtual, target.virtual), expand)
            break
        except _AxisSplitNeeded as wish:
            grid, split = _split_axis(grid, wish.axis, wish.major)
            first = {axis: _replace_axes(names, split) for axis, names in first.items()}
            second = {axis: _replace_axes(names, split) for axis, names in second.items()}
        except _NoCommonForm:
            return None
    shape = tuple(size for size, _, _ in dims)
    sums = (_replace_axes(source.layout.sums, first), _replace_axes(target.layout.sums, second))
    return ViewPair(
        View(grid, L(*[axes for _, axes, _ in dims], sums=sums[0]), shape),
        View(grid, L(*[axes for _, _, axes in dims], sums=sums[1]), shape),
    )


# ---- grids ------------------------------------------------------------------


def find_common_grid(first: Grid, second: Grid) -> tuple[Grid, AxisSplits, AxisSplits] | None:
    """Return the coarsest grid that refines both, and for each axis of either its run of axes."""
    if first == second:
        same: AxisSplits = {
            name: (name,) if size > 1 else ()
            for name, size in zip(first.names, first.sizes, strict=True)
        }
        return first, same, same
    both = [axis_spans(first), axis_spans(second)]
    strides = sorted({1, *(stride for one in both for span in one.values() for stride in span)})
    if first.size != second.size or any(high % low for low, high in pairwise(strides)):
        return None
    names: dict[tuple[int, int], str] = {}
    for low, high in pairwise(strides):
        names[low, high] = _name_axis((low, high), both, set(names.values()))
    outer = list(reversed(names))
    grid = Grid(tuple(names[span] for span in outer), tuple(high // low for low, high in outer))
    split_first, split_second = (
        {
            axis: tuple(names[span] for span in outer if low <= span[0] and span[1] <= high)
            for axis, (low, high) in one.items()
        }
        for one in both
    )
    return grid, split_first, split_second


def axis_spans(grid: Grid) -> dict[str, tuple[int, int]]:
    """Return for each axis its stride and that of the axis outside it."""
    found = {}
    stride = 1
    for name, size in zip(reversed(grid.names), reversed(grid.sizes), strict=True):
        found[name] = (stride, stride * size)
        stride *= size
    return found


def _name_axis(
    span: tuple[int, int], both: list[dict[str, tuple[int, int]]], taken: set[str]
) -> str:
    """
    Return the name of an axis of the common grid: the equal axis, or the axis it is a part of.
    """
    for at, one in enumerate(both):
        for axis, whole in one.items():
            if whole == span and axis not in taken and (at == 0 or axis not in both[0]):
                return axis
    inside = next(
        axis
        for axis, (low, high) in both[0].items()
        if low <= span[0] and span[1] <= high and high > low
    )
    return _fresh_name(inside, taken | set(both[0]) | set(both[1]))


def _fresh_name(axis: str, taken: set[str]) -> str:
    number = 0
    while f"{axis}.{number}" in taken:
        number += 1
    return f"{axis}.{number}"


def _split_axis(grid: Grid, axis: str, major: int) -> tuple[Grid, AxisSplits]:
    taken = set(grid.names)
    first = _fresh_name(axis, taken)
    second = _fresh_name(axis, taken | {first})
    place = grid.names.index(axis)
    size = grid.degree(axis)
    names = (*grid.names[:place], first, second, *grid.names[place + 1 :])
    sizes = (*grid.sizes[:place], major, size // major, *grid.sizes[place + 1 :])
    return Grid(names, sizes), {axis: (first, second)}


def _replace_axes(names: AxisStack, split: AxisSplits) -> AxisStack:
    return tuple(new for name in names for new in split.get(name, (name,)))


def _on_common_grid(view: View, split: AxisSplits, grid: Grid) -> DimPieces:
    """
    Return the dims of a view by axes of the common grid.

    Raises:
        _NoCommonForm: shards would have other bounds.
    """
    dims: DimPieces = []
    for size, stack in zip(view.shape, view.layout.dims, strict=True):
        fine = _replace_axes(stack, split)
        sizes = (
            [view.degree(axis) for axis in stack],
            [view.virtual if a == VIRTUAL_AXIS else grid.degree(a) for a in fine],
        )
        if size % math.prod(sizes[0]) and _part_bounds(size, sizes[0]) != _part_bounds(
            size, sizes[1]
        ):
            raise _NoCommonForm
        dims.append((size, fine))
    return dims


def _part_bounds(size: int, degrees: list[int]) -> list[tuple[int, int]]:
    """Return the shards of a dim that several axes shard one after another."""
    held = [(0, size)]
    for degree in degrees:
        held = [
            (low + start, low + stop)
            for low, high in held
            for start, stop in (shard_range(high - low, degree, place) for place in range(degree))
        ]
    return held


def split_at_strides(grid: Grid, strides: tuple[int, ...]) -> tuple[Grid, AxisSplits]:
    """
    Return the grid whose axes also end at some strides, and for each axis its run of axes.

    Raises:
        ValueError: a stride does not fit the grid's.
    """
    split: AxisSplits = {name: (name,) for name in grid.names}
    for stride in strides:
        for axis, (low, high) in axis_spans(grid).items():
            if low < stride < high:
                if stride % low or high % stride:
                    raise ValueError(f"a stride of {stride} does not fit ({grid})")
                grid, parts = _split_axis(grid, axis, high // stride)
                split = {name: _replace_axes(names, parts) for name, names in split.items()}
                break
    return grid, split


# ---- shapes -----------------------------------------------------------------


def _common_dims(
    source: DimPieces, target: DimPieces, grid: Grid, virtual: tuple[int, int], expand: bool
) -> list[tuple[int, AxisStack, AxisStack]]:
    """Return common dims as (size, axes before, axes after)."""
    found: list[tuple[int, AxisStack, AxisStack]] = []
    for here, there in _match_dims(source, target):
        if len(here) == len(there) == 1 and here[0][0] == there[0][0]:
            pair = (here[0][0], here[0][1], there[0][1])
            if not _needs_expansion(pair, grid, expand):
                found.append(pair)
                continue
            try:
                found += _refine_shapes(
                    _expand_dims(here, grid, virtual[0]),
                    _expand_dims(there, grid, virtual[1]),
                    grid,
                )
            except _NoCommonForm:
                if VIRTUAL_AXIS in (*pair[1], *pair[2]):
                    raise
                found.append(pair)
        else:
            found += _refine_shapes(
                _expand_dims(here, grid, virtual[0]), _expand_dims(there, grid, virtual[1]), grid
            )
    return found


def _needs_expansion(pair: tuple[int, AxisStack, AxisStack], grid: Grid, expand: bool) -> bool:
    """Return whether a dim must (virtual parts) or should be written as several."""
    size, here, there = pair
    if VIRTUAL_AXIS in here or VIRTUAL_AXIS in there:
        return True
    return expand and size > 0 and here != there and max(len(here), len(there)) > 1


def _match_dims(source: DimPieces, target: DimPieces) -> list[tuple[DimPieces, DimPieces]]:
    """Return the shortest runs of dims with equal products."""
    if [size for size, _ in source] == [size for size, _ in target]:
        return [([here], [there]) for here, there in zip(source, target, strict=True)]
    if any(size == 0 for size, _ in source):
        raise _NoCommonForm
    found = []
    left = list(source)
    right = list(target)
    while left or right:
        here = left[:1]
        there = right[:1]
        left = left[1:]
        right = right[1:]
        while (a := math.prod(size for size, _ in here)) != (
            b := math.prod(size for size, _ in there)
        ):
            if a < b:
                here.append(left.pop(0))
            else:
                there.append(right.pop(0))
        found.append((here, there))
    return found


def _expand_dims(dims: DimPieces, grid: Grid, virtual: int) -> DimPieces:
    """Return dims with at most one axis each."""
    found: DimPieces = []
    for size, stack in dims:
        while stack and stack[-1] == VIRTUAL_AXIS:  # the innermost axis: its parts are adjacent
            stack = stack[:-1]
        degrees = [virtual if axis == VIRTUAL_AXIS else grid.degree(axis) for axis in stack]
        if size % math.prod(degrees):
            if len(dims) == 1 and len(stack) == 1 and size > 1:
                found.append((size, stack))
                continue
            raise _NoCommonForm
        for axis, degree in zip(stack[:-1], degrees[:-1], strict=True):
            found.append((degree, () if axis == VIRTUAL_AXIS else (axis,)))
            size //= degree
        found.append((size, stack[-1:]))
    return [piece for piece in found if piece[0] != 1] or [(1, ())]


def _refine_shapes(
    source: DimPieces, target: DimPieces, grid: Grid
) -> list[tuple[int, AxisStack, AxisStack]]:
    """Return the dims of the shape that refines both."""
    strides = sorted({1, *_dim_strides(source), *_dim_strides(target)})
    if any(high % low for low, high in pairwise(strides)):
        raise _NoCommonForm
    here = _split_dims(source, strides, grid)
    there = _split_dims(target, strides, grid)
    return [(size, a, b) for (size, a), (_, b) in zip(here, there, strict=True)]


def _dim_strides(dims: DimPieces) -> list[int]:
    found = []
    stride = 1
    for size, _ in reversed(dims):
        stride *= size
        found.append(stride)
    return found


def _split_dims(dims: DimPieces, strides: list[int], grid: Grid) -> DimPieces:
    """
    Split dims at strides. The axis of a sharded dim goes to the first of its parts, and continues
    in the next one if the axis is larger.
    """
    found: DimPieces = []
    high = math.prod(size for size, _ in dims)
    if high == 1:
        return [(1, ())]
    for size, stack in dims:
        low = high // size
        inner = [stride for stride in strides if low <= stride <= high][::-1]
        parts = [outer // inside for outer, inside in pairwise(inner)]
        high = low
        if len(parts) > 1 and stack:
            found += _place_axis(parts, stack[0], size, grid)
        else:
            found += [(parts[0], stack), *[(part, ()) for part in parts[1:]]]
    return found


def _place_axis(parts: list[int], axis: str, size: int, grid: Grid) -> DimPieces:
    degree = grid.degree(axis)
    if size % degree == 0 and parts[0] % degree == 0:
        return [(parts[0], (axis,)), *[(part, ()) for part in parts[1:]]]
    if size % degree == 0 and degree % parts[0] == 0:
        raise _AxisSplitNeeded(axis, parts[0])
    raise _NoCommonForm
