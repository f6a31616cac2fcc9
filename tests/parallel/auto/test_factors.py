"""Tensor degrees as two axes: where one axis cannot split what two can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdrun.parallel.auto.degrees.condense import HEAD
from pdrun.parallel.auto.degrees.factors import factors_by_nodes, ideal_cost, list_factors
from pdrun.parallel.auto.degrees.pass_costs import PartCost, PassCost
from pdrun.parallel.auto.degrees.planner import PlanReport, plan_of
from tests.parallel.auto import rank_runs
from tests.parallel.auto.random_graphs import make_topology

pytestmark = pytest.mark.torch
SLOW_DEVICES = make_topology(1e9, 1e12, 1e-9, 1e-9, 1e15)


@pytest.mark.parametrize(
    ("degree", "factors"),
    [(1, []), (2, []), (3, []), (4, [(2, 2)]), (6, [(3, 2), (2, 3)]), (8, [(4, 2), (2, 4)])],
)
def test_factors_of_a_degree(degree: int, factors: list[tuple[int, int]]) -> None:
    assert list_factors(degree) == factors


@pytest.mark.parametrize(
    ("degree", "node", "factors"), [(16, 8, (2, 8)), (8, 8, None), (12, 8, None), (4, 1, None)]
)
def test_factors_over_nodes(degree: int, node: int, factors: tuple[int, int] | None) -> None:
    assert factors_by_nodes(degree, node) == factors


def test_ideal_split_sends_nothing_and_divides_the_rest() -> None:
    one = PassCost({HEAD: PartCost(5.0, 3.0, (1.0, 1.0), 2.0, 7, 100, 9)}, 0, 0, 0, 0)
    full = PassCost({HEAD: PartCost(8.0, 16.0, elements=200)}, 0, 0, 0, 0)
    assert ideal_cost(one, full, 4).parts[HEAD] == PartCost(2.0, 3.0, (0.0, 0.0), 0.0, 7, 50, 9)


def plan_narrow_layers(rows: int, width: int, **options: Any) -> PlanReport:
    """Plan two layers for 4 devices."""
    model = rank_runs.narrow_layers(width)
    return plan_of(model, torch.zeros(rows, width), devices=4, **options)


def test_dims_that_four_devices_cannot_split_are_split_twice() -> None:
    """2 rows of 6 elements: no dim has 4 parts of similar size, but rows and columns have 2."""
    report = plan_narrow_layers(2, 6, topology=SLOW_DEVICES, fixed={"tp": 4})
    assert report.choice.factors == (2, 2)
    best, *others = report.result.fitting
    assert best.cost.total < 0.5 * min(one.cost.total for one in others if not one.choice.factors)
    plain = report.to_plain()
    assert plain["mesh"] == {"pp": 1, "dp": 1, "cp": 1, "tp_0": 2, "tp_1": 2}
    assert {"tp_0", "tp_1"} <= set(str(plain["operators"]).replace("'", " ").split())
    assert " 2x2 " in str(report)
    assert "each operator is split over 4 devices (tp, as 2x2)" in str(report)


def test_one_axis_stays_where_two_are_no_better() -> None:
    report = plan_narrow_layers(64, 64, topology=SLOW_DEVICES, fixed={"tp": 4})
    assert report.choice.factors == ()
    assert report.to_plain()["mesh"]["tp"] == 4


def test_one_row_for_two_nodes_is_split_over_nodes_and_inside() -> None:
    topology = make_topology(1e9, 1e12, 1e-9, 1e-9, 1e15, 2, (1e-9, 1e15))
    report = plan_narrow_layers(1, 64, topology=topology)
    assert report.choice.factors == (2, 2)
    report = plan_narrow_layers(4, 64, topology=topology)
    assert all(one.choice.tp < 4 for one in report.result.fitting)
    assert report.result.refused["tp=4"] == "it spans nodes of 2 devices"


def test_ranks_run_a_plan_of_two_axes(worlds: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    plan_narrow_layers(2, 6, topology=SLOW_DEVICES, fixed={"tp": 4}).save(path)
    for mesh, rows in ((path, 2), ("auto", 1)):
        for axes, loss, expected in worlds(4).run(rank_runs.run_narrow_layers, mesh, rows):
            assert axes == ["tp_0", "tp_1"]
            assert loss == pytest.approx(expected, rel=1e-6)
