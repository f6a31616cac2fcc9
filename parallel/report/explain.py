"""What a run does to a model, in words for its user and as data for a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdrun.parallel.model.weights import MIB, tied_names
from pdrun.parallel.report import memory
from pdrun.parallel.report import traffic as volume
from pdrun.parallel.report.placement import weight_layouts

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState

LEVEL_TEXTS = (
    "nothing is cut over the data",
    "optimizer state is cut",
    "optimizer state and gradients are cut",
    "state, gradients and weights are cut",
)

GATHER_TEXTS = {
    "pass": "a unit's weights are gathered for each forward and each backward through it",
    "step": "weights are gathered once a step, and stay from a unit's first forward to its last backward",
}


@dataclass(frozen=True)
class RunPlan:
    """Where everything goes: plain data, the same on every rank of a pipeline's stage."""

    mesh: dict[str, int]
    """Degrees of all axes, outer to inner."""
    level: int
    shard_group: int
    accumulate: int
    weights: dict[str, Any]
    """Where each one lies: shape, layout, stages and blocks, which `pdrun checkpoint` reads."""
    copies: int
    """How many micro-batches are computed at a time."""
    exact: bool
    gather: str | None
    """
    How long weights that level 3 gathers stay: for a "pass" or a "step"; None at the other levels.
    """
    recompute: tuple[str, ...]
    transfers: tuple[dict[str, Any], ...]
    """
    What is summed together: names of weights, bytes, into how many shards it is cut, over which
    axes besides.
    """
    layerwise: tuple[str, ...]
    tiles: dict[str, dict[str, Any]]
    """
    Weights that are cut over tensor axes: shape of the whole, layout, and axes over which gradients
    are summed.
    """
    shared: dict[str, tuple[int, ...]]
    """Weights that several stages hold, and these stages."""

    def to_json(self) -> str:
        """Return the plan as indented JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


def build_plan(state: RunState) -> RunPlan:
    """Return a run's plan."""
    settings = state.settings
    transfers = tuple(
        {
            "weights": [w.name for w in part.weights],
            "bytes": part.layout.numel * part.dtype.itemsize,
            "shards": part.comm.shards,
            "sums": [*state.mesh.data_axes, *part.weights[0].sum_axes],
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
    return RunPlan(
        mesh,
        settings.level,
        settings.shard_group,
        settings.accumulate,
        weight_layouts(state),
        state.copies,
        settings.exact,
        settings.gather if settings.level == 3 else None,
        tuple(state.recomputed_modules),
        transfers,
        alone,
        tiles,
        {weight.name: weight.stages for weight in state.engine.weights if weight.stages},
    )


def explain_run(state: RunState, batch: Any = None) -> str:
    """Return what the run does, a fact a line."""
    settings = state.settings
    plan = build_plan(state)
    world = state.data_group.world
    rows = state.row_axis.size
    trained = [weight for weight in state.engine.weights if weight.is_trained]
    total = sum(weight.numel for weight in trained)
    slices = f"{rows} x {settings.accumulate} = {rows * settings.accumulate} slices"
    lines = [
        f"{state.mesh} on {state.context.backend}: each batch is cut into {slices}",
        f"level {settings.level}: {LEVEL_TEXTS[settings.level]}"
        + (f" over groups of {settings.shard_group} of {world} ranks" if settings.level else ""),
        f"{total:,} trained elements in {len(trained)} weights, summed in {len(plan.transfers)} transfers of up to "
        f"{max((part['bytes'] for part in plan.transfers), default=0) / MIB:.1f} MiB",
    ]
    lines += [GATHER_TEXTS[settings.gather]] if settings.level == 3 else []
    lines += _describe_model_axes(state, plan)
    lines += [told] if (told := state.driver.describe()) else []
    lines += [
        f"tied, counted once: {' = '.join(names)}"
        for names in tied_names(state.original_model or state.model)
    ]
    if plan.layerwise:
        lines.append(f"each rank trains by itself: {', '.join(plan.layerwise)}")
    if state.recomputed_modules:
        lines.append(f"computed again in the backward pass: {', '.join(state.recomputed_modules)}")
    if state.compiled_modules:
        lines.append(f"compiled: {', '.join(state.compiled_modules)}")
    lines.append(_describe_exactness(state))
    if state.objective.is_mean:
        lines.append(
            "the loss returns one number: it is taken for the mean over the rows of its slice"
        )
    if state.synced_buffers:
        lines.append(
            f"{len(state.synced_buffers)} buffers; those that a forward pass changes are rank 0's"
        )
    lines += [sent] if (sent := volume.describe_traffic(state)) else []
    found = memory.estimate_memory(state, batch)
    lines.append(
        str(found) + ("; activations are not counted: this is a stage" if state.mesh.pp > 1 else "")
    )
    return "\n".join(lines)


def _describe_model_axes(state: RunState, plan: RunPlan) -> list[str]:
    """
    Return what is cut over the model axes, and what is summed there: layouts with the weights that
    have them.
    """
    lines = []
    if state.mesh.pp > 1:
        here = sum(weight.nbytes for weight in state.engine.weights)
        stage = f"stage {state.axes['pp'].index} of {state.mesh.pp}"
        lines.append(
            f"{stage}: {len(state.engine.weights)} weights, {here / MIB:.1f} MiB on this rank"
        )
    if state.sequence_slicer is not None and state.mesh.cp > 1:
        lines.append(state.sequence_slicer.describe(state.axes))
    by_layout: dict[str, list[str]] = {}
    by_sums: dict[str, list[str]] = {}
    for weight in state.engine.weights:
        if weight.shard.shape != weight.shape:
            by_layout.setdefault(str(weight.shard.layout), []).append(weight.name)
        if weight.sum_axes:
            by_sums.setdefault(" and ".join(weight.sum_axes), []).append(weight.name)
    lines += [f"cut by {layout}: {', '.join(names)}" for layout, names in by_layout.items()]
    if state.mesh.tensor_axes and by_layout:
        rest = [
            weight.name for weight in state.engine.weights if weight.shard.shape == weight.shape
        ]
        lines.append(f"whole on every rank along the tensor axes: {', '.join(rest) or 'nothing'}")
    lines += [
        f"gradients summed over {axes} too: {', '.join(names)}" for axes, names in by_sums.items()
    ]
    for name, stages in plan.shared.items():
        lines.append(f"shared by stages {', '.join(map(str, stages))}: {name}")
    return lines


def _describe_exactness(state: RunState) -> str:
    settings = state.settings
    low = settings.precision.compute or settings.precision.reduce or settings.wire_dtype
    if settings.exact and not low:
        if state.mesh.size > state.mesh.dp:
            return "exact over dp: the same bits every time; what the other axes cut has other last bits in one process"
        return "exact: the bits of one process that works through the same slices in order"
    reason = (
        "narrow types are rounded"
        if low
        else "sums over ranks are in the network's order (exact=True adds in the ranks')"
    )
    return f"the same mathematics as one process, other last bits: {reason}"
