"""A candidate of the outer search: its degrees and savers, and what a step of it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdrun.parallel.layouts.rank_order import name_part


@dataclass(frozen=True)
class StepChoice:
    """Degrees and savers of one candidate."""

    pp: int
    dp: int
    tp: int
    level: int
    gather: str | None
    recompute: str | None
    microbatches: int
    rows: int
    """Of one pass on a data rank."""
    schedule: str | None = None
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage; empty: the same number on all."""
    factors: tuple[int, ...] = ()
    """Degrees of the tensor axes, outer to inner, if there are several; their product is tp."""
    ep: int = 1
    """Parts of the experts; rows are cut over ep as over dp."""

    @property
    def row_parts(self) -> int:
        """Number of parts of a batch."""
        return self.dp * self.ep

    @property
    def tensor_axes(self) -> dict[str, int]:
        """The tensor axes of the mesh with their degrees, outer to inner."""
        if not self.factors:
            return {"tp": self.tp}
        return {name_part("tp", place, ()): degree for place, degree in enumerate(self.factors)}

    def layers_of(self, layers: int) -> tuple[int, ...]:
        """Return the layers of each stage of a model."""
        return self.stage_layers or (layers // self.pp,) * self.pp

    @property
    def options(self) -> dict[str, object]:
        """The arguments of `parallelize` that are not at their default."""
        found: dict[str, object] = {}
        if self.level:
            found["optimizer_level"] = self.level
        if self.gather is not None:
            found["gather"] = self.gather
        if self.recompute is not None:
            found["recompute"] = self.recompute
        if self.microbatches > 1 and self.pp == 1:
            found["accumulate"] = self.microbatches
        return found


@dataclass(frozen=True)
class StepCost:
    """
    A step of one candidate.

    Attributes:
        seconds: of the step, by what takes them.
        memory: bytes of the fullest device, by what takes them.
    """

    seconds: dict[str, float]
    memory: dict[str, int]

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return math.fsum(self.seconds.values())

    @property
    def peak(self) -> int:
        """Bytes of the fullest device."""
        return sum(self.memory.values())

    @property
    def bound_by(self) -> str:
        """What takes most of the time beside products, with its share; products if they do."""
        others = {name: value for name, value in self.seconds.items() if name != "compute"}
        name = max(others, key=lambda one: others[one])
        share = others[name] / self.total if self.total else 0.0
        if share < 0.1:
            return f"compute {self.seconds['compute'] / self.total:.0%}"
        return f"{name} {share:.0%}"
