"""
Plan files: what `run.plan.save` writes and ``mesh="plan.json", strategy="plan.json"`` reads.

    {"format": 1, "mesh": {"pp": 1, "dp": 4, "cp": 1, "tp": 2},
     "options": {"optimizer_level": 1, "accumulate": 2},
     "pipeline": {"microbatches": 8, "schedule": "1f1b", "stages": {"layers.0": 0}},
     "operators": {"layers.*.q.linear": {"in": [[null, null, null], ["tp", null]]}},
     "experts": {"layers.*.moe": "ep"},
     "weights": {...}}

``weights`` describes checkpoints; `pdrun.parallel.layouts.placement` reads it. The others decide
how a run is made. The world may have another number of devices: "dp" takes what is left.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.auto.degrees.expert_layers import make_expert_strategy
from pdrun.parallel.auto.mindspore_strategies import MindSporeOperators, is_operator_file
from pdrun.parallel.auto.plan_entries import Entry, plan_from_entries
from pdrun.parallel.comm.mesh import EXPERT_AXIS, Mesh, make_mesh
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.operators.graph.constraints import LayoutSpec
from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.pipeline.pipeline import Pipeline
from pdrun.parallel.tensor.strategy import Strategy

PLAN_FORMAT = 1
OPTION_NAMES = ("optimizer_level", "shard_group", "accumulate", "copies", "gather", "recompute")
"""Arguments of `parallelize` that a plan decides."""


@dataclass(frozen=True)
class StepPrediction:
    """
    What a search has predicted for a step.

    Attributes:
        seconds: of a step.
        devices, rows: for which the prediction is.
        topology: name of the topology, with "a guess" if it is one.
    """

    seconds: float
    devices: int
    rows: int
    topology: str

    def describe(self, measured: float | None) -> str:
        """Return the prediction beside the median of the measured steps."""
        text = (
            f"step of {self.rows} rows: predicted {self.seconds * 1e3:,.2f} ms on {self.topology}"
        )
        if measured is None:
            return f"{text}; no step is measured yet"
        ratio = measured / self.seconds
        return f"{text}, measured {measured * 1e3:,.2f} ms, {ratio:,.2f} times that"


@dataclass(frozen=True)
class PlanFile:
    """
    The part of a plan file from which a run is made.

    Attributes:
        mesh: degrees of all axes.
        operators, stored: see `pdrun.parallel.auto.plan_entries`; None: the plan has no operators.
        gather_results: see `pdrun.Operators`.
        options: arguments of `parallelize`.
        pipeline: arguments of `pdrun.Pipeline`, or None.
        predicted: of a searched plan.
        where: the file, for errors.
        experts: the axis over which the experts of modules are cut, by glob.
    """

    mesh: Mapping[str, int]
    operators: Mapping[str, Entry] | None = None
    stored: Mapping[str, Entry] = field(default_factory=dict)
    gather_results: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    pipeline: Mapping[str, Any] | None = None
    where: str = "plan"
    predicted: StepPrediction | None = None
    experts: Mapping[str, str] = field(default_factory=dict)

    def predict_step(self, world: int) -> StepPrediction | None:
        """Return what was predicted for a number of devices."""
        found = self.predicted
        return found if found is not None and found.devices == world else None

    def make_mesh(self, world: int) -> Mesh:
        """
        Return the mesh for a number of devices: the file's, with another dp if the world differs.

        Raises:
            ConfigError: the other axes do not divide the number of devices.
        """
        others = math.prod(size for axis, size in self.mesh.items() if axis != "dp")
        if world % others:
            axes = ", ".join(f"{a}={size}" for a, size in self.mesh.items() if a != "dp")
            what = f"the plan has {axes}, and {others} does not divide the {world} devices"
            raise ConfigError(what, where=self.where, hint="plan again for this world")
        return make_mesh(**{**self.mesh, "dp": world // others})

    def make_strategy(self) -> PlannedOperators | Strategy | None:
        """Return the strategy; None if the plan has neither operators nor experts."""
        if self.experts:
            return make_expert_strategy(self.experts)
        if self.operators is None:
            return None
        return PlannedOperators(self)

    def make_pipeline(self) -> Pipeline | None:
        """Return the pipeline; None if the plan has none."""
        return None if self.pipeline is None else Pipeline(**self.pipeline)


class PlannedOperators(Operators):
    """The strategy of a plan file: its operators, and by propagation what it leaves out."""

    def __init__(self, plan: PlanFile) -> None:
        super().__init__(gather=plan.gather_results)
        self.plan_file = plan

    def with_inputs(self, layouts: tuple[Any, ...]) -> Operators:
        """Refuse layouts of the batch: the operators of the file decide."""
        raise UsageError(
            f"{self.plan_file.where} has the layouts of all operators",
            where="dataset_strategy",
            hint="name the dims of the rows, such as (0, 0), or leave it out",
        )

    def plan_of(
        self, graph: OperatorGraph, mesh: Grid, inner: Mapping[str, LayoutSpec]
    ) -> OperatorPlan:
        """Return the plan for a graph; layouts that `shard` set are already in the file."""
        source = self.plan_file
        found = plan_from_entries(graph, mesh, source.operators or {}, source.stored, source.where)
        if not self.gather:
            found.keep_results_sharded()
        return found


def read_plan(path: str | Path) -> PlanFile | MindSporeOperators:
    """
    Return the plan of a file, or the strategy of MindSpore's file of operator strategies.

    Raises:
        ConfigError: it is neither, or a plan file of another version.
    """
    where = str(path)
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = "run.plan.save or pdrun plan --save writes one"
        raise ConfigError(f"cannot be read as a plan: {error}", where=where, hint=hint) from None
    if is_operator_file(value):
        return MindSporeOperators(value, where)
    return parse_plan(value, where)


def parse_plan(value: Any, where: str = "plan") -> PlanFile:
    """
    Return the plan of a JSON object.

    Raises:
        ConfigError: a key has another form.
    """
    if not isinstance(value, dict) or value.get("format") != PLAN_FORMAT:
        found = value.get("format") if isinstance(value, dict) else value
        what = f"format must be {PLAN_FORMAT}, got {found!r}"
        raise ConfigError(what, where=where, hint="write it with this version of pdrun")
    mesh = _read_object(value, "mesh", where)
    for axis, size in mesh.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"mesh: {axis} must be a count, got {size!r}", where=where)
    options = _read_object(value, "options", where)
    for name in options:
        if name not in OPTION_NAMES:
            what = f"options has the unknown key {name!r}"
            hint = f"the keys are {', '.join(OPTION_NAMES)}"
            raise ConfigError(what, where=where, hint=hint)
    pipeline = value.get("pipeline")
    if pipeline is not None:
        pipeline = _read_object(value, "pipeline", where)
        known = ("microbatches", "schedule", "stages", "chunks", "slices", "shared")
        for name in pipeline:
            if name not in known:
                what = f"pipeline has the unknown key {name!r}"
                raise ConfigError(what, where=where, hint=f"the keys are {', '.join(known)}")
    operators = value.get("operators")
    if operators is not None:
        operators = _read_object(value, "operators", where)
    gather = value.get("gather_results", True)
    if not isinstance(gather, bool):
        raise ConfigError(f"gather_results must be true or false, got {gather!r}", where=where)
    stored = _read_object(value, "stored", where)
    predicted = _read_prediction(value, where)
    experts = _read_object(value, "experts", where)
    _check_experts(experts, operators, where)
    return PlanFile(mesh, operators, stored, gather, options, pipeline, where, predicted, experts)


def _check_experts(
    experts: Mapping[str, Any], operators: Mapping[str, Entry] | None, where: str
) -> None:
    """Refuse entries of experts that this version cannot run."""
    for glob, axis in experts.items():
        if axis != EXPERT_AXIS:
            what = f'experts: the axis of {glob} must be "{EXPERT_AXIS}", got {axis!r}'
            raise ConfigError(what, where=where)
    if experts and operators is not None:
        what = "a plan cannot have both operators and experts"
        raise ConfigError(what, where=where, hint="remove one of both, or plan again")


def _read_prediction(value: Mapping[str, Any], where: str) -> StepPrediction | None:
    """Return the prediction of a plan; None if it has none, or not for what."""
    if value.get("predicted") is None:
        return None
    found = _read_object(value, "predicted", where)
    if not isinstance(found.get("devices"), int) or not isinstance(found.get("rows"), int):
        return None
    seconds = found.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        what = f"predicted: seconds must be above 0, got {seconds!r}"
        raise ConfigError(what, where=where)
    return StepPrediction(seconds, found["devices"], found["rows"], str(found.get("topology")))


def _read_object(value: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    found = value.get(key, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{key} must be an object, got {found!r}", where=where)
    return found
