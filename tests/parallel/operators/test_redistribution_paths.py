"""Paths between layouts: no more bytes than a redistribution sends, and the right tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.watchdog import CollectiveWatchdog
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.redistribute import redistribute
from pdrun.parallel.layouts.view import View
from pdrun.parallel.operators.program import MoveModule
from pdrun.parallel.operators.redistribute import (
    ALL_GATHER_SUM_GRAD,
    COPY_TO_AXIS,
    count_path_bytes,
    redistribution_path,
)

GRIDS = (Grid(("t",), (4,)), Grid(("x", "y"), (2, 4)), Grid(("x", "y", "z"), (2, 2, 2)))
SHAPES = ((16, 64, 32), (8, 24), (64, 512), (6, 10, 7))


@st.composite
def layouts(draw: st.DrawFn, grid: Grid, ndim: int, with_sums: bool) -> L:
    """A layout: each axis shards a dim, is free, or has partial sums."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    sums = []
    for axis in draw(st.permutations(grid.names)):
        place = draw(st.integers(-1, ndim if with_sums else ndim - 1))
        if place == ndim:
            sums.append(axis)
        elif place >= 0:
            dims[place].append(axis)
    return L(*map(tuple, dims), sums=tuple(sums))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[View, L]:
    grid = draw(st.sampled_from(GRIDS))
    shape = draw(st.sampled_from(SHAPES))
    source = View(grid, draw(layouts(grid, len(shape), with_sums=True)), shape)
    return source, draw(layouts(grid, len(shape), with_sums=False))


@given(pairs())
def test_a_path_sends_no_more_than_a_redistribution(pair: tuple[View, L]) -> None:
    source, target = pair
    planned = redistribute(source.layout, target, source.shape, source.grid)
    forward = redistribution_path(source, target, has_grad=False)
    # each step rounds to whole bytes, which counts where pieces are uneven
    rounding = 2 * (len(forward) + 1)
    assert count_path_bytes(forward, 1, has_grad=False)[0] <= planned.sent_bytes() + rounding
    both = redistribution_path(source, target, has_grad=True)
    most = planned.sent_bytes() + planned.sent_bytes(backward=True)
    assert sum(count_path_bytes(both, 1, has_grad=True)) <= most + 2 * rounding


@given(pairs(), st.data())
def test_each_axis_of_other_uses_sums_its_gradients_once(
    pair: tuple[View, L], data: st.DataObject
) -> None:
    source, target = pair
    free = [axis for axis in source.grid.names if axis not in target.axes]
    axes = tuple(data.draw(st.lists(st.sampled_from(free), unique=True))) if free else ()
    moves = redistribution_path(source, target, True, axes)
    summed = [
        axis
        for move in moves
        if move.kind in (COPY_TO_AXIS, ALL_GATHER_SUM_GRAD)
        for axis in move.axes
    ]
    assert sorted(summed) == sorted(axes)
    ends = [source, *(move.after for move in moves)]
    assert ends[-1] == View(source.grid, target, source.shape)
    assert [move.before for move in moves] == ends[:-1]


def test_a_sum_that_becomes_shards_of_another_axis_is_sliced_first() -> None:
    grid = Grid(("x", "y"), (2, 4))
    source = View(grid, L(None, None).partial("y"), (64, 512))
    moves = redistribution_path(source, L("x", None), has_grad=False)
    assert [move.kind for move in moves] == ["slice", "all_reduce"]
    assert count_path_bytes(moves, 4, has_grad=False) == (98304, 0)


CASES = (
    (L(None, None).partial("y"), L("x", None), ()),
    (L(None, None).partial("x"), L(("x", "y"), None), ()),
    (L(("x", "y"), None), L(None, ("y", "x")), ()),
    (L(("x", "y"), None), L(("y", "x"), None), ()),
    (L("x", "y"), L("y", "x"), ()),
    (L(("x", "y"), None), L("y", None), ("x",)),
    (L("y", None).partial("x"), L(None, ("x", "y")), ()),
    (L(("y", "x"), None), L(None, None), ("x", "y")),
)


def run_cases() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return per case: the shard after the moves and its gradient, and those that are right."""
    rank = torch.distributed.get_rank()
    grid = Grid(("x", "y"), (2, 2))
    axes = MeshGroups(grid, rank, torch.device("cpu"), CollectiveWatchdog(30.0, rank, grid.size))
    results = []
    for number, (start, target, uses) in enumerate(CASES):
        source = View(axes.grid, start, (8, 12))
        torch.manual_seed(number)
        full = torch.randn(8, 12, dtype=torch.float64)
        results.append(_run_case(axes, source, target, uses, full))
    return results


def _run_case(
    axes: Any, source: View, target: L, uses: tuple[str, ...], full: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    grid, rank = axes.grid, axes.rank
    place = grid.coordinate(rank)
    shard = _shard(full, source.layout, grid, rank)
    terms = [axis for axis in source.layout.sums if place[axis] != 0]
    x = (shard * 0 if terms else shard).clone().requires_grad_()
    y = x
    for move in redistribution_path(source, target, True, uses):
        group = axes.on_grid(move.after.grid)[move.axes]
        y = MoveModule(move, group, move.after.local_shape(rank))(y)
    # a use differs along the axes of `uses`; elsewhere the gradient is the same on all ranks
    weight = torch.arange(96, dtype=torch.float64).view(8, 12)
    factor = math.prod(1 + place[axis] for axis in uses)
    (y * _shard(weight, target, grid, rank) * factor).sum().backward()
    total = math.prod(sum(range(1, grid.degree(axis) + 1)) for axis in uses)
    assert x.grad is not None
    right = _shard(weight * total, source.layout, grid, rank)
    return y.detach(), _shard(full, target, grid, rank), x.grad, right


def _shard(full: torch.Tensor, layout: L, grid: Grid, rank: int) -> torch.Tensor:
    for dim, (low, high) in enumerate(layout.box(grid, tuple(full.shape), rank)):
        full = full.narrow(dim, low, high - low)
    return full


@pytest.mark.torch
def test_paths_have_the_values_and_gradients_of_one_process(worlds: Any) -> None:
    for rank, results in enumerate(worlds(4).run(run_cases)):
        for case, (value, right_value, grad, right_grad) in zip(CASES, results, strict=True):
            assert torch.equal(value, right_value), (rank, case)
            assert torch.equal(grad, right_grad), (rank, case)
