"""The search finds the cheapest plan: compared with the price of every plan of small graphs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pdrun.parallel.auto.choose import SEARCHES, choose_plan
from pdrun.parallel.auto.prices import price_plan
from pdrun.parallel.auto.search.eliminate import CostNetwork
from pdrun.parallel.auto.search.exact import search_exact
from pdrun.parallel.auto.search.templates import list_templates
from pdrun.parallel.layouts.grid import Grid
from tests.lib.tiers import by_tier
from tests.parallel.auto.random_graphs import cheapest_price, random_problem

pytestmark = pytest.mark.torch
FIRST_SEED = 5000


def test_search_is_the_minimum_over_all_plans() -> None:
    wanted, plans, found, seed = by_tier(5, 320), 0, 0, FIRST_SEED
    while found < wanted:
        seed += 1
        problem = random_problem(seed)
        if problem is None:
            continue
        result = search_exact(problem)
        best, count = cheapest_price(problem)
        plans += count
        found += 1
        assert result.is_exact
        assert result.seconds == pytest.approx(best, rel=1e-9), f"seed {seed}"
        again = price_plan(problem.prices, result.plan).total
        assert again == pytest.approx(best, rel=1e-9), f"seed {seed}"
    assert plans > 50 * wanted


def test_three_axes_are_priced_right_and_never_above_a_template() -> None:
    """Three axes are searched in pairs: the price is that of the plan, and at least the minimum."""
    grid = Grid(("x", "y", "z"), (2, 2, 2))
    split = 0
    for seed in range(FIRST_SEED, FIRST_SEED + by_tier(2, 60)):
        problem = random_problem(seed, grid, math.inf)
        assert problem is not None
        templates = [price_plan(problem.prices, plan).total for _, plan in list_templates(problem)]
        for search in SEARCHES:
            found = choose_plan(problem, search)
            again = price_plan(problem.prices, found.plan).total
            assert found.seconds == pytest.approx(again, rel=1e-9), f"seed {seed}"
            assert found.seconds <= min(templates) * (1 + 1e-9), f"seed {seed}"
            assert not found.is_exact
            split += any(len(sharding.splits) > 1 for sharding in found.plan.shardings)
    assert split


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [5012, 5018])
def test_three_axes_reach_the_minimum_of_small_graphs(seed: int) -> None:
    problem = random_problem(seed, Grid(("x", "y", "z"), (2, 2, 2)))
    assert problem is not None
    best, _ = cheapest_price(problem)
    assert choose_plan(problem).seconds == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_narrowed_tables_give_the_values_of_their_cost(seed: int) -> None:
    """A variable is narrowed after others that depend on it were removed."""
    make = torch.Generator().manual_seed(seed)
    variables = [("operator", place, 0) for place in range(7)]
    network = CostNetwork(max_entries=300)
    tables = []
    for one, other in [*itertools.combinations(range(4), 2), (0, 4), (4, 5), (3, 6)]:
        costs = torch.rand(9, 9, generator=make, dtype=torch.float64)
        tables.append((variables[one], variables[other], costs))
    for variable in variables:
        network.add_variable(variable, 9)
    for first, second, costs in tables:
        network.add_table([first, second], costs)
    lowest = float(network.eliminate())
    values = network.recover({})
    assert not network.is_exact
    again = sum(float(costs[values[first], values[second]]) for first, second, costs in tables)
    assert again == pytest.approx(lowest)
