"""
Processes without a launcher: the environment of either spelling, ranks, and what everybody exits
with.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.rendezvous.clients.dynamic import (
    MAX_RECOVERIES,
    DynamicSpec,
    describe_worker_start,
    from_environ,
)
from pdrun.rendezvous.transport.listen import bind_listener

OURS = {"PDRUN_ROLE": "worker", "PDRUN_SCHEDULER": "10.0.0.1:7077", "PDRUN_WORKERS": "4"}
THEIRS = {
    "MS_ROLE": "MS_WORKER",
    "MS_SCHED_HOST": "10.0.0.1",
    "MS_SCHED_PORT": "7077",
    "MS_WORKER_NUM": "4",
}


def test_both_spellings_say_the_same() -> None:
    expected = DynamicSpec("worker", Endpoint("10.0.0.1", 7077), 4)
    assert from_environ(OURS) == from_environ(THEIRS) == from_environ(OURS | THEIRS) == expected
    assert from_environ(THEIRS | {"MS_ROLE": "MS_SCHED", "MS_TOPO_TIMEOUT": "30"}) == DynamicSpec(
        "scheduler", Endpoint("10.0.0.1", 7077), 4, timeout=30.0
    )
    assert from_environ({}) is None
    assert (
        from_environ({"PDRUN_SCHEDULER": "a:1", "PDRUN_NODE_RANK": "1", "PDRUN_JOB": "x"}) is None
    )


def test_recovery_of_mindspore_is_a_journal_in_its_folder() -> None:
    scheduler = THEIRS | {"MS_ROLE": "MS_SCHED", "MS_RECOVERY_PATH": "/r/x"}
    for extra, journal in (
        ({}, ""),
        ({"MS_ENABLE_RECOVERY": "0"}, ""),
        ({"MS_ENABLE_RECOVERY": "1"}, "/r/x/dynamic.journal"),
        ({"MS_ENABLE_RECOVERY": "1", "PDRUN_JOB": "j"}, "/r/x/j.journal"),
        ({"MS_ENABLE_RECOVERY": "1", "PDRUN_JOURNAL": "/mine"}, "/mine"),
        ({"MS_ENABLE_RECOVERY": "1", "MS_ROLE": "MS_WORKER"}, ""),
    ):
        spec = from_environ(scheduler | extra)
        assert spec is not None and spec.journal == journal
    for broken, text in (
        ({"MS_ENABLE_RECOVERY": "yes"}, "MS_ENABLE_RECOVERY: must be 0 or 1, got 'yes'"),
        ({"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": ""}, "MS_RECOVERY_PATH: is not set"),
    ):
        with pytest.raises(ConfigError, match=text):
            from_environ(scheduler | broken)


def test_recovery_is_for_workers_whose_tables_are_not_on_servers() -> None:
    for extra, restarts in (
        ({}, 0),
        ({"PDRUN_RECOVERY": "0"}, 0),
        ({"PDRUN_RECOVERY": "1"}, MAX_RECOVERIES),
        ({"MS_ENABLE_RECOVERY": "1"}, MAX_RECOVERIES),
        ({"MS_ENABLE_RECOVERY": "1", "MS_SERVER_NUM": "1"}, 0),
    ):
        spec = from_environ(THEIRS | extra)
        assert spec is not None and spec.max_restarts == restarts
        unserved = "MS_SERVER_NUM" in extra
        assert ("no worker is started again" in describe_worker_start(spec)) == unserved
    with pytest.raises(ConfigError, match="PDRUN_RECOVERY: must be 0 or 1, got 'on'"):
        from_environ(THEIRS | {"PDRUN_RECOVERY": "on"})
    with pytest.raises(ConfigError, match="two values for the recovery"):
        from_environ(THEIRS | {"PDRUN_RECOVERY": "1", "MS_ENABLE_RECOVERY": "0"})


def test_identity() -> None:
    for extra, rank, name in (
        ({"MS_NODE_ID": "3"}, 3, ""),
        ({"MS_NODE_ID": "w-3"}, None, "w-3"),
        ({"PDRUN_NODE_RANK": "2"}, 2, ""),
        ({"PDRUN_WORKER_ID": "x", "MS_NODE_ID": "3"}, 3, "x"),
        ({"PDRUN_NODE_RANK": "3", "MS_NODE_ID": "3"}, 3, ""),
    ):
        spec = from_environ(OURS | extra)
        assert spec is not None and (spec.rank, spec.name) == (rank, name)


@pytest.mark.parametrize("environ", [OURS, THEIRS], ids=["pdrun", "mindspore"])
def test_half_an_environment_names_what_is_missing(environ: dict[str, str]) -> None:
    for name in environ:
        rest = {key: value for key, value in environ.items() if key != name}
        with pytest.raises(ConfigError) as caught:
            from_environ(rest)
        assert caught.value.where == name and "is not set" in str(caught.value)
        with pytest.raises(ConfigError, match=name):
            from_environ({**environ, name: ""})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MS_ROLE": "MS_SCHED"}, ["role", "PDRUN_ROLE is worker", "MS_ROLE is scheduler"]),
        ({"MS_WORKER_NUM": "5"}, ["workers", "PDRUN_WORKERS is 4", "MS_WORKER_NUM is 5"]),
        ({"MS_SCHED_PORT": "1"}, ["scheduler", "10.0.0.1:7077", "10.0.0.1:1"]),
        (
            {"PDRUN_NODE_RANK": "1", "MS_NODE_ID": "2"},
            ["rank", "PDRUN_NODE_RANK is 1", "MS_NODE_ID is 2"],
        ),
        ({"MS_ROLE": "MS_PSERVER"}, ["role", "PDRUN_ROLE is worker", "MS_ROLE is server"]),
        (
            {"MS_ROLE": "MS_SERVER", "PDRUN_ROLE": "server"},
            ["PDRUN_SERVERS", "is not set"],
        ),
        ({"MS_SERVER_NUM": "2", "PDRUN_SERVERS": "1"}, ["PDRUN_SERVERS is 1, MS_SERVER_NUM is 2"]),
        ({"PDRUN_SERVERS": "1/node"}, ["PDRUN_SERVERS", "'1/node'"]),
        (
            {
                "PDRUN_SERVERS": "2",
                "PDRUN_ROLE": "server",
                "MS_ROLE": "MS_PSERVER",
                "PDRUN_NODE_RANK": "2",
            },
            ["number of servers (2), got 2"],
        ),
        (
            {"PDRUN_ROLE": "boss"},
            ["PDRUN_ROLE", "must be one of scheduler, server, worker, got 'boss'"],
        ),
        ({"PDRUN_ROLE": "MS_WORKER"}, ["PDRUN_ROLE", "'MS_WORKER'"]),
        ({"PDRUN_WORKERS": "0"}, ["PDRUN_WORKERS", "'0'"]),
        ({"PDRUN_WORKERS": "４"}, ["PDRUN_WORKERS"]),
        ({"MS_WORKER_NUM": "-4"}, ["MS_WORKER_NUM"]),
        ({"PDRUN_NODE_RANK": "4"}, ["number of workers (4), got 4"]),
        ({"PDRUN_JOB": "../x"}, ["PDRUN_JOB"]),
        ({"PDRUN_SCHEDULER": "10.0.0.1"}, ["PDRUN_SCHEDULER", "no port"]),
        ({"MS_SCHED_PORT": "65536"}, ["MS_SCHED_PORT"]),
        ({"MS_SCHED_HOST": "tcp://x"}, ["MS_SCHED_HOST"]),
    ],
)
def test_wrong_and_contradicting_values(changes: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_environ({**OURS, **THEIRS, **changes})
    for word in words:
        assert word in str(caught.value)


SCRIPT = """
import os, sys, time
from pdrun.rendezvous.clients import dynamic
spec = dynamic.from_environ(os.environ)
if os.environ.get("TEST_MANY"):
    import resource
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard) if hard >= 0 else 4096, hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
if spec.role == "scheduler":
    sys.exit(dynamic.run_scheduler(spec, grace=2.0))
me = dynamic.join_cluster(spec)
store = me.store_socket.getsockname()[1] if me.store_socket else 0
print(me.rank, me.world_size, me.local_rank, me.local_world_size, me.master, store, flush=True)
how = os.environ.get(f"TEST_RANK_{me.rank}", os.environ.get("TEST_ALL", ""))
again = os.environ.get("TEST_FILE", "") + "-again"
exec({"": "", "once": "if not os.path.exists(again): open(again, 'w').close(); raise ValueError('once')",
      "chdir": "os.chdir('/'); os.environ['PDRUN_WORKERS'] = '9'; time.sleep(60) if not me.generation else None",
      "boom": "raise ValueError('boom')", "exit": "sys.exit(7)", "sleep": "time.sleep(60)",
      "stubborn": "import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)",
      "wait": "while not os.path.exists(os.environ['TEST_FILE']): time.sleep(0.05)",
      "tidy": "import signal; signal.signal(15, lambda *_: sys.exit(0)); time.sleep(60)"}[how])
"""
SCHEDULER = ("-m", "pdrun", "scheduler")
Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def port() -> int:
    with bind_listener(Endpoint("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def run(tmp_path: Path, port: int) -> Iterator[Run]:
    """Start one process of a dynamic cluster: ``run("worker", TEST_ALL="sleep")``."""
    started: list[subprocess.Popen[str]] = []

    def start(
        role: str, workers: int = 2, command: tuple[str, ...] = ("-c", SCRIPT), **environ: str
    ) -> subprocess.Popen[str]:
        base = {
            key: value for key, value in os.environ.items() if not key.startswith(("PDRUN_", "MS_"))
        }
        base |= {
            "PDRUN_ROLE": role,
            "PDRUN_SCHEDULER": f"127.0.0.1:{port}",
            "PDRUN_WORKERS": str(workers),
        }
        base |= {"XDG_CONFIG_HOME": str(tmp_path)} | environ
        started.append(
            subprocess.Popen(
                [sys.executable, *command],
                env=base,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_three_workers_get_ranks_and_all_end_well(run: Run) -> None:
    workers = [run("worker", 3) for _ in range(3)]
    scheduler = run("scheduler", 3)
    lines = [worker.communicate(timeout=30)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    _, log = scheduler.communicate(timeout=10)
    assert scheduler.returncode == 0 and "waiting for 3 workers" in log and "node" not in log
    assert sorted(line[0] for line in lines) == ["0", "1", "2"]
    assert all(line[2:4] == [line[0], "3"] for line in lines), (
        "local ranks follow ranks on one host"
    )
    (zero,) = [line for line in lines if line[0] == "0"]
    assert {line[4] for line in lines} == {f"127.0.0.1:{zero[5]}"} and zero[5] != "0"
    assert [line[5] for line in lines if line is not zero] == ["0", "0"]


def test_a_process_with_many_open_files_takes_part(run: Run) -> None:
    """`select.select` knows descriptors below 1024 alone."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < 2048:
        pytest.skip(f"a process may open {hard} files here")
    scheduler, workers = run("scheduler"), [run("worker", TEST_MANY="1") for _ in range(2)]
    for worker in workers:
        _, told = worker.communicate(timeout=30)
        assert (worker.returncode, "descriptor" in told) == (0, False), told
    assert scheduler.wait(10) == 0


def test_asked_for_ranks_are_given_and_mindspores_names_work(run: Run, port: int) -> None:
    none = dict.fromkeys(("PDRUN_ROLE", "PDRUN_SCHEDULER", "PDRUN_WORKERS"), "")
    scheduler = run("scheduler")
    theirs = none | {
        "MS_ROLE": "MS_WORKER",
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(port),
        "MS_WORKER_NUM": "2",
    }
    second = run("worker", MS_NODE_ID="1", **theirs)
    first = run("worker", MS_NODE_ID="0", **theirs)
    assert second.communicate(timeout=30)[0].split()[0] == "1"
    assert first.communicate(timeout=30)[0].split()[0] == "0"
    assert scheduler.wait(10) == 0


@pytest.mark.parametrize(
    ("how", "code", "word"), [("boom", 1, "ValueError: boom"), ("exit", 7, "exit code 7")]
)
def test_a_failing_worker_ends_all_with_its_code(run: Run, how: str, code: int, word: str) -> None:
    scheduler = run("scheduler")
    workers = [run("worker", TEST_RANK_1=how, TEST_RANK_0="sleep") for _ in range(2)]
    found = [worker.communicate(timeout=30) for worker in workers]
    assert sorted(worker.returncode for worker in workers) == sorted([code, -signal.SIGTERM])
    (peer,) = [
        err for worker, (_, err) in zip(workers, found, strict=True) if worker.returncode < 0
    ]
    assert "job stopped: rank 1 on" in peer and word in peer
    _, log = scheduler.communicate(timeout=10)
    assert scheduler.returncode == code and word in log


def test_a_killed_worker_ends_all(run: Run) -> None:
    scheduler = run("scheduler")
    workers = [run("worker", TEST_ALL="sleep") for _ in range(2)]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline()
    killed = time.monotonic()
    workers[0].kill()
    _, err = workers[1].communicate(timeout=10)
    assert time.monotonic() - killed < 2.0
    assert re.search(r"worker of rank [01], \S+ \(host \S+\), was lost", err), err
    scheduler.communicate(timeout=10)
    assert scheduler.returncode == 69


def test_pdrun_scheduler_serves_and_recovers_a_cluster_of_mindspores_variables(
    run: Run, port: int, tmp_path: Path
) -> None:
    """MS_ROLE=MS_SCHED: its address and its size are those of the variables."""
    folder = tmp_path / "recovery" / "a"
    theirs = {
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(port),
        "MS_WORKER_NUM": "2",
        "MS_ENABLE_RECOVERY": "1",
        "MS_RECOVERY_PATH": str(folder),
    }
    unset = {"PDRUN_ROLE": "", "PDRUN_SCHEDULER": "", "PDRUN_WORKERS": ""}
    go = tmp_path / "go"
    last = {"TEST_ALL": "wait", "TEST_FILE": str(go)}
    scheduler = run("", command=SCHEDULER, **theirs, **unset, MS_ROLE="MS_SCHED")
    workers = [
        run("", **theirs, **unset, **last, MS_ROLE="MS_WORKER", MS_NODE_ID=str(number))
        for number in range(2)
    ]
    for number, worker in enumerate(workers):
        assert worker.stdout is not None
        assert worker.stdout.readline().startswith(f"{number} 2 ")
    assert scheduler.stderr is not None
    assert "waiting for 2 workers" in scheduler.stderr.readline()
    scheduler.kill()
    assert (folder / "dynamic.journal").exists()
    again = run("", command=SCHEDULER, **theirs, **unset, MS_ROLE="MS_SCHED")
    go.touch()
    for process in (*workers, again):
        process.communicate(timeout=30)
    assert [process.returncode for process in (*workers, again)] == [0, 0, 0]
    assert not (folder / "dynamic.journal").exists()


RECOVERY = {
    "ours": {"PDRUN_RECOVERY": "1"},
    "theirs": {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": "recovery"},
}


@pytest.mark.parametrize("names", RECOVERY)
def test_a_lost_worker_comes_back_under_its_name(run: Run, tmp_path: Path, names: str) -> None:
    """The others start again in place, as they were started; a new process takes the lost rank."""
    recovery = dict(RECOVERY[names])
    if names == "theirs":
        recovery["MS_RECOVERY_PATH"] = str(tmp_path / "recovery")
    scheduler = run("scheduler", **recovery)
    ids = [{"PDRUN_WORKER_ID": "a"}, {"PDRUN_NODE_RANK": "1"}]
    if names == "theirs":
        ids = [{"MS_NODE_ID": "0"}, {"MS_NODE_ID": "1"}]
    kept, lost = (run("worker", TEST_ALL="chdir", **recovery, **each) for each in ids)
    for number, worker in enumerate((kept, lost)):
        assert worker.stdout is not None
        assert worker.stdout.readline().startswith(f"{number} 2 ")
    before = kept.pid
    lost.kill()
    back = run("worker", TEST_ALL="chdir", **recovery, **ids[1])
    assert back.communicate(timeout=30)[0].startswith("1 2 ")
    out, err = kept.communicate(timeout=30)  # whose second run is in its first folder again
    assert out.startswith("0 2 ") and kept.pid == before
    assert "job stopped: worker of rank 1, " in err
    _, log = scheduler.communicate(timeout=30)
    assert [process.returncode for process in (kept, back, scheduler)] == [0, 0, 0], log


def test_a_worker_that_fails_starts_again(run: Run, tmp_path: Path) -> None:
    """So does one with a handler of SIGTERM, which runs before."""
    recovery = {"PDRUN_RECOVERY": "1", "TEST_FILE": str(tmp_path / "file")}
    scheduler = run("scheduler", **recovery)
    failing = run("worker", TEST_ALL="once", PDRUN_NODE_RANK="0", **recovery)
    handler = (
        "import signal; signal.signal(15, lambda *_: (print('tidy', flush=True), sys.exit(3)))"
    )
    waits = f"{handler}; time.sleep(60) if not me.generation else None"
    peer = run(
        "worker",
        command=("-c", SCRIPT.replace('"stubborn"', f'"waits": {waits!r}, "stubborn"')),
        TEST_ALL="waits",
        PDRUN_NODE_RANK="1",
        **recovery,
    )
    out, err = failing.communicate(timeout=30)
    assert [line[:4] for line in out.splitlines()] == ["0 2 ", "0 2 "]
    assert "ValueError: once" in err
    assert [line[:4] for line in peer.communicate(timeout=30)[0].splitlines()] == [
        "1 2 ",
        "tidy",
        "1 2 ",
    ]
    _, log = scheduler.communicate(timeout=30)
    assert [process.returncode for process in (failing, peer, scheduler)] == [0, 0, 0], log


@pytest.mark.thorough
def test_failures_in_a_row_end_a_cluster_with_recovery(run: Run) -> None:
    """One that has ended well starts again with the others, too."""
    scheduler = run("scheduler", PDRUN_RECOVERY="1")
    workers = [run("worker", TEST_RANK_0="boom", PDRUN_RECOVERY="1") for _ in range(2)]
    for worker in workers:
        worker.communicate(timeout=60)
    assert sorted(worker.returncode for worker in workers) == [0, 1]
    _, log = scheduler.communicate(timeout=30)
    assert scheduler.returncode == 1
    assert re.search(r"not restarted: the same failure \d times in a row", log)


def test_one_that_ignores_sigterm_is_killed_after_the_grace(run: Run) -> None:
    scheduler = run("scheduler")
    workers = [run("worker", TEST_RANK_0="stubborn", TEST_RANK_1="boom") for _ in range(2)]
    for worker in workers:
        worker.communicate(timeout=30)
    assert sorted(worker.returncode for worker in workers) == [-signal.SIGKILL, 1]
    scheduler.communicate(timeout=10)
    assert scheduler.returncode == 1


def test_a_handler_of_sigterm_may_tidy_up(run: Run) -> None:
    scheduler = run("scheduler")
    workers = [run("worker", TEST_RANK_0="tidy", TEST_RANK_1="boom") for _ in range(2)]
    for worker in workers:
        worker.communicate(timeout=30)
    assert sorted(worker.returncode for worker in workers) == [0, 1]
    scheduler.communicate(timeout=10)
    assert scheduler.returncode == 1


def test_ctrl_c_at_the_scheduler_ends_the_job(run: Run) -> None:
    scheduler = run("scheduler")
    workers = [run("worker", TEST_ALL="sleep") for _ in range(2)]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline()
    scheduler.send_signal(signal.SIGINT)
    _, log = scheduler.communicate(timeout=10)
    assert scheduler.returncode == 130 and "a signal at the scheduler" in log
    for worker in workers:
        worker.communicate(timeout=10)
        assert worker.returncode in (-signal.SIGINT, 1, 130)


def test_ctrl_c_while_waiting_is_quick(run: Run) -> None:
    scheduler = run("scheduler")
    worker = run("worker")
    assert worker.stderr is not None
    while "1 of 2 workers are here" not in (line := worker.stderr.readline()):
        assert line, "the worker ended"
    stopped = time.monotonic()
    scheduler.send_signal(signal.SIGINT)
    scheduler.communicate(timeout=10)
    assert scheduler.returncode == 130
    assert time.monotonic() - stopped < 4, "a second on a quiet machine"
    worker.communicate(timeout=10)
    assert worker.returncode != 0


def test_a_process_that_expects_another_world_says_so(run: Run) -> None:
    scheduler = run("scheduler", 1)
    worker = run("worker", 2)
    _, err = worker.communicate(timeout=30)
    assert worker.returncode == 1 and "expects 2 workers, the scheduler has 1" in err
    scheduler.communicate(timeout=10)
    assert scheduler.returncode == 78
