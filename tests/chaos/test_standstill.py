"""
Single processes that stand still (SIGSTOP, a debugger, a swap storm) while the workers run on: never
two generations at once, and a stop is obeyed.

Each fault is a function of a bed; they mostly wait, so the module runs them side by side.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from tests.chaos.jobs import Bed, NodeJob
from tests.e2e.conftest import until
from tests.lib.tiers import thorough

SERVED = 20.0
"""Seconds for a stop that takes at most ten on a quiet machine, with the grace of the workers."""


def agent_stands_still(bed: Bed) -> None:
    """Its supervisor ends the old rank before the others go on; then the node joins again."""
    _still(bed, lambda job: [job.pid])


def agent_of_the_first_node_stands_still(bed: Bed) -> None:
    """Its scheduler runs on, and gives the node up like any other."""
    _still(bed, lambda job: [job.pid], host="h1")


def agent_and_supervisor_stand_still(bed: Bed) -> None:
    """The watchdog is left."""
    _still(bed, lambda job: [job.pid, job.supervisor()])


def supervisor_stands_still_on_a_node_that_is_cut_off(bed: Bed) -> None:
    """Its agent cannot end the workers by it, and the others go on: it is ended itself."""
    _still(bed, lambda job: [job.supervisor()], cut=True)


def _still(
    bed: Bed, choose: Callable[[NodeJob], list[int]], host: str = "h3", *, cut: bool = False
) -> None:
    jobs = bed.job("--grace", "3", "--grow", "1", nodes="2:3")
    bed.running(3)
    stopped = next(job for job in jobs if job.host.name == host)
    pids = choose(stopped)
    assert all(pids), "the processes are found"
    if cut:
        bed.cluster.cut("h1", host)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    again = bed.running(2, generation=1)
    time.sleep(1.5)  # a worker that were left would still note that it runs
    old = [life for life in bed.lives() if life.generation == 0 and life.host == host]
    assert old and max(life.last for life in old) <= again[0].at, "two generations ran at once"
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            assert pid != stopped.pid, "only the supervisor may have been ended"
    stopped.resume()
    bed.cluster.heal()
    bed.running(3, generation=2)
    bed.order("all", "exit 0")
    assert bed.codes(timeout=90) == [0] * 3, bed.said()
    bed.clean()


def supervisor_stands_still(bed: Bed) -> None:
    """A job of fixed size: its workers are ended with it, and all nodes have one verdict."""
    jobs = bed.job("--grace", "3")
    bed.running()
    began = time.monotonic()
    os.kill(jobs[1].supervisor(), signal.SIGSTOP)
    assert bed.codes() == [137] * 3, bed.said()
    last = max(life.last for life in bed.lives() if life.host == "h2")
    assert last - began < SERVED, "seven seconds on a quiet machine"
    assert "did not answer for 6 s" in jobs[1].err
    bed.clean()


def ctrl_c_on_the_first_node_while_its_scheduler_stands_still(bed: Bed) -> None:
    """The scheduler is ended and started again, and serves the stop."""
    _stop_without_scheduler(bed, 0)


def ctrl_c_on_another_node_while_the_scheduler_stands_still(bed: Bed) -> None:
    """That node waits for the next scheduler, which the first node starts."""
    _stop_without_scheduler(bed, 1)


def _stop_without_scheduler(bed: Bed, node: int) -> None:
    jobs = bed.job("--grace", "3")
    bed.running()
    scheduler = jobs[0].scheduler()
    os.kill(scheduler, signal.SIGSTOP)
    began = jobs[node].signal(signal.SIGINT)
    codes = bed.codes(timeout=60)
    seconds = time.monotonic() - began
    assert codes == [130] * 3 and seconds < SERVED, (codes, seconds, bed.said())
    assert len(bed.events("verdict")) == 1 and len(bed.notes("signal")) == 3
    bed.clean()


def scheduler_that_stands_still_for_long(bed: Bed) -> None:
    """It is replaced, and no worker notices."""
    jobs: list[NodeJob] = bed.job()
    bed.running()
    scheduler = jobs[0].scheduler()
    os.kill(scheduler, signal.SIGSTOP)
    bed.event("resumed")
    until(lambda: jobs[0].scheduler() not in (0, scheduler), "another scheduler", 20)
    time.sleep(2)
    bed.order("all", "exit 0")
    assert bed.codes() == [0] * 3, bed.said()
    assert not bed.events("lost") and not bed.notes("signal")
    bed.clean()


FAULTS = (
    agent_stands_still,
    agent_and_supervisor_stand_still,
    supervisor_stands_still_on_a_node_that_is_cut_off,
    agent_of_the_first_node_stands_still,
    ctrl_c_on_another_node_while_the_scheduler_stands_still,
    supervisor_stands_still,
    scheduler_that_stands_still_for_long,
    ctrl_c_on_the_first_node_while_its_scheduler_stands_still,
)
"""The longest first."""
SIBLINGS = (
    agent_of_the_first_node_stands_still,
    ctrl_c_on_the_first_node_while_its_scheduler_stands_still,
    scheduler_that_stands_still_for_long,
)
"""Only in the thorough run; another node, and tests/rendezvous/scheduler, have what they show."""
CASES = [thorough(fault.__name__) if fault in SIBLINGS else fault.__name__ for fault in FAULTS]


@pytest.mark.slow
@pytest.mark.parametrize("fault", CASES)
def test_standstill(fault: str, side_by_side: dict[str, Future[None]]) -> None:
    side_by_side[fault].result(timeout=170)
