"""Reductions: dims that stay are sharded. A sum over a sharded dim leaves partial sums."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from pdrun.parallel.operators.rules.labels import (
    Labels,
    count_elements,
    labels_except,
    normalize_dims,
    partial_sum_splits,
    splits_by_labels,
)
from pdrun.parallel.operators.rules.rule import (
    LocalCall,
    LocalContext,
    OperatorView,
    OpSplit,
    register_rule,
)


def _reduced_dims(view: OperatorView | LocalContext) -> tuple[int, ...]:
    """Return the reduced dims."""
    rank = len(view.in_shapes[0])
    value = view.get_arg(1, "dim")
    if isinstance(value, (int, list, tuple)) and not isinstance(value, bool):
        return normalize_dims(value, rank)
    return tuple(range(rank))


def _reduction_labels(
    view: OperatorView, reduced: tuple[int, ...], is_named: bool
) -> tuple[Labels, Labels]:
    """
    Return labels of the dims of the input and of an output.

    Args:
        is_named: reduced dims have a label, too.
    """
    rank = len(view.in_shapes[0])
    ins: list[Hashable | None] = [
        dim if dim not in reduced or is_named else None for dim in range(rank)
    ]
    if len(view.out_shapes[0]) == rank:
        return ins, labels_except(rank, *reduced)
    return ins, [dim for dim in range(rank) if dim not in reduced]


@register_rule("sum")
def split_sum(view: OperatorView) -> list[OpSplit]:
    """Split any dim."""
    reduced = _reduced_dims(view)
    ins, outs = _reduction_labels(view, reduced, is_named=True)
    return splits_by_labels(view, [ins], [outs], summed=reduced) + partial_sum_splits(view, [0])


def local_mean(
    x: torch.Tensor, over: tuple[int, ...], keepdim: bool, count: int, dtype: Any
) -> torch.Tensor:
    """Return this rank's share of a mean over ``count`` elements."""
    if over:
        return torch.sum(x, over, keepdim, dtype=dtype) / count
    return x.to(dtype or x.dtype)


def _call_mean(context: LocalContext) -> LocalCall:
    if not context.is_partial_sum():
        return context.operator.target, context.operator.args, context.operator.kwargs
    reduced = _reduced_dims(context)
    count = count_elements(context.in_shapes[0][dim] for dim in reduced)
    keepdim = bool(reduced) and len(context.out_shapes[0]) == len(context.in_shapes[0])
    return (
        local_mean,
        (context.operator.args[0], reduced, keepdim, count, context.operator.kwargs.get("dtype")),
        {},
    )


@register_rule("mean", local_call=_call_mean)
def split_mean(view: OperatorView) -> list[OpSplit]:
    """Split any dim; each rank divides its sum by the count of the full tensor."""
    return split_sum(view)


@register_rule("histc")
def split_histogram(view: OperatorView) -> list[OpSplit]:
    """Split any dim for partial sums, if the range is given."""
    if view.get_arg(2, "min", 0) == view.get_arg(3, "max", 0):  # the range is that of the values
        return []
    dims = list(range(len(view.in_shapes[0])))
    return splits_by_labels(view, [dims], [[None]], summed=dims)


OTHER_REDUCTION_KINDS = (
    "amax",
    "amin",
    "max",
    "min",
    "prod",
    "any",
    "all",
    "argmax",
    "argmin",
    "var",
    "std",
    "var_mean",
    "logsumexp",
    "norm",
    "linalg_vector_norm",
    "median",
    "argsort",
    "sort",
    "topk",
    "cummax",
    "cumprod",
    "logcumsumexp",
)


@register_rule(*OTHER_REDUCTION_KINDS)
def split_other_reduction(view: OperatorView) -> list[OpSplit]:
    """Split the dims that stay."""
    kind = view.operator.kind
    rank = len(view.in_shapes[0])
    if len(view.in_shapes) > 1:  # max(x, y)
        return []
    if kind in ("sort", "argsort", "topk"):
        position, name, default = {"topk": (2, "dim", -1)}.get(kind, (1, "dim", -1))
        reduced: tuple[int, ...] = normalize_dims(view.get_arg(position, name, default), rank)
    elif kind in ("norm", "linalg_vector_norm"):
        value = view.get_arg(2, "dim")
        reduced = normalize_dims(value, rank)
    else:
        reduced = _reduced_dims(view)
    ins, outs = _reduction_labels(view, reduced, is_named=False)
    return splits_by_labels(view, [ins], [outs] * len(view.out_shapes))
