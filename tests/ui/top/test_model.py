"""What the full screen shows of a job, without a terminal."""

from __future__ import annotations

import pytest

from pdrun.ui.job_status import JobStatus, NodeStatus, RankStatus
from pdrun.ui.report.numbers import StepNumber, StepRow
from pdrun.ui.top.model import TopModel, draw_spark


def job(nodes: int, workers: int = 8, **changes: object) -> JobStatus:
    """A job of many nodes; node 7 is lost, and rank 3 has failed."""
    states = {7: "lost"}
    found = {
        f"n{index}": NodeStatus(f"n{index}", states.get(index, "running"), index, workers)
        for index in range(nodes)
    }
    ranks = {
        rank: RankStatus(rank, f"n{rank // workers}", "running") for rank in range(nodes * workers)
    }
    ranks[3] = RankStatus(3, "n0", "failed", 1, "ValueError: \x1b[2J<script>")
    fields = {"job": "j", "run": "r", "state": "running", "nodes": found, "ranks": ranks}
    return JobStatus(**{**fields, **changes})  # type: ignore[arg-type]


def test_trouble_is_first_and_rows_are_filtered() -> None:
    model = TopModel()
    assert model.update(job(10))
    assert [node.name for node in model.nodes()[:3]] == ["n7", "n0", "n1"]
    assert [node.name for node in model.nodes("N3")] == ["n3"]
    assert model.ranks()[0].rank == 3
    assert [one.rank for one in model.ranks("failed")] == [3]
    assert model.format_node(model.nodes("n3")[0]) == ("n3", "running", "8", "24-31")
    assert model.format_rank(model.ranks()[0]) == (
        "3",
        "n0",
        "failed",
        "1",
        r"ValueError: \x1b[2J<script>",
    )
    assert model.messages()[0].startswith("failed: n0:3 exit code 1")
    head = model.head(100.0, 60)
    assert head[0].startswith("j (r)  running  nodes: 9 running, 1 lost")
    assert all(len(line) <= 60 for line in head)


def test_the_same_status_changes_nothing() -> None:
    model, status = TopModel(), job(2)
    assert model.update(status)
    assert not model.update(status)


def test_curves_have_the_past_and_what_comes() -> None:
    model = TopModel()
    past = StepNumber(3.0, 3.0, 3.0, 0, -1)
    model.seed([StepRow(100.0, 0, 1, {"loss": past}), StepRow(105.0, 0, 2, {"loss": past})])
    model.update(job(2, step=2, step_at=105.0, values={"loss": (3.0, 0, -1)}))
    model.update(job(2, step=3, step_at=110.0, values={"loss": (2.0, 0, -1)}))
    model.update(job(2, step=4, step_at=115.0, values={"loss": (None, -1, 1)}))
    assert list(model.curves["loss"]) == [(1, 3.0), (2, 3.0), (3, 2.0), (4, None)]
    (row,) = model.curve_rows(10)
    assert row == ("loss", "not finite on rank 1", "2", "3", "██▁!")


@pytest.mark.parametrize(
    ("values", "spark"),
    [
        ([], ""),
        ([None], "!"),
        ([1.0, 1.0], "▅▅"),
        ([0.0, 0.5, 1.0], "▁▅█"),
        ([-1.7e308, 1.7e308, float("inf")], "▁█!"),
        ([float(index) for index in range(99)], "▁▁▂▃▄▅▅▆▇█"),
    ],
)
def test_sparks(values: list[float | None], spark: str) -> None:
    found = draw_spark(values, 10)
    assert len(found) == min(10, len(values))
    assert found[:1] == spark[:1] and found[-1:] == spark[-1:]
