"""Losses: rows are cut; sums and means over rows leave terms of a sum. Classes stay whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.nn import functional

from pdrun.parallel.operators.rules.labels import Labels, by_labels, numel
from pdrun.parallel.operators.rules.rule import Call, Place, Split, View, rule

NONE = 0
MEAN = 1
SUM = 2
"""ATen's numbers for reductions."""


@rule("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward")
def cross_entropy(view: View) -> list[Split]:
    """
    logits [N, C, ...], targets [N, ...] (or like logits): cut rows, unless a mean weighs them by
    what is ignored.
    """
    logits = view.ins[0]
    target = view.ins[1]
    reduction = view.arg(3, "reduction", MEAN)
    if reduction == MEAN or len(logits) < 2 or len(view.outs) > 1:
        return []
    first: list[Hashable | None] = [dim if dim != 1 else None for dim in range(len(logits))]
    second = (
        first
        if len(target) == len(logits)
        else [name for dim, name in enumerate(first) if dim != 1]
    )
    ins: list[Labels] = [first, second, *[[None] * len(shape) for shape in view.ins[2:]]]
    rows = [name for name in first if name is not None]
    return by_labels(
        view, ins, [rows if reduction == NONE else []], lost=rows if reduction == SUM else ()
    )


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "mse_loss": functional.mse_loss,
    "l1_loss": functional.l1_loss,
    "smooth_l1_loss": functional.smooth_l1_loss,
    "huber_loss": functional.huber_loss,
    "binary_cross_entropy": functional.binary_cross_entropy,
    "binary_cross_entropy_with_logits": functional.binary_cross_entropy_with_logits,
    "soft_margin_loss": functional.soft_margin_loss,
}
_REDUCTION = {"binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4}


def _reduction(view: View | Place) -> int:
    return int(view.arg(_REDUCTION.get(view.operator.kind, 2), "reduction", MEAN))


def share_of_mean(
    target: Callable[..., torch.Tensor], count: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return this rank's share of a mean over ``count`` elements."""
    return target(*args, **kwargs) / count


def _run_loss(place: Place) -> Call:
    operator = place.operator
    if not place.adds_up() or _reduction(place) != MEAN:
        return operator.target, operator.args, operator.kwargs
    at = _REDUCTION.get(operator.kind, 2)
    args = list(operator.args)
    kwargs = dict(operator.kwargs)
    if at < len(args):
        args[at] = SUM
    else:
        kwargs["reduction"] = SUM
    return share_of_mean, (operator.target, numel(place.ins[0]), *args), kwargs


@rule(*ELEMENTWISE, run=_run_loss)
def elementwise_loss(view: View) -> list[Split]:
    """Cut any dim, of inputs of one shape."""
    if any(shape != view.ins[0] for shape in view.ins[1:]):
        return []
    labels = list(range(len(view.ins[0])))
    reduced = _reduction(view) != NONE
    return by_labels(
        view, [labels] * len(view.ins), [[] if reduced else labels], lost=labels if reduced else ()
    )
