"""Each generation starts once, in its turn, and with the store that was announced for it."""

from __future__ import annotations

import os
import socket

from pdrun.rendezvous.protocol import messages as m
from tests.launcher.agent.test_conversation import WELCOME, AgentHarness, ended, started
from tests.lib.agent_fakes import make_assign, make_plan


def test_workers_that_run_are_not_started_again():
    with AgentHarness() as harness:
        started(harness)
        harness.supervisor.commands.clear()
        harness.turn(m.Start(0))
        assert harness.supervisor.commands == {}


def test_a_start_of_another_generation_starts_nobody():
    with AgentHarness() as harness:
        harness.turn(WELCOME, make_assign(2, nodes=2), m.Start(1))
        assert harness.supervisor.commands == {}
        harness.turn(m.Start(0))
        assert list(harness.supervisor.commands) == [0]


def test_the_store_of_a_restart_is_the_one_that_was_announced_for_it():
    with AgentHarness(plan=make_plan(1, nodes=2, max_restarts=1)) as harness:
        started(harness)
        harness.turn(events=ended(1 << 8))
        (finished,) = harness.sent(m.Finished)
        harness.turn(m.Assign(1, 0, 2, 0, 2, 1, finished.store))
        with socket.socket(fileno=os.dup(harness.agent._helpers.stores.fileno())) as listener:
            assert f"127.0.0.1:{listener.getsockname()[1]}" == finished.store
