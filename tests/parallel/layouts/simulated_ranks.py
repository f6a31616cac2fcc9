"""All ranks of a plan in one process, as numpy arrays: what each step means, whatever runs it."""

from __future__ import annotations

import random

import numpy as np

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.steps import RedistributionPlan
from pdrun.parallel.layouts.view import View


def held(view: View, rank: int, dense: np.ndarray) -> np.ndarray:
    """Return what a rank holds of a dense tensor, without regard to partial sums."""
    part = dense
    for dim, ranges in enumerate(view.ranges_of(rank)):
        part = np.concatenate([np.take(part, range(low, high), dim) for low, high in ranges], dim)
    return part


def start(view: View, dense: np.ndarray, seed: int) -> list[np.ndarray]:
    """Lay a dense tensor over the ranks: terms of partial sums are random and add up to it."""
    dice = np.random.default_rng(seed)
    terms = {}
    for rank in range(view.grid.size):
        key = view.grid.group_index(view.layout.sums, rank)
        if key not in terms:
            terms[key] = dice.integers(-50, 50, dense.shape)
    if terms:
        terms[0] = dense - sum(term for key, term in terms.items() if key)
    return [
        held(view, rank, terms[view.grid.group_index(view.layout.sums, rank)]).copy()
        for rank in range(view.grid.size)
    ]


def run(plan: RedistributionPlan, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Carry out the steps on what the ranks hold."""
    for step in plan.steps:
        grid, view, new = step.after.grid, step.after, []
        for rank in range(grid.size):
            group = grid.group_ranks(step.axes, rank)
            here = grid.group_index(step.axes, rank)
            mine = [parts[other] for other in group]
            box = view.layout.box(grid, view.shape, rank) if step.kind != "reshape" else ()
            if step.kind == "reshape":
                out = parts[rank].reshape(view.local_shape(rank))
            elif step.kind == "all_gather":
                out = np.concatenate(mine, step.dim)
            elif step.kind == "all_reduce":
                out = sum(mine)
            elif step.kind == "first":
                out = parts[rank] * (here == 0)
            elif step.kind == "pad":
                out = np.concatenate(
                    [part * (at == here) for at, part in enumerate(mine)], step.dim
                )
            else:
                low, high = box[step.dim]
                outer = step.before.layout.box(step.before.grid, view.shape, rank)[step.dim][0]
                source = sum(mine) if step.kind == "reduce_scatter" else parts[rank]
                if step.kind == "all_to_all":
                    source = np.concatenate(mine, step.origin)
                out = np.take(source, range(low - outer, high - outer), step.dim)
            assert out.shape == view.local_shape(rank), (
                f"{step}: rank {rank} holds {out.shape}, not {view}"
            )
            new.append(out)
        parts = new
    return parts


def added(view: View, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Return for each rank the sum of what is held along the axes of partial sums."""
    return [
        sum(parts[other] for other in view.grid.group_ranks(view.layout.sums, rank))
        for rank in range(view.grid.size)
    ]


def check(plan: RedistributionPlan, seed: int = 0) -> None:
    """Hold a plan against dense tensors."""
    dense = np.arange(np.prod(plan.source.shape, dtype=int)).reshape(plan.source.shape) + 1
    after = dense.reshape(plan.target.shape)
    parts = run(plan, start(plan.source, dense, seed))
    for rank, part in enumerate(added(plan.target, parts)):
        np.testing.assert_array_equal(part, held(plan.target, rank, after))


def random_ends(dice: random.Random, size: int) -> tuple[View, View]:
    """
    Return two views of the same elements over ``size`` ranks: any grids, shapes, layouts and
    partial sums.
    """
    grid = _random_grid(dice, size)
    other = grid if dice.random() < 0.5 else _random_grid(dice, size)
    even = dice.random() < 0.6
    shape = [
        dice.choice((2, 4, 6, 8, 12)) if even else dice.randint(1, 9)
        for _ in range(dice.randint(1, 3))
    ]
    after = list(shape)
    if dice.random() < 0.4:
        at = dice.randrange(len(after))
        factor = next((p for p in dice.sample((2, 3, 4), 3) if after[at] % p == 0), 1)
        after[at : at + 1] = [factor, after[at] // factor]
    ends = [(grid, tuple(shape)), (other, tuple(after))]
    if dice.random() < 0.5:
        ends.reverse()
    first, second = (
        View(grid, _random_layout(dice, grid, len(shape)), shape) for grid, shape in ends
    )
    return first, second


def _random_grid(dice: random.Random, size: int) -> Grid:
    sizes = []
    while size > 1:
        sizes.append(dice.choice([p for p in range(2, size + 1) if size % p == 0]))
        size //= sizes[-1]
    return Grid(tuple(dice.sample("abcdef", len(sizes))), tuple(sizes))


def _random_layout(dice: random.Random, grid: Grid, dims: int) -> L:
    stacks: list[list[str]] = [[] for _ in range(dims)]
    sums = []
    for axis in dice.sample(grid.names, len(grid.names)):
        place = dice.randint(-2, dims - 1)
        if place >= 0:
            stacks[place].append(axis)
        elif place == -2:
            sums.append(axis)
    return L(*map(tuple, stacks), sums=tuple(sums))
