"""
Losses: rows are sharded. Sums and means over rows return partial sums. Classes stay replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from pdrun.parallel.operators.rules.labels import (
    Labels,
    count_elements,
    labels_except,
    splits_by_labels,
)
from pdrun.parallel.operators.rules.rule import (
    LocalCall,
    LocalContext,
    OperatorView,
    OpSplit,
    register_rule,
)

REDUCE_NONE = 0
REDUCE_MEAN = 1
REDUCE_SUM = 2
"""ATen's numbers for reductions."""


@register_rule("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward")
def split_cross_entropy(view: OperatorView) -> list[OpSplit]:
    """
    logits [N, C, ...], targets [N, ...] (or like logits): split rows, unless the reduction is a
    mean.

    The weight of a mean depends on the targets that are ignored on all ranks.
    """
    logits = view.in_shapes[0]
    target = view.in_shapes[1]
    reduction = view.get_arg(3, "reduction", REDUCE_MEAN)
    if reduction == REDUCE_MEAN or len(logits) < 2 or len(view.out_shapes) > 1:
        return []
    first = labels_except(len(logits), 1)
    second = (
        first
        if len(target) == len(logits)
        else [name for dim, name in enumerate(first) if dim != 1]
    )
    ins: list[Labels] = [first, second, *[[None] * len(shape) for shape in view.in_shapes[2:]]]
    rows = [name for name in first if name is not None]
    return splits_by_labels(
        view,
        ins,
        [rows if reduction == REDUCE_NONE else []],
        summed=rows if reduction == REDUCE_SUM else (),
    )


ELEMENTWISE_LOSSES: dict[str, Callable[..., Any]] = {
    "mse_loss": functional.mse_loss,
    "l1_loss": functional.l1_loss,
    "smooth_l1_loss": functional.smooth_l1_loss,
    "huber_loss": functional.huber_loss,
    "binary_cross_entropy": functional.binary_cross_entropy,
    "binary_cross_entropy_with_logits": functional.binary_cross_entropy_with_logits,
    "soft_margin_loss": functional.soft_margin_loss,
}
_REDUCTION_POSITIONS = {"binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4}


def _loss_reduction(view: OperatorView | LocalContext) -> int:
    return int(
        view.get_arg(_REDUCTION_POSITIONS.get(view.operator.kind, 2), "reduction", REDUCE_MEAN)
    )


def local_mean_loss(
    target: Callable[..., torch.Tensor], count: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return this rank's share of a mean over ``count`` elements."""
    return target(*args, **kwargs) / count


def _call_loss(context: LocalContext) -> LocalCall:
    operator = context.operator
    if not context.is_partial_sum() or _loss_reduction(context) != REDUCE_MEAN:
        return operator.target, operator.args, operator.kwargs
    position = _REDUCTION_POSITIONS.get(operator.kind, 2)
    args = list(operator.args)
    kwargs = dict(operator.kwargs)
    if position < len(args):
        args[position] = REDUCE_SUM
    else:
        kwargs["reduction"] = REDUCE_SUM
    return local_mean_loss, (operator.target, count_elements(context.in_shapes[0]), *args), kwargs


@register_rule(*ELEMENTWISE_LOSSES, local_call=_call_loss)
def split_elementwise_loss(view: OperatorView) -> list[OpSplit]:
    """Split any dim, for inputs of one shape."""
    if any(shape != view.in_shapes[0] for shape in view.in_shapes[1:]):
        return []
    labels = list(range(len(view.in_shapes[0])))
    is_reduced = _loss_reduction(view) != REDUCE_NONE
    return splits_by_labels(
        view,
        [labels] * len(view.in_shapes),
        [[] if is_reduced else labels],
        summed=labels if is_reduced else (),
    )
