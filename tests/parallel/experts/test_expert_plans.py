"""Plans with the axis ep: searched as by brute force, priced by closed forms, and run on ranks."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.auto.degrees.choices import StepChoice
from pdrun.parallel.auto.degrees.condense import RowScaler
from pdrun.parallel.auto.degrees.expert_layers import find_expert_layers
from pdrun.parallel.auto.degrees.outer import search_degrees
from pdrun.parallel.auto.degrees.planner import PlanReport, plan_of
from pdrun.parallel.auto.degrees.result import OuterResult, PlanRequest
from pdrun.parallel.auto.plan_file import parse_plan
from pdrun.parallel.operators.graph.export import export_graph
from pdrun.parallel.operators.graph.graph import OperatorGraph
from tests.lib.rank_pool import RankError
from tests.lib.tiers import by_tier, thorough
from tests.parallel.auto.random_graphs import make_topology
from tests.parallel.experts import expert_plan_runs as runs

pytestmark = pytest.mark.torch
FLOAT = 4


def plan_experts(
    devices: int = 2, fixed: dict[str, int] | None = None, **options: Any
) -> PlanReport:
    """Plan the small model."""
    sizes = {key: options.pop(key) for key in ("dim", "experts", "top_k") if key in options}
    options.setdefault("topology", runs.TOPOLOGY)
    with torch.device("meta"):
        model = runs.ExpertModel(**sizes)
    return plan_of(model, runs.expert_batch(), devices=devices, fixed=fixed, **options)


def export_experts(rows: int, experts: int) -> OperatorGraph:
    """Return the graph of the small model."""
    model = runs.ExpertModel(experts=experts)  # a new one: layers count the rows of each pass
    return export_graph(model, (runs.expert_batch(rows),))


def list_priced(result: OuterResult) -> dict[StepChoice, float]:
    """Return the seconds of all candidates."""
    return {one.choice: one.cost.total for one in (*result.fitting, *result.too_large)}


@pytest.mark.parametrize("seed", range(by_tier(1, 8)))
def test_expert_degree_is_the_minimum_over_all_degrees(seed: int) -> None:
    """Every legal mesh is priced alone; the best of them is what the free search chooses."""
    choose = random.Random(900 + seed)
    devices = choose.choice([4, 6])
    experts = choose.choice([4, 6, 8])
    topology = make_topology(
        10 ** choose.uniform(10, 14),
        10 ** choose.uniform(11, 12.5),
        1e-9,
        10 ** choose.uniform(-9, -5),
        10 ** choose.uniform(8, 11),
        choose.choice([2, 8]),
        (1e-6, 10 ** choose.uniform(7, 10)),
    )
    scaler = RowScaler(lambda rows: export_experts(rows, experts))
    layers = find_expert_layers(runs.ExpertModel(experts=experts))
    request = PlanRequest(devices, 12, topology, 2**40, recompute=False, expert_layers=layers)
    free = search_degrees(scaler, request)
    every: dict[StepChoice, float] = {}
    for pp, ep in itertools.product((1, 2), range(1, devices + 1)):
        if devices % (pp * ep):
            continue
        fixed = {"pp": pp, "ep": ep, "tp": 1, "dp": devices // pp // ep}
        one = search_degrees(scaler, replace(request, fixed=fixed))
        assert bool(one.fitting) == (experts % ep == 0), f"seed {seed}, {fixed}"
        every |= list_priced(one)
    found = {choice: cost for choice, cost in list_priced(free).items() if choice.pp <= 2}
    assert found == every
    assert free.chosen.cost.total == min(list_priced(free).values())
    assert {choice.ep for choice in found} > {1}


@pytest.mark.parametrize("recompute", [None, "full"])
def test_traffic_and_memory_of_experts_are_closed_forms(recompute: str | None) -> None:
    report = plan_experts(4, {"pp": 1, "tp": 1, "level": 0, "microbatches": 1})
    by_degree = {
        one.choice.ep: one.cost
        for one in report.result.fitting
        if one.choice.recompute == recompute
    }
    assert set(by_degree) == {1, 2, 4}
    tokens = runs.ROWS // 4 * runs.LENGTH
    rows = tokens * runs.TOP_K * runs.DIM * FLOAT
    elements = runs.LAYERS * runs.EXPERTS * 3 * runs.DIM * runs.HIDDEN
    links = runs.TOPOLOGY.levels[0]
    forwards = 1 if recompute is None else 2
    for ep, cost in by_degree.items():
        if ep == 1:
            assert "experts" not in cost.seconds
            continue
        # there and back, forward and backward; the numbers of rows before each forward
        one_way = links.latency + rows * (ep - 1) / ep / links.bandwidth
        seconds = runs.LAYERS * (2 * (1 + forwards) * one_way + forwards * links.latency)
        assert cost.seconds["experts"] == pytest.approx(seconds)
        saved = elements * (ep - 1) // ep
        assert cost.memory["state"] == by_degree[1].memory["state"] - 8 * saved
        assert cost.memory["weights"] == by_degree[1].memory["weights"] - FLOAT * saved
        assert cost.seconds["data axes"] < by_degree[1].seconds["data axes"]


def test_table_and_file_have_the_experts() -> None:
    report = plan_experts(fixed={"pp": 1, "tp": 1})
    assert (report.choice.dp, report.choice.ep) == (1, 2)
    text = str(report)
    assert "  pp  dp  ep  tp  level" in text
    assert "the experts of a layer are divided over 2 of them" in text
    assert "without experts on several devices: +" in text
    plain = report.to_plain()
    assert plain["mesh"] == {"pp": 1, "dp": 1, "ep": 2, "cp": 1, "tp": 1}
    assert plain["experts"] == {"layers.*.moe": "ep"}
    plan = parse_plan(plain)
    assert str(plan.make_mesh(6)) == "mesh(dp=3, ep=2)"
    assert plan.make_strategy() is not None
    with pytest.raises(ConfigError, match=r'layers\.\*\.moe must be "ep"'):
        parse_plan({**plain, "experts": {"layers.*.moe": "tp"}})
    with pytest.raises(ConfigError, match="cannot have both operators and experts"):
        parse_plan({**plain, "operators": {}})


def test_degrees_that_cannot_be_have_a_reason() -> None:
    with pytest.raises(UsageError, match=r"ep=3: the 4 experts of layers\.0\.moe do not divide"):
        _ = plan_experts(3, {"ep": 3}, rows=6).choice
    with pytest.raises(UsageError, match="dp=1, ep=2: 3 rows do not divide by 2"):
        _ = plan_experts(2, {"ep": 2}, rows=3).choice
    with pytest.raises(UsageError, match="ep and tp together: a plan splits operators or experts"):
        _ = plan_experts(4, {"ep": 2, "tp": 2}).choice


@pytest.mark.parametrize("ranks", [2, thorough(4)])
def test_searched_plan_is_right_and_sends_what_is_planned(
    worlds: Any, tmp_path: Path, ranks: int
) -> None:
    """Verified against one process, saved, loaded; bytes of rows and memory as predicted."""
    path = str(tmp_path / "plan.json")
    found = worlds(ranks).run(runs.search_mesh, path, bound=240.0)
    plan = found[0]["plan"]
    assert plan["mesh"]["ep"] == ranks
    assert plan["experts"] == {"layers.*.moe": "ep"}
    # each rank's rows travel there and back, in the forward and in the backward pass
    tokens = runs.ROWS // ranks * runs.LENGTH
    rows = 4 * runs.LAYERS * tokens * runs.TOP_K * runs.DIM * FLOAT
    assert sum(one["sent"] for one in found) == ranks * rows
    fixed = {"ep": ranks, "pp": 1, "tp": 1, "microbatches": 1}
    priced = plan_experts(ranks, fixed, recompute=False).result
    level = plan["level"]
    (cost,) = (
        one.cost
        for one in priced.fitting
        if one.choice.level == level and one.choice.gather == plan["gather"]
    )
    for name, counted in found[0]["memory"].items():
        assert cost.memory[name] == pytest.approx(counted, rel=0.05), name
    again = worlds(ranks).run(runs.run_plan, path)
    assert again[0]["mesh"] == plan["mesh"]
    assert again[0]["experts"] == plan["experts"]


@pytest.mark.parametrize(
    "fixed", [{"pp": 2, "ep": 2}, thorough({"dp": 2, "ep": 2, "level": 3})], ids=str
)
def test_plan_file_with_stages_or_data_axes_runs(
    worlds: Any, tmp_path: Path, fixed: dict[str, int]
) -> None:
    path = tmp_path / "plan.json"
    plan_experts(4, {"tp": 1, **fixed}, recompute=False).save(path)
    found = worlds(4).run(runs.run_plan, str(path))
    assert {axis: found[0]["mesh"][axis] for axis in ("pp", "ep")} == {
        "pp": fixed.get("pp", 1),
        "ep": 2,
    }


def test_auto_on_a_mesh_with_ep_cuts_all_experts(worlds: Any) -> None:
    found = worlds(2).run(runs.run_given_mesh, {"ep": 2})
    assert found[0]["experts"] == {"layers.*.moe": "ep"}
    with pytest.raises(RankError, match="splits operators over tp or experts over ep"):
        worlds(4).run(runs.run_given_mesh, {"ep": 2, "tp": 2})
