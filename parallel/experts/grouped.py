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
    if torch.compiler.is_compiling() and x.dtype != torch.bfloat16:
        return _uncompiled_product(x, weight, rows)  # torch traces grouped_mm in bf16 only
    return _multiply(x, weight, rows)


def _multiply(x: torch.Tensor, weight: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    if not x.shape[0]:
        return x @ weight[0]  # no rows, but gradients of zero
    if why_looped(x.device.type, x.dtype, (x.shape[1], weight.shape[2])):
        pieces = x.split(rows.sizes)
        matrices = weight.unbind(0)
        return torch.cat([piece @ w for piece, w in zip(pieces, matrices, strict=True)])
    assert _grouped_mm is not None
    return cast("torch.Tensor", _ContiguousGrad.apply(_grouped_mm(x, weight, offs=rows.offsets)))


_uncompiled_product = torch.compiler.disable(_multiply)


class _ContiguousGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.contiguous()
