"""
Lookups: tables are sharded by columns, or by rows with masked lookups that return partial sums.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.nn import functional

from pdrun.parallel.operators.rules.labels import (
    Labels,
    broadcast_labels,
    labels_except,
    partial_sum_splits,
    splits_by_labels,
)
from pdrun.parallel.operators.rules.rule import (
    PARTIAL,
    REPLICATED,
    LocalCall,
    LocalContext,
    OperatorView,
    OpSplit,
    register_rule,
)


def local_embedding(
    weight: torch.Tensor, index: torch.Tensor, low: int, padding: int
) -> torch.Tensor:
    """
    Look up in a table that has the rows from ``low`` on. Other rows give 0.

    Args:
        padding: row of this shard without a gradient; -1: none.
    """
    local = index - low
    outside = (local < 0) | (local >= weight.shape[0])
    if weight.shape[0] == 0:
        return (weight.sum() * 0).expand(*index.shape, weight.shape[1])
    found = functional.embedding(
        local.masked_fill(outside, 0), weight, padding if padding >= 0 else None
    )
    return found.masked_fill(outside.unsqueeze(-1), 0.0)


def _call_embedding(context: LocalContext) -> LocalCall:
    weight, index = context.operator.args[:2]
    low, high = context.in_boxes[0][0]
    if (low, high) == (0, context.in_shapes[0][0]):
        return context.operator.target, context.operator.args, context.operator.kwargs
    padding = context.get_arg(2, "padding_idx", -1)
    return (
        local_embedding,
        (weight, index, low, padding - low if low <= padding < high else -1),
        {},
    )


@register_rule("embedding", local_call=_call_embedding)
def split_embedding(view: OperatorView) -> list[OpSplit]:
    """weight [V, H], index [...]: split V, H or any dim of the index."""
    lead: list[Hashable] = list(range(len(view.in_shapes[1])))
    splits = splits_by_labels(view, [["v", "h"], lead], [[*lead, "h"]], summed=["v"])
    if view.get_arg(3, "scale_grad_by_freq", False) or view.get_arg(4, "sparse", False):
        splits = [split for split in splits if split.in_states[0] != 0]
    return splits + [OpSplit((PARTIAL, REPLICATED), (PARTIAL,))]


@register_rule("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
def split_embedding_bag(view: OperatorView) -> list[OpSplit]:
    """weight [V, H], index and offsets: split H."""
    outs: list[Labels] = [[None, "h"], *[[None] * len(out) for out in view.out_shapes[1:]]]
    if view.get_arg(4, "mode", 0) == 2:  # the largest: its fourth result is as wide as the table
        return []
    return splits_by_labels(
        view, [[None, "h"], *[[None] * len(shape) for shape in view.in_shapes[1:]]], outs
    )


@register_rule("index_select")
def split_index_select(view: OperatorView) -> list[OpSplit]:
    """Split all other dims, or the index."""
    indexed = view.get_arg(1, "dim") % len(view.in_shapes[0])
    labels = labels_except(len(view.in_shapes[0]), indexed)
    outs = [*labels[:indexed], "i", *labels[indexed + 1 :]]
    return splits_by_labels(
        view, [labels, ["i"] if len(view.in_shapes[1]) else []], [outs]
    ) + partial_sum_splits(view, [0])


@register_rule("gather", "take_along_dim")
def split_gather(view: OperatorView) -> list[OpSplit]:
    """Split the other dims that are as long in the index, or the dim itself in index and result."""
    rank = len(view.in_shapes[0])
    indexed = view.get_arg(2 if view.operator.kind == "take_along_dim" else 1, "dim") % rank
    x: list[Hashable | None] = [
        dim if dim != indexed and view.in_shapes[0][dim] == view.in_shapes[1][dim] else None
        for dim in range(rank)
    ]
    index = [name if dim != indexed else "i" for dim, name in enumerate(x)]
    return splits_by_labels(view, [x, index], [index]) + partial_sum_splits(view, [0])


@register_rule("scatter", "scatter_add", "index_add", "index_copy")
def split_scatter(view: OperatorView) -> list[OpSplit]:
    """Split the other dims, if all tensors are as long."""
    rank = len(view.in_shapes[0])
    indexed = view.get_arg(1, "dim") % rank
    full_shapes = [shape for shape in view.in_shapes if len(shape) == rank]
    labels = [
        dim if dim != indexed and len({shape[dim] for shape in full_shapes}) == 1 else None
        for dim in range(rank)
    ]
    ins: list[Labels] = [
        labels if len(shape) == rank and rank > 1 else [None] * len(shape)
        for shape in view.in_shapes
    ]
    return splits_by_labels(view, ins, [labels]) if rank > 1 else []


@register_rule("index")
def split_index(view: OperatorView) -> list[OpSplit]:
    """
    x[i, j, :, k]: split the dims that are not indexed, or the dims of the indices if all have the
    same shape.
    """
    indices: list[Any] = list(view.get_arg(1, "indices"))
    rank = len(view.in_shapes[0])
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    if not indexed or any(len(shape) != len(view.in_shapes[1]) for shape in view.in_shapes[1:]):
        return []
    x = labels_except(rank, *indexed)
    index_ndim = len(view.out_shapes[0]) - (rank - len(indexed))  # dims of the indices together
    if indexed != list(
        range(indexed[0], indexed[-1] + 1)
    ):  # apart: the dims of the indices come first
        outs = [*["?"] * index_ndim, *[name for name in x if name is not None]]
    else:
        outs = [*x[: indexed[0]], *["?"] * index_ndim, *x[indexed[-1] + 1 :]]
    if (
        any(shape != view.in_shapes[1] for shape in view.in_shapes[1:])
        or len(view.in_shapes[1]) != index_ndim
    ):
        ins: list[Labels] = [x, *[[None] * len(shape) for shape in view.in_shapes[1:]]]
        return splits_by_labels(
            view, ins, [[None if name == "?" else name for name in outs]]
        ) + partial_sum_splits(view, [0])
    count = iter(range(index_ndim))
    out_labels = [f"i{next(count)}" if name == "?" else name for name in outs]
    index_labels = [f"i{dim}" for dim in range(index_ndim)]
    return splits_by_labels(
        view, [x, *[index_labels] * (len(view.in_shapes) - 1)], [out_labels]
    ) + partial_sum_splits(view, [0])


@register_rule("index_put")
def split_index_put(view: OperatorView) -> list[OpSplit]:
    """x[i, j] = values: split the dims of x that are not indexed."""
    indices: list[Any] = list(view.get_arg(1, "indices"))
    x, *index_shapes, values = view.in_shapes
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    if len(index_shapes) != len(indexed) or not indexed:
        return []
    if any(
        len(shape) > 1 and shape == x[dim : dim + len(shape)]
        for dim, shape in zip(indexed, index_shapes, strict=True)
    ):  # it can be a mask, which is for several dims
        return []
    labels = labels_except(len(x), *indexed)
    index_dims = list(torch.broadcast_shapes(*index_shapes))
    first = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    shape = [size for dim, size in enumerate(x) if dim not in indexed]
    names: list[Hashable | None] = [name for name in labels if name is not None]
    shape[first:first] = index_dims
    names[first:first] = [None] * len(index_dims)
    ins: list[Labels] = [labels, *[[None] * len(each) for each in index_shapes]]
    return splits_by_labels(view, [*ins, broadcast_labels(values, tuple(shape), names)], [labels])


@register_rule("one_hot")
def split_one_hot(view: OperatorView) -> list[OpSplit]:
    """Split any dim of the index, if the number of classes is given."""
    labels = list(range(len(view.in_shapes[0])))
    if view.get_arg(1, "num_classes", -1) > 0:
        return splits_by_labels(view, [labels], [[*labels, None]])
    return []


@register_rule("bucketize")
def split_bucketize(view: OperatorView) -> list[OpSplit]:
    """Split the values; the boundaries stay replicated."""
    if len(view.in_shapes) < 2:
        return []
    labels = list(range(len(view.in_shapes[0])))
    return splits_by_labels(view, [labels, [None]], [labels])
