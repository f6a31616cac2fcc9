"""
Templates: well-known plans, made from the structure of a graph without names.

    whole       every rank computes everything
    rows        products are split on their first dim; operators between them follow
    megatron    products in pairs: the first by columns, the second by rows, one all-reduce behind
    sequence    the same, with the sequence sharded between the pairs

They are candidates beside every search, and the starting point of "sharding_propagation" without
seeds.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdrun.errors import UsageError
from pdrun.parallel.auto.flops import count_products
from pdrun.parallel.auto.search.problem import SearchProblem
from pdrun.parallel.operators.plan import OperatorPlan, OperatorSharding, UserLayouts
from pdrun.parallel.operators.propagate import propagate_layouts
from pdrun.parallel.operators.rules.rule import OpSplit, list_splits, view_operator

TEMPLATE_NAMES = ("whole", "rows", "megatron", "sequence")


def list_templates(problem: SearchProblem) -> Iterator[tuple[str, OperatorPlan]]:
    """Yield the templates that are possible, by name."""
    for name in TEMPLATE_NAMES:
        seeds = _find_seeds(problem, name)
        if not seeds and name != "whole":
            continue
        try:
            plan = propagate_seeds(problem, seeds)
        except (UsageError, ValueError):
            continue
        yield name, plan


def propagate_seeds(problem: SearchProblem, seeds: dict[int, OperatorSharding]) -> OperatorPlan:
    """
    Return the plan that follows from some operators' shardings by propagation.

    What the user configured has priority. Operators without a rule are replicated.
    """
    user = problem.user
    layouts = UserLayouts(
        {**seeds, **user.shardings},
        dict(user.weights),
        dict(user.results),
        user.replicated | set(problem.candidates.without_rule),
        dict(user.entry_names),
        dict(user.interleaved),
    )
    plan = propagate_layouts(problem.graph, problem.grid, layouts)
    plan.notes.clear()  # `choose_plan` names operators without a rule, with their share
    if not problem.gather:
        plan.keep_results_sharded()
    return plan


def _find_seeds(problem: SearchProblem, name: str) -> dict[int, OperatorSharding]:
    """Return the splits of a template's products."""
    graph = problem.graph
    seeds: dict[int, OperatorSharding] = {}
    if name == "whole":
        return seeds
    is_columns = [False] * len(graph.tensors)  # whether a product by columns is before it
    by_rows: set[int] = set()  # tensors that a product by rows makes
    for position, operator in enumerate(graph.operators):
        behind = any(is_columns[index] for index in operator.inputs)
        params = [
            slot
            for slot, index in enumerate(operator.inputs)
            if graph.tensors[index].kind == "param"
        ]
        split: OpSplit | None = None
        if params and _is_product(problem, position):
            weight = operator.inputs[params[0]]
            splits = list_splits(view_operator(graph, operator)) or []
            if name == "rows":
                split = _find_split(splits, lambda one: one.out_states[0] == 0)
            elif behind:
                split = _find_split(splits, OpSplit.makes_partial)
                behind = False
                by_rows.update(operator.outputs)
            else:
                last = len(graph.shape_of(operator.outputs[0])) - 1
                slot = operator.inputs.index(weight)
                split = _find_split(
                    splits,
                    lambda one, slot=slot, last=last: (
                        one.out_states[0] == last and one.in_states[slot] is not None
                    ),
                )
                behind = split is not None
        elif name == "sequence" and operator.kind == "add" and by_rows & set(operator.inputs):
            shape = graph.shape_of(operator.outputs[0])
            if len(shape) > 2:
                wanted = len(shape) - 2
                splits = list_splits(view_operator(graph, operator)) or []
                split = _find_split(splits, lambda one, wanted=wanted: one.out_states[0] == wanted)
        if split is not None and position not in problem.user.shardings:
            seeds |= _make_seed(problem, position, split)
        for index in operator.outputs:
            is_columns[index] = behind
    return seeds


def _is_product(problem: SearchProblem, position: int) -> bool:
    operator = problem.graph.operators[position]
    view = view_operator(problem.graph, operator)
    return count_products(operator, view.in_shapes, view.out_shapes) is not None


def _find_split(splits: list[OpSplit], fits: object) -> OpSplit | None:
    assert callable(fits)
    return next((split for split in splits if fits(split)), None)


def _make_seed(
    problem: SearchProblem, position: int, split: OpSplit
) -> dict[int, OperatorSharding]:
    """Return the sharding over all tensor axes together, if a candidate has it."""
    splits = dict.fromkeys(problem.candidates.axes, split)
    if any(candidate.sharding.splits == splits for candidate in problem.candidates.of(position)):
        return {position: OperatorSharding(splits, problem.grid.names, problem.grid.names)}
    return {}
