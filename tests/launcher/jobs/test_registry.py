"""The registry of jobs: whole entries only, no process taken for another, no name guessed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from pdrun.errors import UsageError
from pdrun.launcher.jobs import registry
from pdrun.launcher.jobs.lookup import find_job, find_running_job
from pdrun.launcher.jobs.registry import (
    JobRecord,
    is_alive,
    make_job_record,
    prune_jobs,
    read_start_ticks,
    register_job,
)


def entry(run: str, job: str = "train", **changes: object) -> JobRecord:
    """An entry of a process that has ended."""
    made = make_job_record(run, job, events="/e", log_dir="/l", made=1.0, pid=os.getpid())
    return replace(made, **{"ticks": made.ticks - 1, **changes})  # type: ignore[arg-type]


def alive(run: str, job: str = "train") -> JobRecord:
    """An entry of this very process."""
    return make_job_record(run, job, events="/e", log_dir="/l", made=2.0)


def test_what_is_registered_is_listed_newest_first_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "jobs"
    one, two = entry("r1"), alive("r2")
    assert register_job(one, folder) and register_job(two, folder)
    assert registry.list_jobs(folder) == [two, one]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "r1.json": 0o600,
        "r2.json": 0o600,
    }


def test_where_the_registry_is(tmp_path: Path) -> None:
    assert registry.registry_folder({"XDG_STATE_HOME": "/s", "HOME": "/h"}) == Path("/s/pdrun/jobs")
    assert registry.registry_folder({"XDG_STATE_HOME": "relative", "HOME": "/h"}) == Path(
        "/h/.local/state/pdrun/jobs"
    )
    with pytest.raises(OSError, match="HOME"):
        registry.registry_folder({})


def test_a_home_that_cannot_be_written_costs_nothing_but_the_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert register_job(entry("r1")) is False
    assert registry.list_jobs() == []
    assert register_job(entry("../evil"), tmp_path / "jobs") is False
    assert list((tmp_path / "jobs").iterdir()) == []


def test_a_process_is_known_by_its_start_time_and_host_too() -> None:
    assert is_alive(alive("r"))
    assert not is_alive(entry("r"))
    assert not is_alive(replace(alive("r"), host="elsewhere"))


def test_a_process_that_has_gone_and_one_that_nobody_reaped() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    job = make_job_record("r", "train", events="/e", log_dir="/l", made=1.0, pid=process.pid)
    assert is_alive(job)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(job)
    process.wait(10)
    assert read_start_ticks(process.pid) is None
    process.stdin.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"run": "r1"}',
        '{"run": 1}',
        "\xff",
        '{"run": "other"}',
        "[" * 50_000,
    ],
)
def test_files_that_are_no_entry_are_passed_over(tmp_path: Path, text: str) -> None:
    register_job(entry("r2"), tmp_path)
    (tmp_path / "r1.json").write_text(text)
    assert [job.run for job in registry.list_jobs(tmp_path)] == ["r2"]


def test_entries_with_wrong_types_links_and_pipes_are_passed_over(tmp_path: Path) -> None:
    register_job(entry("r1"), tmp_path)
    good = json.loads((tmp_path / "r1.json").read_text())
    for name, value in (
        ("pid", "1"),
        ("pid", True),
        ("pid", -1),
        ("events", None),
        ("made", "x"),
        ("made", float("nan")),
        ("made", 10**400),
        ("pid", 10**30),
        ("events", "a\0"),
    ):
        (tmp_path / "r1.json").write_text(json.dumps({**good, name: value}))
        assert registry.list_jobs(tmp_path) == []
    (tmp_path / "r2.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "r3.json")
    assert registry.list_jobs(tmp_path) == []


def test_an_entry_of_a_later_version_is_read(tmp_path: Path) -> None:
    register_job(entry("r1"), tmp_path)
    data = json.loads((tmp_path / "r1.json").read_text())
    (tmp_path / "r1.json").write_text(json.dumps({**data, "colour": "blue"}))
    assert len(registry.list_jobs(tmp_path)) == 1


KNOWN = [
    alive("demo-3", "demo"),
    entry("demo-2", "demo"),
    entry("demo-1", "demo"),
    entry("eval-9", "eval"),
]


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("demo-1", "demo-1"),
        ("demo", "demo-3"),
        ("eval", "eval-9"),
        ("ev", "eval-9"),
        ("dem", "demo-3"),
    ],
)
def test_names_that_find_a_job(name: str, run: str) -> None:
    assert find_job(name, KNOWN).run == run


def test_names_that_find_none_or_several() -> None:
    with pytest.raises(
        UsageError, match=r"no job 'dmo'; did you mean 'demo'\? known: demo \(run demo-3\)"
    ):
        find_job("dmo", KNOWN)
    with pytest.raises(UsageError, match="none is known here"):
        find_job("x", [])
    with pytest.raises(
        UsageError, match=r"means more than one job; name one run: a \(run r1\), ab \(run r2\)"
    ):
        find_job("r", [entry("r1", "a"), entry("r2", "ab")])
    with pytest.raises(UsageError, match="means more than one job"):
        find_job("demo", [alive("demo-4", "demo"), *KNOWN])
    with pytest.raises(UsageError, match=r"the job's name is empty; known: demo \(run demo-3\)"):
        find_job("", KNOWN[:1])  # pdrun stop "$JOB", where JOB is not set, had stopped the only job


def test_of_several_runs_that_run_the_newest_can_be_asked_for() -> None:
    newer = replace(alive("demo-4", "demo"), made=9.0)
    assert find_job("demo", [newer, *KNOWN], newest=True) == newer
    assert find_job("demo", KNOWN[1:], newest=True).run == "demo-2"
    with pytest.raises(UsageError, match="means more than one job"):
        find_job("e", [alive("e-1", "eval"), alive("e-2", "else")], newest=True)


def test_entries_whose_logs_are_no_more_are_forgotten(tmp_path: Path) -> None:
    register_job(entry("r1", log_dir="/gone"), tmp_path)
    register_job(entry("r2"), tmp_path)
    registry.remove_jobs(Path("/gone"), tmp_path)
    assert [job.run for job in registry.list_jobs(tmp_path)] == ["r2"]
    registry.remove_jobs(Path("/gone"), tmp_path / "nowhere")


def test_the_one_that_runs() -> None:
    assert find_running_job(KNOWN).run == "demo-3"
    with pytest.raises(UsageError, match="no job of yours is running"):
        find_running_job(KNOWN[1:])
    with pytest.raises(UsageError, match="2 jobs are running; name one: demo"):
        find_running_job([*KNOWN, alive("x")])


def test_old_entries_of_ended_jobs_are_forgotten(tmp_path: Path) -> None:
    for number in range(12):
        register_job(entry(f"r{number:02}", made=float(number)), tmp_path)
    register_job(replace(alive("running"), made=0.0), tmp_path)
    prune_jobs(tmp_path, max_ended=5)
    assert [job.run for job in registry.list_jobs(tmp_path)] == [
        "r11",
        "r10",
        "r09",
        "r08",
        "r07",
        "running",
    ]


def test_many_that_register_list_and_prune_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_ENDED_JOBS", 20)

    def work(number: int) -> int:
        assert register_job(alive(f"run-{number}"), tmp_path)
        for job in registry.list_jobs(tmp_path):
            assert job.log_dir == "/l"
        prune_jobs(tmp_path, max_ended=20)
        return number

    with ThreadPool(8) as pool:
        assert sum(pool.map(work, range(80))) == sum(range(80))
    runs = {job.run for job in registry.list_jobs(tmp_path)}
    assert runs == {f"run-{number}" for number in range(80)}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".draft-")]
