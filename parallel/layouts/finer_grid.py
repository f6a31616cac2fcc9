"""
A finer grid: axes are split so that device matrices and counts become axes of the grid.

    refine_grid(Grid(("dp", "x"), (2, 8)), ("x",), [WantedCounts(((4, 2), (2, 1)))])
    dp=2, x_0=4, x_1=2

The ranks keep their order: the parts of an axis are in its place, major first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pdrun.parallel.layouts.device_matrix import DeviceMatrixLayout, has_counts
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.rank_order import name_part

BATCH_AXIS = "dp"
"""The axis that counts can mean on dim 0 of a tensor with rows."""
TENSOR_AXIS = "tp"
"""The axis that is split if there is no mesh."""
Counts = tuple[int, ...]


@dataclass(frozen=True)
class WantedCounts:
    """The counts of the inputs of an operator, or of one weight, which has no rows."""

    inputs: tuple[Counts, ...]
    has_rows: bool = True


@dataclass(frozen=True)
class FinerGrid:
    """
    A grid with some axes split.

    Attributes:
        parts: of each axis that is split, the axes in its place.
    """

    grid: Grid
    parts: dict[str, tuple[str, ...]]

    def names_of(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return axes of the coarse grid by those of this one."""
        return tuple(part for axis in axes for part in self.parts.get(axis, (axis,)))

    def expand(self, layout: L) -> L:
        """Return a layout on the coarse grid by the axes of this one."""
        return L(*map(self.names_of, layout.dims), sums=self.names_of(layout.sums))


def refine_grid(
    grid: Grid, axes: tuple[str, ...], wanted: Iterable[DeviceMatrixLayout | WantedCounts]
) -> FinerGrid:
    """
    Return the coarsest grid that expresses what is wanted, as far as splitting some axes can.

    Args:
        axes: the inner axes of the grid: those that can be split.
        wanted: layouts on device matrices, and counts.
    """
    bounds = frozenset(_strides([grid.degree(axis) for axis in axes]))
    counted = []
    for one in wanted:
        if isinstance(one, DeviceMatrixLayout):
            bounds = _add_matrix(bounds, one.grid.sizes)
        else:
            counted.append(one)
    for counts in counted:
        for candidate in _candidates(bounds, counts):
            finer = _split_axes(grid, axes, candidate)
            if _expresses(finer, axes, counts):
                bounds = candidate
                break
    return _split_axes(grid, axes, bounds)


def derive_degrees(
    wanted: Sequence[DeviceMatrixLayout | WantedCounts], world: int
) -> dict[str, int] | None:
    """
    Return the degrees of a mesh for layouts; None if all ranks on the axis of the batch express
    them.

    Device matrices whose outer axis is "dp" mean the axis of the batch. All other devices are on
    one tensor axis, which `refine_grid` splits.
    """
    rows = Grid((BATCH_AXIS, TENSOR_AXIS), (world, 1))
    if all(_fits_batch(one, rows) for one in wanted):
        return None
    matrices = [one.grid for one in wanted if isinstance(one, DeviceMatrixLayout)]
    outer = {(grid.names[0], grid.sizes[0]) for grid in matrices if grid.size == world}
    if len(outer) == 1:
        name, size = outer.pop()
        if name == BATCH_AXIS:
            return {BATCH_AXIS: size, TENSOR_AXIS: -1}
    return {TENSOR_AXIS: world}


def _fits_batch(one: DeviceMatrixLayout | WantedCounts, rows: Grid) -> bool:
    """Return whether a layout or counts shard nothing but the batch."""
    if isinstance(one, DeviceMatrixLayout):
        first, *others = [one.parts_along(axes) for axes in (*one.layout.dims, ())]
        return first in (1, rows.size) and set(others) <= {1}
    return _expresses(FinerGrid(rows, {}), (TENSOR_AXIS,), one)


def _candidates(bounds: frozenset[int], counts: WantedCounts) -> Iterator[frozenset[int]]:
    """Yield strides of axes that may express counts, the coarsest first."""
    yield bounds
    yield _add_matrix(bounds, _matrix_of(counts, max(bounds)))
    fine = [
        factor
        for low, high in reversed(list(pairwise(sorted(bounds))))
        for factor in _prime_factors(high // low)
    ]
    yield frozenset(_strides(fine))


def _strides(sizes: Iterable[int]) -> list[int]:
    """Return the products of sizes from the right, from 1 to that of all."""
    found = [1]
    for size in reversed(list(sizes)):
        found.append(found[-1] * size)
    return found


def _add_matrix(bounds: frozenset[int], sizes: Iterable[int]) -> frozenset[int]:
    """Return bounds with those of a device matrix, or unchanged if there is no common grid."""
    limit = max(bounds)
    together = sorted(bounds | {stride for stride in _strides(sizes) if stride < limit})
    if any(high % low for low, high in pairwise(together)):
        return bounds
    return frozenset(together)


def _matrix_of(counts: WantedCounts, size: int) -> list[int]:
    """
    Return the device matrix that counts mean: one axis per count, in order, and the repeats.

    A count that an earlier input has is taken for the same dim of the operator. If the rest of the
    devices may be needed by such a count after all, it is split into prime factors.
    """
    factors: list[int] = []
    for position, one in enumerate(counts.inputs):
        unused = list(factors) if position else []
        for count in one:
            if count in unused:
                unused.remove(count)
            elif count > 1:
                factors.append(count)
    rest, left = divmod(size, math.prod(factors))
    if left:
        return []
    has_several = sum(any(count > 1 for count in one) for one in counts.inputs) > 1
    return [*factors, *(_prime_factors(rest) if has_several else [rest])]


def _prime_factors(number: int) -> list[int]:
    found = []
    divisor = 2
    while number > 1:
        if number % divisor:
            divisor += 1
        else:
            found.append(divisor)
            number //= divisor
    return found


def _expresses(finer: FinerGrid, axes: tuple[str, ...], counts: WantedCounts) -> bool:
    """Return whether axes make the counts of each input, with or without the axis of the batch."""
    names = finer.names_of(axes)
    rows = 1
    if counts.has_rows and BATCH_AXIS in finer.grid.names:
        rows = finer.grid.degree(BATCH_AXIS)
    return all(
        has_counts(one, finer.grid, names)
        or (one[0] % rows == 0 and has_counts((one[0] // rows, *one[1:]), finer.grid, names))
        for one in counts.inputs
        if one
    )


def _split_axes(grid: Grid, axes: tuple[str, ...], bounds: frozenset[int]) -> FinerGrid:
    """Return the grid whose axes end at the given strides of the devices."""
    names: list[str] = []
    sizes: list[int] = []
    parts: dict[str, tuple[str, ...]] = {}
    stride = math.prod(grid.degree(axis) for axis in axes)
    for name, size in zip(grid.names, grid.sizes, strict=True):
        if name not in axes:
            names.append(name)
            sizes.append(size)
            continue
        inner = stride // size
        steps = sorted(bound for bound in bounds if inner <= bound <= stride)
        own = [high // low for low, high in reversed(list(pairwise(steps)))]
        stride = inner
        if len(own) > 1:
            parts[name] = tuple(name_part(name, at, grid.names) for at in range(len(own)))
        names += parts.get(name, (name,))
        sizes += own if len(own) > 1 else [size]
    return FinerGrid(Grid(tuple(names), tuple(sizes)), parts)
