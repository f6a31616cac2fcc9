"""
The scheduler process is killed under a running job: the workers do not notice, and the verdict is
the right one.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Job, Shell, alive, free_port, gone_within, until
from tests.lib.tiers import by_tier, thorough

STAMPS = """
import os, sys, time
rank = os.environ["RANK"]
open("pids", "a").write(f"{os.getpid()}\\n")
with open("stamps" + rank, "w") as file:
    while not os.path.exists("enough"):
        delay = int(open("/proc/self/schedstat").read().split()[1]) / 1e9
        file.write(f"{time.monotonic()} {delay}\\n"); file.flush()
        print("step", rank, time.monotonic(), flush=True)
        if os.path.exists("fail" + rank):
            raise ValueError("boom")
        time.sleep(0.01)
"""

PATIENT = """
import sys
from pdrun.rendezvous.scheduler import child
child.RESTART_WINDOW_SECONDS = 0.0  # any number of restarts: this is about what each of them does
from pdrun.__main__ import main
sys.exit(main())
"""


def scheduler_of(job: Job) -> psutil.Process | None:
    """The scheduler process that this pdrun runs."""
    try:
        found = psutil.Process(job.process.pid).children()
        return next(
            (each for each in found if "pdrun.rendezvous.scheduler.child_main" in each.cmdline()),
            None,
        )
    except psutil.Error:
        return None


def killed(job: Job) -> float:
    """Kill the scheduler process; return when."""
    until(lambda: scheduler_of(job) is not None, "the scheduler runs")
    process = scheduler_of(job)
    assert process is not None
    process.send_signal(signal.SIGKILL)
    return time.monotonic()


def connections(job: Job) -> int:
    """How many agents are connected with the scheduler process that this pdrun runs."""
    try:
        process = scheduler_of(job)
        found = process.net_connections("tcp") if process else []
        return sum(each.status == psutil.CONN_ESTABLISHED for each in found)
    except psutil.Error:
        return 0


def back(job: Job, count: int) -> None:
    """Wait until the scheduler has come back ``count`` times in all."""
    job.expect(r"the scheduler process is back after", timeout=60.0, count=count)


def stamps(shell: Shell, rank: int) -> list[tuple[float, float]]:
    """When a worker made its steps, and how long it had waited for a CPU until then."""
    path = shell.folder / f"stamps{rank}"
    lines = path.read_text().splitlines()[:-1] if path.exists() else []
    return [(float(when), float(delay)) for when, delay in map(str.split, lines)]


def gaps_of(shell: Shell, rank: int, begin: float, end: float) -> list[float]:
    """Seconds between a worker's steps, without those in which other processes had its CPU."""
    found = [(when, delay) for when, delay in stamps(shell, rank) if begin < when < end]
    return [
        (after - before) - (waited_after - waited_before)
        for (before, waited_before), (after, waited_after) in itertools.pairwise(found)
    ]


def start_of_a_process() -> float:
    """
    Seconds that the start of a scheduler's process takes here and now, with all that other tests do
    beside it.
    """
    code = (
        "import pdrun.rendezvous.scheduler.child_main, pdrun.rendezvous.transport.zmq_server,"
        " pdrun.rendezvous.journal.replay"
    )
    begin = time.monotonic()
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
    return time.monotonic() - begin


def two_nodes(shell: Shell, *options: str, script: str, runner: str = "") -> list[Job]:
    """Two nodes of two workers each, started by hand; the first runs the scheduler."""
    where = f"127.0.0.1:{free_port()}"
    python = [sys.executable, runner] if runner else [sys.executable, "-m", "pdrun"]
    jobs = []
    for rank in (0, 1):
        words = (
            "--nodes",
            "2",
            "--devices",
            "2",
            "--grace",
            "2",
            "--scheduler",
            where,
            "--node-rank",
            str(rank),
            "--node-name",
            f"host{rank}",
            "--show-ranks",
            "none",
            *options,
            script,
        )
        jobs.append(shell.start_process([*python, *words]))
    return jobs


def running(shell: Shell) -> None:
    until(
        lambda: all(len(stamps(shell, rank)) > 3 for rank in range(4)), "all four workers run", 60.0
    )


@pytest.mark.slow
def test_kills_disturb_no_worker(shell: Shell) -> None:
    first, second = two_nodes(
        shell, script=shell.script(STAMPS), runner=shell.script(PATIENT, "patient.py")
    )
    running(shell)
    pids = sorted(shell.pids("pids"))
    began, outages, start_up = time.monotonic(), [], start_of_a_process()
    kills = by_tier(5, 20)
    for number in range(kills):
        start = killed(first)
        back(first, number + 1)
        outages.append(time.monotonic() - start)
        until(lambda: connections(first) >= 2, "both nodes are connected again")
    took = time.monotonic() - began
    assert sorted(shell.pids("pids")) == pids and all(alive(pid) for pid in pids), (
        "a worker was started anew"
    )
    for rank in range(4):
        gaps = gaps_of(shell, rank, began, began + took)
        assert max(gaps) < 2.0 and statistics.median(gaps) < 0.1, (
            f"rank {rank} stood still for {max(gaps):.2f} s"
        )
    start_up = max(start_up, start_of_a_process())
    assert statistics.median(outages) < 2.0 + 3 * start_up, (
        f"{outages}, where a process alone takes {start_up:.2f} s"
    )
    (shell.folder / "enough").touch()
    assert [job.wait(60) for job in (first, second)] == [0, 0], first.err + second.err
    assert "was lost" not in first.err + second.err and first.err.count("restarting it") == kills


@pytest.mark.parametrize("when", [thorough("after"), "meanwhile"])
def test_the_right_verdict_after_a_kill(shell: Shell, when: str) -> None:
    first, second = two_nodes(shell, script=shell.script(STAMPS))
    running(shell)
    if when == "meanwhile":
        os.kill(
            first.process.pid, signal.SIGSTOP
        )  # nobody starts the scheduler again until the failure has happened
    killed(first)
    if when == "after":
        back(first, 1)
    pids = shell.pids("pids")
    (shell.folder / "fail3").touch()
    if when == "meanwhile":
        until(lambda: sum(map(alive, pids)) == 3, "the worker has failed")
        os.kill(first.process.pid, signal.SIGCONT)
    assert [job.wait(60) for job in (first, second)] == [1, 1], first.err + second.err
    for job in (first, second):
        assert "rank 3" in job.err and "ValueError: boom" in job.err and "host1" in job.err
    gone_within(pids, 2.0)
    assert not list(shell.folder.glob("pdrun-logs/*/scheduler.journal"))


def test_simulated_nodes_and_a_job_without_files(shell: Shell) -> None:
    """The journal lies in a folder of its own, which goes with the job."""
    temporary = shell.folder / "tmp"
    temporary.mkdir()
    job = shell.start(
        "--nodes",
        "2",
        "--devices",
        "2",
        "--local",
        "--no-files",
        "--show-ranks",
        "none",
        shell.script(STAMPS),
        env={"TMPDIR": str(temporary)},
    )
    running(shell)
    assert len(list(temporary.glob("pdrun-*/scheduler.journal"))) == 1
    found = [
        each
        for each in psutil.Process(job.process.pid).children(recursive=True)
        if "pdrun.rendezvous.scheduler.child_main" in each.cmdline()
    ]
    assert len(found) == 1
    found[0].send_signal(signal.SIGKILL)
    back(job, 1)
    (shell.folder / "enough").touch()
    assert job.wait(60) == 0, job.err
    assert not list(temporary.glob("pdrun-*"))


def test_a_damaged_journal_ends_the_job_with_69(shell: Shell) -> None:
    first, second = two_nodes(shell, "--on-scheduler-loss", "wait=3", script=shell.script(STAMPS))
    running(shell)
    pids = shell.pids("pids")
    (journal,) = shell.folder.glob("pdrun-logs/*/scheduler.journal")
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)
    killed(first)
    assert [job.wait(60) for job in (first, second)] == [69, 69], first.err + second.err
    assert "damaged at byte" in first.err and str(journal.name) in first.err
    # the first node's agent reports the verdict; if it cannot, the second one sees the loss only
    assert "is damaged at" in second.err or "lost the scheduler" in second.err
    assert "Traceback" not in first.err + second.err
    gone_within(pids, 2.0)


@pytest.mark.parametrize(("how", "least"), [("wait=2", 2.0), ("stop", 0.0)])
def test_a_scheduler_that_stays_away(shell: Shell, how: str, least: float) -> None:
    """
    It is stopped, not ended, so that nobody starts another one; and with ``stop`` it is simply
    killed.
    """
    first, second = two_nodes(shell, "--on-scheduler-loss", how, script=shell.script(STAMPS))
    running(shell)
    pids = shell.pids("pids")
    if how == "stop":
        begin = killed(first)
        assert not list(shell.folder.glob("pdrun-logs/*/scheduler.journal"))
    else:
        process = scheduler_of(first)
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
    assert [job.wait(60) for job in (first, second)] == [69, 69], first.err + second.err
    assert least <= time.monotonic() - begin < 20.0
    gone_within(pids, 2.0)
    assert ("has died (killed by SIGKILL)" if how == "stop" else "lost the scheduler") in first.err


def test_a_stop_while_the_scheduler_is_dead(shell: Shell) -> None:
    """Ctrl-C is answered although nobody is there to answer it."""
    first, second = two_nodes(shell, script=shell.script(STAMPS))
    running(shell)
    pids = shell.pids("pids")
    process = scheduler_of(first)
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    first.signal(signal.SIGINT)
    assert first.wait(30) == 130, first.err
    second.signal(signal.SIGINT)
    assert second.wait(30) == 130, second.err
    gone_within(pids, 2.0)


def test_a_standalone_scheduler_resumes_by_itself(shell: Shell) -> None:
    where = f"127.0.0.1:{free_port()}"
    words = (
        "scheduler",
        "--nodes",
        "2",
        "--listen",
        where,
        "--job",
        "demo",
        "--journal",
        "kept.journal",
    )
    scheduler = shell.start(*words)
    scheduler.expect("waiting for 2 nodes")
    script = shell.script(STAMPS)
    nodes = [
        shell.start(
            "--nodes",
            "2",
            "--devices",
            "2",
            "--grace",
            "2",
            "--job",
            "demo",
            "--scheduler",
            where,
            "--no-serve",
            "--node-name",
            f"host{rank}",
            "--show-ranks",
            "none",
            script,
        )
        for rank in (0, 1)
    ]
    running(shell)
    scheduler.process.kill()
    scheduler.process.wait(10)
    again = shell.start(*words)
    again.expect("resuming from kept.journal")
    (shell.folder / "fail0").touch()
    assert [job.wait(60) for job in (*nodes, again)] == [1, 1, 1], nodes[0].err + again.err
    assert not Path(shell.folder, "kept.journal").exists()


def test_a_journal_needs_an_address_that_stays(shell: Shell) -> None:
    code, _, err = shell.run("scheduler", "--nodes", "2", "--journal", "kept.journal")
    assert code == 2 and "--journal" in err and "--listen HOST:PORT" in err
