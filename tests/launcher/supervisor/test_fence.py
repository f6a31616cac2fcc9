"""
The fence: an agent that stands still keeps no workers beyond it; nor does a supervisor, nor both.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pdrun.launcher.stdlib_only import watchdog
from pdrun.launcher.stdlib_only.watchdog import (
    FENCE_DELAY_SECONDS,
    MAX_WAIT_SECONDS,
    RECHECK_SECONDS,
    STALL_SECONDS,
    Fence,
)
from pdrun.launcher.supervisor.events import Exited, Spawned, WorkersFenced
from pdrun.rendezvous.transport.zmq_util import wait_readable
from tests.lib.supervisor_driver import (
    SupervisorDriver,
    is_alive,
    python,
    read_pid,
    supervisor_driver,
    wait_until,
)

LEAVES_A_CHILD = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    with open(sys.argv[1], 'w') as file:
        file.write(f'{os.getpid()}\\n')
time.sleep(600)
"""


SOON_SECONDS = 0.6
SLACK_SECONDS = 8.0
"""For a machine that runs other work."""


def begin(driver: SupervisorDriver, folder: Path) -> tuple[list[int], float]:
    """
    Start a worker with a child in a session of its own, then set a fence that is near; return the
    pids and the fence.
    """
    driver.start(0, python(LEAVES_A_CHILD, folder / "pid"))
    pids = [driver.wait(Spawned).pid, read_pid(folder / "pid")]
    fence = time.monotonic() + SOON_SECONDS
    driver.supervisor.send_ping(fence)
    return pids, fence


def watchdog_of(driver: SupervisorDriver, workers: list[int]) -> int:
    """Return the pid of the supervisor's watchdog: its only child that is no worker."""
    children = Path(f"/proc/{driver.supervisor.pid}/task/{driver.supervisor.pid}/children")
    (pid,) = {int(pid) for pid in children.read_text().split()} - set(workers)
    return pid


def ended_at(pids: list[int], seconds: float = 20.0) -> float:
    """Wait until all processes have ended; return the time."""
    wait_until(lambda: not any(map(is_alive, pids)), seconds, "the end of the workers")
    return time.monotonic()


def keep(driver: SupervisorDriver, fence: float | None, until: float) -> None:
    """Do as an agent that is well: move the fence until a time."""
    while time.monotonic() < until:
        driver.supervisor.read_events()
        driver.supervisor.send_ping(fence)
        time.sleep(0.1)


@pytest.mark.parametrize("still", ["agent", "agent and supervisor"])
def test_workers_end_at_the_fence(tmp_path: Path, still: str) -> None:
    with supervisor_driver() as driver:
        pids, fence = begin(driver, tmp_path)
        if still == "agent":  # the supervisor acts, not its watchdog
            os.kill(watchdog_of(driver, pids), signal.SIGSTOP)
        else:  # the watchdog is left
            driver.supervisor.read_events()
            wait_readable(driver.supervisor.fileno(), wait=5)  # it has passed the fence on
            os.kill(driver.supervisor.pid, signal.SIGSTOP)
        assert fence <= ended_at(pids) < fence + FENCE_DELAY_SECONDS + SLACK_SECONDS
        with pytest.raises(WorkersFenced, match="did not show in time that they may run"):
            driver.wait(Exited)
        assert not is_alive(driver.supervisor.pid)


def test_an_agent_that_is_well_moves_the_fence(tmp_path: Path) -> None:
    with supervisor_driver() as driver:
        pids, first = begin(driver, tmp_path)
        driver.supervisor.lift_fence()  # the next ping is sent immediately
        keep(driver, first + 60.0, first + 1.0)
        assert all(map(is_alive, pids)) and is_alive(driver.supervisor.pid)


def test_a_fence_is_lifted_when_no_worker_runs(tmp_path: Path) -> None:
    """What is ready for the next generation (fork server, store) may outlast it."""
    with supervisor_driver() as driver:
        pids, fence = begin(driver, tmp_path)
        driver.supervisor.lift_fence()
        keep(driver, None, fence + FENCE_DELAY_SECONDS + 0.5)
        assert all(map(is_alive, pids))


def test_a_machine_that_stood_still_is_given_time_to_ask(tmp_path: Path) -> None:
    """Supervisor, watchdog and agent wake up after the fence: the agent may still move it."""
    with supervisor_driver() as driver:
        pids, fence = begin(driver, tmp_path)
        both = (driver.supervisor.pid, watchdog_of(driver, pids))
        for pid in both:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(max(0.0, fence - time.monotonic()) + MAX_WAIT_SECONDS + STALL_SECONDS + 0.2)
        assert all(map(is_alive, pids))
        for pid in both:
            os.kill(pid, signal.SIGCONT)
        driver.supervisor.lift_fence()
        keep(driver, time.monotonic() + 600.0, time.monotonic() + RECHECK_SECONDS + 0.5)
        assert all(map(is_alive, pids))


def test_what_one_process_judges() -> None:
    fence = Fence(0.5)
    assert fence.wait_seconds(10.0) is None and not fence.is_over(1000.0)
    fence.move(20.0)
    assert fence.wait_seconds(10.0) == MAX_WAIT_SECONDS
    assert not fence.is_over(11.0)
    assert fence.wait_seconds(20.0) == 0.5 and not fence.is_over(20.4)
    assert fence.is_over(20.6)
    fence.move(30.0)  # in time for everything that follows
    assert fence.wait_seconds(21.0) == MAX_WAIT_SECONDS and not fence.is_over(22.0)
    assert fence.wait_seconds(29.0) == MAX_WAIT_SECONDS
    assert not fence.is_over(40.0), "it stood still itself"
    assert fence.wait_seconds(40.0) == MAX_WAIT_SECONDS and not fence.is_over(41.0)
    assert fence.wait_seconds(41.5) == pytest.approx(40.0 + RECHECK_SECONDS - 41.5)
    assert fence.is_over(40.0 + RECHECK_SECONDS)
    fence.move(None)
    assert not fence.is_over(1e9)
    late = Fence()
    assert late.wait_seconds(10.0) is None
    late.move(20.0)
    assert not late.is_over(30.0), "it may have stood still before it read its first fence"
    assert late.wait_seconds(30.0) == MAX_WAIT_SECONDS
    assert late.is_over(31.0 + RECHECK_SECONDS - 1.0)


def test_the_watchdog_reads_the_last_line_and_the_end() -> None:
    read, write = os.pipe()
    fence = Fence()
    watchdog.write_fence(write, 12.5)
    watchdog.write_fence(write, 13.25)
    assert watchdog.read_fence(read, fence) and fence.fence_at == 13.25
    watchdog.write_fence(write, None)
    assert watchdog.read_fence(read, fence) and fence.fence_at is None
    watchdog.write_fence(-1, 1.0)  # there is no watchdog
    os.close(write)
    assert not watchdog.read_fence(read, fence)
    os.close(read)
