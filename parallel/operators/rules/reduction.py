"""Reductions: the dims that stay are cut; a sum over a cut dim leaves terms of a sum."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from pdrun.parallel.operators.rules.labels import Labels, by_labels, dims, linear, numel
from pdrun.parallel.operators.rules.rule import Call, Place, Split, View, rule


def _over(view: View | Place) -> tuple[int, ...]:
    """Return the dims that a reduction goes over."""
    rank = len(view.ins[0])
    value = view.arg(1, "dim")
    if isinstance(value, (int, list, tuple)) and not isinstance(value, bool):
        return dims(value, rank)
    return tuple(range(rank))


def _labels(view: View, over: tuple[int, ...], named: bool) -> tuple[Labels, Labels]:
    """
    Return names of the dims of the input and of an output; those that are reduced have one if
    ``named``.
    """
    rank = len(view.ins[0])
    ins: list[Hashable | None] = [dim if dim not in over or named else None for dim in range(rank)]
    if len(view.outs[0]) == rank:
        return ins, [dim if dim not in over else None for dim in range(rank)]
    return ins, [dim for dim in range(rank) if dim not in over]


@rule("sum")
def total(view: View) -> list[Split]:
    """Cut any dim."""
    over = _over(view)
    ins, outs = _labels(view, over, named=True)
    return by_labels(view, [ins], [outs], lost=over) + linear(view, [0])


def mean_part(
    x: torch.Tensor, over: tuple[int, ...], keepdim: bool, count: int, dtype: Any
) -> torch.Tensor:
    """Return this rank's share of a mean over ``count`` elements."""
    if over:
        return torch.sum(x, over, keepdim, dtype=dtype) / count
    return x.to(dtype or x.dtype)


def _run_mean(place: Place) -> Call:
    if not place.adds_up():
        return place.operator.target, place.operator.args, place.operator.kwargs
    over = _over(place)
    count = numel(place.ins[0][dim] for dim in over)
    keep = bool(over) and len(place.outs[0]) == len(place.ins[0])
    return (
        mean_part,
        (place.operator.args[0], over, keep, count, place.operator.kwargs.get("dtype")),
        {},
    )


@rule("mean", run=_run_mean)
def mean(view: View) -> list[Split]:
    """Cut any dim; each rank divides its sum by the count of the whole."""
    return total(view)


OTHERS = (
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


@rule(*OTHERS)
def others(view: View) -> list[Split]:
    """Cut the dims that stay."""
    kind = view.operator.kind
    rank = len(view.ins[0])
    if len(view.ins) > 1:  # max(x, y)
        return []
    if kind in ("sort", "argsort", "topk"):
        place, name, otherwise = {"topk": (2, "dim", -1)}.get(kind, (1, "dim", -1))
        over: tuple[int, ...] = dims(view.arg(place, name, otherwise), rank)
    elif kind in ("norm", "linalg_vector_norm"):
        value = view.arg(2, "dim")
        over = dims(value, rank)
    else:
        over = _over(view)
    ins, outs = _labels(view, over, named=False)
    return by_labels(view, [ins], [outs] * len(view.outs))
