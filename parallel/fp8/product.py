"""
The matrix products of a linear layer in fp8, with scales of the moment (Micikevicius et al., FP8
Formats for Deep Learning, 2022).

    scales     output, gradient of the input     gradient of the weight     gradients are cast to
    "tensor"   fp8                               fp8                        e5m2
    "row"      fp8                               bf16                       e4m3

Inputs and weights are cast to e4m3. A scale is a power of two: the cast only drops bits of the
mantissa and what lies below the range, so a tensor and its parts are cast to the same values.

fp8 multipliers read both sides along the dim that is summed. The backward pass needs each operand
the other way round than the forward pass, which is a transposed copy. Everything here is written in
plain operators: torch.compile fuses maxima and casts with what is around them, and decides what is
kept for the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

SCALES = ("tensor", "row")
ALIGNMENT = 16
"""What the sizes of a product must be multiples of."""
COMPUTE_TYPE = torch.bfloat16
FORWARD_TYPE = torch.float8_e4m3fn
GRADIENT_TYPE = torch.float8_e5m2
LEAST_MAXIMUM = 1e-30
"""A maximum below it counts as this; its scale is still finite."""


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: str
) -> torch.Tensor:
    """
    Return what ``torch.nn.functional.linear`` returns, in bf16, multiplied in fp8.

    Args:
        x: ``[..., in]``, in any floating point type.
        weight: ``[out, in]``; both are multiples of `ALIGNMENT`.
        scales: "tensor" or "row".
    """
    rows = math.prod(x.shape[:-1])
    if rows == 0:  # no maximum
        return functional.linear(
            x.to(COMPUTE_TYPE), weight.to(COMPUTE_TYPE), _cast_bias(bias, COMPUTE_TYPE)
        )
    y = _ScaledLinear.apply(x.reshape(rows, x.shape[-1]), weight, scales)
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + _cast_bias(bias, y.dtype)


def _cast_bias(bias: torch.Tensor | None, kind: torch.dtype) -> Any:
    return None if bias is None else bias.to(kind)


def find_factor(x: torch.Tensor, kind: torch.dtype, dim: int | None) -> torch.Tensor:
    """
    Return the largest powers of two by which a tensor can be multiplied before it is cast.

    Args:
        kind: the narrow type.
        dim: each slice along it has its own factor; None: one for the tensor.
    """
    largest = torch.linalg.vector_norm(x, math.inf, dim=dim, keepdim=dim is not None).float()
    ratio = torch.finfo(kind).max / largest.clamp(min=LEAST_MAXIMUM)
    return ratio.log2().floor().exp2()


def cast(x: torch.Tensor, factor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return a tensor times its factors, in a narrow type."""
    return (x * factor.to(x.dtype)).to(kind)


def multiply(
    left: torch.Tensor,
    right: torch.Tensor,
    left_factor: torch.Tensor,
    right_factor: torch.Tensor,
    kind: torch.dtype = COMPUTE_TYPE,
    *,
    is_fast: bool = False,
) -> torch.Tensor:
    """
    Return ``left @ right.T`` of two casts, without their factors.

    Args:
        left, right: contiguous, ``[m, k]`` and ``[n, k]``.
        left_factor, right_factor: one number, or ``[m, 1]`` and ``[n, 1]``.
        kind: type of the result.
        is_fast: add up in fewer bits.
    """
    return torch._scaled_mm(
        left,
        right.t(),
        scale_a=left_factor.reciprocal(),
        scale_b=right_factor.reciprocal().t() if right_factor.dim() else right_factor.reciprocal(),
        out_dtype=kind,
        use_fast_accum=is_fast,
    )


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: str) -> torch.Tensor:
        is_row = scales == "row"
        x_factor = find_factor(x, FORWARD_TYPE, -1 if is_row else None)
        weight_factor = find_factor(weight, FORWARD_TYPE, -1 if is_row else None)
        narrow = cast(x, x_factor, FORWARD_TYPE)
        y = multiply(
            narrow, cast(weight, weight_factor, FORWARD_TYPE), x_factor, weight_factor, is_fast=True
        )
        # the sum over rows, of the weight's gradient, has another size
        ctx.is_wide = is_row or x.shape[0] % ALIGNMENT != 0
        ctx.is_row, ctx.x_type = is_row, x.dtype
        kept = x.to(COMPUTE_TYPE) if ctx.is_wide else narrow
        ctx.save_for_backward(kept, x_factor, weight, weight_factor)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, x_factor, weight, weight_factor = ctx.saved_tensors
        kind = FORWARD_TYPE if ctx.is_row else GRADIENT_TYPE
        factor = find_factor(grad, kind, -1 if ctx.is_row else None)
        narrow = cast(grad, factor, kind)
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            if ctx.is_row:  # rows of the transposed weight
                weight_factor = find_factor(weight, FORWARD_TYPE, 0)
            turned = cast(weight, weight_factor, FORWARD_TYPE).t().contiguous()
            scale = weight_factor.t() if ctx.is_row else weight_factor
            to_x = multiply(narrow, turned, factor, scale).to(ctx.x_type)
        if ctx.needs_input_grad[1]:
            if ctx.is_wide:
                to_weight = (grad.t() @ x).to(weight.dtype)
            else:
                columns, inputs = narrow.t().contiguous(), x.t().contiguous()
                to_weight = multiply(columns, inputs, factor, x_factor, weight.dtype)
        return to_x, to_weight, None
