"""
Collectives with gradients, for modules and programs that shard their tensors by hand.

One convention: a tensor that is replicated along an axis has a replicated gradient.

    forward              input, output                          backward
    copy_to_axis         replicated, used for shards            all-reduce
    all_reduce           partial, replicated                    identity
    all_gather           sharded, replicated                    this rank's shard
    slice_to_shard       replicated, sharded                    all-gather
    reduce_scatter       partial, sharded                       all-gather
    all_gather_sum_grad  sharded, full and used for shards      reduce-scatter
    all_to_all           sharded on another dim                 all-to-all

``all_gather_sum_grad`` is `all_gather` followed by `copy_to_axis`. A replicated tensor whose use
gives a sharded or partial result must pass `copy_to_axis` (or `all_gather_sum_grad`) once.
"""

from __future__ import annotations

from typing import Any

import torch

from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.layouts.layout import shard_range


def copy_to_axis(x: torch.Tensor, axis: AxisGroup) -> torch.Tensor:
    """
    Return ``x``, a replicated tensor that each rank uses for another shard; gradients are summed.
    """
    if axis.size == 1:
        return x
    return _CopyToAxis.apply(x, axis)


def all_reduce(x: torch.Tensor, axis: AxisGroup) -> torch.Tensor:
    """Return the sum over the ranks, replicated."""
    if axis.size == 1:
        return x
    return _AllReduce.apply(x, axis)


def all_gather(
    x: torch.Tensor, axis: AxisGroup, dim: int, total: int | None = None
) -> torch.Tensor:
    """
    Return the full tensor of one sharded along ``dim`` (of size ``total``), for replicated
    computation.
    """
    if axis.size == 1:
        return x
    return _AllGather.apply(x, axis, dim, total)


def all_gather_sum_grad(
    x: torch.Tensor, axis: AxisGroup, dim: int, total: int | None = None
) -> torch.Tensor:
    """Return the full tensor of one sharded along ``dim``, for computation that differs by rank."""
    if axis.size == 1:
        return x
    return _AllGatherSumGrad.apply(x, axis, dim, total)


def slice_to_shard(x: torch.Tensor, axis: AxisGroup, dim: int) -> torch.Tensor:
    """Return this rank's shard along ``dim`` of a replicated tensor."""
    if axis.size == 1:
        return x
    return _SliceToShard.apply(x, axis, dim)


def reduce_scatter(x: torch.Tensor, axis: AxisGroup, dim: int) -> torch.Tensor:
    """Return this rank's shard along ``dim`` of the sum over the ranks."""
    if axis.size == 1:
        return x
    return _ReduceScatter.apply(x, axis, dim)


def all_to_all(
    x: torch.Tensor, axis: AxisGroup, split_dim: int, concat_dim: int, total: int
) -> torch.Tensor:
    """
    Shard a tensor along ``split_dim`` that is sharded along ``concat_dim`` (of size ``total``).
    """
    if axis.size == 1:
        return x
    return _AllToAll.apply(x, axis, split_dim, concat_dim, total)


# ---- inside -----------------------------------------------------------------


def _own_shard(x: torch.Tensor, axis: AxisGroup, dim: int) -> torch.Tensor:
    low, high = shard_range(x.shape[dim], axis.size, axis.index)
    return x.narrow(dim, low, high - low)


class _CopyToAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: AxisGroup) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.axis.all_reduce(grad), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: AxisGroup) -> torch.Tensor:
        return axis.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: AxisGroup, dim: int, total: int | None
    ) -> torch.Tensor:
        ctx.axis = axis
        ctx.dim = dim
        return axis.all_gather(x, dim, total)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _own_shard(grad, ctx.axis, ctx.dim), None, None, None


class _AllGatherSumGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: AxisGroup, dim: int, total: int | None
    ) -> torch.Tensor:
        ctx.axis = axis
        ctx.dim = dim
        return axis.all_gather(x, dim, total)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.axis.reduce_scatter(grad, ctx.dim), None, None, None


class _SliceToShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: AxisGroup, dim: int) -> torch.Tensor:
        ctx.axis = axis
        ctx.dim = dim
        ctx.total = x.shape[dim]
        return _own_shard(x, axis, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.axis.all_gather(grad, ctx.dim, ctx.total), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: AxisGroup, dim: int) -> torch.Tensor:
        ctx.axis = axis
        ctx.dim = dim
        ctx.total = x.shape[dim]
        return axis.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.axis.all_gather(grad, ctx.dim, ctx.total), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: AxisGroup, split_dim: int, concat_dim: int, total: int
    ) -> torch.Tensor:
        ctx.axis = axis
        ctx.split_dim = split_dim
        ctx.concat_dim = concat_dim
        ctx.total = x.shape[split_dim]
        return axis.all_to_all(x, split_dim, concat_dim, total)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (
            ctx.axis.all_to_all(grad, ctx.concat_dim, ctx.split_dim, ctx.total),
            None,
            None,
            None,
            None,
        )


FUNCTIONS: dict[str, Any] = {
    "copy_to_axis": _CopyToAxis,
    "all_reduce": _AllReduce,
    "all_gather": _AllGather,
    "slice": _SliceToShard,
    "reduce_scatter": _ReduceScatter,
    "all_gather_sum_grad": _AllGatherSumGrad,
    "all_to_all": _AllToAll,
}
"""The autograd function of each, for callers that run its passes separately."""
