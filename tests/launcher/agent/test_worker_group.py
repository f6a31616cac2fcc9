"""
The workers of a generation, with a keeper that only remembers and a clock that is turned by hand.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pdrun.clock import FakeClock
from pdrun.launcher.agent import worker_group as module
from pdrun.launcher.agent.worker_group import WorkerGroup
from pdrun.launcher.common import procfs
from pdrun.launcher.supervisor.events import Exited, Spawned, SpawnFailed, Swept
from tests.lib.agent_fakes import FakeOutput, FakeSupervisor, make_assign, make_plan
from tests.lib.supervisor_driver import wait_until

HEAD = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n'
GLOO = HEAD + "RuntimeError: Connection closed by peer\n"
OWN = HEAD + "ValueError: boom\n"


class GroupHarness:
    """A started group with fakes."""

    def __init__(self, workers: int = 2, **plan) -> None:
        self.supervisor, self.output, self.clock = FakeSupervisor(), FakeOutput(), FakeClock()
        self.reports = []
        self.group = WorkerGroup(
            make_plan(workers, **plan),
            "run",
            make_assign(workers),
            self.supervisor,
            self.output,
            self.clock,
            lambda rank, cause: self.reports.append((rank, cause)),
        )
        self.group.start_workers()
        for slot in range(workers):
            self.group.handle_event(Spawned(slot, 2**22 + slot))  # above any real pid

    def exit(self, slot: int, status: int, *, sweep: bool = True) -> None:
        self.group.handle_event(Exited(slot, 2**22 + slot, status, self.clock.monotonic()))
        if sweep:
            self.group.handle_event(Swept(slot, ()))

    def later(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.group.run_due()

    @property
    def kinds(self) -> list[tuple[int, str]]:
        return [(rank, cause.kind) for rank, cause in self.reports]


def test_each_worker_is_reported_once_after_its_sweep():
    harness = GroupHarness()
    harness.exit(0, 0, sweep=False)
    assert (harness.reports, harness.supervisor.sweeps) == ([], [0])
    harness.group.handle_event(Swept(0, ()))
    harness.exit(1, 42 << 8)
    assert harness.kinds == [(0, "ok"), (1, "exit")]
    assert harness.group.is_done
    assert harness.output.revealed == [1]


def test_a_slow_sweep_does_not_hold_the_report_for_ever():
    harness = GroupHarness(1)
    harness.exit(0, 3 << 8, sweep=False)
    assert harness.group.next_deadline() == harness.clock.monotonic() + module.SWEEP_SECONDS
    harness.later(module.SWEEP_SECONDS)
    assert (harness.kinds, harness.group.is_done) == ([(0, "exit")], False)
    harness.later(module.SWEEP_SECONDS + module.UNKILLABLE_SECONDS)
    assert harness.group.is_done


def test_a_victim_is_held_back_until_the_true_cause_has_spoken():
    harness = GroupHarness(3)
    harness.output.traces[1] = (harness.clock.monotonic(), GLOO)
    harness.exit(1, 1 << 8)
    assert harness.reports == []
    harness.clock.advance(0.1)
    harness.output.traces[0] = (harness.clock.monotonic(), OWN)
    harness.exit(0, 1 << 8)
    assert harness.kinds == [(0, "exception")]
    harness.later(module.SETTLE_SECONDS)
    assert harness.kinds == [(0, "exception"), (1, "communication")]


def test_a_victim_alone_is_reported_after_the_settling():
    harness = GroupHarness(2)
    harness.output.traces[1] = (harness.clock.monotonic(), GLOO)
    harness.exit(1, 1 << 8)
    harness.later(module.SETTLE_SECONDS - 0.01)
    assert harness.reports == []
    harness.later(0.02)
    assert harness.kinds == [(1, "communication")]


def test_the_last_victim_waits_for_nobody():
    harness = GroupHarness(2)
    for slot in (0, 1):
        harness.output.traces[slot] = (harness.clock.monotonic(), GLOO)
        harness.exit(slot, 1 << 8)
    assert sorted(harness.kinds) == [(0, "communication"), (1, "communication")]


@pytest.mark.parametrize(("kind", "group"), [("command", True), ("script", False)])
def test_stop_signals_leader_or_group_and_kills_at_grace(kind, group):
    harness = GroupHarness(2, kind=kind, argv=("python", "x.py"))
    harness.group.stop_workers(signal.SIGTERM, 5.0)
    assert harness.supervisor.signals == [(0, 15, group), (1, 15, group)]
    harness.exit(0, signal.SIGTERM)
    assert harness.group.next_deadline() == harness.clock.monotonic() + 5.0
    harness.later(4.9)
    assert len(harness.supervisor.signals) == 2
    harness.later(0.2)
    assert harness.supervisor.signals[2:] == [(1, 9, True)]
    harness.exit(1, signal.SIGKILL)
    assert harness.kinds == [(0, "stopped"), (1, "stopped")]
    assert harness.group.is_done


def test_a_stop_that_is_repeated_sends_nothing_twice_and_an_earlier_one_counts():
    harness = GroupHarness(1)
    harness.group.stop_workers(signal.SIGTERM, 5.0)
    harness.clock.advance(1)
    harness.group.stop_workers(signal.SIGTERM, 5.0)
    assert len(harness.supervisor.signals) == 1
    harness.group.stop_workers(signal.SIGKILL, 0.0)
    assert harness.supervisor.signals[1:] == [(0, 9, True)]


def test_what_cannot_be_killed_is_named_and_left():
    harness = GroupHarness(1)
    harness.group.stop_workers(signal.SIGKILL, 0.0)
    assert harness.group.next_deadline() == harness.clock.monotonic() + module.UNKILLABLE_SECONDS
    harness.later(module.UNKILLABLE_SECONDS)
    assert harness.group.is_done
    assert "cannot be killed" in harness.output.printed_lines[0]
    harness.exit(0, 9)  # it did end after all: no second report
    assert len(harness.reports) == 1


def test_what_ended_before_the_stop_keeps_its_cause():
    harness = GroupHarness(2)
    harness.output.traces[0] = (harness.clock.monotonic(), OWN)
    harness.clock.advance(0.05)
    harness.group.stop_workers(signal.SIGTERM, 5.0)
    harness.exit(0, signal.SIGTERM)
    harness.exit(1, signal.SIGTERM)
    assert harness.kinds == [(0, "exception"), (1, "stopped")]
    assert [cause.code for _, cause in harness.reports] == [143, 143]
    assert harness.supervisor.signals == [
        (1, signal.SIGTERM, True)
    ]  # the other was still on its way out


def test_an_order_to_stop_waits_for_one_that_may_be_leaving():
    harness = GroupHarness(2)
    harness.output.traces = {0: (harness.clock.monotonic(), OWN)}
    harness.clock.advance(0.05)
    harness.group.stop_workers(signal.SIGTERM, 30.0)
    assert harness.group.next_deadline() == harness.clock.monotonic() + module.STOP_DELAY_SECONDS
    harness.later(module.STOP_DELAY_SECONDS / 2)
    assert harness.supervisor.signals == [(1, signal.SIGTERM, True)]
    harness.later(module.STOP_DELAY_SECONDS / 2 + 0.01)
    assert harness.supervisor.signals[1:] == [(0, signal.SIGTERM, True)]
    harness.exit(0, signal.SIGTERM)
    harness.exit(1, signal.SIGTERM)
    assert harness.kinds == [(0, "suspect"), (1, "stopped")]


@pytest.mark.parametrize(
    ("number", "age", "survived", "grace", "wait"),
    [
        (signal.SIGTERM, 0.1, False, 2.0, 1.0),
        (signal.SIGTERM, 0.1, True, 30.0, 0.0),
        (signal.SIGTERM, 11.0, False, 30.0, 0.0),
        (signal.SIGINT, 0.1, False, 30.0, 0.0),
    ],
)
def test_that_waiting_is_short_and_rare(number, age, survived, grace, wait):
    harness = GroupHarness(1)
    harness.output.traces, harness.output.survivors = (
        {0: (harness.clock.monotonic(), OWN)},
        {0} if survived else set(),
    )
    harness.clock.advance(age)
    harness.group.stop_workers(number, grace)
    assert len(harness.supervisor.signals) == (not wait)
    harness.later(wait + 0.001)
    assert harness.supervisor.signals == [(0, number, True)]


def test_workers_that_cannot_start_are_reported():
    harness = GroupHarness(1)
    harness.group.handle_event(SpawnFailed(0, 2, "/x: No such file"))
    assert [(cause.kind, cause.code) for _, cause in harness.reports] == [("startup", 127)]
    assert harness.group.is_done


def test_leftovers_are_said_unless_the_job_was_stopped():
    harness = GroupHarness(2)
    harness.exit(0, 0, sweep=False)
    harness.group.handle_event(Swept(0, ("77 sleep 600",)))
    assert harness.output.printed_lines == [
        "pdrun: rank 0 left processes behind, which were ended: 77 sleep 600"
    ]
    harness.group.stop_workers(signal.SIGTERM, 1.0)
    harness.exit(1, 15, sweep=False)
    harness.group.handle_event(Swept(1, ("78 sleep 600",), ("79 dd D",)))
    assert harness.output.printed_lines[1:] == [
        "pdrun: rank 1 left processes that cannot be killed: 79 dd D"
    ]


def test_a_dead_keeper_ends_every_worker():
    harness = GroupHarness(2)
    harness.exit(0, 0)
    harness.group.mark_lost("the keeper process was killed")
    assert harness.group.is_done
    assert harness.kinds == [(0, "ok"), (1, "lost")]
    assert harness.reports[1][1].summary == "the keeper process was killed"


def test_forwarded_signals_go_to_running_workers():
    harness = GroupHarness(2, kind="script", argv=("python", "x.py"))
    harness.exit(0, 0)
    harness.group.forward_signal(signal.SIGUSR1)
    harness.group.forward_signal(signal.SIGSTOP)
    assert harness.supervisor.signals == [(1, signal.SIGUSR1, False), (1, signal.SIGSTOP, True)]


def test_environment_of_each_worker():
    harness = GroupHarness(2, env={"MINE": "1", "RANK": "user"})
    env = harness.supervisor.commands[1].env
    assert (env["LOCAL_RANK"], env["MASTER_ADDR"], env["MASTER_PORT"], env["MINE"]) == (
        "1",
        "127.0.0.1",
        "4000",
        "1",
    )
    assert env["RANK"] == "user"


def test_a_worker_that_somebody_stopped_is_continued_so_that_it_hears_the_order():
    harness = GroupHarness(2)
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as stopped:
        try:
            os.kill(stopped.pid, signal.SIGSTOP)
            wait_until(lambda: procfs.read_state(stopped.pid).letter == "T")
            harness.group.handle_event(Spawned(1, stopped.pid))
            harness.group.stop_workers(signal.SIGTERM, 5.0)
            assert harness.supervisor.signals == [
                (0, signal.SIGTERM, True),
                (1, signal.SIGTERM, True),
                (1, signal.SIGCONT, True),
            ]
        finally:
            stopped.kill()


def test_who_runs_and_which_ranks_are_here():
    harness = GroupHarness(2)
    assert harness.group.alive_workers() == [(0, 0, 2**22), (1, 1, 2**22 + 1)]
    harness.exit(0, 0)
    assert harness.group.alive_workers() == [(1, 1, 2**22 + 1)] and harness.group.ranks == range(2)
