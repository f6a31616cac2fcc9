"""
The exact search: the cheapest plan of all, by variable elimination.

Equal layers are folded. A block between two borders is a table over what crosses them, and a chain
of blocks is a sequence of min-plus products. The result is priced again by `price_plan`: a
difference is a fault of pdrun.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pdrun.errors import PdrunError, UsageError
from pdrun.parallel.auto.prices import price_plan
from pdrun.parallel.auto.search.eliminate import Variable
from pdrun.parallel.auto.search.problem import SearchProblem, operator_variable
from pdrun.parallel.auto.search.repeat import Repetition, find_repetition
from pdrun.parallel.auto.search.tables import NetworkBuilder
from pdrun.parallel.operators.plan import OperatorPlan

TOLERANCE = 1e-6
"""Relative difference of two prices of one plan that rounding explains."""


@dataclass(frozen=True)
class PlanSearchResult:
    """
    A plan and how it was found.

    Attributes:
        seconds: its price for one pass.
        is_exact: whether no plan is cheaper.
        repetition: the layers that were folded.
    """

    plan: OperatorPlan
    seconds: float
    is_exact: bool = True
    repetition: Repetition | None = None


def search_exact(problem: SearchProblem, fold: bool = True) -> PlanSearchResult:
    """
    Return the cheapest plan.

    Args:
        fold: search equal layers once; the price is the same.

    Raises:
        UsageError: the user's layouts allow no plan.
    """
    with _one_thread():
        return _search(problem, fold)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: tables are small, and threads that wait for each other take far longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _search(problem: SearchProblem, fold: bool) -> PlanSearchResult:
    count = len(problem.graph.operators)
    builder = NetworkBuilder(problem)
    repetition = find_repetition(problem) if fold else None
    crossing = repetition.crossing_operators(problem) if repetition is not None else None
    if repetition is None or crossing is None:
        network, _ = builder.build_network(0, count)
        seconds = float(network.eliminate())
        _require_finite(seconds)
        values = network.recover({})
        return _make_result(problem, seconds, values, network.is_exact, None)
    return _search_folded(problem, repetition, crossing)


def _search_folded(
    problem: SearchProblem, repetition: Repetition, crossing: list[int]
) -> PlanSearchResult:
    """Search head, block and tail, and join them."""
    builder = NetworkBuilder(problem)
    times, period = repetition.times, repetition.period
    border = [operator_variable(position) for position in crossing]
    head, _ = builder.build_network(0, repetition.head_end)
    tail, outside = builder.build_network(repetition.end, len(problem.graph.operators))
    shared = [variable for variable in outside if variable[0] == "moves"]
    last = [_shift(variable, (times - 1) * period) for variable in border]
    head_costs = head.eliminate([*border, *shared])
    widths = [head.sizes[variable] for variable in border]
    for variable, width in zip(last, widths, strict=True):
        tail.add_variable(variable, width)
    tail_costs = tail.eliminate([*last, *shared])
    block, _ = builder.build_network(repetition.head_end, repetition.head_end + period)
    behind = [_shift(variable, period) for variable in border]
    for variable, width in zip(border, widths, strict=True):
        block.add_variable(variable, width)
    size = math.prod(widths)
    block_costs = block.eliminate([*border, *behind]).reshape(size, size)
    costs = head_costs.reshape(size, -1)
    steps: list[Tensor] = []
    for _ in range(times - 1):
        costs, before = (costs.unsqueeze(1) + block_costs.unsqueeze(-1)).min(0)
        steps.append(before)
    total = (costs + tail_costs.reshape(size, -1)).flatten()
    best = int(total.argmin())
    seconds = float(total[best])
    _require_finite(seconds)
    state, joint = divmod(best, costs.shape[1])
    states = [state]
    for before in reversed(steps):
        states.append(int(before[states[-1], joint]))
    states.reverse()
    together = _unravel(joint, [head.sizes[variable] for variable in shared], shared)
    values = head.recover({**_unravel(states[0], widths, border), **together})
    values.update(tail.recover({**_unravel(states[-1], widths, last), **together}))
    for number in range(times - 1):
        found = block.recover(
            {
                **_unravel(states[number], widths, border),
                **_unravel(states[number + 1], widths, behind),
            }
        )
        for variable, value in found.items():
            if variable[0] == "operator" and variable[1] >= repetition.head_end:
                values[_shift(variable, number * period)] = value
    is_exact = head.is_exact and block.is_exact and tail.is_exact
    return _make_result(problem, seconds, values, is_exact, repetition)


def _shift(variable: Variable, distance: int) -> Variable:
    return (variable[0], variable[1] + distance, variable[2])


def _unravel(value: int, sizes: list[int], variables: list[Variable]) -> dict[Variable, int]:
    """Return the values of some variables from their joint index."""
    found = {}
    for variable, size in zip(reversed(variables), reversed(sizes), strict=True):
        value, found[variable] = divmod(value, size)
    return found


def _require_finite(seconds: float) -> None:
    if not math.isfinite(seconds):
        raise UsageError(
            "the given layouts allow no plan",
            where="pdrun.Auto",
            hint="an operator takes a partial sum that nothing makes; remove that entry",
        )


def _make_result(
    problem: SearchProblem,
    seconds: float,
    values: dict[Variable, int],
    is_exact: bool,
    repetition: Repetition | None,
) -> PlanSearchResult:
    """Return the plan of a solution, after its price was computed a second time."""
    choices = [
        values[operator_variable(position)] for position in range(len(problem.graph.operators))
    ]
    stored = {index: problem.stored_layout(index, values) for index in problem.chained_weights}
    plan = problem.make_plan(choices, stored)
    again = price_plan(problem.prices, plan).total
    if abs(again - seconds) > TOLERANCE * max(again, seconds) + 1e-12:
        raise PdrunError(
            f"the search found a plan for {seconds:.6e} s, which costs {again:.6e} s",
            where="pdrun.Auto",
            hint="please report the model and the topology",
        )
    return PlanSearchResult(plan, seconds, is_exact, repetition)
