"""
What `parallelize` has decided for a run, and where each value came from: for `pdrun status` and
`pdrun report`, through the event log. Rank 0 reports it once, when the run is made.

The order of a pipeline is sent as *cells*, one text per rank: ``0F1@250+125`` is the forward of
stage 0 on micro-batch 1, from 250 to 375 thousandths of the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pdrun import elastic
from pdrun.parallel.auto.auto import Auto
from pdrun.parallel.auto.inputs import AUTO, ParallelChoices
from pdrun.parallel.auto.plan_file import StepPrediction
from pdrun.parallel.operators.compiler import find_engine
from pdrun.parallel.pipeline.describe import shorten_names
from pdrun.parallel.pipeline.runner import PipelineRunner
from pdrun.parallel.pipeline.schedules.schedule import PipelineSchedule
from pdrun.parallel.pipeline.schedules.timeline import ActionCosts, simulate_schedule
from pdrun.parallel.report.explain import LEVEL_TEXTS

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState

Fact = tuple[str, str, str]
"""Name, value, and where the value came from."""
CELL_UNITS = 1_000
"""Parts of a step in which cells are given."""
MAX_STAGES = 64
_SHOWN_APART = frozenset(
    ("model", "optimizer", "loss", "mesh", "strategy", "pipeline", "sample", "forward", "scheduler")
)
"""Arguments that are no settings, or have lines of their own."""


def report_plan(
    state: RunState,
    predicted: StepPrediction | None,
    given: ParallelChoices,
    arguments: Any,
    signature: inspect.Signature,
) -> None:
    """
    Report the plan of a run, if this is rank 0 of a job of pdrun.

    Args:
        predicted: what the search of the plan has predicted for a step.
        given: what the call of `parallelize` had, before files were read and plans searched.
        arguments: those that count, as attributes.
        signature: of `parallelize`, with its defaults.
    """
    if elastic.takes_plan():
        facts = list_plan_facts(state, given, arguments, signature)
        if predicted is not None:
            text = predicted.describe(None).partition(";")[0]
            facts.append(("prediction", text, "searched"))
        driver = state.driver
        cells: list[Fact] = []
        if isinstance(driver, PipelineRunner):
            cells = list(encode_cells(driver.schedule, driver.stages.split.cost_shares))
        elastic.report_plan(facts, tuple(cells))


def list_plan_facts(
    state: RunState, given: ParallelChoices, arguments: Any, signature: inspect.Signature
) -> list[Fact]:
    """Return the lines about a run; arguments at their default are left out, but for the main."""
    sources = {
        name: _find_source(name, given, arguments, parameter.default)
        for name, parameter in signature.parameters.items()
        if hasattr(arguments, name)
    }
    settings = state.settings
    slices = state.row_axis.size * settings.accumulate
    level = f"{settings.level}: {LEVEL_TEXTS[settings.level]}"
    if settings.level:
        level += f", in groups of {settings.shard_group}"
    trained = [weight for weight in state.engine.weights if weight.is_trained]
    elements = sum(weight.numel for weight in trained)
    facts = [
        ("mesh", str(state.mesh), sources["mesh"]),
        ("slices of a batch", str(slices), ""),
        ("optimizer_level", level, sources["optimizer_level"]),
        ("trained", f"{elements:,} elements in {len(trained)} weights on rank 0", "model"),
    ]
    facts += _describe_stages(state, sources["pipeline"])
    facts += _describe_cut(state, arguments, sources["strategy"])
    for name, source in sources.items():
        if name not in _SHOWN_APART and name != "optimizer_level" and source != "default":
            facts.append((name, _shorten(getattr(arguments, name)), source))
    return facts


def _find_source(name: str, given: ParallelChoices, arguments: Any, default: Any) -> str:
    """Return where the value of an argument came from."""
    value = getattr(arguments, name)
    before = getattr(given, name, value)
    if isinstance(before, str) and name in ("mesh", "strategy"):
        return "searched" if before == AUTO else f"file {before}"
    if hasattr(given, name) and _differs(before, value) and not _differs(before, default):
        chosen = next((one for one in (given.mesh, given.strategy) if isinstance(one, str)), "")
        if chosen:
            return "searched" if chosen == AUTO else f"file {chosen}"
        return "default" if name == "mesh" else "strategy"
    if name == "strategy" and isinstance(value, Auto):
        return "searched"
    return f"argument {name}=" if _differs(value, default) else "default"


def _differs(one: Any, other: Any) -> bool:
    """Return whether two values differ; tensors and arrays in them are never compared."""
    if one is other:
        return False
    simple = (str, int, float, bool, type(None), tuple, list)
    if isinstance(one, simple) and isinstance(other, simple):
        return repr(one) != repr(other)
    return True


def _describe_stages(state: RunState, source: str) -> Iterator[Fact]:
    runner = state.driver
    if not isinstance(runner, PipelineRunner):
        return
    schedule, split = runner.schedule, runner.stages.split
    shares = split.cost_shares
    bubble = simulate_schedule(schedule, ActionCosts(shares=shares)).bubble_share
    text = (
        f"{schedule.name}: {schedule.stage_count} stages on {schedule.rank_count} ranks, "
        f"{schedule.microbatch_count} micro-batches, bubble {bubble:.1%} with the stages' shares"
    )
    yield "pipeline", text, source
    for stage, rank in list(enumerate(schedule.stage_ranks))[:MAX_STAGES]:
        names = shorten_names(split.modules_of(stage))
        yield f"stage {stage}", f"{shares[stage]:.1%} of the cost on rank {rank} of pp: {names}", ""


def _describe_cut(state: RunState, arguments: Any, source: str) -> Iterator[Fact]:
    engine = find_engine(state.model)
    plan = None if engine is None else engine.first_plan
    if plan is not None:
        count = len(plan.graph.operators)
        cut = sum(bool(sharding.splits) for sharding in plan.shardings)
        sums = sum(map(bool, plan.grad_sums.values()))
        text = f"{cut} of {count} operators split over tensor axes, {sums} gradients summed there"
        yield "operators", text, source
        for number, note in enumerate(plan.notes[:4]):
            yield f"note {number + 1}", note, "plan"
    elif arguments.strategy is not None:
        yield "strategy", _shorten(arguments.strategy), source
    layouts: dict[str, int] = {}
    for weight in state.engine.weights:
        if weight.shard.shape != weight.shape:
            layout = str(weight.shard.layout)
            layouts[layout] = layouts.get(layout, 0) + 1
    for layout, count in sorted(layouts.items(), key=lambda item: -item[1])[:8]:
        yield f"layout {layout}", f"{count} weights", ""


def _shorten(value: Any) -> str:
    """Return a value as one line: the entries of a mapping, else its text; never an address."""
    entries = getattr(value, "entries", None) or getattr(value, "rules", None)
    if isinstance(value, Mapping):
        text = ", ".join(f"{key}: {_shorten(one)}" for key, one in value.items())
    elif isinstance(entries, Mapping) and entries:
        text = f"{type(value).__name__}: {_shorten(entries)}"
    elif _defines_no_text(type(value)):
        text = type(value).__name__
    elif callable(value) and hasattr(value, "__name__"):
        text = value.__name__
    else:
        text = str(value)
    return " ".join(text.split())[: elastic.MAX_FACT_CHARACTERS]


def _defines_no_text(kind: Any) -> bool:
    """Return whether a type defines no text: it would be printed as an address."""
    return kind.__repr__ is object.__repr__ and kind.__str__ is object.__str__


def encode_cells(schedule: PipelineSchedule, shares: tuple[float, ...]) -> Iterator[Fact]:
    """Yield the cells of each rank: forwards take 1, backwards 2, times the stage's share."""
    found = simulate_schedule(schedule, ActionCosts(shares=shares))
    scale = CELL_UNITS / (found.duration or 1.0)
    for rank, row in enumerate(schedule.rows):
        cells = []
        for action in row:
            if action in found.spans:
                begin, end = (round(when * scale) for when in found.spans[action])
                cells.append(f"{action}@{begin}+{end - begin}")
        yield f"cells {rank}", " ".join(cells), ""
