"""What a run says about itself: each value with its source, and the order of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pdrun
from pdrun import elastic
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.pipeline.schedules.builders import make_schedule
from pdrun.parallel.pipeline.schedules.timeline import ActionCosts, bubble_share
from pdrun.parallel.report.plan_facts import Fact, encode_cells
from pdrun.ui.report.pipeline import idle_share, parse_cells, render_pipeline


def square_loss(output: Any, batch: Any) -> torch.Tensor:
    return (output - batch[1]).square().mean()


def facts_of(monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, tuple[str, str]]:
    said: list[Fact] = []
    monkeypatch.setattr(elastic, "takes_plan", lambda: True)
    monkeypatch.setattr(elastic, "report_plan", lambda facts, cells=(): said.extend(facts))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    batch = torch.ones(4, 4), torch.ones(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = parallelize(model, optimizer, square_loss, sample=batch, **options)
    run.step(batch)
    path = options.get("save")
    assert path is None
    facts_of.run = run  # type: ignore[attr-defined]
    return {name: (value, source) for name, value, source in said}


def test_values_and_their_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = facts_of(monkeypatch)
    assert found["mesh"] == ("mesh(dp=1)", "default")
    assert found["optimizer_level"][1] == "default"
    assert "accumulate" not in found, "at its default"
    assert found["trained"][0].startswith("30 elements in 4 weights")
    found = facts_of(monkeypatch, optimizer_level=2, accumulate=2, clip=1.0, seed=0)
    assert found["optimizer_level"][0].startswith("2: ")
    assert found["optimizer_level"][1] == "argument optimizer_level="
    assert found["accumulate"] == ("2", "argument accumulate=")
    assert found["clip"] == ("1.0", "argument clip=")
    plan = tmp_path / "plan.json"
    facts_of.run.plan.save(plan)  # type: ignore[attr-defined]
    found = facts_of(monkeypatch, mesh=str(plan), strategy=str(plan))
    assert found["mesh"][1] == f"file {plan}"
    assert found["optimizer_level"][1] == f"file {plan}"
    assert found["accumulate"] == ("2", f"file {plan}")
    found = facts_of(monkeypatch, mesh="auto", strategy="auto")
    assert found["mesh"][1] == "searched" and "prediction" in found


def test_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    found = facts_of(monkeypatch, mesh=pdrun.mesh(tp=1), strategy="auto")
    assert found["strategy"][1] == "searched"
    assert found["mesh"][1] == "argument mesh="
    styles = pdrun.Strategy({"0": pdrun.col("tp")})
    found = facts_of(monkeypatch, mesh=pdrun.mesh(tp=1), strategy=styles)
    assert found["strategy"][1] == "argument strategy=" and "0: col" in found["strategy"][0]
    assert " at 0x" not in str(found), "equal runs have equal reports"


def test_nothing_is_said_outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(elastic, "report_plan", lambda *facts: said.append(facts))
    model = nn.Linear(4, 2)
    run = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), square_loss)
    run.step((torch.ones(4, 4), torch.ones(4, 2)))
    assert not said


def test_the_use_is_reported_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDRUN_PEAK_FLOPS", "1e12")
    found = facts_of(monkeypatch)
    assert found["peak of a device"] == ("1 TFLOP/s", "variable PDRUN_PEAK_FLOPS")
    # no gradient for the model's input
    assert found["FLOPs per step"][0] == f"{2 * 4 * (2 * 16 + 3 * 8):.4g}"
    run = facts_of.run  # type: ignore[attr-defined]
    metrics = run.step((torch.ones(4, 4), torch.ones(4, 2)))
    assert 0 < run._read_numbers(metrics)["mfu"] < 1


def test_a_model_that_cannot_be_counted_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    class Valued(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 if x.sum().item() > 0 else 2)

    said: list[Fact] = []
    monkeypatch.setenv("PDRUN_PEAK_FLOPS", "1e12")
    monkeypatch.setattr(elastic, "takes_plan", lambda: True)
    monkeypatch.setattr(elastic, "report_plan", lambda facts, cells=(): said.extend(facts))
    model = Valued(4, 2)
    run = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), square_loss)
    for _ in range(2):
        metrics = run.step((torch.ones(4, 4), torch.ones(4, 2)))
    assert "mfu" not in run._read_numbers(metrics)
    assert any(name == "FLOPs per step" and "not counted" in value for name, value, _ in said)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_cells_have_the_bubble_of_the_schedule(name: str) -> None:
    schedule, shares = make_schedule(name, 4, 8), (0.2, 0.3, 0.3, 0.2)
    cells = list(encode_cells(schedule, shares))
    rows = parse_cells({name: value for name, value, _ in cells})
    assert [len(row) for row in rows] == [len(row) for row in schedule.rows]
    expected = bubble_share(schedule, ActionCosts(shares=shares))
    assert idle_share(rows) == pytest.approx(expected, abs=0.01)
    assert render_pipeline(rows).count('class="cell') == sum(map(len, rows))
