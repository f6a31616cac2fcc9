"""`status`, `logs` and `stop` against registered jobs: real processes, real files."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdrun.errors import UsageError
from pdrun.eventlog import EventLog, JobStatus, LogEvent
from pdrun.launcher.jobs import log_reader, registry
from pdrun.launcher.jobs.log_reader import LogReader
from pdrun.launcher.jobs.logs import print_logs
from pdrun.launcher.jobs.lookup import find_job
from pdrun.launcher.jobs.status import (
    MAX_LISTED_JOBS,
    list_statuses,
    read_status,
    show_status,
)
from pdrun.launcher.jobs.stop import _signal_process, stop_job
from pdrun.launcher.output.console import Console
from pdrun.ui import status as screen

TERM_ONCE = (
    "import signal, sys, time\nsignal.signal(15, lambda n, f: sys.exit(143))\n"
    "print('up', flush=True)\ntime.sleep(60)"
)
TERM_TWICE = (
    "import signal, sys, time\nseen = []\n"
    "def stop(n, f):\n    seen.append(n)\n    print('term', flush=True)\n    if len(seen) == 2: sys.exit(143)\n"
    "signal.signal(15, stop)\nprint('up', flush=True)\nwhile True: time.sleep(0.02)"
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """Filled by `start`; reaped at once when it ends, as a shell would."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        threading.Thread(target=child.wait, daemon=True).start()
        return child

    yield start  # type: ignore[misc]
    for child in started:
        child.kill()
        child.wait(10)
        child.stdout.close()  # type: ignore[union-attr]


def register(home: Path, pid: int, run: str = "demo-1", *events: LogEvent) -> registry.JobRecord:
    log = EventLog(home / "logs" / run / "events.jsonl")
    log.append(LogEvent("created", 1000.0, {"job": "demo", "run": run, "nodes": 1}))
    log.append(LogEvent("joined", 1000.0, {"node": "n0", "workers": 2}))
    log.append(LogEvent("assigned", 1000.0, {"generation": 0, "nodes": [["n0", 0, 2]]}))
    log.append(LogEvent("started", 1000.0, {"generation": 0}))
    for event in events:
        log.append(event)
    log.close()
    job = registry.make_job_record(
        run, "demo", events=str(log.path), log_dir=str(home / "logs"), made=1000.0, pid=pid
    )
    assert registry.register_job(job)
    return job


def ended() -> int:
    """Return the number of a process that has gone."""
    child = subprocess.Popen(["true"])
    child.wait(10)
    return child.pid


VERDICT = LogEvent("verdict", 1010.0, {"code": 3, "reason": "rank 1 failed"})


def test_stop_ends_the_job_and_says_how(
    home: Path, process, capsys: pytest.CaptureFixture[str]
) -> None:
    child = process(TERM_ONCE)
    register(home, child.pid)
    assert stop_job("demo", timeout=20) == 0
    assert child.wait(10) == 143
    assert (
        "pdrun: job demo (run demo-1) has stopped: it ended without a verdict"
        in capsys.readouterr().err
    )
    assert stop_job("demo") == 0
    assert "is not running" in capsys.readouterr().err


def test_a_forced_stop_signals_twice(home: Path, process) -> None:
    child = process(TERM_TWICE)
    register(home, child.pid)
    assert stop_job("demo", timeout=0.5) == 69
    assert stop_job(None, force=True, timeout=20) == 0
    assert child.wait(10) == 143


def test_stop_never_signals_a_process_that_took_over_the_number(home: Path, process) -> None:
    child = process(TERM_ONCE)
    job = register(home, child.pid)
    registry.register_job(replace(job, ticks=job.ticks - 5))
    assert stop_job("demo") == 0
    _signal_process(replace(job, ticks=job.ticks - 5), 9)
    assert child.poll() is None


def test_where_the_kernel_has_no_handles_of_processes_the_start_time_must_do(
    home: Path, process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int):
        def pidfd_open(pid: int, flags: int = 0) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pidfd_open", pidfd_open)

    child = process(TERM_ONCE)
    job = register(home, child.pid)
    refuse(errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        stop_job("demo", timeout=20)
    refuse(errno.ENOSYS)
    _signal_process(replace(job, ticks=job.ticks - 5), 9)
    assert child.poll() is None, "the number belongs to another process now"
    assert stop_job("demo", timeout=20) == 0
    assert child.wait(10) == 143


def test_stop_of_a_job_elsewhere_or_unknown_is_a_usage_error(home: Path) -> None:
    job = register(home, os.getpid())
    registry.register_job(replace(job, host="other-host"))
    with pytest.raises(
        UsageError, match=r"was started on other-host; stop it there, or give --scheduler"
    ):
        stop_job("demo")
    with pytest.raises(UsageError, match=r"no job 'dmo'; did you mean 'demo'\?"):
        stop_job("dmo")
    with pytest.raises(UsageError, match="no job of yours is running here"):
        stop_job()


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


def test_of_a_job_without_an_event_log_nobody_says_how_it_ended(
    home: Path, process, capsys: pytest.CaptureFixture[str]
) -> None:
    child = process(TERM_ONCE)
    registry.register_job(replace(register(home, child.pid), events=""))
    assert stop_job("demo", timeout=20) == 0
    assert capsys.readouterr().err.endswith(
        "has stopped: how it ended is not known: no event log\n"
    )
    assert list_statuses("demo")[0].state == "dead"


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


# Logs
# --------------------------------------------------------------------------------------------------


def write(home: Path, generation: int, name: str, data: bytes, run: str = "demo-1") -> None:
    folder = home / "logs" / run / str(generation)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("ab") as file:
        file.write(data)


def show(home: Path, *args: str, **kwargs: object) -> tuple[int, str, str]:
    """Run `print_logs` with a console of files; return (code, stdout, stderr)."""
    paths = [home / "shown.out", home / "shown.err"]
    fds = [os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) for path in paths]
    try:
        code = print_logs(*args, console=Console(*fds), **kwargs)  # type: ignore[arg-type]
    finally:
        for fd in fds:
            os.close(fd)
    return code, paths[0].read_text(), paths[1].read_text()


def test_logs_of_the_last_generation_with_prefixes_in_rank_order(home: Path) -> None:
    register(home, ended())
    write(home, 0, "rank_0.out", b"old\n")
    for rank in (10, 1, 0):
        write(home, 1, f"rank_{rank}.out", b"out %d\nhalf" % rank)
        write(home, 1, f"rank_{rank}.err", b"err %d\n" % rank)
    code, out, err = show(home, "demo")
    assert code == 0
    assert out == "n0:0| out 0\nn0:1| out 1\n10| out 10\nn0:0| half\nn0:1| half\n10| half\n"
    said = "pdrun: generation 1, the last of 2; --generation all shows all\n"
    assert err == said + "n0:0| err 0\nn0:1| err 1\n10| err 10\n"
    assert show(home, ranks="1", stderr=False)[1:] == ("n0:1| out 1\nn0:1| half\n", said)
    with pytest.raises(
        UsageError, match=r"--ranks: run demo-1 has no rank 7,20-30; there are 0-1,10"
    ):
        show(home, ranks="0,7,20-30")


def test_logs_of_other_generations(home: Path) -> None:
    register(home, ended())
    for generation in (0, 1, 10):
        write(home, generation, "rank_0.out", b"1\n2\ng%d\n" % generation)
    assert show(home, generation=1, lines=1) == (0, "n0:0| g1\n", "")
    assert show(home, generation="all", lines=1) == (0, "n0:0| g0\nn0:0| g1\nn0:0| g10\n", "")
    assert show(home, lines=1)[1] == "n0:0| g10\n"
    with pytest.raises(
        UsageError, match=r"--generation: run demo-1 has no generation 2; known: 0, 1, 10"
    ):
        show(home, generation=2)


@pytest.mark.parametrize(
    ("lines", "expected"), [(1, "3\n"), (2, "2\n3\n"), (9, "1\n2\n3\n"), (0, "")]
)
def test_the_last_lines_only(home: Path, lines: int, expected: str) -> None:
    register(home, ended())
    write(home, 0, "rank_0.out", b"1\n2\n3\n")
    assert show(home, "demo", lines=lines)[1].replace("n0:0| ", "") == expected


def test_the_last_lines_of_a_big_file(home: Path) -> None:
    path = home / "big"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(200_000)) + b"half")
    with path.open("rb") as file:
        log_reader.seek_last_lines(file, 100_001)
        assert file.read().split(b"\n")[0] == b"100000"


def test_other_file_names(home: Path) -> None:
    job = register(home, ended())
    registry.register_job(replace(job, log_name="{node}-w{rank}"))
    write(home, 0, "n0-w1.out", b"one\n")
    write(home, 0, "unrelated.out", b"no\n")
    assert show(home, "demo", ranks="1")[1] == "n0:1| one\n"


def test_follow_goes_on_through_a_restart_until_the_end(home: Path, process) -> None:
    child = process(TERM_ONCE)
    register(home, child.pid)
    write(home, 0, "rank_0.out", b"first\n")
    shown = home / "shown"
    fd = os.open(shown, os.O_CREAT | os.O_WRONLY)
    result: list[int] = []
    thread = threading.Thread(
        target=lambda: result.append(print_logs(follow=True, console=Console(fd, fd)))
    )
    thread.start()

    def seen(text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in shown.read_text():
            assert time.monotonic() < deadline, shown.read_text()
            time.sleep(0.01)

    seen("n0:0| first\n")
    write(home, 0, "rank_0.out", b"second\nha")
    write(home, 0, "rank_1.out", b"late file\n")
    seen("n0:1| late file\n")
    write(home, 0, "rank_0.out", b"lf\n")
    seen("n0:0| half\n")
    write(home, 1, "rank_0.out", b"restarted\n")
    seen("restarted\n")
    write(home, 1, "rank_0.out", b"last word")
    child.terminate()
    thread.join(20)
    os.close(fd)
    assert result == [0]
    assert shown.read_text().endswith("n0:0| last word\n")
    assert shown.read_text().count("second") == 1


def test_following_ends_with_its_reader_and_not_with_the_job(home: Path) -> None:
    register(home, os.getpid())
    write(home, 0, "rank_0.out", b"first\n")
    read, out = os.pipe()
    result: list[int] = []
    thread = threading.Thread(
        target=lambda: result.append(print_logs(follow=True, console=Console(out, out)))
    )
    thread.start()
    assert os.read(read, 100) == b"n0:0| first\n"
    os.close(read)  # | head -1; and the workers print nothing more
    thread.join(20)
    os.close(out)
    assert result == [141]


def test_logs_that_go_while_they_are_followed_are_no_fault(home: Path) -> None:
    register(home, os.getpid())
    write(home, 0, "rank_0.out", b"first\n")
    with (home / "shown").open("wb") as file:
        reader = LogReader(
            find_job("demo", registry.list_jobs()),
            read_status,
            Console(file.fileno(), file.fileno()),
            ranks="all",
            lines=None,
            stdout=True,
            stderr=True,
        )
        assert reader.show_new()
        shutil.rmtree(home / "logs")
        with pytest.raises(
            UsageError, match=r"logs/demo-1: the logs of demo cannot be read: No such file"
        ):
            reader.show_new()


def test_a_log_that_may_not_be_read_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(home, ended())
    write(home, 0, "rank_0.out", b"first\n")

    opened = Path.open

    def refuse(path: Path, *how: str, **more: str):
        if path.suffix == ".out":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        UsageError, match=r"0/rank_0\.out: the logs of demo cannot be read: Permission denied"
    ):
        show(home, "demo-1")


def test_logs_that_are_not_here(home: Path) -> None:
    with pytest.raises(UsageError, match="no job of yours is known here"):
        print_logs()
    job = register(home, ended())
    registry.register_job(replace(job, run="demo-2", events="", log_dir=str(home / "elsewhere")))
    with pytest.raises(UsageError, match=r"elsewhere/demo-2: the logs of demo are not here"):
        print_logs("demo-2")
