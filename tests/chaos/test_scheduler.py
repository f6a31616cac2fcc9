"""
The scheduler's process killed: it comes back from its journal, and no worker notices; or it gives
up and says so.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.chaos.jobs import Bed, NodeJob
from tests.e2e.conftest import until


def kill_scheduler(job: NodeJob) -> float:
    """Kill the scheduler of the first node; return the time."""
    until(lambda: bool(job.scheduler()), "a scheduler runs", 30)
    os.kill(job.scheduler(), signal.SIGKILL)
    return time.monotonic()


def test_a_killed_scheduler_comes_back_and_no_worker_notices(bed: Bed) -> None:
    """
    Three times, which is as often as a minute allows; then the job ends as if nothing had been.
    """
    jobs = bed.job()
    bed.running()
    for count in range(3):
        kill_scheduler(jobs[0])
        bed.event("resumed", count=count + 1)
    assert not bed.notes("signal") and len(bed.notes("start")) == 3
    bed.order("all", "exit 0")
    assert bed.codes() == [0] * 3, bed.said()
    assert not bed.events("lost") and len(bed.events("assigned")) == 1
    bed.clean()


@pytest.mark.thorough
def test_a_failure_while_there_is_no_scheduler_is_not_forgotten(bed: Bed) -> None:
    jobs = bed.job()
    bed.running()
    kill_scheduler(jobs[0])
    bed.order(2, "exit 5")
    assert bed.codes() == [5] * 3, bed.said()
    bed.clean()


@pytest.mark.thorough
def test_a_scheduler_killed_while_the_nodes_meet(bed: Bed) -> None:
    first, second = bed.start("h1"), bed.start("h2")
    first.expect("2 of 3 nodes")
    kill_scheduler(first)
    third = bed.start("h3")
    bed.running()
    bed.order("all", "exit 0")
    assert bed.codes(first, second, third) == [0] * 3, bed.said()
    bed.clean()


@pytest.mark.thorough  # rendezvous/scheduler/test_recovery.py kills it at every commit of one
def test_a_scheduler_killed_in_a_restart_counts_it_once(bed: Bed) -> None:
    jobs = bed.job("--max-restarts", "1", "--grace", "2", worker=["ignore"])
    bed.running()
    bed.order(1, "exit 7", when="g0")
    bed.event("restarting")
    kill_scheduler(jobs[0])
    assert [note.restarts for note in bed.running(generation=1)] == [1, 1, 1]
    bed.order("all", "exit 8", when="g1")
    assert bed.codes() == [8] * 3, bed.said()
    bed.clean()


def test_a_scheduler_that_dies_again_and_again_is_given_up(bed: Bed) -> None:
    """The others are told at once, and do not wait for a minute."""
    jobs = bed.job("--grace", "3")
    bed.running()
    deadline = time.monotonic() + 90
    while jobs[0].process.poll() is None and time.monotonic() < deadline:
        if pid := jobs[0].scheduler():
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    assert bed.codes(timeout=10) == [69] * 3, bed.said()
    assert len(bed.notes("signal")) == 3
    assert "after 3 restarts in 60 s" in jobs[1].err and "scheduler process on h1" in jobs[1].err
    assert bed.event("verdict").data["code"] == 69
    bed.clean()


@pytest.mark.thorough  # e2e/test_recovery.py has it: `damaged_journal`
@pytest.mark.parametrize("journal", ["missing", "empty", "damaged"])
def test_a_scheduler_that_cannot_be_resumed_ends_the_job_everywhere(bed: Bed, journal: str) -> None:
    jobs = bed.job("--grace", "3")
    bed.running()
    (path,) = bed.folder.rglob("scheduler.journal")
    os.kill(jobs[0].scheduler(), signal.SIGSTOP)  # it must not write what is damaged
    if journal == "missing":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(b"" if journal == "empty" else data[:40] + b"~" + data[41:])
    os.kill(jobs[0].scheduler(), signal.SIGKILL)
    assert bed.codes(timeout=15) == [69] * 3, bed.said()
    assert bed.event("verdict").data["code"] == 69
    bed.clean()


def test_the_first_agent_killed_with_its_scheduler_is_not_waited_for(bed: Bed) -> None:
    """Nobody is left to tell the others: the host refuses their connections."""
    jobs = bed.job("--grace", "3")
    bed.running()
    scheduler = jobs[0].scheduler()
    os.kill(jobs[0].pid, signal.SIGSTOP)  # so that neither sees the other's end
    os.kill(scheduler, signal.SIGKILL)
    os.kill(jobs[0].pid, signal.SIGKILL)
    assert bed.codes(*jobs[1:], timeout=30) == [69] * 2, bed.said()
    assert "refused connections for 5 s" in jobs[1].err
    bed.clean()


@pytest.mark.thorough
def test_a_stop_while_there_is_no_scheduler_is_obeyed(bed: Bed) -> None:
    """By all: the first node waits for its scheduler to be back, and tells it."""
    jobs = bed.job("--grace", "3", "--on-scheduler-loss", "wait=10")
    bed.running()
    kill_scheduler(jobs[0])
    jobs[0].signal(signal.SIGTERM)
    assert bed.codes(timeout=60) == [143] * 3, bed.said()
    assert len(bed.notes("signal")) == 3
    bed.clean()


@pytest.mark.thorough  # e2e/test_recovery.py has it: `stays_away`
def test_a_job_told_not_to_wait_ends_at_once(bed: Bed) -> None:
    jobs = bed.job("--on-scheduler-loss", "stop")
    bed.running()
    kill_scheduler(jobs[0])
    assert bed.codes(timeout=40) == [69] * 3, bed.said()
    bed.clean()
