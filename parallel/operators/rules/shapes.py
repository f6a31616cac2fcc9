"""
What only moves elements: dims that keep their meaning are cut; shapes among the arguments become
local ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import gcd

import torch

from pdrun.parallel.operators.rules.labels import Labels, by_labels, dims, groups, linear
from pdrun.parallel.operators.rules.rule import Call, Place, Split, View, rule


def _every(
    view: View, ins: list[Labels], outs: list[Labels], divides: dict[Hashable, int] | None = None
) -> list[Split]:
    """Moving elements is linear in all inputs together."""
    return by_labels(view, ins, outs, divides) + linear(view, range(len(view.ins)))


# ---- the same elements in another shape -------------------------------------


def reshaped(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return `x` in another shape, as a view where that is possible."""
    return x.reshape(shape)


def _run_reshape(place: Place) -> Call:
    return reshaped, (place.operator.args[0], place.out()), {}


@rule(
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
    run=_run_reshape,
)
def reshape(view: View) -> list[Split]:
    """
    Cut a dim that stays, or the first of dims that are folded or unfolded, if parts end where rows
    do.
    """
    before = view.ins[0]
    after = view.outs[0]
    ins: list[Hashable | None] = [None] * len(before)
    outs: list[Hashable | None] = [None] * len(after)
    divides: dict[Hashable, int] = {}
    for name, (left, right) in enumerate(groups(before, after)):
        ins[left[0]] = outs[right[0]] = name
        if len(left) > 1 or len(right) > 1:
            divides[name] = gcd(before[left[0]], after[right[0]])
    others: list[Labels] = [[None] * len(shape) for shape in view.ins[1:]]
    found = by_labels(view, [ins, *others], [outs], divides)
    return found + (linear(view, [0]) if len(view.ins) == 1 else [])


# ---- dims in another order --------------------------------------------------


def _order(view: View) -> list[int]:
    rank = len(view.ins[0])
    kind = view.operator.kind
    order = list(range(rank))
    if kind in ("t", "numpy_T"):
        return order[::-1]
    if kind in ("transpose", "swapaxes", "swapdims"):
        a = view.arg(1, "dim0") % rank
        b = view.arg(2, "dim1") % rank
        order[a], order[b] = order[b], order[a]
        return order
    if kind == "permute":
        return list(dims(view.arg(1, "dims"), rank))
    source, target = (
        dims(view.arg(place, name), rank) for place, name in ((1, "source"), (2, "destination"))
    )
    rest = [dim for dim in order if dim not in source]
    for to, dim in sorted(zip(target, source, strict=True)):
        rest.insert(to, dim)
    return rest


@rule("permute", "transpose", "t", "movedim", "moveaxis", "numpy_T", "swapaxes", "swapdims")
def permute(view: View) -> list[Split]:
    """Cut any dim."""
    return _every(view, [list(range(len(view.ins[0])))], [_order(view)])


# ---- more elements ----------------------------------------------------------


def expanded(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return `x` broadcast to a shape."""
    return x.expand(shape)


def _run_expand(place: Place) -> Call:
    return expanded, (place.operator.args[0], place.out()), {}


@rule("expand", "expand_as", "broadcast_to", run=_run_expand)
def expand(view: View) -> list[Split]:
    """Cut any dim: those that are new, or had one element, in the result only."""
    before = view.ins[0]
    after = view.outs[0]
    skip = len(after) - len(before)
    ins = [skip + dim if size == after[skip + dim] else None for dim, size in enumerate(before)]
    others: list[Labels] = [[None] * len(shape) for shape in view.ins[1:]]
    found = by_labels(view, [ins, *others], [list(range(len(after)))])
    return found + (linear(view, [0]) if len(view.ins) == 1 else [])


@rule("repeat", "tile")
def repeat(view: View) -> list[Split]:
    """Cut dims that aren't repeated."""
    before = view.ins[0]
    after = view.outs[0]
    skip = len(after) - len(before)
    labels: list[Hashable | None] = [
        dim if size == after[skip + dim] else None for dim, size in enumerate(before)
    ]
    return _every(view, [labels], [[*[None] * skip, *labels]])


@rule("repeat_interleave")
def repeat_interleave(view: View) -> list[Split]:
    """Cut any dim; each element of one becomes several that stay together."""
    if len(view.ins) > 1 or view.arg(2, "dim") is None:
        return []
    before = view.ins[0]
    after = view.outs[0]
    divides: dict[Hashable, int] = {
        dim: size for dim, size in enumerate(before) if size != after[dim]
    }
    labels = list(range(len(before)))
    return _every(view, [labels], [labels], divides)


# ---- fewer elements, and pieces ---------------------------------------------


@rule("select")
def select(view: View) -> list[Split]:
    """Cut all other dims."""
    (over,) = dims(view.arg(1, "dim"), len(view.ins[0]))
    labels = [None if dim == over else dim for dim in range(len(view.ins[0]))]
    return _every(view, [labels], [[name for dim, name in enumerate(labels) if dim != over]])


@rule("slice", "narrow")
def slices(view: View) -> list[Split]:
    """Cut the dims of which everything is taken."""
    before = view.ins[0]
    after = view.outs[0]
    labels = [dim if size == after[dim] else None for dim, size in enumerate(before)]
    if view.operator.kind == "narrow":
        labels[view.arg(1, "dim") % len(before)] = None
    elif view.arg(4, "step", 1) != 1 or (view.arg(3, "end") or 0) < 0:
        labels[view.arg(1, "dim", 0) % len(before)] = None
    return _every(view, [labels], [labels])


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def split(view: View) -> list[Split]:
    """Cut all other dims."""
    over = view.arg(2, "dim", 0) % len(view.ins[0])
    labels = [None if dim == over else dim for dim in range(len(view.ins[0]))]
    return _every(view, [labels], [labels] * len(view.outs))


@rule("unbind")
def unbind(view: View) -> list[Split]:
    """Cut all other dims."""
    over = view.arg(1, "dim", 0) % len(view.ins[0])
    labels = [None if dim == over else dim for dim in range(len(view.ins[0]))]
    return _every(
        view, [labels], [[name for dim, name in enumerate(labels) if dim != over]] * len(view.outs)
    )


@rule("cat", "concat")
def cat(view: View) -> list[Split]:
    """Cut all other dims."""
    rank = len(view.outs[0])
    over = view.arg(1, "dim", 0) % rank
    labels = [None if dim == over else dim for dim in range(rank)]
    if any(
        len(shape) != rank for shape in view.ins
    ):  # empty tensors of one dim are let through by torch
        return []
    return _every(view, [labels] * len(view.ins), [labels])


@rule("stack")
def stack(view: View) -> list[Split]:
    """Cut all dims that were there before."""
    over = view.arg(1, "dim", 0) % len(view.outs[0])
    labels = list(range(len(view.ins[0])))
    return _every(view, [labels] * len(view.ins), [[*labels[:over], None, *labels[over:]]])


@rule("select_scatter", "slice_scatter")
def scatter_view(view: View) -> list[Split]:
    """x and what is put into it: cut all dims but the one that is indexed."""
    rank = len(view.ins[0])
    over = view.arg(2, "dim", 0) % rank
    labels = [None if dim == over else dim for dim in range(rank)]
    source = (
        [name for dim, name in enumerate(labels) if dim != over]
        if len(view.ins[1]) < rank
        else labels
    )
    return _every(view, [labels, source], [labels])


# ---- elements elsewhere -----------------------------------------------------


@rule("flip", "roll")
def moved(view: View) -> list[Split]:
    """Cut the dims along which nothing moves."""
    place, name = (1, "dims") if view.operator.kind == "flip" else (2, "dims")
    over = dims(view.arg(place, name), len(view.ins[0]))
    labels = [None if dim in over else dim for dim in range(len(view.ins[0]))]
    return _every(view, [labels], [labels])


@rule("pad", "constant_pad_nd")
def pad(view: View) -> list[Split]:
    """Cut the dims that aren't padded."""
    rank = len(view.ins[0])
    touched = (len(view.arg(1, "pad")) + 1) // 2
    labels = [dim if dim < rank - touched else None for dim in range(rank)]
    found = by_labels(view, [labels], [labels])
    value = view.arg(3, "value") if view.operator.kind == "pad" else view.arg(2, "value")
    return found + (linear(view, [0]) if not value else [])


@rule("tril", "triu")
def triangle(view: View) -> list[Split]:
    """Cut the dims in front of the matrices."""
    rank = len(view.ins[0])
    labels = [dim if dim < rank - 2 else None for dim in range(rank)]
    return _every(view, [labels], [labels])


@rule("cumsum")
def cumsum(view: View) -> list[Split]:
    """Cut all other dims."""
    (over,) = dims(view.arg(1, "dim"), len(view.ins[0]))
    labels = [None if dim == over else dim for dim in range(len(view.ins[0]))]
    return _every(view, [labels], [labels])
