"""
Rank lists: which rank has which place in a device matrix.

A rank list reorders the axes of a device matrix, or parts of them. Written in the order of the
ranks it is another device matrix, without a list:

    Layout((2, 2), ("a", "b"), rank_list=(0, 2, 1, 3))  is  Layout((2, 2), ("b", "a"))
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from pdrun.errors import UsageError
from pdrun.parallel.layouts.grid import Grid

API_NAME = "Layout"


def order_axes(grid: Grid, rank_list: Sequence[Any]) -> tuple[Grid, dict[str, tuple[str, ...]]]:
    """
    Return the grid in the order of the ranks, and for each axis its run of axes there, major first.

    Args:
        rank_list: the rank at each place, outer axis first. Ranks can start at a multiple of their
            number, as those of a stage do.

    Raises:
        UsageError: the list does not have each rank once, or is no order of the grid's axes.
    """
    ranks = _check_ranks(grid, rank_list)
    digits: list[tuple[str, int, int]] = []  # (axis, size, stride of the ranks), outer to inner
    place_stride = grid.size
    for axis, size in zip(grid.names, grid.sizes, strict=True):
        place_stride //= size
        digits += [(axis, *digit) for digit in _split_axis(ranks, size, place_stride)]
    inner_first = sorted(digits, key=lambda digit: digit[2])
    strides = [math.prod(size for _, size, _ in inner_first[:at]) for at in range(len(digits))]
    if [stride for _, _, stride in inner_first] != strides or not _has_digits(ranks, digits):
        what = f"rank_list {tuple(rank_list)} is no order of the axes ({grid})"
        hint = "ranks along an axis must have equal distances, such as (0, 2, 1, 3)"
        raise UsageError(what, where=API_NAME, hint=hint)
    counts = {axis: sum(one == axis for one, _, _ in digits) for axis in grid.names}
    names: list[str] = []
    parts: dict[str, tuple[str, ...]] = {
        name: (name,) for name in grid.names if grid.degree(name) == 1
    }
    for axis, _, _ in digits:
        at = len(parts.get(axis, ()))
        names.append(axis if counts[axis] == 1 else name_part(axis, at, grid.names))
        parts[axis] = (*parts.get(axis, ()), names[-1])
    ordered = sorted(zip(names, digits, strict=True), key=lambda one: -one[1][2])
    single = [name for name in grid.names if grid.degree(name) == 1]
    sizes = [size for _, (_, size, _) in ordered]
    return (
        Grid((*(name for name, _ in ordered), *single), (*sizes, *(1 for _ in single))),
        parts,
    )


def name_part(axis: str, at: int, taken: Collection[str]) -> str:
    """Return the name of a part of an axis, which no other axis has."""
    name = f"{axis}_{at}"
    while name in taken:
        name += "_"
    return name


def _check_ranks(grid: Grid, rank_list: Sequence[Any]) -> list[int]:
    """Return the ranks of a list, counted from its smallest."""
    if not isinstance(rank_list, (tuple, list)) or not all(
        isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in rank_list
    ):
        raise UsageError(
            f"rank_list must be a list of ranks, got {rank_list!r}",
            where=API_NAME,
            hint=f"for ({grid}) for example {list(range(grid.size))}",
        )
    first = min(rank_list, default=0)
    ranks = [rank - first for rank in rank_list]
    if first % grid.size or sorted(ranks) != list(range(grid.size)):
        what = f"rank_list {tuple(rank_list)} must have each of {grid.size} consecutive ranks once"
        hint = f"({grid}) has {grid.size} devices; the first rank is a multiple of {grid.size}"
        raise UsageError(what, where=API_NAME, hint=hint)
    return ranks


def _split_axis(ranks: list[int], size: int, place_stride: int) -> list[tuple[int, int]]:
    """Return the (size, stride of the ranks) of the digits of an axis, outer to inner."""
    digits: list[tuple[int, int]] = []
    while size > 1:
        step = ranks[place_stride]
        fitting = (
            count
            for count in range(size, 1, -1)
            if size % count == 0
            and all(ranks[place_stride * at] == step * at for at in range(count))
        )
        count = next(fitting, size)
        digits.insert(0, (count, step))
        size //= count
        place_stride *= count
    return digits


def _has_digits(ranks: list[int], digits: list[tuple[str, int, int]]) -> bool:
    """Return whether each rank is the sum of its digits."""
    expected = [0]
    for _, size, stride in digits:
        expected = [base + stride * at for base in expected for at in range(size)]
    return expected == ranks
