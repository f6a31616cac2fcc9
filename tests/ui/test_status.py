"""How a job's status looks: plain lines, tables, and what comes from elsewhere never obeyed."""

from __future__ import annotations

import io
import os
import pty
import threading
from dataclasses import replace

import pytest

from pdrun.eventlog import LogEvent
from pdrun.ui import live, status
from pdrun.ui.job_status import JobStatus, NodeStatus, RankStatus
from pdrun.ui.replay import replay_events


def job(*more: LogEvent, **changes: object) -> JobStatus:
    events = [
        LogEvent("created", 1000.0, {"job": "demo", "run": "demo-1", "nodes": 2}),
        LogEvent("joined", 1001.0, {"node": "node0", "workers": 2}),
        LogEvent("joined", 1001.0, {"node": "node1", "workers": 1}),
        LogEvent(
            "assigned", 1001.0, {"generation": 0, "nodes": [["node0", 0, 2], ["node1", 2, 1]]}
        ),
        LogEvent("started", 1002.0, {"generation": 0}),
        *more,
    ]
    return replace(replay_events(events), **changes)  # type: ignore[arg-type]


def plain(*found: JobStatus, now: float = 1065.0) -> str:
    out = io.StringIO()
    status.show_status(found, out=out, now=now)
    return out.getvalue()


def on_terminal(call) -> str:
    """Return what ``call`` writes to a pseudo terminal."""
    ours, theirs = pty.openpty()
    got: list[bytes] = []

    def reader() -> None:
        try:
            while data := os.read(ours, 4096):
                got.append(data)
        except OSError:
            pass

    thread = threading.Thread(target=reader)
    thread.start()
    with os.fdopen(theirs, "w") as out:
        call(out)
    thread.join(10)
    os.close(ours)
    return b"".join(got).decode()


def test_one_job_in_plain_lines() -> None:
    assert plain(job()) == (
        "job       demo\n"
        "run       demo-1\n"
        "state     running\n"
        "time      0:01:05\n"
        "nodes     2 of 2: 2 running\n"
        "ranks     3: 3 running\n"
        "node      node0  running  ranks 0-1\n"
        "node      node1  running  rank 2\n"
    )


def test_a_job_that_failed_names_the_ranks_that_did() -> None:
    ended = [
        LogEvent(
            "exited",
            1010.0,
            {"rank": 2, "node": "node1", "code": 1, "how": "exception", "cause": "ValueError: b"},
        ),
        LogEvent(
            "exited",
            1010.0,
            {"rank": 0, "node": "node0", "code": 143, "how": "stopped", "cause": "ended by pdrun"},
        ),
        LogEvent("warning", 1010.0, {"text": "clock differs"}),
        LogEvent("verdict", 1012.0, {"code": 1, "reason": "rank 2 failed"}),
    ]
    text = plain(job(*ended))
    assert "state     failed, exit code 1\n" in text
    assert "reason    rank 2 failed\n" in text
    assert "time      0:00:12\n" in text
    assert "ranks     3: 1 stopped, 1 running, 1 failed\n" in text
    assert "failed    node1:2 exit code 1: ValueError: b\n" in text
    assert "failed    node0:0" not in text
    assert "warning   clock differs\n" in text


def test_a_failed_job_says_what_to_do() -> None:
    reason = "rank 2 on b failed: RuntimeError: Connection closed by peer"
    reason += "; rank 1 on a had ended before, without an error"
    event = LogEvent("verdict", 1012.0, {"code": 1, "reason": reason, "how": "communication"})
    created = LogEvent("created", 1000.0, {"job": "j", "run": "j-1", "nodes": 2})
    text = plain(replay_events([created, event]))
    (line,) = [line for line in text.splitlines() if line.startswith("hint")]
    assert "rank 1 on a had ended before" in line and "same number of steps" in line


def test_several_jobs_are_a_list_and_none_is_said() -> None:
    text = plain(job(), job(run="demo-2", state="done", code=0))
    assert text.splitlines() == [
        "JOB   STATE    CODE  NODES   TIME     RUN",
        "demo  running        2 of 2  0:01:05  demo-1",
        "demo  done     0     2 of 2  0:01:05  demo-2",
    ]
    assert plain() == "no jobs found\n"


def test_words_for_how_a_job_ended_and_for_nodes_that_have_left() -> None:
    assert status.job_state(job(state="done", code=0)) == "done"
    assert (
        status.job_state(job(state="done", code=143, reason="rank 0 on a failed: SIGTERM"))
        == "failed"
    )
    assert (
        status.job_state(job(state="done", code=143, reason="stopped by SIGTERM on a")) == "stopped"
    )
    assert (
        status.job_state(job(state="done", code=124, reason="the time limit of 5 s has passed"))
        == "stopped"
    )
    left = job(LogEvent("left", 1010.0, {"node": "node0"}))
    assert "nodes     2 of 2: 1 ended, 1 running\n" in plain(left)
    assert "node      node0  ended    ranks 0-1\n" in plain(left)


def test_who_came_and_went_is_told_apart_from_who_is_there() -> None:
    events = [
        LogEvent("lost", 1010.0, {"node": "node1", "reason": "silent"}),
        LogEvent("assigned", 1011.0, {"generation": 1, "nodes": [["node0", 0, 2]]}),
        LogEvent("started", 1012.0, {"generation": 1}),
        LogEvent("joined", 1013.0, {"node": "node2", "workers": 1}),
        LogEvent("standby", 1013.0, {"node": "node2"}),
    ]
    assert "nodes     2 of 2: 1 running, 1 lost\n" in plain(job(*events[:1])), (
        "until there is another generation"
    )
    assert "nodes     2 of 2: 1 running, 1 standby; gone: 1 lost\n" in plain(job(*events))
    events += [
        LogEvent("left", 1020.0, {"node": "node2"}),
        LogEvent("left", 1021.0, {"node": "node0"}),
        LogEvent("verdict", 1021.0, {"code": 0, "reason": "done"}),
    ]
    assert "nodes     1 of 2: 1 ended; gone: 1 lost, 1 ended\n" in plain(job(*events))


def test_a_dead_job_grows_no_older() -> None:
    assert status.format_age(job(state="dead", ended_at=1003.0), 9999.0) == "0:00:03"
    assert status.format_age(job(state="dead"), 9999.0) == "-"


def test_a_thousand_nodes_fit_a_screen() -> None:
    nodes = {
        f"n{i}": NodeStatus(f"n{i}", "lost" if i == 500 else "running", i, 8) for i in range(1000)
    }
    ranks = {r: RankStatus(r, f"n{r // 8}", "failed", 1, "x") for r in range(8000)}
    lines = plain(job(nodes=nodes, ranks=ranks)).splitlines()
    assert len(lines) < 40
    assert [line for line in lines if line.startswith("node ")] == [
        "node      n500  lost  ranks 4000-4007"
    ]
    assert lines[-1] == "failed    and 7984 more"


def test_a_terminal_gets_a_table_with_colours() -> None:
    text = on_terminal(lambda out: status.show_status([job()], out=out, now=1065.0))
    assert "\x1b[" in text
    assert all(word in text for word in ("demo-1", "running", "node1", "ranks 0-1"))
    text = on_terminal(
        lambda out: status.show_status([job(), job(run="demo-2")], out=out, now=1065.0)
    )
    assert "demo-2" in text


def test_names_from_elsewhere_are_shown_not_obeyed() -> None:
    evil = "\x1b[2J[red]x\n"
    found = job(
        job=evil, reason=evil, warnings=(evil,), nodes={evil: NodeStatus(evil, "lost", 0, 1)}
    )
    for text in (
        plain(found),
        on_terminal(lambda out: status.show_status([found], out=out, now=0.0)),
    ):
        assert "\x1b[2J" not in text
        assert text.count("\\x1b[2J[red]x\\n") == 4


def test_following_elsewhere_than_on_a_terminal_prints_what_changes() -> None:
    states = [
        job(),
        job(),
        job(state="stopping", reason="by bob"),
        job(state="done", code=0, reason="by bob"),
    ]
    out = io.StringIO()
    assert live.follow_status(lambda: [states.pop(0)], out=out, sleep=lambda seconds: None) == 0
    assert states == []
    assert out.getvalue().splitlines() == [
        "demo: state running",
        "demo: nodes 2 of 2: 2 running",
        "demo: ranks 3: 3 running",
        "demo: state stopping",
        "demo: reason by bob",
        "demo: state done, exit code 0",
    ]


def test_following_ends_with_its_reader_though_nothing_changes() -> None:
    read, write = os.pipe()
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            os.close(read)
        assert len(waits) < 5

    with os.fdopen(write, "w") as out, pytest.raises(BrokenPipeError):
        live.follow_status(
            lambda: [JobStatus("demo", "demo-1", state="running")], out=out, sleep=sleep
        )
    assert len(waits) == 2


def test_following_on_a_terminal_ends_with_the_job() -> None:
    states = [job(), job(state="done", code=7)]
    text = on_terminal(
        lambda out: live.follow_status(
            lambda: [states.pop(0)], out=out, clock=lambda: 1065.0, sleep=lambda seconds: None
        )
    )
    assert "running" in text and "failed, exit code 7" in text
    assert states == []


def test_ctrl_c_ends_following() -> None:
    def interrupted() -> list[JobStatus]:
        raise KeyboardInterrupt

    assert live.follow_status(interrupted, out=io.StringIO()) == 130


def test_the_plan_of_a_run_with_its_sources() -> None:
    plan = {
        "mesh": ("mesh(dp=2)", "default"),
        "clip": ("1.0\x1b[2J", "argument clip="),
        "slices": ("2", ""),
        "cells 0": ("0F0@0+1", ""),
    }
    found = status.format_plain([JobStatus(plan=plan)], 0.0)
    assert "plan      mesh: mesh(dp=2) (default)" in found
    assert "plan      slices: 2" in found
    assert any("clip: 1.0\\x1b[2J (argument clip=)" in line for line in found)
    assert not any("0F0@" in line for line in found), "of the picture"
    many = JobStatus(plan={f"n{i}": ("x" * 999, "") for i in range(99)})
    lines = [line for line in status.format_plain([many], 0.0) if line.startswith("plan")]
    assert len(lines) == status.MAX_LISTED_PLAN + 1 and max(map(len, lines)) < 220
    assert lines[-1] == "plan      75 more in pdrun report"
