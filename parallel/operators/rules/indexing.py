"""
Looking up: tables are cut by columns, or by rows with masked look-ups that leave terms of a sum.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.nn import functional

from pdrun.parallel.operators.rules.labels import Labels, by_labels, linear
from pdrun.parallel.operators.rules.rule import PARTIAL, WHOLE, Call, Place, Split, View, rule


def masked_embedding(
    weight: torch.Tensor, index: torch.Tensor, low: int, padding: int
) -> torch.Tensor:
    """
    Look up in rows ``low`` and following of a table; what lies elsewhere is 0.

    Args:
        padding: row of this part that gets no gradient; -1: none.
    """
    local = index - low
    outside = (local < 0) | (local >= weight.shape[0])
    if weight.shape[0] == 0:
        return (weight.sum() * 0).expand(*index.shape, weight.shape[1])
    found = functional.embedding(
        local.masked_fill(outside, 0), weight, padding if padding >= 0 else None
    )
    return found.masked_fill(outside.unsqueeze(-1), 0.0)


def _run_embedding(place: Place) -> Call:
    weight, index = place.operator.args[:2]
    low, high = place.in_boxes[0][0]
    if (low, high) == (0, place.ins[0][0]):
        return place.operator.target, place.operator.args, place.operator.kwargs
    padding = place.arg(2, "padding_idx", -1)
    return (
        masked_embedding,
        (weight, index, low, padding - low if low <= padding < high else -1),
        {},
    )


@rule("embedding", run=_run_embedding)
def embedding(view: View) -> list[Split]:
    """weight [V, H], index [...]: cut V, H or any dim of the index."""
    lead: list[Hashable] = list(range(len(view.ins[1])))
    found = by_labels(view, [["v", "h"], lead], [[*lead, "h"]], lost=["v"])
    if view.arg(3, "scale_grad_by_freq", False) or view.arg(4, "sparse", False):
        found = [split for split in found if split.ins[0] != 0]
    return found + [Split((PARTIAL, WHOLE), (PARTIAL,))]


@rule("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(view: View) -> list[Split]:
    """weight [V, H], index and offsets: cut H."""
    outs: list[Labels] = [[None, "h"], *[[None] * len(out) for out in view.outs[1:]]]
    if view.arg(4, "mode", 0) == 2:  # the largest: its fourth result is as wide as the table
        return []
    return by_labels(view, [[None, "h"], *[[None] * len(some) for some in view.ins[1:]]], outs)


@rule("index_select")
def index_select(view: View) -> list[Split]:
    """Cut all other dims, or the index."""
    over = view.arg(1, "dim") % len(view.ins[0])
    labels: list[Hashable | None] = [
        None if dim == over else dim for dim in range(len(view.ins[0]))
    ]
    outs = [*labels[:over], "i", *labels[over + 1 :]]
    return by_labels(view, [labels, ["i"] if len(view.ins[1]) else []], [outs]) + linear(view, [0])


@rule("gather", "take_along_dim")
def gather(view: View) -> list[Split]:
    """Cut the other dims that are as long in the index, or the dim itself in index and result."""
    rank = len(view.ins[0])
    over = view.arg(2 if view.operator.kind == "take_along_dim" else 1, "dim") % rank
    x: list[Hashable | None] = [
        dim if dim != over and view.ins[0][dim] == view.ins[1][dim] else None for dim in range(rank)
    ]
    index = [name if dim != over else "i" for dim, name in enumerate(x)]
    return by_labels(view, [x, index], [index]) + linear(view, [0])


@rule("scatter", "scatter_add", "index_add", "index_copy")
def scatter(view: View) -> list[Split]:
    """Cut the other dims, where all tensors are as long."""
    rank = len(view.ins[0])
    over = view.arg(1, "dim") % rank
    full = [shape for shape in view.ins if len(shape) == rank]
    labels = [
        dim if dim != over and len({shape[dim] for shape in full}) == 1 else None
        for dim in range(rank)
    ]
    ins: list[Labels] = [
        labels if len(shape) == rank and rank > 1 else [None] * len(shape) for shape in view.ins
    ]
    return by_labels(view, ins, [labels]) if rank > 1 else []


@rule("index")
def index(view: View) -> list[Split]:
    """x[i, j, :, k]: cut the dims that aren't indexed, or those of a lone index."""
    given: list[Any] = list(view.arg(1, "indices"))
    rank = len(view.ins[0])
    places = [dim for dim, one in enumerate(given) if one is not None]
    if not places or any(len(shape) != len(view.ins[1]) for shape in view.ins[1:]):
        return []
    x: list[Hashable | None] = [None if dim in places else dim for dim in range(rank)]
    wide = len(view.outs[0]) - (rank - len(places))  # dims of the indices together
    if places != list(
        range(places[0], places[-1] + 1)
    ):  # apart: the dims of the indices come first
        outs = [*["?"] * wide, *[name for name in x if name is not None]]
    else:
        outs = [*x[: places[0]], *["?"] * wide, *x[places[-1] + 1 :]]
    if any(shape != view.ins[1] for shape in view.ins[1:]) or len(view.ins[1]) != wide:
        ins: list[Labels] = [x, *[[None] * len(shape) for shape in view.ins[1:]]]
        return by_labels(view, ins, [[None if name == "?" else name for name in outs]]) + linear(
            view, [0]
        )
    count = iter(range(wide))
    named = [f"i{next(count)}" if name == "?" else name for name in outs]
    same = [f"i{dim}" for dim in range(wide)]
    return by_labels(view, [x, *[same] * (len(view.ins) - 1)], [named]) + linear(view, [0])


@rule("one_hot")
def one_hot(view: View) -> list[Split]:
    """Cut any dim of the index, where the number of classes is given."""
    labels = list(range(len(view.ins[0])))
    if view.arg(1, "num_classes", -1) > 0:
        return by_labels(view, [labels], [[*labels, None]])
    return []


@rule("bucketize")
def bucketize(view: View) -> list[Split]:
    """Cut the values; the borders stay whole."""
    if len(view.ins) < 2:
        return []
    labels = list(range(len(view.ins[0])))
    return by_labels(view, [labels, [None]], [labels])
