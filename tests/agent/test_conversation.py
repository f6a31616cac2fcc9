"""The agent's part of the conversation, with a scheduler that is a list: losses, refusals, repetitions, silences."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest

from pdrun.errors import PdrunError, RendezvousError
from pdrun.launcher import agent as module
from pdrun.launcher.agent import Agent
from pdrun.launcher.model import Exited, Spawned, Swept
from pdrun.launcher.signals import Signals
from pdrun.launcher.surroundings import Surroundings
from pdrun.rendezvous import messages as m
from tests.agent.fakes import FakeKeeper, FakeLink, FakeOutput, make_assign, make_plan

WELCOME = m.Welcome("demo", "demo-run", "", "s" * 32, 1.0, 10.0)


class Desk:
    """An agent that is turned by hand."""

    def __init__(self, *inbox, plan=None, **around) -> None:
        self.keepers, self.output = [], FakeOutput()
        self.link = FakeLink(*inbox)
        self.signals = Signals()
        self.agent = Agent(
            plan or make_plan(1, nodes=2, grace=5.0), self.link, self.signals,
            Surroundings(keeper=self.new_keeper, output=lambda plan: self.output, **around),
        )  # fmt: skip

    def new_keeper(self, plan=None) -> FakeKeeper:
        self.keepers.append(FakeKeeper())
        return self.keepers[-1]

    @property
    def keeper(self) -> FakeKeeper:
        return self.keepers[-1]

    def __enter__(self):
        self.signals.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.agent.close()
        for keeper in self.keepers:
            keeper.close()
        self.signals.__exit__(*error)

    def turn(self, *inbox, events=()) -> None:
        """One round of the loop; creates the keeper as `run` does."""
        self.agent._keeper = self.agent._keeper or self.new_keeper()
        self.link.inbox += inbox
        self.keeper.add(*events)
        self.agent._turn()

    def sent(self, kind):
        return [message for message in self.link.sent if isinstance(message, kind)]


def started(desk: Desk) -> None:
    desk.turn(WELCOME, make_assign(2, nodes=2), m.Start(0))
    desk.turn(events=[Spawned(0, 2**22)])


@pytest.fixture
def desk():
    with Desk() as made:
        yield made


def ended(status: int) -> list:
    return [Exited(0, 2**22, status, time.monotonic()), Swept(0, ())]


def test_the_whole_conversation_in_order(desk):
    started(desk)
    desk.turn(events=ended(3 << 8))
    desk.turn(m.Verdict(3, "rank 0 failed"))
    assert [type(message) for message in desk.link.sent] == [m.Join, m.Ready, m.WorkerExit, m.Finished, m.Leave]
    assert desk.agent.run() == 3
    join = desk.sent(m.Join)[0]
    assert (join.node, join.workers, join.store.startswith("127.0.0.1:")) == ("node0", 1, True)


def test_what_is_repeated_after_a_reconnection_is_done_once(desk):
    started(desk)
    desk.turn(WELCOME, make_assign(2, nodes=2), m.Start(0), m.StopWorkers(7, 15, 1.0, "of another generation"))
    assert (len(desk.sent(m.Join)), len(desk.sent(m.Ready)), len(desk.keeper.commands)) == (1, 1, 1)
    assert desk.keeper.signals == []


def test_a_restart_starts_anew_with_a_fresh_store():
    with Desk(plan=make_plan(1, nodes=2, max_restarts=1)) as desk:
        started(desk)
        desk.turn(events=ended(1 << 8))
        fresh = desk.sent(m.Finished)[0].store
        assert fresh and fresh != desk.sent(m.Join)[0].store
        desk.turn(m.Assign(1, 0, 2, 0, 2, 1, fresh), m.Start(1))
        assert desk.keeper.commands[0].env["TORCHELASTIC_RESTART_COUNT"] == "1"
        assert desk.keeper.commands[0].env["MASTER_PORT"] == fresh.rpartition(":")[2]


def test_a_lost_link_stops_the_workers_with_grace_and_leaves_with_69(desk):
    started(desk)
    desk.turn(RendezvousError("the scheduler was silent for 10 s"))
    assert desk.keeper.signals == [(0, signal.SIGTERM, True)]
    assert "silent for 10 s" in desk.output.said[-1]
    desk.turn(events=ended(signal.SIGTERM))
    assert desk.agent.run() == 69
    assert desk.output.said[-1] == "pdrun: exit code 69"


def test_a_link_lost_while_leaving_does_not_spin(desk):
    started(desk)
    desk.turn(RendezvousError("gone"))
    os.write(desk.link._write, b"x")  # readable for ever
    begin = time.monotonic()
    desk.agent._group._kill_at = begin + 0.2
    desk.turn()
    assert time.monotonic() - begin > 0.15


def test_a_dead_scheduler_process_is_noticed_at_once():
    read, write = os.pipe()

    class Child:
        def fileno(self) -> int:
            return read

    with Desk(scheduler_child=Child()) as desk:
        started(desk)
        os.close(write)
        begin = time.monotonic()
        desk.turn()
        assert desk.keeper.signals == [(0, signal.SIGTERM, True)]
        assert "scheduler process on this node has died" in desk.output.said[-1]
        assert time.monotonic() - begin < 0.5
    os.close(read)


def test_a_refusal_before_the_start_is_an_error_with_its_code(desk):
    desk.turn(WELCOME)
    with pytest.raises(PdrunError, match="two nodes are called") as caught:
        desk.turn(m.Refuse(78, "two nodes are called node0"))
    assert caught.value.exit_code == 78


def test_a_refusal_while_workers_run_ends_them_first(desk):
    started(desk)
    desk.turn(m.Refuse(69, "node0 was given up"))
    assert desk.keeper.signals == [(0, signal.SIGTERM, True)]
    desk.turn(events=ended(signal.SIGTERM))
    assert desk.agent.run() == 69


def test_a_node_that_cannot_start_says_so(desk):
    desk.agent._planner = lambda welcome: make_plan(1, nodes=2, argv=("/nowhere/tool",))
    desk.turn(WELCOME, make_assign(2, nodes=2))
    (unready,) = desk.sent(m.Unready)
    assert (unready.code, "/nowhere/tool" in unready.reason) == (127, True)
    assert not desk.sent(m.Ready)


def test_a_verdict_while_workers_run_ends_them(desk):
    started(desk)
    desk.turn(m.Verdict(69, "host1 was lost"))
    assert desk.keeper.signals == [(0, signal.SIGTERM, True)]
    desk.turn(events=ended(signal.SIGTERM))
    assert desk.agent.run() == 69


def test_a_stop_that_nobody_answers_is_carried_out_alone(desk, monkeypatch):
    monkeypatch.setattr(module, "STOP_ANSWER", 0.05)
    started(desk)
    desk.agent._signalled(signal.SIGINT)
    assert desk.sent(m.StopRequest) == [m.StopRequest(2, "SIGINT on node0", False)]
    time.sleep(0.06)
    desk.turn()
    assert desk.keeper.signals == [(0, signal.SIGINT, True)]
    desk.turn(events=ended(signal.SIGINT))
    assert desk.agent.run() == 130


def test_ctrl_c_while_waiting_for_nodes_ends_within_a_second(desk):
    desk.turn(WELCOME, m.Waiting(("node0",), ("node rank 1",), 2, 5.0, 600.0))
    desk.agent._signalled(signal.SIGINT)
    begin = time.monotonic()
    assert desk.agent.run() == 130
    assert time.monotonic() - begin < 1.0


def test_ctrl_c_before_the_welcome_ends_at_once(desk):
    desk.agent._signalled(signal.SIGTERM)
    assert desk.agent.run() == 143


def test_the_second_stop_kills_here_without_asking_anybody(desk):
    started(desk)
    desk.agent._signalled(signal.SIGINT)
    desk.agent._signalled(signal.SIGINT)
    assert desk.sent(m.StopRequest)[1].force
    assert (0, signal.SIGKILL, True) in desk.keeper.signals


def test_a_node_that_has_finished_waits_for_the_others_to_stop(desk):
    started(desk)
    desk.turn(events=ended(0))
    desk.agent._signalled(signal.SIGINT)
    assert desk.agent._answer_by > time.monotonic() + 5.0  # their grace
    desk.agent._signalled(signal.SIGINT)
    assert desk.agent._answer_by < time.monotonic() + 2.1
    desk.turn(m.Verdict(130, "stopped by SIGINT on node0"))
    assert desk.agent.run() == 130


def test_missing_nodes_are_named_with_the_command_that_starts_them():
    with Desk(address="10.0.0.1:29400") as desk:
        waiting = m.Waiting(("node0",), ("node rank 1",), 2, 5.0, 600.0)
        desk.turn(WELCOME, waiting, waiting)
        line = (
            "pdrun: 1 of 2 nodes are here (node0), missing: node rank 1; 5.0 s of 10 min 0 s; "
            "start each with: pdrun join 10.0.0.1:29400"
        )
        token = "the token of `pdrun token show` here"
        assert desk.output.said == [f"{line} (a host that does not share this home needs {token})", line]


@pytest.mark.parametrize(("address", "place", "end"), [
    ("127.0.0.1:29400", {}, "pdrun join 127.0.0.1:29400"),
    ("10.0.0.1:29400", {"insecure": True}, "pdrun join --insecure 10.0.0.1:29400"),
    ("10.0.0.1:29400", {"token_file": "t"}, "needs the token of this node's --token-file)"),
])  # fmt: skip
def test_the_line_for_the_others_says_how_they_are_trusted(address, place, end):
    plan = make_plan(1, nodes=2)
    plan = replace(plan, spec=replace(plan.spec, place=replace(plan.spec.place, **place)))
    with Desk(plan=plan, address=address) as desk:
        desk.turn(WELCOME, m.Waiting(("node0",), ("1 more node",), 2, 5.0, 600.0))
        assert desk.output.said[0].endswith(end)


def test_the_end_of_the_lifeline_ends_everything_at_once():
    read, write = os.pipe()
    with Desk(lifeline=read) as desk:
        started(desk)
        os.close(write)
        desk.turn()
        assert desk.keeper.closed
        assert desk.agent.run() == 69
    os.close(read)


def test_quiet_agents_leave_the_jobs_lines_to_another():
    with Desk(quiet=True) as desk:
        started(desk)
        desk.turn(m.Waiting(("node0",), ("x",), 2, 5.0, 600.0), m.Verdict(1, "rank 5 failed"))
        assert desk.output.said == []
