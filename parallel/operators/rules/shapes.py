"""
Operators that only move elements: dims that keep their meaning are sharded. Shapes among the
arguments become local ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import gcd

import torch

from pdrun.parallel.operators.rules.labels import (
    Labels,
    group_reshaped_dims,
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


def _linear_splits(
    view: OperatorView,
    ins: list[Labels],
    outs: list[Labels],
    divides: dict[Hashable, int] | None = None,
) -> list[OpSplit]:
    """Return the splits by labels, and the one in which all tensors are partial sums."""
    return splits_by_labels(view, ins, outs, divides) + partial_sum_splits(
        view, range(len(view.in_shapes))
    )


# ---- the same elements in another shape -------------------------------------


def local_reshape(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return `x` in another shape, as a view if possible."""
    return x.reshape(shape)


def _call_reshape(context: LocalContext) -> LocalCall:
    return local_reshape, (context.operator.args[0], context.local_out_shape()), {}


@register_rule(
    "view",
    "reshape",
    "_unsafe_view",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "view_as",
    "reshape_as",
    "_reshape_alias",
    local_call=_call_reshape,
)
def split_reshape(view: OperatorView) -> list[OpSplit]:
    """
    Split a dim that stays, or the first of folded or unfolded dims if shards end where rows end.
    """
    before = view.in_shapes[0]
    after = view.out_shapes[0]
    ins: list[Hashable | None] = [None] * len(before)
    outs: list[Hashable | None] = [None] * len(after)
    divides: dict[Hashable, int] = {}
    for name, (left, right) in enumerate(group_reshaped_dims(before, after)):
        ins[left[0]] = outs[right[0]] = name
        if len(left) > 1 or len(right) > 1:
            divides[name] = gcd(before[left[0]], after[right[0]])
    others: list[Labels] = [[None] * len(shape) for shape in view.in_shapes[1:]]
    splits = splits_by_labels(view, [ins, *others], [outs], divides)
    return splits + (partial_sum_splits(view, [0]) if len(view.in_shapes) == 1 else [])


# ---- dims in another order --------------------------------------------------


def _dim_order(view: OperatorView) -> list[int]:
    rank = len(view.in_shapes[0])
    kind = view.operator.kind
    order = list(range(rank))
    if kind in ("t", "numpy_T"):
        return order[::-1]
    if kind in ("transpose", "swapaxes", "swapdims"):
        first = view.get_arg(1, "dim0") % rank
        second = view.get_arg(2, "dim1") % rank
        order[first], order[second] = order[second], order[first]
        return order
    if kind == "permute":
        return list(normalize_dims(view.get_arg(1, "dims"), rank))
    source, target = (
        normalize_dims(view.get_arg(position, name), rank)
        for position, name in ((1, "source"), (2, "destination"))
    )
    rest = [dim for dim in order if dim not in source]
    for to, dim in sorted(zip(target, source, strict=True)):
        rest.insert(to, dim)
    return rest


@register_rule(
    "permute", "transpose", "t", "movedim", "moveaxis", "numpy_T", "swapaxes", "swapdims"
)
def split_permute(view: OperatorView) -> list[OpSplit]:
    """Split any dim."""
    return _linear_splits(view, [list(range(len(view.in_shapes[0])))], [_dim_order(view)])


# ---- more elements ----------------------------------------------------------


def local_expand(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return `x` broadcast to a shape."""
    return x.expand(shape)


def _call_expand(context: LocalContext) -> LocalCall:
    return local_expand, (context.operator.args[0], context.local_out_shape()), {}


@register_rule("expand", "expand_as", "broadcast_to", local_call=_call_expand)
def split_expand(view: OperatorView) -> list[OpSplit]:
    """Split any dim; a dim that is new, or had one element, in the result only."""
    before = view.in_shapes[0]
    after = view.out_shapes[0]
    skip = len(after) - len(before)
    ins = [skip + dim if size == after[skip + dim] else None for dim, size in enumerate(before)]
    others: list[Labels] = [[None] * len(shape) for shape in view.in_shapes[1:]]
    splits = splits_by_labels(view, [ins, *others], [list(range(len(after)))])
    return splits + (partial_sum_splits(view, [0]) if len(view.in_shapes) == 1 else [])


@register_rule("repeat", "tile")
def split_repeat(view: OperatorView) -> list[OpSplit]:
    """Split dims that are not repeated."""
    before = view.in_shapes[0]
    after = view.out_shapes[0]
    skip = len(after) - len(before)
    labels: list[Hashable | None] = [
        dim if size == after[skip + dim] else None for dim, size in enumerate(before)
    ]
    return _linear_splits(view, [labels], [[*[None] * skip, *labels]])


@register_rule("repeat_interleave")
def split_repeat_interleave(view: OperatorView) -> list[OpSplit]:
    """Split any dim; the copies of an element stay together."""
    if len(view.in_shapes) > 1 or view.get_arg(2, "dim") is None:
        return []
    before = view.in_shapes[0]
    after = view.out_shapes[0]
    divides: dict[Hashable, int] = {
        dim: size for dim, size in enumerate(before) if size != after[dim]
    }
    labels = list(range(len(before)))
    return _linear_splits(view, [labels], [labels], divides)


# ---- fewer elements, and pieces ---------------------------------------------


@register_rule("select")
def split_select(view: OperatorView) -> list[OpSplit]:
    """Split all other dims."""
    (over,) = normalize_dims(view.get_arg(1, "dim"), len(view.in_shapes[0]))
    labels = labels_except(len(view.in_shapes[0]), over)
    return _linear_splits(
        view, [labels], [[name for dim, name in enumerate(labels) if dim != over]]
    )


@register_rule("slice", "narrow")
def split_slice(view: OperatorView) -> list[OpSplit]:
    """Split the dims that are taken in full."""
    before = view.in_shapes[0]
    after = view.out_shapes[0]
    labels = [dim if size == after[dim] else None for dim, size in enumerate(before)]
    if view.operator.kind == "narrow":
        labels[view.get_arg(1, "dim") % len(before)] = None
    elif view.get_arg(4, "step", 1) != 1 or (view.get_arg(3, "end") or 0) < 0:
        labels[view.get_arg(1, "dim", 0) % len(before)] = None
    return _linear_splits(view, [labels], [labels])


@register_rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def split_chunks(view: OperatorView) -> list[OpSplit]:
    """Split all other dims."""
    over = view.get_arg(2, "dim", 0) % len(view.in_shapes[0])
    labels = labels_except(len(view.in_shapes[0]), over)
    return _linear_splits(view, [labels], [labels] * len(view.out_shapes))


@register_rule("unbind")
def split_unbind(view: OperatorView) -> list[OpSplit]:
    """Split all other dims."""
    over = view.get_arg(1, "dim", 0) % len(view.in_shapes[0])
    labels = labels_except(len(view.in_shapes[0]), over)
    return _linear_splits(
        view,
        [labels],
        [[name for dim, name in enumerate(labels) if dim != over]] * len(view.out_shapes),
    )


@register_rule("cat", "concat")
def split_cat(view: OperatorView) -> list[OpSplit]:
    """Split all other dims."""
    rank = len(view.out_shapes[0])
    over = view.get_arg(1, "dim", 0) % rank
    labels = labels_except(rank, over)
    if any(
        len(shape) != rank for shape in view.in_shapes
    ):  # empty tensors of one dim are let through by torch
        return []
    return _linear_splits(view, [labels] * len(view.in_shapes), [labels])


@register_rule("stack")
def split_stack(view: OperatorView) -> list[OpSplit]:
    """Split all dims of the inputs."""
    over = view.get_arg(1, "dim", 0) % len(view.out_shapes[0])
    labels = list(range(len(view.in_shapes[0])))
    return _linear_splits(
        view, [labels] * len(view.in_shapes), [[*labels[:over], None, *labels[over:]]]
    )


@register_rule("select_scatter", "slice_scatter")
def split_view_scatter(view: OperatorView) -> list[OpSplit]:
    """x and the values for a part of it: split all dims but the indexed one."""
    rank = len(view.in_shapes[0])
    over = view.get_arg(2, "dim", 0) % rank
    labels = labels_except(rank, over)
    source = (
        [name for dim, name in enumerate(labels) if dim != over]
        if len(view.in_shapes[1]) < rank
        else labels
    )
    return _linear_splits(view, [labels, source], [labels])


# ---- elements elsewhere -----------------------------------------------------


@register_rule("flip", "roll")
def split_flip(view: OperatorView) -> list[OpSplit]:
    """Split the dims along which nothing moves."""
    position = 1 if view.operator.kind == "flip" else 2
    moved_dims = normalize_dims(view.get_arg(position, "dims"), len(view.in_shapes[0]))
    labels = labels_except(len(view.in_shapes[0]), *moved_dims)
    return _linear_splits(view, [labels], [labels])


@register_rule("pad", "constant_pad_nd")
def split_pad(view: OperatorView) -> list[OpSplit]:
    """Split the dims that are not padded."""
    rank = len(view.in_shapes[0])
    padded_dims = (len(view.get_arg(1, "pad")) + 1) // 2
    labels = labels_except(rank, *range(max(rank - padded_dims, 0), rank))
    splits = splits_by_labels(view, [labels], [labels])
    value = view.get_arg(3, "value") if view.operator.kind == "pad" else view.get_arg(2, "value")
    return splits + (partial_sum_splits(view, [0]) if not value else [])


@register_rule("tril", "triu")
def split_triangle(view: OperatorView) -> list[OpSplit]:
    """Split the dims before the matrices."""
    rank = len(view.in_shapes[0])
    labels = labels_except(rank, rank - 2, rank - 1)
    return _linear_splits(view, [labels], [labels])


@register_rule("cumsum")
def split_cumsum(view: OperatorView) -> list[OpSplit]:
    """Split all other dims."""
    (over,) = normalize_dims(view.get_arg(1, "dim"), len(view.in_shapes[0]))
    labels = labels_except(len(view.in_shapes[0]), over)
    return _linear_splits(view, [labels], [labels])


@register_rule("diff")
def split_diff(view: OperatorView) -> list[OpSplit]:
    """Split all other dims."""
    (over,) = normalize_dims(view.get_arg(2, "dim", -1), len(view.in_shapes[0]))
    labels = labels_except(len(view.in_shapes[0]), over)
    return splits_by_labels(view, [labels] * len(view.in_shapes), [labels])
