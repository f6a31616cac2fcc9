"""The line below the output: what it says, and that it fits any terminal."""

from __future__ import annotations

import pytest

from pdrun.ui.job_status import JobStatus, NodeStatus, RankStatus
from pdrun.ui.live_line import LiveLine, text_width

NODES = {name: NodeStatus(name, "running", index, 2) for index, name in enumerate(("n0", "n1"))}
RUNNING = JobStatus(
    job="j",
    run="r",
    state="running",
    expected=2,
    started_at=1000.0,
    nodes=NODES,
    ranks={rank: RankStatus(rank, f"n{rank // 2}", "running") for rank in range(4)},
)


def at_step(step: int, when: float, **changes: object) -> JobStatus:
    fields = {"step": step, "step_at": when, "total": 1000, "values": {"loss": (2.5, 0, -1)}}
    return RUNNING.__class__(**{**vars(RUNNING), **fields, **changes})


def test_a_job_that_runs() -> None:
    line = LiveLine()
    assert line.format(RUNNING, 1012.0, 80) == "running: 4 ranks on 2 nodes  0:00:12 elapsed"
    assert (
        line.format(at_step(100, 1020.0), 1020.0, 80)
        == "step 100 of 1,000  loss 2.5  0:00:20 elapsed"
    )
    found = line.format(at_step(120, 1025.0, restarts=1), 1027.0, 80)
    # 880 steps at 4 a second, and 2 s have passed since the report
    assert found == "step 120 of 1,000  loss 2.5  4 steps/s  1 restart  3:38 left  0:00:27 elapsed"


def test_rates_do_not_reach_over_a_restart() -> None:
    line = LiveLine()
    line.format(at_step(900, 1020.0), 1020.0, 80)
    assert "left" not in line.format(at_step(100, 1060.0, generation=1), 1060.0, 80)
    assert "1 steps/s" in line.format(at_step(105, 1065.0, generation=1), 1065.0, 80)


def test_a_slow_rank_is_shown_while_it_is_named() -> None:
    line = LiveLine()
    slow = ("rank 3 on n1 needs 0.31 s per step, the others 0.2 s", "other text")
    assert "rank 3 slow" in line.format(at_step(1, 1001.0, warnings=slow), 1001.0, 80)
    assert "rank 3 slow" in line.format(at_step(2, 1050.0, warnings=slow), 1050.0, 80)
    assert "slow" not in line.format(at_step(3, 1100.0, warnings=slow), 1100.0, 80)
    lag = (*slow, "rank 1 on n0 is 3 steps behind the others (step 4, most are at 7)")
    assert "rank 1 slow" in line.format(at_step(4, 1101.0, warnings=lag), 1101.0, 80)


def test_a_value_that_is_not_finite_is_named_with_its_rank() -> None:
    status = at_step(7, 1010.0, values={"loss": (None, -1, 3)})
    assert "loss not finite on rank 3" in LiveLine().format(status, 1010.0, 80)


def test_who_is_missing_while_a_job_meets() -> None:
    status = JobStatus(state="gathering", expected=4, started_at=1000.0, nodes={"n0": NODES["n0"]})
    line = LiveLine(["n0", "n1", "n2", "n3"])
    assert line.format(status, 1008.0, 120) == (
        "waiting: 1 of 4 nodes have joined  here: n0  missing: n1, n2, n3  0:00:08 elapsed"
    )
    many = LiveLine([f"host{index}" for index in range(5000)])
    assert text_width(many.format(status, 1008.0, 200)) <= 200


def test_states_between_and_the_end() -> None:
    line = LiveLine()
    restarting = JobStatus(state="restarting", reason="rank 1 failed\x1b[2J", started_at=1000.0)
    assert (
        line.format(restarting, 1001.0, 80) == r"restarting: rank 1 failed\x1b[2J  0:00:01 elapsed"
    )
    assert line.format(JobStatus(state="done"), 1001.0, 80) == ""


@pytest.mark.parametrize("width", [20, 40, 79, 80, 119, 299])
@pytest.mark.parametrize("name", ["loss", "<script>", "\x1b]0;x\x07", "\u202eevil", "名前", "é"])
def test_it_fits_and_hostile_names_are_harmless(width: int, name: str) -> None:
    line = LiveLine([name * 20])
    values = {name: (1e-300, 0, -1), name * 9: (2.0, 0, -1), "c": (3.0, 0, 2)}
    for status in (
        at_step(10**12, 1001.0, total=10**15, values=values, restarts=99),
        at_step(10**12 + 1, 1006.0, total=10**15, values=values, restarts=99),
        JobStatus(state="gathering", expected=9, nodes={name: NodeStatus(name, "joined")}),
        JobStatus(state="stopping", reason=name * 50),
    ):
        text = line.format(status, 1_000_000.0, width)
        assert text and text.isprintable() and text_width(text) <= width
        if status.step > 0:
            assert text.startswith("step 1,000,000,000,0")


def test_the_use_of_the_devices_is_behind_the_loss() -> None:
    values = dict.fromkeys(("a", "b", "loss", "mfu"), (0.4123, 0, -1))
    text = LiveLine().format(JobStatus(state="running", step=3, values=values), 1.0, 200)
    assert "loss 0.4123  MFU 41.2 %  a 0.4123" in text
    values["mfu"] = (41.23, 0, -1)
    text = LiveLine().format(JobStatus(state="running", step=3, values=values), 1.0, 200)
    assert "mfu 41.23" in text, "a number of the script, in its own unit"
