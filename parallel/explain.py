"""What a run does to a model, in words for its user and as data for a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdrun.parallel import memory
from pdrun.parallel.weights import MIB, tied_names

if TYPE_CHECKING:
    from pdrun.parallel.run import Run

LEVELS = (
    "nothing is cut",
    "optimizer state is cut",
    "optimizer state and gradients are cut",
    "state, gradients and weights are cut",
)


@dataclass(frozen=True)
class Plan:
    """Where everything goes: plain data, the same on every rank."""

    mesh: dict[str, int]
    level: int
    shard_group: int
    accumulate: int
    exact: bool
    recompute: tuple[str, ...]
    transfers: tuple[dict[str, Any], ...]
    """What is summed together: names of weights, bytes, into how many shards it is cut."""
    layerwise: tuple[str, ...]

    def to_json(self) -> str:
        """Return the plan as indented JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


def plan_of(run: Run) -> Plan:
    """Return a run's plan."""
    settings = run.settings
    transfers = tuple(
        {
            "weights": [w.name for w in part.weights],
            "bytes": part.layout.numel * part.dtype.itemsize,
            "shards": part.comm.shards,
        }
        for part in run.engine.bundles
    )
    mesh = {axis: run.mesh.degree(axis) for axis in ("pp", "dp", "cp", "tp")}
    alone = tuple(weight.name for weight in run.engine.weights if weight.alone)
    return Plan(
        mesh,
        settings.level,
        settings.shard_group,
        settings.accumulate,
        settings.exact,
        tuple(run.recomputed),
        transfers,
        alone,
    )


def explain(run: Run, batch: Any = None) -> str:
    """Return what the run does, a fact a line."""
    settings, plan = run.settings, plan_of(run)
    world = run.axis.world
    trained = [weight for weight in run.engine.weights if weight.trained]
    total = sum(weight.numel for weight in trained)
    slices = f"{world} x {settings.accumulate} = {world * settings.accumulate} slices"
    lines = [
        f"{run.mesh} on {run.context.backend}: each batch is cut into {slices}",
        f"level {settings.level}: {LEVELS[settings.level]}"
        + (f" over groups of {settings.shard_group} of {world} ranks" if settings.level else ""),
        f"{total:,} trained elements in {len(trained)} weights, summed in {len(plan.transfers)} transfers of up to "
        f"{max((part['bytes'] for part in plan.transfers), default=0) / MIB:.1f} MiB",
    ]
    lines += [f"tied, counted once: {' = '.join(names)}" for names in tied_names(run.model)]
    if plan.layerwise:
        lines.append(f"each rank trains by itself: {', '.join(plan.layerwise)}")
    if run.recomputed:
        lines.append(f"computed again in the backward pass: {', '.join(run.recomputed)}")
    lines.append(_numbers(run))
    if run.objective.plain:
        lines.append("the loss returns one number: it is taken for the mean over the rows of its slice")
    if run.buffers:
        lines.append(f"{len(run.buffers)} buffers; those that a forward pass changes are rank 0's")
    lines.append(str(memory.estimate(run, batch)))
    return "\n".join(lines)


def _numbers(run: Run) -> str:
    settings = run.settings
    low = settings.precision.compute or settings.precision.reduce or settings.wire
    if settings.exact and not low:
        return "exact: the bits of one process that works through the same slices in order"
    reason = (
        "narrow types are rounded"
        if low
        else "sums over ranks are in the network's order (exact=True adds in the ranks')"
    )
    return f"the same mathematics as one process, other last bits: {reason}"
