"""``pdrun.Fp8``: which linear modules multiply in fp8, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdrun.errors import UsageError
from pdrun.parallel.fp8.product import SCALES

API_NAME = "pdrun.Fp8"
LEAST_ELEMENTS = 1 << 21
"""Elements of a weight from which casts cost less than the products save (on H200)."""


@dataclass(frozen=True)
class Fp8:
    """
    Linear modules that multiply in fp8; everything else computes in bf16.

    Attributes:
        scales: "tensor": a scale for each tensor, all three products in fp8; "row": a scale for
            each row, gradients of weights in bf16.
        modules: a glob or globs of names; (): the linear modules inside of units, so that
            embeddings and heads stay in bf16.
        exclude: a glob or globs of names that stay in bf16.
        least: elements of a rank's part of a weight below which it stays in bf16.
    """

    scales: str = "tensor"
    modules: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()
    least: int = LEAST_ELEMENTS

    def __post_init__(self) -> None:
        if self.scales not in SCALES:
            what = f"scales must be 'tensor' or 'row', got {self.scales!r}"
            raise UsageError(what, where=API_NAME)
        for name in ("modules", "exclude"):
            value = getattr(self, name)
            globs = (value,) if isinstance(value, str) else value
            if not isinstance(globs, Sequence) or not all(isinstance(g, str) for g in globs):
                what = f"{name} must be a glob or a list of globs, got {value!r}"
                raise UsageError(what, where=API_NAME, hint=f'{name}=["blocks.*"]')
            object.__setattr__(self, name, tuple(globs))
        if isinstance(self.least, bool) or not isinstance(self.least, int) or self.least < 0:
            what = f"least must be a number of elements, got {self.least!r}"
            raise UsageError(what, where=API_NAME)
