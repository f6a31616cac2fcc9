"""All ranks of a plan in one process, as numpy arrays: what each step means, whatever runs it."""

from __future__ import annotations

import numpy as np

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.steps import Plan
from pdrun.parallel.layouts.view import View


def held(view: View, rank: int, dense: np.ndarray) -> np.ndarray:
    """Return what a rank holds of a dense tensor, without regard to partial sums."""
    part = dense
    for dim, ranges in enumerate(view.ranges(rank)):
        part = np.concatenate([np.take(part, range(low, high), dim) for low, high in ranges], dim)
    return part


def start(view: View, dense: np.ndarray, seed: int) -> list[np.ndarray]:
    """Lay a dense tensor over the ranks: terms of partial sums are random and add up to it."""
    dice = np.random.default_rng(seed)
    terms = {}
    for rank in range(view.grid.size):
        key = view.grid.index(view.layout.sums, rank)
        if key not in terms:
            terms[key] = dice.integers(-50, 50, dense.shape)
    if terms:
        terms[0] = dense - sum(term for key, term in terms.items() if key)
    return [held(view, rank, terms[view.grid.index(view.layout.sums, rank)]).copy() for rank in range(view.grid.size)]


def run(plan: Plan, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Carry out the steps on what the ranks hold."""
    for step in plan.steps:
        grid, view, new = step.after.grid, step.after, []
        for rank in range(grid.size):
            group = grid.group(step.axes, rank)
            here = grid.index(step.axes, rank)
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
                out = np.concatenate([part * (at == here) for at, part in enumerate(mine)], step.dim)
            else:
                low, high = box[step.dim]
                outer = step.before.layout.box(step.before.grid, view.shape, rank)[step.dim][0]
                source = sum(mine) if step.kind == "reduce_scatter" else parts[rank]
                if step.kind == "all_to_all":
                    source = np.concatenate(mine, step.origin)
                out = np.take(source, range(low - outer, high - outer), step.dim)
            assert out.shape == view.local_shape(rank), f"{step}: rank {rank} holds {out.shape}, not {view}"
            new.append(out)
        parts = new
    return parts


def added(view: View, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Return for each rank the sum of what is held along the axes of partial sums."""
    return [sum(parts[other] for other in view.grid.group(view.layout.sums, rank)) for rank in range(view.grid.size)]


def check(plan: Plan, seed: int = 0) -> None:
    """Hold a plan against dense tensors."""
    dense = np.arange(np.prod(plan.source.shape, dtype=int)).reshape(plan.source.shape) + 1
    after = dense.reshape(plan.target.shape)
    parts = run(plan, start(plan.source, dense, seed))
    for rank, part in enumerate(added(plan.target, parts)):
        np.testing.assert_array_equal(part, held(plan.target, rank, after))


def grids(*pairs: tuple[tuple[str, int], ...]) -> list[Grid]:
    """Return grids from (name, size) pairs."""
    return [Grid(tuple(name for name, _ in pair), tuple(size for _, size in pair)) for pair in pairs]


def whole(dims: int) -> L:
    """Return the layout that cuts nothing."""
    return L(*[None] * dims)
