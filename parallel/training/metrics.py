"""The result of a step: global numbers, copied from the device when they are read."""

from __future__ import annotations

import math
from typing import Any

import torch

from pdrun.parallel.experts.loads import ExpertLoad, StepLoads


class Metrics:
    """
    Numbers of one step, the same on every rank.

    Reading one waits for the device. A loop that reads every tenth step only lets the device run
    ahead.
    """

    def __init__(
        self,
        step: int,
        totals: torch.Tensor,
        norm: torch.Tensor | None,
        skipped: bool = False,
        staleness: int = 0,
        loads: StepLoads | None = None,
    ) -> None:
        self.step = step
        """Number of this step, from 1."""
        self.skipped = skipped
        """Whether the optimizer skipped this step because gradients were not finite (fp16 only)."""
        self.staleness = staleness
        """
        Updates of other workers on the parameter servers between this worker's fetch and its push;
        0 without servers and in sync mode.
        """
        self.seconds: float | None = None
        """Seconds since the end of the step before, with all that was between; None at first."""
        self.predicted_seconds: float | None = None
        """Seconds of a step that the search of the plan has predicted; None without a search."""
        self._totals: Any = totals
        self._norm: Any = norm
        self._loads: Any = loads

    @property
    def loss(self) -> float:
        """The sum of all losses over the sum of all counts."""
        total, count = self._read_totals()
        return total / count

    @property
    def experts(self) -> dict[str, ExpertLoad]:
        """The loads of each layer with experts, by its name; empty without any."""
        if isinstance(self._loads, StepLoads):
            self._loads = self._loads.read()
        return self._loads or {}

    @property
    def tokens(self) -> float:
        """The sum of all counts: tokens, rows, or what the loss counts."""
        return self._read_totals()[1]

    @property
    def grad_norm(self) -> float | None:
        """
        The norm of all gradients before clipping; None unless ``clip`` or ``norm`` asks for it.
        """
        if isinstance(self._norm, torch.Tensor):
            self._norm = float(self._norm)
        return self._norm  # type: ignore[no-any-return]

    def read_numbers(self) -> dict[str, float]:
        """Return loss and gradient norm, if there is one, by name."""
        total, count = self._read_totals()
        numbers = {"loss": total / count if count else math.nan}
        if self.grad_norm is not None:
            numbers["grad_norm"] = self.grad_norm
        return numbers

    def _read_totals(self) -> tuple[float, float]:
        if isinstance(self._totals, torch.Tensor):
            self._totals = tuple(self._totals.tolist())
        return self._totals  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        norm = "" if self.grad_norm is None else f", grad_norm={self.grad_norm:.6g}"
        return f"Metrics(step={self.step}, loss={self.loss:.6g}, tokens={self.tokens:g}{norm})"
