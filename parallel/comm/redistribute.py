"""
Redistribute real tensors between layouts, with gradients.

    y = redistribute(x, L("dp", None), L(None, "dp"), axes, shape=(64, 512))

``x`` and ``y`` are the shards of this rank. Each step is one of `autograd`'s collectives;
all-to-alls are true ones on every back end. By their convention the gradient of ``y`` has the
layout of ``y`` (replicated over axes of partial sums), and becomes the gradient of ``x`` in the
layout of ``x``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from pdrun.errors import UsageError
from pdrun.parallel.comm import autograd
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.redistribute import plan_redistribution
from pdrun.parallel.layouts.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    FIRST,
    PAD,
    REDUCE_SCATTER,
    RESHAPE,
    SLICE,
    LayoutStep,
    RedistributionPlan,
)
from pdrun.parallel.layouts.view import View
from pdrun.parallel.torch_compat import untraced

API_NAME = "redistribute"
_cached_plan = lru_cache(maxsize=4096)(plan_redistribution)


@untraced  # traced, the planner itself would be compiled with each layer: seconds, and graph breaks
def redistribute(
    x: torch.Tensor,
    source: L | View,
    target: L | View,
    axes: MeshGroups,
    shape: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """
    Return this rank's shard of a tensor in another layout; every rank of the mesh must call it.

    Args:
        x: this rank's shard in ``source``.
        source, target: layouts on ``axes``, or views with another grid over the same ranks.
            ``target`` can have another shape of the same elements.
        axes: the groups of this rank.
        shape: of the full tensor, for layouts (a view has its shape).

    Raises:
        UsageError: ``x`` is not this rank's shard, or source and target do not fit.
    """
    start = _as_view(source, axes, shape)
    return run_plan(_cached_plan(start, _as_view(target, axes, shape or start.shape)), x, axes)


def run_plan(plan: RedistributionPlan, x: torch.Tensor, axes: MeshGroups) -> torch.Tensor:
    """
    Carry out the steps of a plan on this rank's shard.

    Raises:
        UsageError: ``x`` is not this rank's shard of the plan's source.
    """
    expected = plan.source.local_shape(axes.rank)
    if tuple(x.shape) != expected:
        what = (
            f"x must be rank {axes.rank}'s shard {list(expected)} of {plan.source},"
            f" got {list(x.shape)}"
        )
        raise UsageError(what, where=API_NAME)
    for step in plan.steps:
        x = _run_step(step, x, axes)
    return x


def _as_view(end: L | View, axes: MeshGroups, shape: tuple[int, ...] | None) -> View:
    if isinstance(end, View):
        return end
    if shape is None:
        what = f"shape= must be the shape of the full tensor for the layout {end}"
        raise UsageError(what, where=API_NAME)
    return View(axes.grid, end, tuple(shape))


def _run_step(step: LayoutStep, x: torch.Tensor, axes: MeshGroups) -> torch.Tensor:
    local = step.after.local_shape(axes.rank)
    if step.kind == RESHAPE:
        return x.reshape(local)
    axis = axes.on_grid(step.after.grid)[step.axes]
    if step.kind == SLICE:
        return autograd.slice_to_shard(x, axis, step.dim)
    if step.kind == ALL_TO_ALL:
        return autograd.all_to_all(x, axis, step.dim, step.origin, local[step.origin])
    if step.kind == ALL_GATHER:
        return autograd.all_gather(x, axis, step.dim, local[step.dim])
    if step.kind == ALL_REDUCE:
        return autograd.all_reduce(x, axis)
    if step.kind == REDUCE_SCATTER:
        return autograd.reduce_scatter(x, axis, step.dim)
    if step.kind == FIRST:
        if axis.size == 1:
            return x
        return _FirstRankOnly.apply(x, axis.index == 0)
    assert step.kind == PAD, step.kind
    return _pad_shard(x, step, axes.rank)


def _pad_shard(x: torch.Tensor, step: LayoutStep, rank: int) -> torch.Tensor:
    """Return a shard at its place among zeros."""
    low, high = step.before.ranges_of(rank)[step.dim][0]
    first, last = step.after.ranges_of(rank)[step.dim][0]
    around = [0, 0] * (x.dim() - 1 - step.dim) + [low - first, last - high]
    return F.pad(x, around)


class _FirstRankOnly(torch.autograd.Function):
    """
    A replicated tensor as a partial sum: the first rank has it, the others have zeros.

    Each rank has the gradient of the sum.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: bool) -> torch.Tensor:
        return x.view_as(x) if first else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None
