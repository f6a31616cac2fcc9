"""
`pdrun.plan_of`: the plan of a model for a number of devices, on a machine without them.

    report = pdrun.plan_of(model, batch, devices=64, topology="h100x8", memory="72GiB")
    print(report)                   # the candidates, and why the first one is chosen
    report.save("plan.json")        # mesh="plan.json", strategy="plan.json" of `parallelize`

Nothing is computed. The weights of the model can be on the meta device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.auto.auto import Auto, compute_type, detect_topology
from pdrun.parallel.auto.choose import EXACT, check_search
from pdrun.parallel.auto.degrees.choices import StepChoice
from pdrun.parallel.auto.degrees.condense import RowScaler
from pdrun.parallel.auto.degrees.expert_layers import describe_experts, find_expert_layers
from pdrun.parallel.auto.degrees.guide import describe_result
from pdrun.parallel.auto.degrees.memory import TrainingBytes
from pdrun.parallel.auto.degrees.outer import search_degrees
from pdrun.parallel.auto.degrees.result import PLAN_API, OuterResult, PlanRequest
from pdrun.parallel.auto.degrees.step_costs import CHUNKS
from pdrun.parallel.auto.plan_entries import describe_operators, describe_stored
from pdrun.parallel.auto.plan_file import PLAN_FORMAT, PlanFile, parse_plan
from pdrun.parallel.auto.topology import Topology
from pdrun.parallel.auto.topology_file import load_topology, parse_size
from pdrun.parallel.comm.mesh import make_mesh
from pdrun.parallel.data.batch_slicing import count_rows, parse_batch_slicing
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.placement import WeightLayout
from pdrun.parallel.operators.graph.constraints import LayoutSpec
from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.operators.graph.sample_call import capture_call
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.pipeline.split import split_model
from pdrun.parallel.training.loss import ForwardFunction

ADAM_STATE_BYTES = 8.0
"""Bytes of optimizer state per element, if the caller does not say."""


class _GraphReader(Operators):
    """Returns the graph of a call, without a plan."""

    def plan_of(
        self, graph: OperatorGraph, mesh: Grid, inner: Mapping[str, LayoutSpec]
    ) -> OperatorPlan:
        """Return an empty plan of the graph."""
        return OperatorPlan(graph, Grid((), ()), [])


class PlanReport:
    """
    The result of a search over degrees.

    Attributes:
        result: all candidates.
    """

    def __init__(
        self, result: OuterResult, export: Any, auto: Auto, experts: dict[str, str]
    ) -> None:
        self.result = result
        self._export = export
        self._auto = auto
        self._experts = experts

    @property
    def choice(self) -> StepChoice:
        """
        The chosen candidate.

        Raises:
            UsageError: no candidate fits into the memory.
        """
        return self.result.chosen.choice

    def describe(self, top: int = 10) -> str:
        """Return the best candidates as a table, and why the first one is chosen."""
        return describe_result(self.result, top)

    def __str__(self) -> str:
        return self.describe()

    def to_plain(self, place: int = 0) -> dict[str, Any]:
        """
        Return a plan as JSON data.

        Args:
            place: of the candidates that fit, the fastest first.
        """
        chosen = self.result.chosen if not place else self.result.fitting[place]
        choice = chosen.choice
        request = self.result.request
        mesh = {"pp": choice.pp, "dp": choice.dp}
        if choice.ep > 1:
            mesh["ep"] = choice.ep
        mesh |= {"cp": 1, **choice.tensor_axes}
        plain: dict[str, Any] = {
            "format": PLAN_FORMAT,
            "made": {
                "pdrun": pdrun.__version__,
                "topology": request.topology.digest(),
            },
            "predicted": {
                "seconds": chosen.cost.total,
                "bytes": chosen.cost.peak,
                "devices": request.devices,
                "rows": request.rows,
                "topology": request.topology.name + ", a guess" * request.topology.is_guess,
            },
            "mesh": mesh,
            "options": choice.options,
            "pipeline": _describe_pipeline(choice, request.layer_names),
            "operators": None,
            "experts": self._experts if choice.ep > 1 else {},
            "stored": {},
            "gather_results": self._auto.gather,
            "weights": {},
        }
        if choice.tp > 1:
            graph = self._export(choice.rows)
            plan = self._auto.plan_of(graph, make_mesh(**mesh).grid, {})
            plain["operators"] = describe_operators(plan)
            plain["stored"] = describe_stored(plan)
            plain["weights"] = {
                graph.tensors[index].name: WeightLayout(layout).to_plain()
                for index, layout in plan.weights.items()
                if layout.axes
            }
        return plain

    def to_json(self) -> str:
        """Return the chosen plan as indented JSON."""
        return json.dumps(self.to_plain(), indent=2) + "\n"

    def plan_file(self) -> PlanFile:
        """Return the chosen plan as `parallelize` reads it from a file."""
        return parse_plan(json.loads(self.to_json()), PLAN_API)

    def save(self, path: str | Path) -> None:
        """Write the chosen plan to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


def _describe_pipeline(choice: StepChoice, layers: Sequence[str]) -> dict[str, Any] | None:
    """Return the arguments of `pdrun.Pipeline`; None without stages."""
    if choice.pp == 1:
        return None
    schedule = choice.schedule or "1f1b"
    found: dict[str, Any] = {"microbatches": choice.microbatches, "schedule": schedule}
    if CHUNKS[schedule] > 1:
        found["chunks"] = CHUNKS[schedule]
    if choice.stage_layers:
        starts = accumulate(choice.stage_layers[:-1])  # what is behind a layer is on its stage
        found["stages"] = {layers[at]: stage for stage, at in enumerate(starts, 1)}
        found["stages"] = {layers[0]: 0, **found["stages"]}
    return found


def find_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the members of a model's only outermost list of modules; empty if it has several."""
    try:
        units = split_model(model, 1).unit_stages
    except UsageError:
        return ()
    lists = {
        name.rpartition(".")[0]: type(model.get_submodule(name.rpartition(".")[0]))
        for name in units
    }
    parents = [name for name, kind in lists.items() if issubclass(kind, nn.ModuleList)]
    if len(parents) != 1:
        return ()
    return tuple(name for name in units if name.rpartition(".")[0] == parents[0])


def plan_of(
    model: nn.Module,
    sample: Any,
    *,
    devices: int,
    topology: Topology | str | None = None,
    memory: int | str | None = None,
    rows: int | None = None,
    fixed: Mapping[str, int] | None = None,
    state_bytes: float = ADAM_STATE_BYTES,
    precision: Any = None,
    recompute: bool = True,
    gather: bool = True,
    search: str = EXACT,
    forward: ForwardFunction | None = None,
    compiled: bool = False,
) -> PlanReport:
    """
    Search mesh, optimizer level, micro-batches, recomputation and operators for some devices.

    Args:
        sample: a batch as `Run.step` takes it.
        devices: of the job.
        topology: a `Topology`, the name of a built-in one, or a file; default: by this machine's
            device.
        memory: bytes of a device that the run can use, such as "72GiB"; default: the topology's.
        rows: of a step; default: those of the sample.
        fixed: degrees that are given: "pp", "dp", "ep", "tp", and "level" and "microbatches".
        state_bytes: of the optimizer per element of a weight.
        precision, forward: as for `parallelize`.
        recompute: whether recomputation is considered.
        gather: see `pdrun.Operators`.
        search: see `pdrun.Auto`.
        compiled: whether the run has ``compile=``.

    Raises:
        UsageError: the model does not export, or an argument is wrong.
        ConfigError: the topology is unknown.
    """
    if isinstance(topology, str):
        topology = load_topology(topology)
    found = topology or detect_topology()
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise UsageError(f"devices must be a count, got {devices!r}", where=PLAN_API)
    if sample is None:
        what = "sample must be a batch, got None: a plan needs its shapes"
        raise UsageError(what, where=PLAN_API, hint="sample=batch")
    limit = found.usable_bytes
    if memory is not None:
        limit = parse_size(memory, "memory", PLAN_API)
    half = compute_type(precision)
    itemsize = half.itemsize if half is not None else 4
    master = 4 if half is not None else 0
    request = PlanRequest(
        devices,
        count_rows(sample, parse_batch_slicing(None, 1)) if rows is None else rows,
        found,
        limit,
        TrainingBytes(itemsize, master, 4, state_bytes),
        itemsize,
        dict(fixed or {}),
        recompute,
        gather,
        check_search(search),
        find_layers(model),
        compiled,
        find_expert_layers(model),
    )

    def export(count: int) -> OperatorGraph:
        device = torch.device("cpu")
        args, kwargs = capture_call(model, forward, repeat_rows(sample, count), device)
        return _GraphReader().plan(model, Grid(("dp", "tp"), (1, 1)), args, kwargs).graph

    result = search_degrees(RowScaler(export, half), request)
    auto = Auto(search=search, gather=gather, topology=found).for_step(1, precision, compiled)
    return PlanReport(result, export, auto, describe_experts(model, request.expert_layers))


def repeat_rows(sample: Any, count: int) -> Any:
    """Return a batch with a number of rows: those of a sample, repeated."""
    known = count_rows(sample, parse_batch_slicing(None, 1))
    places = torch.arange(count) % known

    def take(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.dim() == 0 or leaf.shape[0] != known:
            return leaf
        return leaf[places.to(leaf.device)]

    return pytree.tree_map_only(torch.Tensor, take, sample)
