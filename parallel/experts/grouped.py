"""
Products of groups of rows with a matrix per group: torch's ``grouped_mm`` where it serves, a loop
where not.

What ``grouped_mm`` does not check or do is kept here:

* rows beyond the last offset are uninitialised memory: the groups always cover all rows;
* its backward refuses an expanded gradient: the gradient is made contiguous first;
* rows must be multiples of 16 bytes, and fp64 is not supported: a loop then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

ROW_BYTES = 16
"""Rows of both matrices must be multiples of this."""
GROUPED_TYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),
}
"""Types that grouped_mm is used for; on CUDA others would be a loop inside of torch."""

_GroupedProduct = Callable[..., torch.Tensor]


def _find_grouped_mm() -> _GroupedProduct | None:
    found = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    return cast("_GroupedProduct | None", found)


_grouped_mm = _find_grouped_mm()


def why_looped(device_type: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> str:
    """
    Return why products of rows of these sizes are a loop; empty if grouped_mm computes them.
    """
    if _grouped_mm is None:
        return "this torch has no grouped_mm"
    if dtype not in GROUPED_TYPES.get(device_type, ()):
        return f"grouped_mm is not used for {str(dtype).removeprefix('torch.')} on {device_type}"
    odd = next((size for size in sizes if size * dtype.itemsize % ROW_BYTES), None)
    if odd is not None:
        return f"rows of {odd} elements are not a multiple of {ROW_BYTES} bytes"
    return ""


class ExpertRows:
    """
    Rows sorted by expert.

    Args:
        counts: rows of each expert, on the rows' device.
        sizes: the same numbers on the host, if they are known.
    """

    def __init__(self, counts: torch.Tensor, sizes: list[int] | None = None) -> None:
        self.counts = counts
        self.offsets = counts.cumsum(0).to(torch.int32)
        self._sizes = sizes

    @property
    def sizes(self) -> list[int]:
        """Rows of each expert; waits for the device if they are not known."""
        if self._sizes is None:
            self._sizes = self.counts.tolist()
        return self._sizes


def grouped_product(x: torch.Tensor, weight: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    """
    Multiply each expert's rows with its matrix.

    Args:
        x: ``[rows, in]``, sorted by expert.
        weight: ``[experts, in, out]``.
        rows: how many rows each expert has; together all of ``x``.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        weight = weight.to(dtype)
    is_traced = torch.compiler.is_compiling() or type(x) is not torch.Tensor
    if is_traced and (x.dtype != torch.bfloat16 or _why_product_looped(x, weight)):
        # torch traces grouped_mm in bf16 only, and a loop needs sizes
        found: torch.Tensor = torch.ops.pdrun_experts.grouped_product(x, weight, rows.offsets)
        return found
    return _multiply(x, weight, rows)


def _why_product_looped(x: torch.Tensor, weight: torch.Tensor) -> str:
    return why_looped(x.device.type, x.dtype, (x.shape[1], weight.shape[2]))


def _multiply(x: torch.Tensor, weight: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    if not x.shape[0]:
        return x @ weight[0]  # no rows, but gradients of zero
    if _why_product_looped(x, weight):
        pieces = x.split(rows.sizes)
        matrices = weight.unbind(0)
        return torch.cat([piece @ w for piece, w in zip(pieces, matrices, strict=True)])
    assert _grouped_mm is not None
    return cast("torch.Tensor", _ContiguousGrad.apply(_grouped_mm(x, weight, offs=rows.offsets)))


# ---- as an operator, for compiled code and fake tensors ---------------------


def _rows_of(offsets: torch.Tensor) -> ExpertRows:
    return ExpertRows(offsets.diff(prepend=offsets.new_zeros(1)).long())


def _run_product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """See `grouped_product`."""
    with torch.no_grad():
        return _multiply(x, weight, _rows_of(offsets)).clone()


def _run_weight_grad(x: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the weight of `grouped_product`."""
    sizes = _rows_of(offsets).sizes
    pairs = zip(x.split(sizes), grad.split(sizes), strict=True)
    return torch.stack([rows.T @ of_rows for rows, of_rows in pairs])


def _product_shape(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _weight_grad_shape(x: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return x.new_empty(offsets.shape[0], x.shape[1], grad.shape[1])


def _save_product(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, Any, None]:
    x, weight, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    of_rows = _product_operator(grad, weight.transpose(1, 2).contiguous(), offsets)
    return of_rows, _weight_grad_operator(x, grad, offsets), None


_product_operator: Any = torch.library.custom_op(
    "pdrun_experts::grouped_product", _run_product, mutates_args=()
)
_weight_grad_operator: Any = torch.library.custom_op(
    "pdrun_experts::grouped_weight_grad", _run_weight_grad, mutates_args=()
)
_product_operator.register_fake(_product_shape)
_weight_grad_operator.register_fake(_weight_grad_shape)
_product_operator.register_autograd(_product_backward, setup_context=_save_product)


class _ContiguousGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.contiguous()
