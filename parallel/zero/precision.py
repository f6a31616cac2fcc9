"""
Mixed precision: the type in which the model computes, and what stays wider.

Optimizers use masters in the weights' own type. With ``compute``, the model's parameters are copies
in that type, refreshed after each step; gradients are added and reduced in ``reduce``. With
``autocast`` the parameters keep their type, and torch chooses the type of each operator. In fp16
the loss is scaled because of the narrow range: see `LossScale`. With ``fp8`` the products of linear
modules are computed in fp8: see `pdrun.parallel.fp8`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.fp8.options import Fp8

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class Precision:
    """
    A mixed precision policy.

    Attributes:
        compute: "bf16" or "fp16": type of the model's parameters and floating point inputs; None:
            their own. Weights of batch normalisations keep theirs, as their running statistics do.
        reduce: type in which gradients are added over micro-batches and ranks; None: that of the
            masters.
        autocast: parameters keep their type, and ``compute`` is the type of autocast.
        scale: first loss scale in fp16; it doubles after 2,000 good steps and halves after a bad
            one.
        fp8: which linear modules multiply in fp8; needs ``compute="bf16"``.
    """

    compute: str | None = None
    reduce: str | None = None
    autocast: bool = False
    scale: float = 65536.0
    fp8: Fp8 | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "reduce"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES:
                raise UsageError(
                    f"{name} must be one of {', '.join(DTYPES)}, got {value!r}",
                    where="pdrun.Precision",
                )
        if self.autocast and self.compute not in ("bf16", "fp16"):
            raise UsageError(
                "autocast=True requires compute='bf16' or 'fp16'", where="pdrun.Precision"
            )
        if self.fp8 is not None and not isinstance(self.fp8, Fp8):
            what = f"fp8 must be a pdrun.Fp8, got {self.fp8!r}"
            raise UsageError(what, where="pdrun.Precision", hint="fp8=pdrun.Fp8()")
        if self.fp8 is not None and self.compute != "bf16":
            what = f"fp8 requires compute='bf16', got {self.compute!r}"
            raise UsageError(what, where="pdrun.Precision", hint='precision="fp8" means both')

    def weight_dtype(self, own: torch.dtype, wide: bool = False) -> torch.dtype:
        """
        Return the type of a parameter in the model.

        Args:
            own: type of its master.
            wide: whether it keeps that type.
        """
        is_code = own.itemsize == 1  # a quantised value, which means something with its scale
        if self.input_dtype is not None and own.is_floating_point and not (wide or is_code):
            return self.input_dtype
        return own

    def sum_dtype(self, own: torch.dtype) -> torch.dtype:
        """Return the type in which gradients of a weight are added."""
        return DTYPES[self.reduce] if self.reduce and own.is_floating_point else own

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Type of floating point inputs; None: unchanged."""
        return DTYPES[self.compute] if self.compute and not self.autocast else None

    def autocast_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context manager of the forward pass."""
        if not self.autocast:
            return nullcontext()
        context: AbstractContextManager[Any] = torch.autocast(
            device.type, dtype=DTYPES[self.compute or ""]
        )
        return context


def parse_precision(value: Any) -> Precision:
    """
    Return the meaning of a user's ``precision``: None, "bf16", "fp16", "fp8", a Precision or an
    Fp8.
    """
    if value is None:
        return Precision()
    if value == "fp8":
        return Precision("bf16", fp8=Fp8())
    if isinstance(value, Fp8):
        return Precision("bf16", fp8=value)
    return Precision(compute=value) if isinstance(value, str) else _require_precision(value)


def _require_precision(value: Any) -> Precision:
    if not isinstance(value, Precision):
        raise UsageError(
            "precision must be 'bf16', 'fp16', 'fp8', a pdrun.Precision or a pdrun.Fp8, got"
            f" {value!r}",
            where="pdrun.parallelize",
        )
    return value


class LossScale:
    """The loss scale of fp16: the same on every rank, because it depends on the global norm."""

    GROWTH_STEPS = 2000

    def __init__(self, first: float) -> None:
        self.value = first
        self.good_steps = 0

    def record_step(self, finite: bool) -> None:
        """Adapt the scale to a step with finite gradients, or to a skipped one."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == self.GROWTH_STEPS:
            self.value = self.value * 2
            self.good_steps = 0
