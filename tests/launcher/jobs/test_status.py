"""`pdrun status` of registered jobs: real processes, real files."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pdrun.errors import UsageError
from pdrun.eventlog import LogEvent
from pdrun.launcher.jobs import registry
from pdrun.launcher.jobs.lookup import find_job
from pdrun.launcher.jobs.status import (
    MAX_LISTED_JOBS,
    list_statuses,
    show_status,
)
from pdrun.launcher.jobs.stop import stop_job
from pdrun.ui import status as screen
from pdrun.ui.job_status import JobStatus
from tests.launcher.jobs.helpers import VERDICT, ended, register, show, write


def test_status_as_json_and_for_people(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(home, ended(), "demo-1", VERDICT)
    assert show_status("demo", as_json=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["state"], data["code"], data["nodes"][0]["name"], len(data["ranks"])) == (
        "done",
        3,
        "n0",
        2,
    )
    shown: list[JobStatus] = []
    monkeypatch.setattr(screen, "show_status", shown.extend)
    assert show_status(None) == 0
    assert [one.run for one in shown] == ["demo-1"]


@pytest.mark.parametrize("name", ["logs/demo-1", "logs/demo-1/", "logs/demo-1/events.jsonl"])
def test_a_folder_of_logs_means_its_job(
    home: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered or not, for each command that takes a job."""
    monkeypatch.chdir(home)
    job = register(home, ended(), "demo-1", VERDICT)
    write(home, 0, "rank_1.out", b"hello\n")
    assert find_job(name, registry.list_jobs()) == job
    assert [one.run for one in list_statuses(name)] == ["demo-1"]
    assert show(home, name)[1] == "n0:1| hello\n"
    assert stop_job(name) == 0
    assert "is not running" in capsys.readouterr().err
    shutil.rmtree(home / "state")  # as on another machine
    (one,) = list_statuses(name)
    assert (one.job, one.run, one.code) == ("demo", "demo-1", 3)
    assert show(home, name)[1] == "n0:1| hello\n"
    monkeypatch.chdir(home / "logs")
    assert list_statuses("demo-1")[0].code == 3, "its name, where the folder is"
    with pytest.raises(UsageError, match="no job of yours has its logs in 'demo-1/'"):
        stop_job("demo-1/")
    with pytest.raises(UsageError, match=r"demo-2/events.jsonl: there is no event log"):
        list_statuses("./demo-2/events.jsonl")


def test_a_job_whose_agent_was_killed_is_dead_not_running(home: Path) -> None:
    register(home, ended())
    (one,) = list_statuses("demo")
    assert (one.state, one.reason) == ("dead", "its agent ended without a verdict")
    assert one.ended_at == (home / "logs" / "demo-1" / "events.jsonl").stat().st_mtime
    register(home, os.getpid())
    assert list_statuses("demo")[0].state == "running"


def test_a_job_without_a_readable_event_log_is_still_shown(home: Path) -> None:
    job = register(home, os.getpid())
    Path(job.events).unlink()
    (one,) = list_statuses("demo")
    assert (one.job, one.run) == ("demo", "demo-1") and "No such file" in one.reason
    registry.register_job(replace(job, events=""))
    (one,) = list_statuses("demo")
    assert (one.state, one.reason) == ("unknown", "no event log"), "it may well be running"


def test_a_damaged_event_log_hides_no_other_job(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(home, ended(), "demo-1", LogEvent("verdict", 1005.0, {"code": 3, "reason": "r"}))
    damaged = register(home, ended(), "demo-2")
    with Path(damaged.events).open("a") as log:
        log.write(
            "[" * 100_000 + '\n{"kind": "joined", "time": 1}\n{"kind": "verdict", "time": NaN}\n'
        )
    assert show_status(as_json=True, all_jobs=True) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {one["run"]: one["state"] for one in shown} == {"demo-1": "done", "demo-2": "dead"}


def test_status_without_a_name_is_of_the_one_that_runs_else_of_all(home: Path) -> None:
    register(home, ended(), "demo-1")
    register(home, ended(), "demo-2")
    assert len(list_statuses(None)) == 2
    register(home, os.getpid(), "demo-3")
    assert [one.run for one in list_statuses(None)] == ["demo-3"]
    assert len(list_statuses(None, all_jobs=True)) == 3


def test_only_the_newest_are_listed_unless_all_are_asked_for(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = ended()
    for number in range(MAX_LISTED_JOBS + 3):
        registry.register_job(
            replace(register(home, gone, f"demo-{number:02}"), made=float(number))
        )
    shown = [one.run for one in list_statuses(None)]
    assert shown == [f"demo-{number:02}" for number in range(MAX_LISTED_JOBS + 2, 2, -1)]
    assert capsys.readouterr().err == "pdrun: 3 older job(s) are not listed; --all lists them\n"
    assert len(list_statuses(None, all_jobs=True)) == MAX_LISTED_JOBS + 3
    for number in range(2):
        job = register(home, os.getpid(), f"demo-{number:02}")
        registry.register_job(replace(job, made=float(number)))
    assert {"demo-00", "demo-01"} < {one.run for one in list_statuses(None)}


def test_of_two_runs_with_one_name_the_newest_is_shown_and_none_is_stopped(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for made in (1.0, 2.0):
        registry.register_job(replace(register(home, os.getpid(), f"demo-{made:g}"), made=made))
        write(home, 0, "rank_0.out", b"%d\n" % made, f"demo-{made:g}")
    assert [one.run for one in list_statuses("demo")] == ["demo-2"]
    assert (
        capsys.readouterr().err
        == "pdrun: 2 runs are called demo; this is the newest that runs, demo-2\n"
    )
    assert show(home, "demo")[1] == "n0:0| 2\n"
    assert show(home, "demo-1")[1] == "n0:0| 1\n"
    with pytest.raises(UsageError, match="means more than one job; name one run: demo"):
        stop_job("demo")
