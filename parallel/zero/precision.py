"""
Mixed precision: the type in which the model computes, and what is kept wider.

Optimizers work on masters in the weights' own type. With ``compute`` set, the model's parameters
are copies in that type, made anew after each step; gradients are added up and reduced in
``reduce``. ``autocast`` leaves the parameters as they are and lets torch choose the type of each
operator instead. fp16's narrow range needs its loss scaled: see `LossScale`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pdrun.errors import UsageError

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
        compute: "bf16" or "fp16": the model's parameters and floating point inputs have this type;
            None: their own.
            Weights of batch normalisations keep theirs, as their running statistics do.
        reduce: type in which gradients are added up over micro-batches and ranks; None: that of the
            masters.
        autocast: parameters keep their type, and ``compute`` is what autocast uses.
        scale: the first factor of a loss in fp16; it doubles after 2,000 good steps and halves
            after a bad one.
    """

    compute: str | None = None
    reduce: str | None = None
    autocast: bool = False
    scale: float = 65536.0

    def __post_init__(self) -> None:
        for name in ("compute", "reduce"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES:
                raise UsageError(
                    f"{name}={value!r} is none of {', '.join(DTYPES)}", where="pdrun.Precision"
                )
        if self.autocast and self.compute not in ("bf16", "fp16"):
            raise UsageError("autocast needs compute='bf16' or 'fp16'", where="pdrun.Precision")

    def weight_dtype(self, own: torch.dtype, wide: bool = False) -> torch.dtype:
        """
        Return the type of a parameter in the model whose master has type ``own``, which a ``wide``
        one keeps.
        """
        if self.input_dtype is not None and own.is_floating_point and not wide:
            return self.input_dtype
        return own

    def sum_dtype(self, own: torch.dtype) -> torch.dtype:
        """Return the type in which gradients of a weight are added."""
        return DTYPES[self.reduce] if self.reduce and own.is_floating_point else own

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Type to which floating point inputs are brought, or None."""
        return DTYPES[self.compute] if self.compute and not self.autocast else None

    def autocast_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return what the forward pass runs in."""
        if not self.autocast:
            return nullcontext()
        context: AbstractContextManager[Any] = torch.autocast(
            device.type, dtype=DTYPES[self.compute or ""]
        )
        return context


def parse_precision(value: Any) -> Precision:
    """Return the policy that a user's ``precision`` means: None, "bf16", "fp16" or a Precision."""
    if value is None:
        return Precision()
    return Precision(compute=value) if isinstance(value, str) else _require_precision(value)


def _require_precision(value: Any) -> Precision:
    if not isinstance(value, Precision):
        raise UsageError(
            f"precision={value!r}",
            where="pdrun.parallelize",
            hint="'bf16', 'fp16' or pdrun.Precision(...)",
        )
    return value


class LossScale:
    """
    The factor on a loss in fp16: the same on every rank, since the norm that it looks at is global.
    """

    GROWTH_STEPS = 2000

    def __init__(self, first: float) -> None:
        self.value = first
        self.good_steps = 0

    def record_step(self, finite: bool) -> None:
        """Take note of a step whose gradients were finite, or not: then it was left out."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == self.GROWTH_STEPS:
            self.value = self.value * 2
            self.good_steps = 0
