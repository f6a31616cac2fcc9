"""
The choice of a plan for one graph on given tensor axes: one of three searches, and the templates.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from pdrun.errors import UsageError, did_you_mean
from pdrun.parallel.auto.prices import price_plan
from pdrun.parallel.auto.search.exact import PlanSearchResult, search_exact
from pdrun.parallel.auto.search.missing_rules import (
    MissingRule,
    check_missing_rules,
    describe_missing_rules,
    find_missing_rules,
)
from pdrun.parallel.auto.search.problem import SearchProblem
from pdrun.parallel.auto.search.recursive import search_recursive
from pdrun.parallel.auto.search.templates import list_templates, propagate_seeds
from pdrun.parallel.operators.plan import OperatorPlan, OperatorSharding

AUTO_API = "pdrun.Auto"
EXACT = "dynamic_programming"
RECURSIVE = "recursive_programming"
PROPAGATION = "sharding_propagation"
SEARCHES = (EXACT, RECURSIVE, PROPAGATION)
MAX_JOINT_AXES = 2
"""Tensor axes that are searched together; with more, pairs of axes are searched in rounds."""
SIGNIFICANT_SAVING = 1e-9
"""Relative saving by which a template replaces the plan that was searched."""


def check_search(name: object) -> str:
    """
    Return the name of a search.

    Raises:
        UsageError: there is no such search.
    """
    if name not in SEARCHES:
        hint = did_you_mean(str(name), SEARCHES) or f"one of {', '.join(SEARCHES)}"
        raise UsageError(f"search={name!r} is unknown", where=AUTO_API, hint=hint)
    return str(name)


def choose_plan(
    problem: SearchProblem,
    search: str = EXACT,
    fold: bool = True,
    times: Sequence[int] | None = None,
) -> PlanSearchResult:
    """
    Return the plan that a search finds, or a template that is cheaper.

    Args:
        times: see `find_missing_rules`.

    Raises:
        UsageError: an operator without a rule has too many of the FLOPs, or the user's layouts
            allow no plan.
    """
    missing = find_missing_rules(problem, times)
    check_missing_rules(missing, AUTO_API)
    if search == EXACT and len(problem.candidates.axes) > MAX_JOINT_AXES:
        found = _search_rounds(problem, fold)
    elif search == EXACT:
        found = search_exact(problem, fold)
    elif search == RECURSIVE:
        found = search_recursive(problem)
    else:
        plan = propagate_seeds(problem, {})
        found = PlanSearchResult(plan, price_plan(problem.prices, plan).total, is_exact=False)
        if problem.user.shardings or problem.user.weights:
            return _with_notes(missing, found)
    if not found.is_exact:
        found = _take_template(problem, found)
    return _with_notes(missing, found)


def _take_template(problem: SearchProblem, found: PlanSearchResult) -> PlanSearchResult:
    """Return the cheapest of a result and the templates."""
    for _, plan in list_templates(problem):
        seconds = price_plan(problem.prices, plan).total
        if seconds < found.seconds * (1 - SIGNIFICANT_SAVING):
            found = PlanSearchResult(plan, seconds, is_exact=False)
    return found


def _search_rounds(problem: SearchProblem, fold: bool) -> PlanSearchResult:
    """
    Search three and more axes: each pair exactly while the others keep their splits, until no pair
    improves. The start is the recursive search or a template, the cheaper of both.
    """
    best = _take_template(problem, search_recursive(problem))
    pairs = list(itertools.combinations(problem.candidates.axes, 2))
    unchanged = 0
    while unchanged < len(pairs):
        pair = pairs[0]
        pairs = [*pairs[1:], pair]
        found = search_exact(_hold_axes(problem, best.plan, pair), fold)
        unchanged += 1
        if found.seconds < best.seconds * (1 - SIGNIFICANT_SAVING):
            best = PlanSearchResult(found.plan, found.seconds, is_exact=False)
            unchanged = 1
    shardings = [
        replace(sharding, fixed_axes=_given_axes(problem, position))
        for position, sharding in enumerate(best.plan.shardings)
    ]
    return replace(best, plan=replace(best.plan, shardings=shardings))


def _given_axes(problem: SearchProblem, position: int) -> tuple[str, ...]:
    given = problem.user.shardings.get(position)
    return given.fixed_axes if given is not None else ()


def _hold_axes(problem: SearchProblem, plan: OperatorPlan, pair: tuple[str, ...]) -> SearchProblem:
    """Return the problem of a pair of axes: along all others the splits are those of a plan."""
    shardings = {}
    for position, sharding in enumerate(plan.shardings):
        given = _given_axes(problem, position)
        held = tuple(axis for axis in problem.grid.names if axis not in pair or axis in given)
        splits = {axis: split for axis, split in sharding.splits.items() if axis in held}
        shardings[position] = OperatorSharding(splits, sharding.axis_order, held)
    user = replace(problem.user, shardings=shardings)
    return SearchProblem(problem.graph, problem.grid, problem.prices, user, problem.gather)


def _with_notes(missing: Sequence[MissingRule], found: PlanSearchResult) -> PlanSearchResult:
    """Return a result whose plan names the operators that no rule splits."""
    note = describe_missing_rules(missing)
    if not note:
        return found
    return replace(found, plan=replace(found.plan, notes=[*found.plan.notes, note]))
