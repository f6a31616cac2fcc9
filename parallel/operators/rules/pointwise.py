"""Pointwise operators: any dim can be sharded. Partial sums pass through linear ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from pdrun.parallel.operators.rules.labels import (
    Labels,
    broadcast_labels,
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

UNARY_KINDS = (
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "bitwise_not",
    "ceil",
    "celu",
    "clamp",
    "clamp_max",
    "clamp_min",
    "clip",
    "cos",
    "cosh",
    "deg2rad",
    "digamma",
    "elu",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "frac",
    "gelu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "isfinite",
    "isinf",
    "isnan",
    "leaky_relu",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_sigmoid",
    "logical_not",
    "logit",
    "mish",
    "nan_to_num",
    "reciprocal",
    "relu",
    "relu6",
    "round",
    "rsqrt",
    "selu",
    "sgn",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinc",
    "sinh",
    "softplus",
    "softshrink",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "threshold",
    "trunc",
    "zeros_like",
    "ones_like",
    "full_like",
)
BROADCAST_KINDS = (
    "atan2",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "copysign",
    "eq",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "ge",
    "gt",
    "hypot",
    "isclose",
    "le",
    "logaddexp",
    "logical_and",
    "logical_or",
    "logical_xor",
    "lt",
    "maximum",
    "minimum",
    "ne",
    "pow",
    "remainder",
    "xlogy",
    "addcdiv",
    "addcmul",
    "lerp",
    "rsub",
    "__and__",
    "__or__",
)
LINEAR_KINDS = ("clone", "neg", "negative", "positive", "real", "constrain", "detach", "stop")
CAST_KINDS = ("to", "_to_copy", "type_as")


def _split_any_dim(view: OperatorView) -> list[OpSplit]:
    (out, *_) = view.out_shapes
    names = list(range(len(out)))
    return splits_by_labels(
        view,
        [broadcast_labels(shape, out) for shape in view.in_shapes],
        [names] * len(view.out_shapes),
    )


@register_rule(*UNARY_KINDS, *BROADCAST_KINDS)
def split_elementwise(view: OperatorView) -> list[OpSplit]:
    """Split any dim, of all inputs that are not broadcast along it."""
    return _split_any_dim(view)


@register_rule("prelu")
def split_prelu(view: OperatorView) -> list[OpSplit]:
    """x [N, C, ...] and weight [C], or one weight for all: split any dim."""
    shape, weight = view.in_shapes
    first = list(range(len(shape)))
    is_per_channel = math.prod(weight) > 1
    second: Labels = [1 if is_per_channel else None] * len(weight)
    return splits_by_labels(view, [first, second], [first])


@register_rule(*LINEAR_KINDS)
def split_linear_elementwise(view: OperatorView) -> list[OpSplit]:
    """As `elementwise`; a partial sum stays one."""
    return _split_any_dim(view) + partial_sum_splits(view, [0])


@register_rule(*CAST_KINDS)
def split_cast(view: OperatorView) -> list[OpSplit]:
    """As `elementwise`; partial sums do not pass."""
    return _split_any_dim(view)


@register_rule("add", "sub")
def split_addition(view: OperatorView) -> list[OpSplit]:
    """As `elementwise`; the sum of two partial sums is a partial sum."""
    has_both = len(view.in_shapes) == 2
    return _split_any_dim(view) + (partial_sum_splits(view, [0, 1]) if has_both else [])


@register_rule("mul", "multiply")
def split_multiplication(view: OperatorView) -> list[OpSplit]:
    """As `elementwise`; one factor can be a partial sum."""
    return _split_any_dim(view) + partial_sum_splits(
        view, *([position] for position in range(len(view.in_shapes)))
    )


@register_rule("div", "divide", "true_divide")
def split_division(view: OperatorView) -> list[OpSplit]:
    """As `elementwise`; the dividend can be a partial sum, unless the result is rounded."""
    is_rounded = view.operator.kwargs.get("rounding_mode") is not None
    return _split_any_dim(view) + ([] if is_rounded else partial_sum_splits(view, [0]))


@register_rule("where")
def split_where(view: OperatorView) -> list[OpSplit]:
    """As `elementwise`; both choices can be partial sums."""
    has_both = len(view.in_shapes) == 3
    return _split_any_dim(view) + (partial_sum_splits(view, [1, 2]) if has_both else [])


@register_rule("masked_fill")
def split_masked_fill(view: OperatorView) -> list[OpSplit]:
    """As `elementwise`; a partial sum can be filled with zeros."""
    is_zero = len(view.in_shapes) == 2 and view.get_arg(2, "value") == 0
    return _split_any_dim(view) + (partial_sum_splits(view, [0]) if is_zero else [])


def local_copy(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return `torch.ops.aten.copy`, which has no derivative."""
    return source.to(device=x.device, dtype=x.dtype).expand(x.shape).clone()


def _call_copy(context: LocalContext) -> LocalCall:
    return local_copy, tuple(context.operator.args[:2]), {}


@register_rule("copy", local_call=_call_copy)
def split_copy(view: OperatorView) -> list[OpSplit]:
    """As `elementwise`; the values can be broadcast."""
    return _split_any_dim(view)


@register_rule("fill")
def split_fill(view: OperatorView) -> list[OpSplit]:
    """As `elementwise`; the value is replicated."""
    return _split_any_dim(view)


# ---- dropout ----------------------------------------------------------------


def local_dropout(
    x: torch.Tensor, p: float, training: bool, shape: tuple[int, ...], box: Any
) -> torch.Tensor:
    """
    Return this rank's shard of a tensor after dropout.

    The mask is drawn for the full tensor, so that it does not depend on the split.

    Args:
        shape: of the full tensor (of this data rank).
        box: (low, high) of this rank's shard in every dim.
    """
    if not training or p == 0:
        return x
    if tuple(x.shape) == shape:
        return functional.dropout(x, p, True)
    mask = functional.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p, True)
    return x * mask[tuple(slice(low, high) for low, high in box)]


def _call_dropout(context: LocalContext) -> LocalCall:
    args = (
        context.operator.args[0],
        context.get_arg(1, "p"),
        context.get_arg(2, "train"),
        context.out_shapes[0],
        context.out_boxes[0],
    )
    return local_dropout, args, {}


@register_rule("dropout", local_call=_call_dropout)
def split_dropout(view: OperatorView) -> list[OpSplit]:
    """As `elementwise`, with the mask of the full tensor; a partial sum stays one."""
    return _split_any_dim(view) + partial_sum_splits(view, [0])


def local_native_dropout(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `local_dropout`, and where it is not 0."""
    result = local_dropout(x, *args)
    return result, result != 0


def _call_native_dropout(context: LocalContext) -> LocalCall:
    _, args, kwargs = _call_dropout(context)
    return local_native_dropout, args, kwargs


@register_rule("native_dropout", local_call=_call_native_dropout)
def split_native_dropout(view: OperatorView) -> list[OpSplit]:
    """As `dropout`, without partial sums: the second result is not a sum."""
    return _split_any_dim(view)
