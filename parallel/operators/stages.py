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
from pdrun.parallel.layouts.view import View
from pdrun.parallel.operators.graph.graph import Operator, OperatorGraph, TensorRef
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.operators.redistribute import rule_path

if TYPE_CHECKING:
    from pdrun.parallel.pipeline.split import StageSplit

OPERATORS_IN_STAGES = "pdrun.Operators in stages"
ORDER_HINT = "give Pipeline(stages={glob: stage}) in the order in which values flow"


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
        if index in self.received:
            return self.received[index]
        return plan.source_layout(index)


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
        if tensor.kind == "buffer":
            unit = _enclosing_unit(tensor.name, split.unit_stages)
            if unit is not None:
                graph.tensor_stages[index] = split.unit_stages[unit]
    dropout_stage = 0
    for position, operator in enumerate(graph.operators):
        stage = _operator_stage(graph, operator, split)
        if draws_mask(operator):
            # masks are counted in the order of the model: a dropout has one stage
            if stage is None:
                stage = 0
            if stage < dropout_stage:
                raise UsageError(
                    f"{operator.name} of stage {stage} draws its mask after a dropout of stage"
                    f" {dropout_stage}: the mask would differ from one process",
                    where=OPERATORS_IN_STAGES,
                    hint=ORDER_HINT,
                )
            dropout_stage = stage
        graph.operators[position] = replace(operator, stage=stage)
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
    stages_of_inputs = [
        (graph.tensor_stages[index], index)
        for index in operator.inputs
        if index in graph.tensor_stages
    ]
    latest, index = max(stages_of_inputs, default=(None, -1))
    if unit is None:
        return latest
    stage = split.unit_stages[unit]
    if latest is not None and latest > stage:
        raise UsageError(
            f"{operator.name} of stage {stage} takes {graph.tensors[index].name},"
            f" which stage {latest} computes",
            where=operator.source or OPERATORS_IN_STAGES,
            hint=ORDER_HINT,
        )
    return stage


def _enclosing_unit(name: str, units: Mapping[str, int]) -> str | None:
    """Return the unit that a name is, or is inside."""
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name or None


def draws_mask(operator: Operator) -> bool:
    """Return whether an operator draws a dropout mask."""
    if operator.kind == "scaled_dot_product_attention":
        return bool(operator.get_arg(4, "dropout_p", 0.0))
    return (
        "dropout" in operator.kind
        and bool(operator.get_arg(1, "p"))
        and bool(operator.get_arg(2, "train"))
    )


# ---- what each stage computes, receives and sends ---------------------------


def stage_plans(plan: OperatorPlan) -> tuple[StagePlan, ...]:
    """Return what each stage computes; one plan without a pipeline."""
    graph = plan.graph
    if not graph.stage_count:
        return (StagePlan(0, tuple(range(len(graph.operators))), {}, {}),)
    producers = graph.tensor_producers()
    results = [value.index for value in graph.results if isinstance(value, TensorRef)]
    operators: list[tuple[int, ...]] = []
    last_stages: dict[int, int] = {}
    layouts: dict[int, L] = {}
    for stage in range(graph.stage_count):
        is_last = stage == graph.stage_count - 1
        own_operators = [
            position for position, operator in enumerate(graph.operators) if operator.stage == stage
        ]
        own_results = results if is_last else []
        operators.append(_add_common_operators(graph, producers, own_operators, own_results))
        for index, wanted in _wanted_layouts(plan, operators[-1], own_results):
            if graph.tensor_stages.get(index, stage) < stage:
                last_stages[index] = stage
                if index not in layouts:
                    layouts[index] = _sent_layout(plan, index, wanted)
    found_plans: list[StagePlan] = []
    received: dict[int, L] = {}
    for stage, stage_operators in enumerate(operators):
        crossing = sorted(
            index for index, end in last_stages.items() if graph.tensor_stages[index] <= stage < end
        )
        sent = {index: layouts[index] for index in crossing}
        found_plans.append(
            StagePlan(stage, stage_operators, received, sent, stage == graph.stage_count - 1)
        )
        received = sent
    return tuple(found_plans)


def _add_common_operators(
    graph: OperatorGraph,
    producers: Mapping[int, int],
    own_operators: Iterable[int],
    results: Iterable[int],
) -> tuple[int, ...]:
    """Return operators, with the operators of every stage that they, or results, need."""
    found = set(own_operators)
    todo = [index for position in found for index in graph.operators[position].inputs]
    todo += results
    while todo:
        position = producers.get(todo.pop())
        if (
            position is not None
            and position not in found
            and graph.operators[position].stage is None
        ):
            found.add(position)
            todo += graph.operators[position].inputs
    return tuple(sorted(found))


def _wanted_layouts(
    plan: OperatorPlan, operators: Iterable[int], results: Iterable[int]
) -> Iterator[tuple[int, L]]:
    """Yield the tensors that operators and results take, with the layouts that they need."""
    for position in operators:
        for slot, index in enumerate(plan.graph.operators[position].inputs):
            ndim = len(plan.graph.shape_of(index))
            yield index, plan.shardings[position].input_layout(slot, ndim)
    for index in results:
        yield index, plan.result_layout(index)


def _sent_layout(plan: OperatorPlan, index: int, wanted: L) -> L:
    """
    Return the layout in which a tensor is sent to an operator that needs it in ``wanted``.

    It is the layout in which the tensor was made, without partial sums.
    """
    layout = plan.source_layout(index)
    for move in rule_path(View(plan.grid, layout, plan.graph.shape_of(index)), wanted):
        if not layout.sums:
            break
        layout = move.after.layout
    return layout


# ---- weights per stage ------------------------------------------------------


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
    all_stages = tuple(range(split.stage_count))
    used: dict[str, set[int]] = {}
    for stage_plan in stage_plans(plan):
        for position in stage_plan.operators:
            for index in plan.graph.operators[position].inputs:
                if plan.graph.tensors[index].kind == "param":
                    used.setdefault(plan.graph.tensors[index].name, set()).add(stage_plan.stage)
    for first, stages in used.items():
        own_stages = {stage for name in names[first] for stage in split.holders_of(name)}
        if all(loose.get(name) == all_stages for name in names[first]):
            loose |= dict.fromkeys(names[first], tuple(sorted(stages)))
        elif stages - own_stages:
            loose[first] = tuple(sorted({*split.holders_of(first), *(stages - own_stages)}))
    return replace(split, loose_weights=loose)
