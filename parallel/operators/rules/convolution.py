"""
Convolutions and pooling: rows, channels out, channels in (terms of a sum), groups; space stays
whole.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from pdrun.parallel.operators.rules.labels import Labels, splits_by_labels
from pdrun.parallel.operators.rules.rule import (
    LocalCall,
    LocalContext,
    OperatorView,
    OpSplit,
    register_rule,
)

CONVOLUTION_KINDS = ("conv1d", "conv2d", "conv3d", "convolution")


def _group_count(view: OperatorView | LocalContext) -> int:
    return int(
        view.get_arg(8, "groups", 1)
        if view.operator.kind == "convolution"
        else view.get_arg(6, "groups", 1)
    )


def _is_transposed(view: OperatorView) -> bool:
    return view.operator.kind == "convolution" and bool(view.get_arg(6, "transposed", False))


def _call_convolution(context: LocalContext) -> LocalCall:
    operator = context.operator
    args = list(operator.args)
    kwargs = dict(operator.kwargs)
    if _group_count(context) > 1:
        parts = 1
        for axis, split in context.splits.items():
            parts *= context.axis_size[axis] if split.in_states[0] == 1 else 1
        where = 8 if operator.kind == "convolution" else 6
        if where < len(args):
            args[where] = args[where] // parts
        else:
            kwargs["groups"] = kwargs["groups"] // parts
    if not context.is_partial_sum() or len(context.in_shapes) < 3:
        return operator.target, tuple(args), kwargs
    return local_convolution, (operator.target, float(context.is_first_term()), *args), kwargs


def local_convolution(
    target: object,
    factor: float,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *args: object,
    **kwargs: object,
) -> torch.Tensor:
    """Return a convolution with a factor for its bias."""
    result: torch.Tensor = target(x, weight, bias * factor, *args, **kwargs)  # type: ignore[operator]
    return result


@register_rule(*CONVOLUTION_KINDS, local_call=_call_convolution)
def split_convolution(view: OperatorView) -> list[OpSplit]:
    """x [N, C, ...], weight [O, C / groups, ...], bias [O]."""
    space: list[Hashable | None] = [None] * (len(view.in_shapes[1]) - 2)
    if _is_transposed(view) or len(view.in_shapes[0]) != len(view.in_shapes[1]):
        return []
    many = _group_count(view)
    if many > 1:
        ins: list[Labels] = [["n", "c", *space], ["c", None, *space], ["c"]]
        return splits_by_labels(view, ins[: len(view.in_shapes)], [["n", "c", *space]], {"c": many})
    ins = [["n", "c", *space], ["o", "c", *space], ["o"]]
    return splits_by_labels(view, ins[: len(view.in_shapes)], [["n", "o", *space]], summed=["c"])


_SPACE_DIMS = {"1d": 1, "2d": 2, "3d": 3}


@register_rule(
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool2d_with_indices",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "_adaptive_avg_pool2d",
    "adaptive_max_pool2d",
)
def split_pooling(view: OperatorView) -> list[OpSplit]:
    """x [N, C, ...]: cut N or C."""
    space = next(count for name, count in _SPACE_DIMS.items() if name in view.operator.kind)
    labels = [*range(len(view.in_shapes[0]) - space), *[None] * space]
    return splits_by_labels(view, [labels], [labels] * len(view.out_shapes))


@register_rule("upsample_nearest2d", "upsample_bilinear2d", "pixel_shuffle")
def split_resizing(view: OperatorView) -> list[OpSplit]:
    """x [N, C, H, W]: cut N."""
    labels = ["n", *[None] * (len(view.in_shapes[0]) - 1)]
    return splits_by_labels(view, [labels], [labels])
