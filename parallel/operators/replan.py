"""Plans for other shapes: the layouts of a first plan, applied to the graph of another call."""

from __future__ import annotations

from dataclasses import replace

from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.operators.plan import OperatorPlan, OperatorSharding, UserLayouts
from pdrun.parallel.operators.propagate import propagate_layouts
from pdrun.parallel.operators.rules.rule import OpSplit, list_splits, view_operator


def layouts_like(first: OperatorPlan, graph: OperatorGraph) -> UserLayouts:
    """
    Return a first plan's layouts for another graph of the same model, by names of operators and
    weights.

    New operators, and operators whose split is impossible with these sizes, stay open.
    """
    names = {operator.name: position for position, operator in enumerate(first.graph.operators)}
    weights = {first.graph.tensors[index].name: layout for index, layout in first.weights.items()}
    user_layouts = UserLayouts()
    for index, tensor in enumerate(graph.tensors):
        if tensor.kind == "param" and tensor.name in weights:
            user_layouts.weights[index] = weights[tensor.name]
    for position, operator in enumerate(graph.operators):
        old_position = names.get(operator.name)
        if old_position is None:
            continue
        sharding = first.shardings[old_position]
        old_operator = first.graph.operators[old_position]
        splits = list_splits(view_operator(graph, operator))
        if splits is None:
            # without a rule, so the user replicated it
            user_layouts.replicated.add(position)
            continue
        found = {axis: _find_same_split(splits, split) for axis, split in sharding.splits.items()}
        if all(split is not None for split in found.values()) and _is_divisible(first, found):
            splits_now = {axis: split for axis, split in found.items() if split is not None}
            user_layouts.shardings[position] = OperatorSharding(
                splits_now, sharding.axis_order, first.grid.names
            )
        part_split = first.interleaved.get(old_position)
        if part_split is not None:
            split_now = _find_same_split(splits, part_split.split)
            if split_now is not None and position in user_layouts.shardings:
                user_layouts.interleaved[position] = replace(part_split, split=split_now)
        if old_operator.outputs[0] in first.out_layouts:
            user_layouts.results[position] = first.out_layouts[old_operator.outputs[0]]
    return user_layouts


def replan(first: OperatorPlan, graph: OperatorGraph) -> OperatorPlan:
    """
    Return the plan for the same model with other shapes: the layouts of the first plan, by name.

    Operators that the first plan lacks, or whose split is impossible with these sizes, follow by
    propagation.
    """
    plan = propagate_layouts(graph, first.grid, layouts_like(first, graph))
    sums = {first.graph.tensors[index].name: axes for index, axes in first.grad_sums.items()}
    plan.grad_sums = {index: sums.get(graph.tensors[index].name, ()) for index in plan.grad_sums}
    return plan


def _find_same_split(splits: list[OpSplit], wanted: OpSplit) -> OpSplit | None:
    for split in splits:
        if (split.in_states, split.out_states) == (wanted.in_states, wanted.out_states):
            return split
    return None


def _is_divisible(first: OperatorPlan, splits: dict[str, OpSplit | None]) -> bool:
    for split in splits.values():
        parts = first.grid.group_size(
            tuple(axis for axis, other in splits.items() if other == split)
        )
        if split is not None and split.must_divide and split.must_divide % parts:
            return False
    return True
