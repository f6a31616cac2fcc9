"""
Rows of tokens: copied for their experts, put in another order, and summed by token.

Rows are read from where they are, in both directions and in both passes: no row is written to a
place that an index says. So torch.compile makes one kernel of a copy and what is next to it.
"""

from __future__ import annotations

from typing import Any, cast

import torch

F32 = torch.float32
ROW_DIMS = 2
"""Dims of rows in the order of the experts; those by token have three."""
MAX_SHORT = 1 << 15
"""Experts whose numbers fit into 16 bits, with one too many for dropped rows."""


def sort_rows(index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the order of rows by expert, and the place of each row in it; dropped rows are last.

    Args:
        index: ``[tokens, top_k]``.
    """
    # short keys take a quarter of the time on GPUs, which sort by digits
    keys = index.reshape(-1).to(torch.int16 if experts < MAX_SHORT else torch.int64)
    order = keys.argsort(stable=True)
    places = torch.arange(len(order), device=order.device)
    return order, torch.empty_like(order).index_copy_(0, order, places)


def reorder_rows(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return all rows in another order."""
    return cast("torch.Tensor", _ReorderRows.apply(rows, order, inverse))


class _ReorderRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def take_rows(
    tokens: torch.Tensor, order: torch.Tensor, places: torch.Tensor, top_k: int
) -> torch.Tensor:
    """
    Return a row for each expert of each token.

    Args:
        order: of rows by expert, without dropped ones; see `sort_rows`.
        places: of all rows in it.
    """
    return cast("torch.Tensor", _TakeRows.apply(tokens, order, places, top_k))


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, order: torch.Tensor, places: torch.Tensor, top_k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.by_token = len(tokens), top_k, tokens.shape[1]
        return tokens.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (places,) = ctx.saved_tensors
        if torch.compiler.is_compiling():
            return _sum_by_token(grad, places.view(ctx.by_token[:2])), None, None, None
        return _rows_at(grad, places).view(ctx.by_token).sum(1), None, None, None


def combine_rows(
    rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """
    Return the weighted sum of each token's rows; dropped rows count as zero.

    Args:
        rows: in ``order``; see `take_rows`.
        weights: ``[tokens, top_k]``.
    """
    return cast("torch.Tensor", _CombineRows.apply(rows, weights, order, places))


class _CombineRows(torch.autograd.Function):
    """
    In compiled code the sums are written so that they are read from the rows directly. Otherwise
    rows are copied to their tokens first, and the copy is kept for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor,
        order: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            ctx.save_for_backward(rows, weights, order, places)
            return _sum_by_token(rows, places.view(weights.shape), weights)
        by_token = _rows_at(rows, places).view(*weights.shape, rows.shape[1])
        ctx.save_for_backward(by_token, weights, order, places)
        return torch.bmm(weights.to(rows.dtype).unsqueeze(1), by_token).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        kept, weights, order, places = ctx.saved_tensors
        by_row = weights.reshape(-1).index_select(0, order).unsqueeze(1)
        if kept.dim() == ROW_DIMS:  # the forward pass was compiled
            grad_rows = grad.index_select(0, order // weights.shape[1]).to(weights.dtype)
            products = (kept * grad_rows).sum(1)
            of_rows = (grad_rows * by_row).to(grad.dtype)
            of_weights = _rows_at(products, places).view(weights.shape)
        else:
            grad = grad.contiguous()
            of_rows = grad.index_select(0, order // weights.shape[1]) * by_row.to(grad.dtype)
            of_weights = torch.bmm(kept, grad.unsqueeze(2)).squeeze(2)
        return of_rows, of_weights.to(weights.dtype), None, None


def _sum_by_token(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Return the weighted sum of each token's rows, for a compiler: one term after the other is one
    kernel over rows; a sum over a dim of a few is one over numbers.

    Args:
        places: of the rows, ``[tokens, top_k]``.
        weights: of the terms; None: 1.
    """
    is_whole = len(rows) == places.numel()
    total: torch.Tensor | None = None
    for k in range(places.shape[1]):
        at = places[:, k]
        term = rows.index_select(0, at) if is_whole else _rows_or_zeros(rows, at)
        term = term.to(torch.promote_types(rows.dtype, F32))
        if weights is not None:
            term = term * weights[:, k : k + 1]
        total = term if total is None else total + term
    assert total is not None, "a token has an expert"
    return total.to(rows.dtype)


def _rows_at(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the rows at all places; zeros for rows that are dropped."""
    if len(rows) == len(places):
        return rows.index_select(0, places)
    return _rows_or_zeros(rows, places)


def _rows_or_zeros(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the rows at some places; beyond the last one, where rows are dropped, zeros."""
    if not len(rows):
        return rows.new_zeros(len(places), *rows.shape[1:])
    found = rows.index_select(0, places.clamp(max=len(rows) - 1))
    is_dropped = places >= len(rows)
    return found.masked_fill(is_dropped.view(-1, *[1] * (rows.dim() - 1)), 0.0)
