"""Describes what a run does to a model, as text and as data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdrun.errors import UsageError
from pdrun.parallel.auto.mindspore_strategies import write_operator_strategies
from pdrun.parallel.auto.plan_entries import describe_operators, describe_stored
from pdrun.parallel.auto.plan_file import PLAN_FORMAT
from pdrun.parallel.auto.predict import describe_prediction
from pdrun.parallel.comm.mesh import EXPERT_AXIS
from pdrun.parallel.model.weights import MIB, Weight, tied_names
from pdrun.parallel.operators.compiler import find_engine
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.pipeline.runner import PipelineRunner
from pdrun.parallel.pipeline.schedules.builders import ANY_CHUNKS, DEFAULT_CHUNKS
from pdrun.parallel.report import memory
from pdrun.parallel.report.placement import weight_layouts
from pdrun.parallel.report.traffic import describe_traffic

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState

LEVEL_TEXTS = (
    "nothing is sharded over the data axes",
    "optimizer state is sharded",
    "optimizer state and gradients are sharded",
    "optimizer state, gradients and weights are sharded",
)
GATHER_TEXTS = {
    "pass": "a unit's weights are gathered for each of its forwards and backwards",
    "step": "a unit's weights are gathered once per step and stay until its last backward",
}


@dataclass(frozen=True)
class RunPlan:
    """
    The placement of everything: plain data, the same on every rank of a pipeline's stage.

    ``mesh="plan.json", strategy="plan.json"`` of `parallelize` makes the same run from its file.
    """

    format: int
    mesh: dict[str, int]
    """Degrees of all axes, outer to inner."""
    level: int
    shard_group: int
    accumulate: int
    weights: dict[str, Any]
    """Each weight's shape, layout, stages and blocks; `pdrun checkpoint` reads them."""
    copies: int
    """Micro-batches that are computed side by side."""
    exact: bool
    gather: str | None
    """Level 3: how long gathered weights stay, "pass" or "step"; None at the other levels."""
    recompute: tuple[str, ...]
    transfers: tuple[dict[str, Any], ...]
    """The gradient buckets: names of weights, bytes, number of shards, and axes of the sum."""
    layerwise: tuple[str, ...]
    tiles: dict[str, dict[str, Any]]
    """
    Weights that are sharded over tensor axes: full shape, layout, and axes over which gradients are
    summed.
    """
    shared: dict[str, tuple[int, ...]]
    """Weights that several stages have, and these stages."""
    options: dict[str, Any]
    """Arguments of `parallelize` that are not at their default."""
    pipeline: dict[str, Any] | None
    """Arguments of `pdrun.Pipeline`."""
    operators: dict[str, Any] | None
    """The layouts of every operator (`plan_entries`); None without `pdrun.Operators`."""
    stored: dict[str, Any]
    """Weights that are stored in another layout than their first use needs."""
    gather_results: bool
    """See `pdrun.Operators`."""
    experts: dict[str, str] = field(default_factory=dict)
    """The axis over which experts are cut, by glob, if a strategy does nothing else."""
    predicted: dict[str, Any] | None = None
    """Seconds of a step, if a search has chosen the plan, and for what they are predicted."""
    operator_plan: OperatorPlan | None = field(default=None, repr=False, compare=False)
    """That of all operators, in full; not in the file."""

    def to_json(self) -> str:
        """Return the plan as indented JSON."""
        value = asdict(replace(self, operator_plan=None))
        del value["operator_plan"]
        return json.dumps(value, indent=2) + "\n"

    def save(self, path: str | Path, form: str = "pdrun") -> None:
        """
        Write the plan to a file.

        Args:
            form: "pdrun", or "mindspore" for a file of operator strategies as MindSpore's.

        Raises:
            UsageError: another form, or MindSpore's for a run without `pdrun.Operators`.
        """
        text = self.to_json()
        if form == "mindspore" and self.operator_plan is not None:
            text = json.dumps(write_operator_strategies(self.operator_plan), indent=2) + "\n"
        elif form != "pdrun":
            what = f"form must be 'pdrun', or 'mindspore' for operators, got {form!r}"
            hint = (
                "strategy=pdrun.Operators({...}) has operators; weights: pdrun checkpoint strategy"
            )
            raise UsageError(what, where="run.plan.save", hint=hint)
        Path(path).write_text(text, encoding="utf-8")


def build_plan(state: RunState) -> RunPlan:
    """Return a run's plan."""
    settings = state.settings
    transfers = tuple(
        {
            "weights": [w.name for w in part.weights],
            "bytes": part.layout.numel * part.dtype.itemsize,
            "shards": part.comm.shards,
            "sums": [*_data_axes_of(part.weights[0], state), *part.weights[0].sum_axes],
        }
        for part in state.engine.gradient_buckets
    )
    mesh = {axis: state.mesh.degree(axis) for axis in state.mesh.grid.names}
    tiles = {
        w.name: {
            "shape": list(w.shard.shape),
            "layout": str(w.shard.layout),
            "sums": list(w.sum_axes),
        }
        for w in state.engine.weights
        if w.sum_axes or w.shard.shape != w.shape
    }
    alone = tuple(weight.name for weight in state.engine.weights if weight.unsynced)
    gather = None
    if settings.level == 3:
        gather = settings.gather
    operators, stored, gather_results = None, {}, True
    engine = find_engine(state.model)
    if engine is not None and engine.first_plan is not None:
        operators = describe_operators(engine.first_plan)
        stored = describe_stored(engine.first_plan)
        gather_results = engine.gather
    return RunPlan(
        PLAN_FORMAT,
        mesh,
        settings.level,
        settings.shard_group,
        settings.accumulate,
        weight_layouts(state),
        state.copies,
        settings.exact,
        gather,
        tuple(state.recomputed_modules),
        transfers,
        alone,
        tiles,
        {weight.name: weight.stages for weight in state.engine.weights if weight.stages},
        _describe_options(state),
        _describe_pipeline(state, engine is not None),
        operators,
        stored,
        gather_results,
        operator_plan=None if engine is None else engine.first_plan,
    )


def _data_axes_of(weight: Weight, state: RunState) -> Iterator[str]:
    """Yield the data axes over which gradients of a weight are summed."""
    for axis in state.mesh.data_axes:
        if axis != EXPERT_AXIS or not weight.is_expert:
            yield axis


def _describe_options(state: RunState) -> dict[str, Any]:
    """Return the arguments of `parallelize` that a plan decides and that are not defaults."""
    settings = state.settings
    is_staged = isinstance(state.driver, PipelineRunner)
    found: dict[str, Any] = {}
    if settings.level:
        found["optimizer_level"] = settings.level
    if settings.level and settings.shard_group != state.mesh.row_parts * state.mesh.cp:
        found["shard_group"] = settings.shard_group
    if settings.accumulate // state.copies > 1 and not is_staged:
        found["accumulate"] = settings.accumulate // state.copies
    if state.copies > 1:
        found["copies"] = state.copies
    if settings.level == 3:
        found["gather"] = settings.gather
    if state.recompute and _is_plain(state.recompute):
        found["recompute"] = state.recompute
    return found


def _is_plain(value: Any) -> bool:
    """Return whether JSON can hold a value."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _describe_pipeline(state: RunState, has_operators: bool) -> dict[str, Any] | None:
    """Return the arguments of `pdrun.Pipeline` that make the same stages; None without stages."""
    runner = state.driver
    if not isinstance(runner, PipelineRunner):
        return None
    schedule, split = runner.schedule, runner.stages.split
    found: dict[str, Any] = {
        "microbatches": schedule.microbatch_count,
        "schedule": schedule.name if schedule.name in DEFAULT_CHUNKS else str(schedule),
        "stages": dict(split.unit_stages),
    }
    if schedule.name in ANY_CHUNKS:
        found["chunks"] = schedule.stage_count // schedule.rank_count
    if schedule.slices > 1:
        found["slices"] = schedule.slices
    if split.loose_weights and not has_operators:
        found["shared"] = {name: list(stages) for name, stages in split.loose_weights.items()}
    return found


def explain_run(state: RunState, batch: Any = None) -> str:
    """Return what the run does, one fact per line."""
    plan = build_plan(state)
    lines = [
        *_describe_levels(state, plan),
        *_describe_model_axes(state, plan),
        *_describe_modules(state, plan),
        *_describe_host(state),
        _describe_exactness(state),
    ]
    if state.objective.is_mean:
        lines.append("the loss is one number: it is taken for the mean over the rows of its slice")
    if len(state.buffers):
        lines.append(
            f"{len(state.buffers)} buffers; those that a forward pass changes are rank 0's"
        )
    lines += state.experts.describe()
    if state.served is not None:
        lines.append(state.served.describe())
    lines.append(describe_traffic(state))
    engine = find_engine(state.model)
    if engine is not None and engine.first_plan is not None:
        lines.append(describe_prediction(engine.first_plan))
    estimate = str(memory.estimate_memory(state, batch))
    if state.mesh.pp > 1:
        estimate += "; activations are not counted: this is a stage"
    lines.append(estimate)
    return "\n".join(line for line in lines if line)


def _describe_levels(state: RunState, plan: RunPlan) -> list[str]:
    """Return how the batch is sliced, what is sharded over the data axes, and the buckets."""
    settings = state.settings
    rows = state.row_axis.size
    trained = [weight for weight in state.engine.weights if weight.is_trained]
    total = sum(weight.numel for weight in trained)
    largest = max((bucket["bytes"] for bucket in plan.transfers), default=0)
    slices = f"{rows} x {settings.accumulate} = {rows * settings.accumulate} slices"
    level = f"level {settings.level}: {LEVEL_TEXTS[settings.level]}"
    if settings.level:
        level += f" over groups of {settings.shard_group} of {state.data_group.world} ranks"
    lines = [
        f"{state.mesh} on {state.context.backend}: each batch is cut into {slices}",
        level,
        f"{total:,} trained elements in {len(trained)} weights, summed in {len(plan.transfers)} "
        f"buckets of up to {largest / MIB:.1f} MiB",
    ]
    if settings.level == 3:
        lines.append(GATHER_TEXTS[settings.gather])
    return lines


def _describe_modules(state: RunState, plan: RunPlan) -> list[str]:
    """Return the driver, tied and layerwise weights, and recomputed and compiled modules."""
    lines = [state.driver.describe()]
    for names in tied_names(state.original_model or state.model):
        lines.append(f"tied, counted once: {' = '.join(names)}")
    if plan.layerwise:
        lines.append(f"trained by each rank without communication: {', '.join(plan.layerwise)}")
    if state.recomputed_modules:
        lines.append(f"recomputed in the backward pass: {', '.join(state.recomputed_modules)}")
    if state.compiled_modules:
        lines.append(f"compiled: {', '.join(state.compiled_modules)}")
    lines += state.fp8.describe()
    return lines


def _describe_model_axes(state: RunState, plan: RunPlan) -> list[str]:
    """Return what is sharded over the model axes and what is summed there, by layout."""
    lines = []
    if state.mesh.pp > 1:
        here = sum(weight.nbytes for weight in state.engine.weights)
        stage = f"stage {state.axes['pp'].index} of {state.mesh.pp}"
        count = len(state.engine.weights)
        lines.append(f"{stage}: {count} weights, {here / MIB:.1f} MiB on this rank")
    if state.sequence_slicer is not None and state.mesh.cp > 1:
        lines.append(state.sequence_slicer.describe(state.axes))
    by_layout: dict[str, list[str]] = {}
    by_sums: dict[str, list[str]] = {}
    replicated = []
    for weight in state.engine.weights:
        if weight.shard.shape == weight.shape:
            replicated.append(weight.name)
        else:
            by_layout.setdefault(str(weight.shard.layout), []).append(weight.name)
        if weight.sum_axes:
            by_sums.setdefault(" and ".join(weight.sum_axes), []).append(weight.name)
    for layout, names in by_layout.items():
        lines.append(f"sharded by {layout}: {', '.join(names)}")
    if state.mesh.tensor_axes and by_layout:
        lines.append(f"replicated over the tensor axes: {', '.join(replicated) or 'nothing'}")
    for axes, names in by_sums.items():
        lines.append(f"gradients also summed over {axes}: {', '.join(names)}")
    for name, stages in plan.shared.items():
        lines.append(f"shared by stages {', '.join(map(str, stages))}: {name}")
    return lines


def _describe_host(state: RunState) -> list[str]:
    """Return which modules are computed on the host, and how much they have there."""
    found = state.host_modules
    if found is None or not found.names:
        return []
    size = sum(weight.nbytes for weight in state.engine.weights if weight.is_on_host)
    return [f"computed on the host: {', '.join(found.names)} ({size / MIB:.1f} MiB of weights)"]


def _describe_exactness(state: RunState) -> str:
    settings = state.settings
    low = settings.precision.compute or settings.precision.reduce or settings.wire_dtype
    if low:
        return "the same mathematics as one process, other last bits: narrow types are rounded"
    if not settings.exact:
        return (
            "the same mathematics as one process, other last bits: sums over ranks are in the "
            "network's order (exact=True adds in rank order)"
        )
    if state.mesh.size > state.mesh.dp:
        return "exact over dp: the same bits every time; other axes add in another order"
    return "exact: the bits of one process that computes the same slices in order"
