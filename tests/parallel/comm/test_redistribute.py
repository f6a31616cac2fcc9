"""
Layouts changed on real ranks, forward and backward, against whole tensors; what is sent is what the
plan says.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from pdrun.errors import UsageError
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.redistribute import redistribute, run_plan
from pdrun.parallel.comm.watchdog import CollectiveWatchdog
from pdrun.parallel.layouts.device_matrix import Layout
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.redistribute import plan_full_gather, plan_redistribution
from pdrun.parallel.layouts.view import VIRTUAL_AXIS, View
from tests.lib.tiers import by_tier
from tests.parallel.layouts import simulated_ranks as simulate

pytestmark = pytest.mark.torch


def axes_of(grid: Grid) -> MeshGroups:
    rank = torch.distributed.get_rank()
    return MeshGroups(grid, rank, torch.device("cpu"), CollectiveWatchdog(30.0, rank, grid.size))


def _held(view: View, rank: int, dense: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(simulate.held(view, rank, dense.numpy())))


def _compare(
    source: View, target: View, axes: MeshGroups, seed: int, whole_way: bool = False
) -> None:
    """
    Go from one view to another with values and gradients, and hold both against dense tensors.
    """
    dice = torch.Generator().manual_seed(seed)
    dense, weight = (
        torch.randn(source.shape, generator=dice, dtype=torch.float64) for _ in range(2)
    )
    terms = torch.randn(
        source.grid.group_size(source.layout.sums),
        *source.shape,
        generator=dice,
        dtype=torch.float64,
    )
    terms[0] += dense - terms.sum(0)
    here = source.grid.group_index(source.layout.sums, axes.rank)
    x = _held(source, axes.rank, terms[here]).requires_grad_()
    plan = plan_full_gather(source, target) if whole_way else plan_redistribution(source, target)
    y = run_plan(plan, x, axes)
    y.backward(_held(target, axes.rank, weight.reshape(target.shape)))
    total = axes.on_grid(target.grid)[target.layout.sums].all_reduce(y.detach())
    torch.testing.assert_close(
        total, _held(target, axes.rank, dense.reshape(target.shape)), rtol=0, atol=1e-13
    )
    torch.testing.assert_close(x.grad, _held(source, axes.rank, weight), rtol=0, atol=0)


def compare_many(size: int, seeds: range) -> int:
    """Compare many random pairs of views; return how many sent something."""
    axes, sent = axes_of(Grid(("all",), (size,))), 0
    for seed in seeds:
        dice = random.Random(seed)
        ends = simulate.random_ends(dice, size)
        try:
            _compare(*ends, axes, seed, whole_way=seed % 5 == 0)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {ends[0]} to {ends[1]}: {error}") from error
        sent += bool(plan_redistribution(*ends).collectives)
    return sent


@pytest.mark.parametrize(
    ("size", "count"),
    by_tier([(2, 30), (4, 60), (6, 24), (8, 24)], [(2, 60), (4, 120), (6, 60), (8, 80)]),
)
def test_random_layouts_on_real_ranks(worlds: Any, size: int, count: int) -> None:
    assert worlds(size).run(compare_many, size, range(count))[0] > count // 3


def virtual_parts() -> None:
    axes = axes_of(Grid(("tp",), (4,)))
    matrix = Layout((2, 2, 2), ("a", "b", VIRTUAL_AXIS))
    ends = [
        matrix(("interleaved_parallel", "a"), "b"),
        matrix("a", ("b",)),
        matrix("None", ("b", VIRTUAL_AXIS, "a")),
    ]
    for source in ends:
        for target in ends:
            _compare(source.view_of((8, 16)), target.view_of((8, 16)), axes, 1)


def test_virtual_parts_on_real_ranks(worlds: Any) -> None:
    worlds(4).run(virtual_parts)


def roundabout() -> list[str]:
    """Go from tp to (dp, tp), large enough for a search to be worth it; return the collectives."""
    grid = Grid(("dp", "tp"), (2, 2))
    source, target = (
        View(grid, layout, (1024, 1026)) for layout in (L("tp", None), L(("dp", "tp"), None))
    )
    _compare(source, target, axes_of(grid), 3)
    return [step.kind for step in plan_redistribution(source, target).collectives]


def test_what_a_search_has_found_on_real_ranks(worlds: Any) -> None:
    assert "all_gather" not in worlds(4).run(roundabout)[0]


def counted() -> dict[Any, Any]:
    axes = axes_of(Grid(("x", "y"), (2, 2)))
    x = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
    redistribute(x, L("x", "y"), L("y", None), axes, (8, 8)).sum().backward()
    return {key: (count.calls, count.nbytes) for key, count in axes.counts.items()}


def test_what_is_sent_is_what_the_plan_says(worlds: Any) -> None:
    """
    Dim 0 is gathered over x, y moves there; backward y moves back, and this rank's part over x is
    cut off.
    """
    plan = plan_redistribution(
        *(View(Grid(("x", "y"), (2, 2)), layout, (8, 8)) for layout in (L("x", "y"), L("y", None)))
    )
    assert str(plan) == "all_gather over x: dim 0\nall_to_all over y: dim 1 -> dim 0"
    assert worlds(4).run(counted)[0] == {
        ("all_gather", ("x",)): (1, 4 * 4 * 8),
        ("all_to_all", ("y",)): (2, 2 * 8 * 4 * 8),
    }


def wrong() -> list[str]:
    axes = axes_of(Grid(("x",), (2,)))
    found = []
    for x, shape in ((torch.ones(3, 4), (8, 4)), (torch.ones(4, 4), None)):
        try:
            redistribute(x, L("x", None), L(None, None), axes, shape)
        except UsageError as error:
            found.append(str(error))
    try:
        axes.on_grid(Grid(("a",), (4,)))
    except UsageError as error:
        found.append(str(error))
    return found


def test_what_is_not_this_ranks_part_is_refused(worlds: Any) -> None:
    part, missing, ranks = worlds(2).run(wrong)[1]
    assert "x must be rank 1's shard [4, 4] of L('x', None) of [8, 4] on (x=2), got [3, 4]" in part
    assert "shape= must be the shape of the full tensor" in missing
    assert "must have the same number of ranks" in ranks
