"""Collectives in which every rank of a group takes part in the same way; see the package."""

from __future__ import annotations

from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.collectives.group import API_NAME, check_index, group
from pdrun.parallel.comm.communicator import AxisGroup


def all_reduce(x: torch.Tensor, ranks: AxisGroup | None = None, op: str = "sum") -> torch.Tensor:
    """
    Return the elementwise sum, mean, max or min over the ranks of a group.

    The gradient of a maximum or minimum is divided among the ranks that have it.

    Args:
        x: of the same shape on all ranks.
        ranks: a `group`; default: all ranks.
        op: "sum", "mean", "max" or "min".
    """
    ranks = ranks or group()
    if op not in ("sum", "mean", "max", "min"):
        raise UsageError(
            f"op must be sum, mean, max or min, got {op!r}", where=f"{API_NAME}.all_reduce"
        )
    if op in ("max", "min"):
        extreme: torch.Tensor = _ExtremeAdjoint.apply(x, ranks, op)
        return extreme
    total: torch.Tensor = _AllReduceAdjoint.apply(x, ranks)
    return total / ranks.size if op == "mean" else total


def all_gather(
    x: torch.Tensor, ranks: AxisGroup | None = None, dim: int = 0, total: int | None = None
) -> torch.Tensor:
    """
    Return the ranks' tensors, concatenated along ``dim`` in the order of the group.

    Args:
        total: size of ``dim`` of the result if the ranks' sizes differ by one, as
            ``torch.tensor_split`` makes them; default: all ranks have the size of ``x``.
    """
    ranks = ranks or group()
    gathered: torch.Tensor = _AllGatherAdjoint.apply(x, ranks, dim, total)
    return gathered


def reduce_scatter(x: torch.Tensor, ranks: AxisGroup | None = None, dim: int = 0) -> torch.Tensor:
    """
    Return this rank's part along ``dim`` of the sum over the ranks, as ``torch.tensor_split`` cuts.
    """
    ranks = ranks or group()
    part: torch.Tensor = _ReduceScatterAdjoint.apply(x, ranks, dim)
    return part


def all_to_all(
    x: torch.Tensor,
    ranks: AxisGroup | None = None,
    split_dim: int = 0,
    concat_dim: int = 0,
    total: int | None = None,
) -> torch.Tensor:
    """
    Cut ``x`` along ``split_dim``, send a part to each rank, and concatenate those received.

    Args:
        total: sum of the ranks' sizes of ``concat_dim``; default: all have the size of ``x``.
    """
    ranks = ranks or group()
    if total is None:
        total = x.shape[concat_dim] * ranks.size
    exchanged: torch.Tensor = _AllToAllAdjoint.apply(x, ranks, split_dim, concat_dim, total)
    return exchanged


def broadcast(x: torch.Tensor, ranks: AxisGroup | None = None, source: int = 0) -> torch.Tensor:
    """
    Return the tensor of the rank with index ``source`` in the group.

    Args:
        x: the tensor; on other ranks one of the same shape and type, whose values do not matter.
    """
    ranks = ranks or group()
    check_index(source, ranks, "broadcast")
    copied: torch.Tensor = _BroadcastAdjoint.apply(x, ranks, source)
    return copied


def reduce(x: torch.Tensor, ranks: AxisGroup | None = None, target: int = 0) -> torch.Tensor:
    """Return the sum over the ranks at the rank with index ``target``, zeros elsewhere."""
    ranks = ranks or group()
    check_index(target, ranks, "reduce")
    total: torch.Tensor = _ReduceAdjoint.apply(x, ranks, target)
    return total


# ---- inside -----------------------------------------------------------------


class _AllReduceAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: AxisGroup) -> torch.Tensor:
        ctx.ranks = ranks
        return _fresh(ranks.all_reduce(x), x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.ranks.all_reduce(grad), None


class _ExtremeAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: AxisGroup, op: str) -> torch.Tensor:
        found = ranks.all_reduce(x, op)
        mine = (x == found).to(x.dtype)
        ctx.ranks = ranks
        ctx.save_for_backward(mine / ranks.all_reduce(mine))
        return _fresh(found, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (share,) = ctx.saved_tensors
        return ctx.ranks.all_reduce(grad) * share, None, None


class _AllGatherAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ranks: AxisGroup, dim: int, total: int | None
    ) -> torch.Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return _fresh(ranks.all_gather(x, dim, total), x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.ranks.reduce_scatter(grad, ctx.dim), None, None, None


class _ReduceScatterAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: AxisGroup, dim: int) -> torch.Tensor:
        ctx.ranks, ctx.dim, ctx.total = ranks, dim, x.shape[dim]
        return _fresh(ranks.reduce_scatter(x, dim), x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.ranks.all_gather(grad, ctx.dim, ctx.total), None, None


class _AllToAllAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ranks: AxisGroup, split_dim: int, concat_dim: int, total: int
    ) -> torch.Tensor:
        ctx.ranks, ctx.split_dim, ctx.concat_dim = ranks, split_dim, concat_dim
        ctx.split_total = x.shape[split_dim]
        return _fresh(ranks.all_to_all(x, split_dim, concat_dim, total), x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back = ctx.ranks.all_to_all(grad, ctx.concat_dim, ctx.split_dim, ctx.split_total)
        return back, None, None, None, None


class _BroadcastAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: AxisGroup, source: int) -> torch.Tensor:
        ctx.ranks, ctx.source = ranks, source
        return ranks.broadcast(x.detach().clone(memory_format=torch.contiguous_format), source)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = ctx.ranks.all_reduce(grad)
        return total if ctx.ranks.index == ctx.source else torch.zeros_like(total), None, None


class _ReduceAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: AxisGroup, target: int) -> torch.Tensor:
        ctx.ranks, ctx.target = ranks, target
        total = _fresh(ranks.all_reduce(x), x)
        return total if ranks.index == target else torch.zeros_like(total)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone(memory_format=torch.contiguous_format)
        return ctx.ranks.broadcast(grad, ctx.target), None, None


def _fresh(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a result that is not the input: a group of one returns its input."""
    return result.view_as(result) if result is x else result
