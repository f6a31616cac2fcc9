"""
A graph in pipeline stages: the stage of each operator, and what each stage sends to the next.

* Operators inside a unit (a module that belongs to a stage) run on its stage.
* Operators between units follow their inputs, to the latest stage that one of them is from.
* What depends only on the batch, weights and buffers (masks, positions, a transposed embedding) is
  computed by every stage that needs it and never sent.

The constraints, the plan and the layouts are those of the full graph. What an operator of a later
stage needs is sent through the stages between, in the layout in which it was made: each rank sends
its shard to the rank with the same tensor coordinates. Partial sums are all-reduced before, or
reduce-scattered if a shard is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pdrun.errors import UsageError
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.graph import Operator, OperatorGraph, TensorRef
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.operators.redistribute import redistribution_path

if TYPE_CHECKING:
    from pdrun.parallel.pipeline.split import StageSplit

OPERATORS_IN_STAGES = "pdrun.Operators in stages"
ORDER_HINT = "Pipeline(stages={glob: stage}) in the order in which values flow"


@dataclass(frozen=True)
class StagePlan:
    """
    What one stage computes of a plan; without a pipeline, everything.

    Attributes:
        stage: its index.
        operators: the indices of its operators, in order.
        received: tensors that the stage before sends, with their layouts.
        sent: tensors that this stage sends to the next, with their layouts.
        is_last: whether this stage returns the model's results.
    """

    stage: int
    operators: tuple[int, ...]
    received: Mapping[int, L]
    sent: Mapping[int, L]
    is_last: bool = True

    def source_layout(self, plan: OperatorPlan, index: int) -> L:
        """Return the layout in which this stage receives or makes a tensor."""
        return self.received[index] if index in self.received else plan.source_layout(index)


def assign_stages(graph: OperatorGraph, split: StageSplit) -> None:
    """
    Set the stage of each operator of a graph.

    Raises:
        UsageError: a value would flow back to an earlier stage, dropouts would be counted in
            another order than in one process, or a stage computes nothing. The message has stage
            and operator.
    """
    graph.stage_count = split.stage_count
    for index, tensor in enumerate(graph.tensors):
        unit = _enclosing_unit(tensor.name, split.unit_stages) if tensor.kind == "buffer" else None
        if unit is not None:
            graph.tensor_stages[index] = split.unit_stages[unit]
    dropped = 0
    for place, operator in enumerate(graph.operators):
        stage = _operator_stage(graph, operator, split)
        if _draws_mask(operator):
            stage = 0 if stage is None else stage
            if stage < dropped:
                what = f"{operator.name} of stage {stage} drops after a dropout of stage {dropped}"
                raise UsageError(
                    f"{what}: its mask would not be that of one process",
                    where=OPERATORS_IN_STAGES,
                    hint=ORDER_HINT,
                )
            dropped = stage
        graph.operators[place] = replace(operator, stage=stage)
        if stage is not None:
            graph.tensor_stages.update(dict.fromkeys(operator.outputs, stage))
    for stage in range(split.stage_count):
        if not any(operator.stage == stage for operator in graph.operators):
            names = ", ".join(split.modules_of(stage))
            raise UsageError(
                f"stage {stage} computes nothing: forward calls none of {names}",
                where=OPERATORS_IN_STAGES,
                hint=ORDER_HINT,
            )


def _operator_stage(graph: OperatorGraph, operator: Operator, split: StageSplit) -> int | None:
    """Return the stage of an operator; None if every stage that needs it computes it."""
    unit = _enclosing_unit(operator.module, split.unit_stages)
    found = [
        (graph.tensor_stages[index], index)
        for index in operator.inputs
        if index in graph.tensor_stages
    ]
    latest, index = max(found, default=(None, -1))
    if unit is None:
        return latest
    stage = split.unit_stages[unit]
    if latest is not None and latest > stage:
        what = f"{operator.name} of stage {stage} takes {graph.tensors[index].name}, which stage {latest} computes"
        raise UsageError(what, where=operator.source or OPERATORS_IN_STAGES, hint=ORDER_HINT)
    return stage


def _enclosing_unit(name: str, units: Mapping[str, int]) -> str | None:
    """Return the unit that a name is, or is inside."""
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name or None


def _draws_mask(operator: Operator) -> bool:
    """Return whether an operator draws a dropout mask."""
    if operator.kind == "scaled_dot_product_attention":
        return bool(operator.get_arg(4, "dropout_p", 0.0))
    return (
        "dropout" in operator.kind
        and bool(operator.get_arg(1, "p"))
        and bool(operator.get_arg(2, "train"))
    )


# ---- what each stage computes, takes and gives ------------------------------


def stage_plans(plan: OperatorPlan) -> tuple[StagePlan, ...]:
    """Return what each stage computes; one plan without a pipeline."""
    graph = plan.graph
    if not graph.stage_count:
        return (StagePlan(0, tuple(range(len(graph.operators))), {}, {}),)
    makers = graph.tensor_producers()
    results = [value.index for value in graph.results if isinstance(value, TensorRef)]
    places: list[tuple[int, ...]] = []
    until: dict[int, int] = {}
    layouts: dict[int, L] = {}
    for stage in range(graph.stage_count):
        ends = stage == graph.stage_count - 1
        own = [place for place, operator in enumerate(graph.operators) if operator.stage == stage]
        places.append(_add_common_operators(graph, makers, own, results if ends else ()))
        for index, wanted in _wanted_layouts(plan, places[-1], results if ends else ()):
            if graph.tensor_stages.get(index, stage) < stage:
                until[index] = stage
                if index not in layouts:
                    layouts[index] = _sent_layout(plan, index, wanted)
    found: list[StagePlan] = []
    taken: dict[int, L] = {}
    for stage, some in enumerate(places):
        crossing = sorted(
            index for index, end in until.items() if graph.tensor_stages[index] <= stage < end
        )
        given = {index: layouts[index] for index in crossing}
        found.append(StagePlan(stage, some, taken, given, stage == graph.stage_count - 1))
        taken = given
    return tuple(found)


def _add_common_operators(
    graph: OperatorGraph, makers: Mapping[int, int], own: Iterable[int], results: Iterable[int]
) -> tuple[int, ...]:
    """Return operators, with the operators of every stage that they, or results, need."""
    found = set(own)
    todo = [index for place in found for index in graph.operators[place].inputs] + list(results)
    while todo:
        place = makers.get(todo.pop())
        if place is not None and place not in found and graph.operators[place].stage is None:
            found.add(place)
            todo += graph.operators[place].inputs
    return tuple(sorted(found))


def _wanted_layouts(
    plan: OperatorPlan, places: Iterable[int], results: Iterable[int]
) -> Iterator[tuple[int, L]]:
    """Yield the tensors that operators and results take, with the layouts that they need."""
    for place in places:
        for at, index in enumerate(plan.graph.operators[place].inputs):
            yield index, plan.shardings[place].input_layout(at, len(plan.graph.shape_of(index)))
    for index in results:
        yield index, plan.result_layout(index)


def _sent_layout(plan: OperatorPlan, index: int, wanted: L) -> L:
    """
    Return the layout in which a tensor is sent to an operator that needs it in ``wanted``.

    It is the layout in which the tensor was made, without partial sums.
    """
    layout = plan.source_layout(index)
    for move in redistribution_path(layout, wanted):
        if not layout.sums:
            break
        layout = move.after
    return layout


# ---- who holds which weight -------------------------------------------------


def assign_weights(
    plan: OperatorPlan, split: StageSplit, names: Mapping[str, list[str]]
) -> StageSplit:
    """
    Return a split in which every stage has the weights that its operators use.

    A weight outside the units without a stage is on the stages that use it, if there are any.

    Args:
        names: all names of a weight, by its first name.
    """
    loose: dict[str, Any] = dict(split.loose_weights)
    every = tuple(range(split.stage_count))
    used: dict[str, set[int]] = {}
    for part in stage_plans(plan):
        for place in part.operators:
            for index in plan.graph.operators[place].inputs:
                if plan.graph.tensors[index].kind == "param":
                    used.setdefault(plan.graph.tensors[index].name, set()).add(part.stage)
    for first, stages in used.items():
        own = {stage for name in names[first] for stage in split.holders_of(name)}
        if all(loose.get(name) == every for name in names[first]):
            loose |= dict.fromkeys(names[first], tuple(sorted(stages)))
        elif stages - own:
            loose[first] = tuple(sorted({*split.holders_of(first), *(stages - own)}))
    return replace(split, loose_weights=loose)
