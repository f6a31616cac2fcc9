"""Searched, saved, loaded and edited plans on real ranks: the numbers of one process."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.auto.builtin_topologies import BUILTIN_TOPOLOGIES
from pdrun.parallel.auto.degrees.planner import plan_of
from pdrun.parallel.auto.inputs import ParallelChoices, _take_plan
from pdrun.parallel.auto.measure import MEASURED_STEPS, WARMUP_STEPS, check_measurable
from pdrun.parallel.auto.plan_file import parse_plan
from tests.lib.rank_pool import RankError
from tests.lib.tiers import thorough
from tests.parallel.auto import rank_runs

pytestmark = pytest.mark.torch
EXACT, RECURSIVE = "dynamic_programming", "recursive_programming"
PROPAGATION = "sharding_propagation"


@pytest.mark.parametrize(
    ("topology", "degrees", "search", "stages"),
    [
        ("node", {"tp": 2}, EXACT, 1),
        thorough("free", {"tp": 2}, EXACT, 1),
        thorough("slow", {"tp": 2}, EXACT, 1),
        thorough("node", {"tp": 2}, RECURSIVE, 1),
        thorough("free", {"tp": 2}, PROPAGATION, 1),
    ],
)
def test_searched_plans_compute_what_one_process_does(
    worlds: Any, topology: str, degrees: dict[str, int], search: str, stages: int
) -> None:
    found = worlds(2).run(rank_runs.verify_search, topology, degrees, search, stages)
    assert all(one == found[0] for one in found)
    plan = json.loads(found[0]["plan"])
    is_sharded = any(entry != "replicated" for entry in plan["operators"].values())
    assert is_sharded == (topology != "slow")
    assert bool(found[0]["moves"]) == (topology != "slow")


@pytest.mark.parametrize(
    ("topology", "degrees", "search", "stages"),
    [
        thorough("free", {"tp": 2}, EXACT, 2),
        thorough("node", {"x": 2, "y": 2}, EXACT, 1),
        thorough("free", {"x": 2, "y": 2}, RECURSIVE, 1),
        thorough("node", {"tp": 4}, EXACT, 1),
        thorough("free", {"dp": 2, "tp": 2}, EXACT, 1),
    ],
)
def test_searched_plans_on_four_ranks(
    worlds: Any, topology: str, degrees: dict[str, int], search: str, stages: int
) -> None:
    found = worlds(4).run(rank_runs.verify_search, topology, degrees, search, stages)
    plans = [json.loads(one["plan"])["operators"] for one in found]
    assert all(one == plans[0] for one in plans)


@pytest.mark.parametrize(
    ("topology", "degrees"),
    [
        ("node", {"tp": 2}),
        thorough("free", {"tp": 2}),
        thorough("node", {"x": 2, "y": 2}),
        thorough("node", {"tp": 4}),
    ],
)
def test_planned_bytes_over_each_axis_are_sent(
    worlds: Any, topology: str, degrees: dict[str, int]
) -> None:
    world = math.prod(degrees.values())
    for planned, counted in worlds(world).run(rank_runs.count_axis_bytes, topology, degrees):
        assert planned
        assert counted == planned


def test_saved_plan_is_the_plan_that_runs(worlds: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    worlds(2).run(rank_runs.save_plan, path, "node", {"tp": 2})
    saved = rank_runs.read_json(path)
    assert saved["operators"]["layers.*.q.linear"] == {"in": [[None, None, None], ["tp", None]]}
    loaded = worlds(2).run(rank_runs.load_plan, path)
    assert loaded[0]["operators"] == saved["operators"]
    assert loaded[0]["stored"] == saved["stored"]
    assert loaded[0] == saved


def test_measured_plan_replaces_the_arguments_of_the_call(worlds: Any, tmp_path: Path) -> None:
    path, result = tmp_path / "plan.json", tmp_path / "result.json"
    worlds(2).run(rank_runs.save_plan, str(path), "node", {"tp": 2}, accumulate=2)
    steps = WARMUP_STEPS + MEASURED_STEPS
    # 8 rows in two passes: accumulate is that of the plan
    found = worlds(2).run(rank_runs.measured_plan, str(path), str(result))
    assert found == [[4, 4] * steps] * 2
    assert rank_runs.read_json(result)["seconds"] > 0


def test_plans_are_measured_on_their_own_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    h100, cpu = BUILTIN_TOPOLOGIES["h100x8"], BUILTIN_TOPOLOGIES["cpu"]
    with pytest.raises(UsageError, match="--measure: plans for h100x8 cannot be measured here"):
        check_measurable(2, h100, cpu)
    check_measurable(64, cpu, cpu)
    check_measurable(2, replace(cpu, name="mine", is_guess=False), cpu)
    with pytest.raises(UsageError, match="has 0 devices, and the plans need 8"):
        check_measurable(8, h100, h100)


@pytest.mark.thorough
def test_edited_plan_follows_by_propagation(worlds: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    worlds(2).run(rank_runs.save_plan, str(path), "slow", {"tp": 2})
    plan = rank_runs.read_json(path)
    assert set(plan["operators"].values()) == {"replicated"}
    plan["operators"] = {"layers.*.up.linear": {"in": [None, ["tp", None]]}}
    path.write_text(json.dumps(plan))
    loaded = worlds(2).run(rank_runs.load_plan, str(path))
    assert loaded[0]["operators"]["layers.*.down.linear"] == {
        "in": [[None, None, "tp"], [None, "tp"]]
    }


@pytest.mark.thorough
def test_plan_of_another_world_and_with_stages(worlds: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    worlds(2).run(rank_runs.save_plan, path, "node", {"tp": 2}, optimizer_level=1, accumulate=2)
    loaded = worlds(4).run(rank_runs.load_plan, path)
    assert loaded[0]["mesh"] == {"pp": 1, "dp": 2, "cp": 1, "tp": 2}
    assert loaded[0]["options"] == {"optimizer_level": 1, "accumulate": 2}
    worlds(4).run(rank_runs.save_plan, path, "node", {"tp": 2}, stages=2)
    saved = rank_runs.read_json(path)
    assert saved["pipeline"]["schedule"] == "1f1b"
    loaded = worlds(4).run(rank_runs.load_plan, path)
    assert loaded[0]["pipeline"] == saved["pipeline"]
    assert loaded[0]["operators"] == saved["operators"]


def test_stages_with_other_numbers_of_layers_run(worlds: Any, tmp_path: Path) -> None:
    """Three layers on two stages; the head is on the second, which has one layer."""
    path = tmp_path / "plan.json"
    report = plan_of(
        rank_runs.small_decoder(3),
        rank_runs.batch_of_tokens(),
        devices=2,
        topology=rank_runs.TOPOLOGIES["free"],
        fixed={"pp": 2, "tp": 1, "microbatches": 2},
        gather=False,
    )
    assert report.choice.stage_layers == (2, 1)
    report.save(path)
    found = worlds(2).run(rank_runs.load_plan, str(path), layers=3)
    assert found[0]["predicted"]["seconds"] == report.result.chosen.cost.total
    assert found[0]["predicted"]["rows"] == 4
    stages = found[0]["pipeline"]["stages"]
    assert [stages[f"layers.{at}"] for at in range(3)] == [0, 0, 1]


def test_errors_of_plan_files(worlds: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    worlds(2).run(rank_runs.save_plan, str(path), "node", {"tp": 2})
    good = rank_runs.read_json(path)

    def message(**changes: Any) -> str:
        path.write_text(json.dumps({**good, **changes}))
        return str(worlds(2).failures(rank_runs.load_plan, str(path))[0][1])

    other = {**good["operators"], "layers.*.other.linear": "replicated"}
    del other["layers.*.up.linear"]
    assert "no operator layers.*.other.linear" in message(operators=other)
    assert "layers.0.up.linear is not in the plan" in message(operators=other)
    wrong = {**good["operators"], "layers.*.up.linear": {"in": [[None, None, None]]}}
    assert "layers.0.up.linear has 2 inputs, and 1 in the plan" in message(operators=wrong)
    assert "format must be 1, got 2" in message(format=2)
    assert "3 does not divide the 2 devices" in message(mesh={"tp": 3})
    assert "options has the unknown key 'level'" in message(options={"level": 1})


def test_auto_as_a_text(worlds: Any) -> None:
    plans = worlds(2).run(rank_runs.auto_strategy, {"tp": 2})
    assert plans[0] == plans[1]
    assert json.loads(plans[0])["operators"] is not None


@pytest.mark.thorough
def test_unknown_search_is_refused(worlds: Any) -> None:
    with pytest.raises(RankError, match="did you mean 'dynamic_programming'"):
        worlds(2).run(rank_runs.verify_search, "node", {"tp": 2}, "dynamic_programing", 1)


def test_auto_mesh_chooses_degrees_and_savers(worlds: Any) -> None:
    plans = worlds(2).run(rank_runs.auto_mesh)
    assert plans[0] == plans[1]
    plan = json.loads(plans[0])
    mesh = plan["mesh"]
    assert mesh["pp"] * mesh["dp"] * mesh["tp"] == 2
    assert (plan["predicted"]["devices"], plan["predicted"]["rows"]) == (2, 4)


def test_a_prediction_is_for_its_own_plan_and_devices() -> None:
    predicted = {"seconds": 0.5, "devices": 2, "rows": 8, "topology": "cpu, a guess", "bytes": 9}
    value = {"format": 1, "mesh": {"dp": 2}, "predicted": predicted}
    plan = parse_plan(value)
    found = plan.predict_step(2)
    assert found is not None
    assert found.describe(0.75) == (
        "step of 8 rows: predicted 500.00 ms on cpu, a guess, measured 750.00 ms, 1.50 times that"
    )
    assert plan.predict_step(4) is None
    assert _take_plan(ParallelChoices(mesh="p.json"), plan, 2).predicted == found
    assert _take_plan(ParallelChoices(recompute="full"), plan, 2).predicted is None
    assert parse_plan({**value, "predicted": {"seconds": 0.5}}).predicted is None
    with pytest.raises(ConfigError, match="predicted: seconds must be above 0, got 0"):
        parse_plan({**value, "predicted": {**predicted, "seconds": 0}})


@pytest.mark.parametrize("degrees", [{"pp": 2, "tp": 2}, thorough({"pp": 2, "dp": 2, "tp": 2})])
def test_recursive_search_with_stages_level_and_recomputation(
    worlds: Any, degrees: dict[str, int]
) -> None:
    world = 1
    for size in degrees.values():
        world *= size
    plans = worlds(world).run(rank_runs.verify_hybrid, degrees)
    assert all(plan["operators"] == plans[0]["operators"] for plan in plans)
    assert plans[0]["options"]["recompute"] == "full"
    assert plans[0]["pipeline"]["microbatches"] == 2
    entries = plans[0]["operators"].values()
    assert any(entry != "replicated" for entry in entries)


def test_ranks_with_other_plans_are_refused(worlds: Any) -> None:
    kinds, texts = zip(*worlds(2).failures(rank_runs.search_on_other_devices), strict=True)
    assert "UsageError" in kinds
    assert any("topology= makes it the same" in text for text in texts)
