"""The search finds the cheapest plan: compared with the price of every plan of small graphs."""

from __future__ import annotations

import pytest

from pdrun.parallel.auto.prices import price_plan
from pdrun.parallel.auto.search.exact import search_exact
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
