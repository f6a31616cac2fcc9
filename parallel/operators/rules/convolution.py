"""
Convolutions and pooling: rows, output channels, input channels (partial sums) and groups are
sharded. Spatial dims stay replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

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
    return int(view.get_arg(_groups_position(view), "groups", 1))


def _groups_position(view: OperatorView | LocalContext) -> int:
    if view.operator.kind == "convolution":
        return 8
    return 6


def _is_transposed(view: OperatorView) -> bool:
    return view.operator.kind == "convolution" and bool(view.get_arg(6, "transposed", False))


def _call_convolution(context: LocalContext) -> LocalCall:
    operator = context.operator
    args = list(operator.args)
    kwargs = dict(operator.kwargs)
    if _group_count(context) > 1:
        parts = 1
        for axis, split in context.splits.items():
            if split.in_states[0] == 1:
                parts *= context.axis_size[axis]
        position = _groups_position(context)
        if position < len(args):
            args[position] = args[position] // parts
        else:
            kwargs["groups"] = kwargs["groups"] // parts
    if not context.is_partial_sum() or len(context.in_shapes) < 3:
        return operator.target, tuple(args), kwargs
    return local_convolution, (operator.target, float(context.is_first_term()), *args), kwargs


def local_convolution(
    target: Callable[..., torch.Tensor],
    factor: float,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *args: object,
    **kwargs: object,
) -> torch.Tensor:
    """Return a convolution with a factor for its bias."""
    return target(x, weight, bias * factor, *args, **kwargs)


@register_rule(*CONVOLUTION_KINDS, local_call=_call_convolution)
def split_convolution(view: OperatorView) -> list[OpSplit]:
    """
    x [N, C, ...], weight [O, C / groups, ...], bias [O]: split N, O or C (partial sums); with
    groups N or the groups.
    """
    space: list[Hashable | None] = [None] * (len(view.in_shapes[1]) - 2)
    if _is_transposed(view) or len(view.in_shapes[0]) != len(view.in_shapes[1]):
        return []
    group_count = _group_count(view)
    if group_count > 1:
        ins: list[Labels] = [["n", "c", *space], ["c", None, *space], ["c"]]
        return splits_by_labels(
            view, ins[: len(view.in_shapes)], [["n", "c", *space]], {"c": group_count}
        )
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
    """x [N, C, ...]: split N or C."""
    space = next(count for name, count in _SPACE_DIMS.items() if name in view.operator.kind)
    labels = [*range(len(view.in_shapes[0]) - space), *[None] * space]
    return splits_by_labels(view, [labels], [labels] * len(view.out_shapes))


@register_rule("upsample_nearest2d", "upsample_bilinear2d", "pixel_shuffle")
def split_resizing(view: OperatorView) -> list[OpSplit]:
    """x [N, C, H, W]: split N."""
    labels = ["n", *[None] * (len(view.in_shapes[0]) - 1)]
    return splits_by_labels(view, [labels], [labels])
