"""
Products: a dim of the result is cut with the factor that it comes from; cutting a contracted dim
leaves terms of a sum.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.nn import functional

from pdrun.parallel.operators.rules.labels import Labels, aligned, by_labels, linear
from pdrun.parallel.operators.rules.rule import Call, Place, Split, View, rule


@rule("mm", "bmm", "matmul", "mv", "dot")
def matmul(view: View) -> list[Split]:
    """[..., I, K] x [..., K, J]; vectors have no I or no J."""
    a, b = view.ins
    (out,) = view.outs
    tail = (["i"] if len(a) > 1 else []) + (["j"] if len(b) > 1 else [])
    lead: list[Hashable] = list(range(len(out) - len(tail)))
    batch = out[: len(lead)]
    first = aligned(a[:-2], batch, lead) + (["i", "k"] if len(a) > 1 else ["k"])
    second = aligned(b[:-2], batch, lead) + (["k", "j"] if len(b) > 1 else ["k"])
    return by_labels(view, [first, second], [lead + tail], lost=["k"]) + linear(view, [0], [1])


def _run_biased(place: Place) -> Call:
    """
    Leave the bias to the first rank where results are added up; it takes part everywhere, with
    weight 0.
    """
    is_linear = place.operator.kind == "linear"
    if not place.adds_up() or len(place.ins) < 3:
        target = linear_now if is_linear else place.operator.target
        return target, place.operator.args, place.operator.kwargs
    args = (*place.operator.args[:3], float(place.is_first()))
    return (linear_once if is_linear else addmm_once), args, {}


def linear_now(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Return what ``torch.nn.functional.linear`` does now: a pipeline may have put off the product for
    the weight.
    """
    return functional.linear(x, weight, bias)


def linear_once(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, factor: float
) -> torch.Tensor:
    """Return `torch.nn.functional.linear` with a factor for the bias."""
    return functional.linear(x, weight, bias * factor)


def addmm_once(
    bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: float
) -> torch.Tensor:
    """Return `torch.addmm` with a factor for what is added."""
    return torch.addmm(bias * factor, x, weight)


@rule("linear", run=_run_biased)
def linear_layer(view: View) -> list[Split]:
    """x [..., K], weight [J, K], bias [J]."""
    lead: list[Hashable] = list(range(len(view.ins[0]) - 1))
    ins: list[Labels] = [[*lead, "k"], ["j", "k"], ["j"]]
    found = by_labels(view, ins[: len(view.ins)], [[*lead, "j"]], lost=["k"])
    return found + ([] if len(view.ins) > 2 else linear(view, [0], [1]))


@rule("addmm", run=_run_biased)
def addmm(view: View) -> list[Split]:
    """added [I, J] (broadcast), x [I, K], weight [K, J]."""
    added = aligned(view.ins[0], view.outs[0], ["i", "j"])
    if view.operator.kwargs:  # factors
        return []
    return by_labels(view, [added, ["i", "k"], ["k", "j"]], [["i", "j"]], lost=["k"])


@rule("einsum")
def einsum(view: View) -> list[Split]:
    """As the equation says; an ellipsis or a repeated index leaves all whole."""
    equation = str(view.arg(0, "equation")).replace(" ", "")
    if "." in equation:
        return []
    left, arrow, right = equation.partition("->")
    ins = left.split(",")
    if any(len(set(some)) < len(some) for some in ins):
        return []
    if not arrow:
        every = left.replace(",", "")
        right = "".join(sorted(name for name in set(every) if every.count(name) == 1))
    if any(
        shape[some.index(name)] == 1 != _widest(view, ins, name)
        for some, shape in zip(ins, view.ins, strict=True)
        for name in some
    ):
        return []
    labels = [list(some) for some in ins]
    return by_labels(view, labels, [list(right)], lost=set("".join(ins)) - set(right)) + linear(
        view, *([place] for place in range(len(ins)))
    )


def _widest(view: View, ins: list[str], name: str) -> int:
    return max(
        shape[some.index(name)] for some, shape in zip(ins, view.ins, strict=True) if name in some
    )
