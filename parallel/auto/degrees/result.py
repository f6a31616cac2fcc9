"""What a search over degrees is asked, and all candidates that it has priced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdrun.errors import UsageError
from pdrun.parallel.auto.choose import EXACT
from pdrun.parallel.auto.degrees.choices import StepChoice, StepCost
from pdrun.parallel.auto.degrees.expert_layers import ExpertLayer
from pdrun.parallel.auto.degrees.memory import TrainingBytes
from pdrun.parallel.auto.search.missing_rules import MissingRule
from pdrun.parallel.auto.topology import Topology

PLAN_API = "pdrun.plan_of"


@dataclass(frozen=True)
class PlanRequest:
    """
    What is to be planned.

    Attributes:
        devices: of the job.
        rows: of a batch over all devices.
        memory: bytes of a device that a run can use.
        kinds: bytes per element of a weight.
        itemsize: bytes of an element of an activation.
        fixed: degrees, "level" and "microbatches" that are given.
        recompute: whether recomputation is considered.
        gather: see `pdrun.Operators`.
        search: see `pdrun.Auto`.
        layer_names: the modules that are the equal layers, in order; empty: they are not known, and
            stages have the same number of them.
        compiled: whether the model is compiled.
        expert_layers: modules whose experts can be cut over ep.
    """

    devices: int
    rows: int
    topology: Topology
    memory: int
    kinds: TrainingBytes = field(default_factory=TrainingBytes)
    itemsize: int = 4
    fixed: Mapping[str, int] = field(default_factory=dict)
    recompute: bool = True
    gather: bool = True
    search: str = EXACT
    layer_names: tuple[str, ...] = ()
    compiled: bool = False
    expert_layers: tuple[ExpertLayer, ...] = ()


@dataclass(frozen=True)
class PricedChoice:
    """A candidate with its price."""

    choice: StepChoice
    cost: StepCost


@dataclass
class OuterResult:
    """
    All candidates.

    Attributes:
        fitting: those that fit into the memory, the fastest first.
        too_large: those that do not, the smallest first.
        refused: reason by degrees, for what cannot be.
        solves: searches of operators.
        flops: of a forward pass over one row.
        missing: operators without a rule, which every rank of tensor axes computes in full.
    """

    request: PlanRequest
    fitting: list[PricedChoice] = field(default_factory=list)
    too_large: list[PricedChoice] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    solves: int = 0
    flops: float = 0.0
    missing: list[MissingRule] = field(default_factory=list)

    @property
    def chosen(self) -> PricedChoice:
        """
        The fastest candidate that fits.

        Raises:
            UsageError: none fits; names the least memory that one needs.
        """
        if self.fitting:
            return self.fitting[0]
        if not self.too_large:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(self.refused.items())[:4])
            raise UsageError(f"no plan is possible: {reasons}", where=PLAN_API)
        least = self.too_large[0]
        parts = ", ".join(
            f"{name} {value / 2**30:.1f}" for name, value in least.cost.memory.items()
        )
        what = (
            f"no plan fits into {self.request.memory / 2**30:.1f} GiB: the smallest needs"
            f" {least.cost.peak / 2**30:.1f} GiB ({parts})"
        )
        hint = "use more devices, fewer rows per batch, or offload="
        raise UsageError(what, where=PLAN_API, hint=hint)
