"""Element by element: any dim may be cut, and terms of sums pass through what is linear."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from pdrun.parallel.operators.rules.labels import aligned, by_labels, linear
from pdrun.parallel.operators.rules.rule import Call, Place, Split, View, rule

UNARY = (
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
MANY = (
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
LINEAR_UNARY = ("clone", "neg", "negative", "positive", "real", "constrain", "detach", "stop")
CAST = ("to", "_to_copy", "type_as")


def _elementwise(view: View) -> list[Split]:
    (out, *_) = view.outs
    names = list(range(len(out)))
    return by_labels(view, [aligned(shape, out) for shape in view.ins], [names] * len(view.outs))


@rule(*UNARY, *MANY)
def elementwise(view: View) -> list[Split]:
    """Cut any dim, of all that isn't broadcast along it."""
    return _elementwise(view)


@rule(*LINEAR_UNARY)
def linear_elementwise(view: View) -> list[Split]:
    """As `elementwise`; a term of a sum stays one."""
    return _elementwise(view) + linear(view, [0])


@rule(*CAST)
def cast(view: View) -> list[Split]:
    """
    As `elementwise`; terms of sums pass from one floating type to another of no less precision.
    """
    return _elementwise(view)


@rule("add", "sub")
def addition(view: View) -> list[Split]:
    """As `elementwise`; the sum of terms of sums is a term of the sum."""
    both = len(view.ins) == 2
    return _elementwise(view) + (linear(view, [0, 1]) if both else [])


@rule("mul", "multiply")
def multiplication(view: View) -> list[Split]:
    """As `elementwise`; one factor may be a term of a sum."""
    return _elementwise(view) + linear(view, *([place] for place in range(len(view.ins))))


@rule("div", "divide", "true_divide")
def division(view: View) -> list[Split]:
    """As `elementwise`; what is divided may be a term of a sum, unless the result is rounded."""
    rounded = view.operator.kwargs.get("rounding_mode") is not None
    return _elementwise(view) + ([] if rounded else linear(view, [0]))


@rule("where")
def where(view: View) -> list[Split]:
    """As `elementwise`; both choices may be terms of sums."""
    both = len(view.ins) == 3
    return _elementwise(view) + (linear(view, [1, 2]) if both else [])


@rule("masked_fill")
def masked_fill(view: View) -> list[Split]:
    """As `elementwise`; a term of a sum may be filled with zeros."""
    zero = len(view.ins) == 2 and view.arg(2, "value") == 0
    return _elementwise(view) + (linear(view, [0]) if zero else [])


@rule("fill")
def fill(view: View) -> list[Split]:
    """As `elementwise`; the value is one for all."""
    return _elementwise(view)


# ---- dropout ----------------------------------------------------------------


def dropped(
    x: torch.Tensor, p: float, training: bool, shape: tuple[int, ...], box: Any
) -> torch.Tensor:
    """
    Return this rank's part of a dropped tensor: the mask is drawn for the whole one, so that it
    doesn't depend on the cut.

    Args:
        shape: of the whole tensor (of this slice of the batch).
        box: (low, high) of this rank's part in every dim.
    """
    if not training or p == 0:
        return x
    if tuple(x.shape) == shape:
        return functional.dropout(x, p, True)
    mask = functional.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p, True)
    return x * mask[tuple(slice(low, high) for low, high in box)]


def _run_dropout(place: Place) -> Call:
    args = (
        place.operator.args[0],
        place.arg(1, "p"),
        place.arg(2, "train"),
        place.outs[0],
        place.out_boxes[0],
    )
    return dropped, args, {}


@rule("dropout", run=_run_dropout)
def dropout(view: View) -> list[Split]:
    """As `elementwise`, with the mask of the whole tensor; a term of a sum stays one."""
    return _elementwise(view) + linear(view, [0])


def dropped_and_kept(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `dropped`, and where it isn't 0."""
    result = dropped(x, *args)
    return result, result != 0


def _run_native_dropout(place: Place) -> Call:
    _, args, kwargs = _run_dropout(place)
    return dropped_and_kept, args, kwargs


@rule("native_dropout", run=_run_native_dropout)
def native_dropout(view: View) -> list[Split]:
    """As `dropout`, without terms of sums: the second result is no sum."""
    return _elementwise(view)
