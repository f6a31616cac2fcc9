"""
The agent's part of the conversation, with a scheduler that is a list: losses, refusals,
repetitions, silences.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest

from pdrun.errors import PdrunError, RendezvousError
from pdrun.launcher.agent import shutdown as module
from pdrun.launcher.agent.agent import Agent
from pdrun.launcher.agent.interfaces import AgentDeps
from pdrun.launcher.common.signals import SignalReceiver
from pdrun.launcher.k8s.manifest import LOST_POD_EXIT_CODES
from pdrun.launcher.supervisor.events import Exited, Spawned, Swept, WorkersFenced
from pdrun.rendezvous.protocol import messages as m
from tests.lib.agent_fakes import FakeLink, FakeOutput, FakeSupervisor, make_assign, make_plan

WELCOME = m.Welcome("demo", "demo-run", "", "s" * 32, 1.0, 10.0)


class FakeScheduler:
    """A scheduler process that runs."""

    due: float | None = None
    is_away = False
    hurried = 0
    verdict: m.Verdict | None = None

    def fileno(self) -> int:
        return -1

    def deadline(self) -> float | None:
        return self.due

    def is_restarting(self) -> bool:
        return self.is_away

    def kill_if_silent(self) -> None:
        self.hurried += 1

    def keep_verdict(self, verdict: m.Verdict) -> None:
        self.verdict = verdict

    def restart_if_dead(self) -> str:
        return ""


class AgentHarness:
    """An agent that is turned by hand."""

    def __init__(self, *inbox, plan=None, **deps) -> None:
        self.supervisors, self.output = [], FakeOutput()
        self.link = FakeLink(*inbox)
        self.signals = SignalReceiver()
        self.agent = Agent(
            plan or make_plan(1, nodes=2, grace=5.0),
            self.link,
            self.signals,
            AgentDeps(
                start_supervisor=self.new_supervisor, make_output=lambda plan: self.output, **deps
            ),
        )

    def new_supervisor(self, plan=None) -> FakeSupervisor:
        self.supervisors.append(FakeSupervisor())
        return self.supervisors[-1]

    @property
    def supervisor(self) -> FakeSupervisor:
        return self.supervisors[-1]

    def __enter__(self):
        self.signals.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.agent.close()
        for supervisor in self.supervisors:
            supervisor.close()
        self.signals.__exit__(*error)

    def turn(self, *inbox, events=()) -> None:
        """One round of the loop; creates the keeper as `run` does."""
        self.agent._helpers.supervisor = self.agent._helpers.supervisor or self.new_supervisor()
        self.link.inbox += inbox
        self.supervisor.add_events(*events)
        self.agent._run_once()

    def sent(self, kind):
        return [message for message in self.link.sent if isinstance(message, kind)]


def started(harness: AgentHarness) -> None:
    harness.turn(WELCOME, make_assign(2, nodes=2), m.Start(0))
    harness.turn(events=[Spawned(0, 2**22)])


@pytest.fixture
def harness():
    with AgentHarness() as made:
        yield made


def ended(status: int) -> list:
    return [Exited(0, 2**22, status, time.monotonic()), Swept(0, ())]


def test_the_whole_conversation_in_order(harness):
    started(harness)
    harness.turn(events=ended(3 << 8))
    harness.turn(m.Verdict(3, "rank 0 failed"))
    assert [type(message) for message in harness.link.sent] == [
        m.Join,
        m.Ready,
        m.WorkerExit,
        m.Finished,
        m.Leave,
    ]
    assert harness.agent.run() == 3
    join = harness.sent(m.Join)[0]
    assert (join.node, join.workers, join.store.startswith("127.0.0.1:")) == ("node0", 1, True)


def test_what_is_repeated_after_a_reconnection_is_done_once(harness):
    started(harness)
    harness.turn(
        WELCOME,
        make_assign(2, nodes=2),
        m.Start(0),
        m.StopWorkers(7, 15, 1.0, "of another generation"),
    )
    assert (
        len(harness.sent(m.Join)),
        len(harness.sent(m.Ready)),
        len(harness.supervisor.commands),
    ) == (1, 1, 1)
    assert harness.supervisor.signals == []


def test_a_restart_starts_anew_with_a_fresh_store():
    with AgentHarness(plan=make_plan(1, nodes=2, max_restarts=1)) as harness:
        started(harness)
        harness.turn(events=ended(1 << 8))
        fresh = harness.sent(m.Finished)[0].store
        assert fresh and fresh != harness.sent(m.Join)[0].store
        harness.turn(m.Assign(1, 0, 2, 0, 2, 1, fresh), m.Start(1))
        assert harness.supervisor.commands[0].env["TORCHELASTIC_RESTART_COUNT"] == "1"
        assert harness.supervisor.commands[0].env["MASTER_PORT"] == fresh.rpartition(":")[2]


def test_a_lost_link_stops_the_workers_with_grace_and_leaves_with_69(harness):
    started(harness)
    harness.turn(RendezvousError("the scheduler was silent for 10 s"))
    assert harness.supervisor.signals == [(0, signal.SIGTERM, True)]
    assert "silent for 10 s" in harness.output.printed_lines[-1]
    harness.turn(events=ended(signal.SIGTERM))
    assert harness.agent.run() == 69
    assert harness.output.printed_lines[-1] == "pdrun: exit code 69"


def test_a_link_lost_while_leaving_does_not_spin(harness):
    started(harness)
    harness.turn(RendezvousError("gone"))
    os.write(harness.link._write, b"x")  # readable for ever
    begin = time.monotonic()
    harness.agent._generation.group._kill_at = begin + 0.2
    harness.turn()
    assert time.monotonic() - begin > 0.15


def test_a_dead_scheduler_process_is_noticed_at_once():
    read, write = os.pipe()

    class Child(FakeScheduler):
        def fileno(self) -> int:
            return read

        def restart_if_dead(self) -> str:
            raise RendezvousError("the scheduler process on this node has died")

    with AgentHarness(scheduler_process=Child()) as harness:
        started(harness)
        os.close(write)
        begin = time.monotonic()
        harness.turn()
        assert harness.supervisor.signals == [(0, signal.SIGTERM, True)]
        assert "scheduler process on this node has died" in harness.output.printed_lines[-1]
        assert time.monotonic() - begin < 5, "at once on a quiet machine"
    os.close(read)


def test_a_scheduler_process_that_is_started_again_disturbs_nobody():
    class Child(FakeScheduler):
        due: float | None = 0.0

        def restart_if_dead(self) -> str:
            self.due = None
            return "the scheduler process is back after 0.5 s"

    with AgentHarness(scheduler_process=Child()) as harness:
        started(harness)
        harness.turn()
        assert "pdrun: the scheduler process is back after 0.5 s" in harness.output.printed_lines
        assert harness.supervisor.signals == [] and harness.agent._shutdown.exit_code is None


def test_a_refusal_before_the_start_is_an_error_with_its_code(harness):
    harness.turn(WELCOME)
    with pytest.raises(PdrunError, match="two nodes are called") as caught:
        harness.turn(m.Refuse(78, "two nodes are called node0"))
    assert caught.value.exit_code == 78


def test_a_pod_waits_for_the_end_of_an_earlier_one(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    refusal = m.Refuse(78, "two nodes are called node0", retry=True)
    with AgentHarness(is_pod=True) as harness:
        harness.turn(WELCOME)
        for _ in range(2):
            renewed = harness.link.renewed
            begin = time.monotonic()
            harness.turn(refusal)
            while harness.link.renewed == renewed:
                harness.turn()
            assert time.monotonic() - begin >= 0.05
            harness.turn(WELCOME)
        assert [join.is_pod for join in harness.sent(m.Join)] == [True] * 3
        said = [line for line in harness.output.printed_lines if "an earlier pod" in line]
        assert len(said) == 1 and "waiting up to 15 s" in said[0]
        harness.turn(m.Standby("the job runs with 1 node"))
        # from now on an earlier instance is this agent itself
        harness.turn(m.Refuse(69, "node0 was given up", rejoin=True))
        harness.turn(WELCOME)
        assert not harness.sent(m.Join)[-1].is_pod


def test_a_pod_that_has_waited_long_enough_gives_no_verdict(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    refusal = m.Refuse(78, "two nodes are called node0", retry=True)
    with AgentHarness(is_pod=True, plan=make_plan(1, nodes=2, grace=0.0)) as harness:
        harness.turn(replace(WELCOME, dead=0.0))
        harness.turn(refusal)
        with pytest.raises(PdrunError, match="the earlier pod has not ended: two nodes") as caught:
            harness.turn(refusal)
        assert caught.value.exit_code in LOST_POD_EXIT_CODES, "the operator makes it again"


def test_a_node_that_was_started_again_asks_until_the_earlier_one_is_known_to_live(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    with AgentHarness(plan=make_plan(1, nodes=2)) as harness:
        harness.turn(WELCOME)
        harness.turn(m.Refuse(78, "two nodes are called node0", retry=True))
        harness.turn()
        harness.turn(WELCOME)
        assert len(harness.sent(m.Join)) == 2
        (said,) = [line for line in harness.output.printed_lines if "an earlier" in line]
        assert "an earlier agent of this name is still a node" in said
        with pytest.raises(PdrunError, match="two nodes") as caught:
            harness.turn(m.Refuse(78, "two nodes are called node0"))
        assert caught.value.exit_code == 78


def test_a_signal_ends_the_wait_for_an_earlier_pod():
    with AgentHarness(is_pod=True) as harness:
        harness.turn(WELCOME)
        harness.turn(m.Refuse(78, "two nodes are called node0", retry=True))
        harness.agent._on_signal(signal.SIGTERM)
        assert harness.agent.run() == 143


def test_a_refusal_while_workers_run_ends_them_first(harness):
    started(harness)
    harness.turn(m.Refuse(69, "node0 was given up"))
    assert harness.supervisor.signals == [(0, signal.SIGTERM, True)]
    harness.turn(events=ended(signal.SIGTERM))
    assert harness.agent.run() == 69


def test_a_node_that_cannot_start_says_so(harness):
    harness.agent._make_plan = lambda welcome: make_plan(1, nodes=2, argv=("/nowhere/tool",))
    harness.turn(WELCOME, make_assign(2, nodes=2))
    (unready,) = harness.sent(m.Unready)
    assert (unready.code, "/nowhere/tool" in unready.reason) == (127, True)
    assert not harness.sent(m.Ready)


def test_a_verdict_while_workers_run_ends_them(harness):
    started(harness)
    harness.turn(m.Verdict(69, "host1 was lost"))
    assert harness.supervisor.signals == [(0, signal.SIGTERM, True)]
    harness.turn(events=ended(signal.SIGTERM))
    assert harness.agent.run() == 69


def test_a_stop_that_nobody_answers_is_carried_out_alone(harness, monkeypatch):
    monkeypatch.setattr(module, "STOP_ANSWER_SECONDS", 0.05)
    started(harness)
    harness.agent._on_signal(signal.SIGINT)
    assert harness.sent(m.StopRequest) == [m.StopRequest(2, "SIGINT on node0", False)]
    time.sleep(0.06)
    harness.turn()
    assert harness.supervisor.signals == [(0, signal.SIGINT, True)]
    harness.turn(events=ended(signal.SIGINT))
    assert harness.agent.run() == 130


def test_a_stop_that_the_scheduler_has_ordered_needs_no_answer(harness, monkeypatch):
    """Slurm signals every node at the same time: another node's request was first."""
    monkeypatch.setattr(module, "STOP_ANSWER_SECONDS", 0.05)
    started(harness)
    harness.turn(m.StopWorkers(0, signal.SIGTERM, 5.0, "stopped by SIGTERM on node1"))
    harness.agent._on_signal(signal.SIGTERM)
    time.sleep(0.06)
    harness.turn()
    assert harness.supervisor.signals == [(0, signal.SIGTERM, True)]
    assert harness.sent(m.Leave) == []
    harness.turn(m.Verdict(143, "stopped by SIGTERM on node1"), events=ended(signal.SIGTERM))
    assert harness.agent.run() == 143


def test_a_stop_waits_for_a_scheduler_process_that_is_being_started_again(monkeypatch):
    """Else the other nodes would wait in vain: its scheduler goes with it. Not for ever."""
    monkeypatch.setattr(module, "STOP_ANSWER_SECONDS", 0.0)

    scheduler = FakeScheduler()
    scheduler.is_away = True
    with AgentHarness(scheduler_process=scheduler) as harness:
        started(harness)
        harness.agent._on_signal(signal.SIGTERM)
        harness.turn()
        assert (
            harness.supervisor.signals == []
            and harness.agent._shutdown.answer_deadline > time.monotonic() + 5.0
        )
        scheduler.is_away = False  # it is back, and is told again by the link
        harness.turn()
        assert harness.supervisor.signals == []
        harness.agent._shutdown.answer_deadline = time.monotonic()
        harness.turn()
        assert harness.supervisor.signals == [(0, signal.SIGTERM, True)]
        harness.turn(events=ended(signal.SIGTERM))
        assert harness.agent.run() == 143


def test_ctrl_c_while_waiting_for_nodes_ends_within_a_second(harness):
    harness.turn(WELCOME, m.Waiting(("node0",), ("node rank 1",), 2, 5.0, 600.0))
    harness.agent._on_signal(signal.SIGINT)
    begin = time.monotonic()
    assert harness.agent.run() == 130
    assert time.monotonic() - begin < 4, "a second on a quiet machine"


def test_ctrl_c_before_the_welcome_ends_at_once(harness):
    harness.agent._on_signal(signal.SIGTERM)
    assert harness.agent.run() == 143


def test_the_second_stop_kills_here_without_asking_anybody(harness):
    started(harness)
    harness.agent._on_signal(signal.SIGINT)
    harness.agent._on_signal(signal.SIGINT)
    assert harness.sent(m.StopRequest)[1].force
    assert (0, signal.SIGKILL, True) in harness.supervisor.signals


def test_a_node_that_has_finished_waits_for_the_others_to_stop(harness):
    started(harness)
    harness.turn(events=ended(0))
    harness.agent._on_signal(signal.SIGINT)
    assert harness.agent._shutdown.answer_deadline > time.monotonic() + 5.0  # their grace
    harness.agent._on_signal(signal.SIGINT)
    assert harness.agent._shutdown.answer_deadline < time.monotonic() + 2.1
    harness.turn(m.Verdict(130, "stopped by SIGINT on node0"))
    assert harness.agent.run() == 130


def test_missing_nodes_are_named_with_the_command_that_starts_them():
    with AgentHarness(address="10.0.0.1:29400") as harness:
        waiting = m.Waiting(("node0",), ("node rank 1",), 2, 5.0, 600.0)
        harness.turn(WELCOME, waiting, waiting)
        line = (
            "pdrun: 1 of 2 nodes have joined (node0), missing: node rank 1; 5.0 s of 10 min 0 s; "
            "start each with: pdrun join 10.0.0.1:29400"
        )
        token = "the token of `pdrun token show` here"
        assert harness.output.printed_lines == [
            f"{line} (a host that does not share this home directory needs {token})",
            line,
        ]


@pytest.mark.parametrize(
    ("address", "place", "end"),
    [
        ("127.0.0.1:29400", {}, "pdrun join 127.0.0.1:29400"),
        ("10.0.0.1:29400", {"insecure": True}, "pdrun join --insecure 10.0.0.1:29400"),
        ("10.0.0.1:29400", {"token_file": "t"}, "needs the token of this node's --token-file)"),
    ],
)
def test_the_line_for_the_others_says_how_they_are_trusted(address, place, end):
    plan = make_plan(1, nodes=2)
    plan = replace(plan, spec=replace(plan.spec, place=replace(plan.spec.place, **place)))
    with AgentHarness(plan=plan, address=address) as harness:
        harness.turn(WELCOME, m.Waiting(("node0",), ("1 more node",), 2, 5.0, 600.0))
        assert harness.output.printed_lines[0].endswith(end)


def test_the_end_of_the_lifeline_ends_everything_at_once():
    read, write = os.pipe()
    with AgentHarness(lifeline=read) as harness:
        started(harness)
        os.close(write)
        harness.turn()
        assert harness.supervisor.closed
        assert harness.agent.run() == 69
    os.close(read)


def test_quiet_agents_leave_the_jobs_lines_to_another():
    with AgentHarness(is_quiet=True) as harness:
        started(harness)
        harness.turn(m.Waiting(("node0",), ("x",), 2, 5.0, 600.0), m.Verdict(1, "rank 5 failed"))
        assert harness.output.printed_lines == []


# Elastic jobs
# --------------------------------------------------------------------------------------------------


def elastic_plan(**more):
    plan = make_plan(1, nodes=3, grace=5.0, **more)
    return replace(
        plan, spec=replace(plan.spec, resources=replace(plan.spec.resources, min_nodes=1))
    )


@pytest.fixture
def flexible():
    with AgentHarness(plan=elastic_plan()) as made:
        yield made


def test_a_node_that_stands_by_says_so_once_and_again_when_the_reason_changes(flexible):
    flexible.turn(
        WELCOME, m.Standby("3 nodes run"), m.Standby("3 nodes run"), m.Standby("no place is left")
    )
    assert flexible.output.printed_lines == [
        "pdrun: node0 is on standby: 3 nodes run",
        "pdrun: node0 is on standby: no place is left",
    ]
    flexible.turn(m.Assign(4, 1, 2, 1, 2, 0, "127.0.0.1:4000", agreed_step=70), m.Start(4))
    env = flexible.supervisor.commands[0].env
    assert (env["RANK"], env["WORLD_SIZE"], env["PDRUN_GENERATION"], env["PDRUN_AGREED_STEP"]) == (
        "1",
        "2",
        "4",
        "70",
    )
    assert os.path.dirname(env["PDRUN_AGENT"]).startswith("/")


def test_a_notice_is_shown_line_by_line_and_harmless(flexible):
    flexible.turn(WELCOME, m.Notice("rank 3 is slow\n\x1b[2Jrank 4 too"))
    assert flexible.output.printed_lines == ["pdrun: rank 3 is slow", "pdrun: \\x1b[2Jrank 4 too"]
    with AgentHarness(is_quiet=True) as quiet:
        quiet.turn(WELCOME, m.Notice("rank 3 is slow"))
        assert quiet.output.printed_lines == []


def test_the_next_generation_has_other_sizes_and_the_same_threads(flexible):
    started(flexible)
    before = flexible.supervisor.commands[0].env
    flexible.turn(m.StopWorkers(0, 15, 5.0, "node2 was lost"), events=ended(signal.SIGTERM))
    (finished,) = flexible.sent(m.Finished)
    assert finished.store and not flexible.supervisor.dismissed
    flexible.turn(m.Assign(1, 0, 1, 0, 1, 0, finished.store), m.Start(1))
    after = flexible.supervisor.commands[0].env
    assert (before["WORLD_SIZE"], after["WORLD_SIZE"], after["GROUP_WORLD_SIZE"]) == ("2", "1", "1")
    assert before["OMP_NUM_THREADS"] == after["OMP_NUM_THREADS"]
    assert "pdrun: restarting with 1 node: node2 was lost" in flexible.output.printed_lines


def test_an_assignment_before_the_start_is_simply_replaced(flexible):
    flexible.turn(WELCOME, make_assign(3, nodes=3), m.Assign(1, 0, 2, 0, 2, 0, "127.0.0.1:4000"))
    flexible.turn(m.Start(0), m.Start(1))
    assert [message.generation for message in flexible.sent(m.Ready)] == [0, 1]
    assert flexible.supervisor.commands[0].env["WORLD_SIZE"] == "2"
    assert (
        flexible.agent._helpers.stores._current is not None
    )  # the socket that was announced is still the one


def test_sigterm_means_this_node_alone(flexible):
    started(flexible)
    flexible.agent._on_signal(signal.SIGTERM)
    assert flexible.sent(m.Depart) == [m.Depart("SIGTERM on node0")] and not flexible.sent(
        m.StopRequest
    )
    flexible.turn(m.StopWorkers(0, 15, 5.0, "node0 departs"))
    assert flexible.agent._shutdown.answer_deadline is None
    flexible.turn(events=ended(signal.SIGTERM))
    assert [type(message) for message in flexible.link.sent[-3:]] == [
        m.WorkerExit,
        m.Finished,
        m.Leave,
    ]
    assert flexible.agent.run() == 143


def test_a_node_that_stands_by_goes_at_once(flexible):
    flexible.turn(WELCOME, m.Standby("3 nodes run"))
    flexible.agent._on_signal(signal.SIGTERM)
    assert flexible.agent.run() == 143
    assert [type(message) for message in flexible.link.sent] == [m.Join, m.Depart, m.Leave]


def test_sigterm_again_kills_the_workers_here_and_nobody_elses(flexible):
    started(flexible)
    flexible.agent._on_signal(signal.SIGTERM)
    flexible.agent._on_signal(signal.SIGTERM)
    assert (0, signal.SIGKILL, True) in flexible.supervisor.signals
    assert not flexible.sent(m.StopRequest)
    flexible.turn(events=ended(signal.SIGKILL))
    assert flexible.agent.run() == 143


def test_ctrl_c_stops_the_job_also_when_this_node_was_leaving(flexible):
    started(flexible)
    flexible.agent._on_signal(signal.SIGTERM)
    flexible.agent._on_signal(signal.SIGINT)
    assert flexible.sent(m.StopRequest) == [m.StopRequest(2, "SIGINT on node0", force=True)]


def test_a_node_without_which_the_job_cannot_go_on_waits_for_the_verdict(flexible):
    started(flexible)
    flexible.agent._on_signal(signal.SIGTERM)
    flexible.turn(
        m.StopWorkers(0, 15, 5.0, "stopped by SIGTERM on node0"), events=ended(signal.SIGTERM)
    )
    assert flexible.agent._exit_code is None
    flexible.turn(m.Verdict(143, "stopped by SIGTERM on node0"))
    assert flexible.agent.run() == 143


def test_a_departure_that_nobody_answers_is_carried_out_alone(flexible, monkeypatch):
    monkeypatch.setattr(module, "STOP_ANSWER_SECONDS", 0.05)
    started(flexible)
    flexible.agent._on_signal(signal.SIGTERM)
    time.sleep(0.06)
    flexible.turn()
    assert flexible.supervisor.signals == [(0, signal.SIGTERM, True)]
    flexible.turn(events=ended(signal.SIGTERM))
    assert flexible.agent.run() == 143


@pytest.mark.parametrize("how", ["fixed size", "scheduler here", "for all"])
def test_sigterm_means_the_job_where_it_cannot_go_on_or_is_meant(how):
    read, write = os.pipe()

    plan = make_plan(1, nodes=2) if how == "fixed size" else elastic_plan()
    deps = {
        "scheduler here": {"scheduler_process": FakeScheduler()},
        "for all": {"lifeline": read},
    }.get(how, {})
    with AgentHarness(plan=plan, **deps) as harness:
        started(harness)
        if how == "for all":
            os.write(write, b"a")
            harness.turn()
        harness.agent._on_signal(signal.SIGTERM)
        assert harness.sent(m.StopRequest) and not harness.sent(m.Depart)
    os.close(read)
    os.close(write)


def test_a_node_that_was_given_up_ends_its_workers_and_joins_as_a_new_one(flexible):
    started(flexible)
    flexible.turn(m.Refuse(69, "node0 was given up: silent for 10 s", rejoin=True))
    assert flexible.supervisor.signals == [(0, signal.SIGKILL, True)]  # others run in its place
    first = flexible.sent(m.Join)[0].store
    flexible.turn(events=ended(signal.SIGTERM))
    assert not flexible.sent(m.WorkerExit) and not flexible.sent(
        m.Finished
    )  # of a generation that is none of its own
    assert flexible.link.renewed == 1
    flexible.turn(WELCOME)
    joins = flexible.sent(m.Join)
    assert len(joins) == 2 and joins[1].store != first
    flexible.turn(
        m.Standby("2 nodes run"), m.Assign(5, 2, 3, 2, 3, 0, "127.0.0.1:4000"), m.Start(5)
    )
    assert flexible.supervisor.commands[0].env["RANK"] == "2"
    assert flexible.agent._exit_code is None


def test_a_node_without_workers_that_was_given_up_joins_at_once(flexible):
    flexible.turn(WELCOME, m.Refuse(69, "given up", rejoin=True))
    flexible.turn(WELCOME)
    assert (flexible.link.renewed, len(flexible.sent(m.Join))) == (1, 2)


def test_the_workers_of_a_node_that_is_cut_off_are_gone_before_the_others_go_on():
    with AgentHarness(plan=elastic_plan()) as harness:
        harness.turn(replace(WELCOME, dead=10.0, lease=6.5), make_assign(2, nodes=2), m.Start(0))
        harness.turn(events=[Spawned(0, 2**22)])
        harness.link.silence = 6.4
        harness.turn()
        assert harness.supervisor.signals == []
        harness.link.silence = 6.6
        harness.turn()
        assert harness.supervisor.signals == [(0, signal.SIGTERM, True)]
        assert harness.agent._generation.group._kill_at - time.monotonic() <= 3.0
        harness.turn(events=ended(signal.SIGTERM))
        assert harness.link.renewed == 1


def test_no_worker_is_started_without_a_fence():
    with AgentHarness(plan=elastic_plan()) as harness:
        harness.turn(replace(WELCOME, dead=10.0, lease=6.5), make_assign(2, nodes=2))
        assert harness.supervisor.fences == []
        spawn = harness.supervisor.spawn
        seen = []
        harness.supervisor.spawn = lambda *a, **k: (
            seen.extend(harness.supervisor.fences),
            spawn(*a, **k),
        )
        harness.turn(m.Start(0))
        assert len(seen) == 1 and seen[0] == pytest.approx(time.monotonic() + 9.0, abs=2.0)
        harness.turn(events=[Spawned(0, 2**22)])
        assert len(harness.supervisor.fences) > 1, "each turn moves it"


def test_the_workers_of_a_cut_off_node_are_killed_before_the_fence():
    with AgentHarness(plan=elastic_plan()) as harness:
        harness.turn(replace(WELCOME, dead=10.0, lease=6.5), make_assign(2, nodes=2), m.Start(0))
        harness.turn(events=[Spawned(0, 2**22)])
        harness.link.silence = 6.6
        harness.turn()
        assert harness.agent._generation.group._kill_at < harness.link.fence_at()


def test_a_node_whose_workers_were_fenced_rejoins_and_reports_nothing():
    with AgentHarness(plan=elastic_plan()) as harness:
        harness.turn(replace(WELCOME, dead=10.0, lease=6.5), make_assign(2, nodes=2), m.Start(0))
        harness.turn(events=[Spawned(0, 2**22)])
        fenced = harness.supervisor
        fenced.failure = WorkersFenced("the workers of this node were ended")
        harness.turn()
        assert fenced.closed and harness.link.renewed == 1
        assert not harness.sent(m.WorkerExit) and not harness.sent(m.Finished)
        harness.turn(WELCOME, m.Assign(5, 1, 2, 1, 2, 0, "127.0.0.1:4000"), m.Start(5))
        assert len(harness.sent(m.Join)) == 2 and len(harness.supervisors) == 2
        assert harness.supervisor.commands[0].env["RANK"] == "1"


def test_a_node_without_a_lease_reports_fenced_workers_as_lost(harness):
    started(harness)
    harness.supervisor.failure = WorkersFenced("the workers of this node were ended")
    harness.turn()
    (exit_,) = harness.sent(m.WorkerExit)
    assert exit_.cause.kind == "lost" and harness.sent(m.Finished)


def test_a_node_that_was_asked_to_stop_leaves_after_the_fence():
    with AgentHarness(plan=elastic_plan()) as harness:
        harness.turn(replace(WELCOME, dead=10.0, lease=6.5), make_assign(2, nodes=2), m.Start(0))
        harness.turn(events=[Spawned(0, 2**22)])
        harness.agent._on_signal(signal.SIGINT)
        harness.supervisor.failure = WorkersFenced("the workers of this node were ended")
        harness.turn()
        assert harness.agent.run() == 130


def test_a_stop_waits_for_a_scheduler_that_stands_still(harness, monkeypatch):
    monkeypatch.setattr(module, "STOP_ANSWER_SECONDS", 0.05)
    started(harness)
    harness.link.silence = 2.0
    harness.agent._on_signal(signal.SIGINT)
    time.sleep(0.06)
    harness.turn()
    assert harness.supervisor.signals == []
    assert "the scheduler does not answer: waiting up to 10 s" in harness.output.printed_lines[-1]
    harness.turn(m.StopWorkers(0, signal.SIGINT, 5.0, "stopped by SIGINT on node0"))
    assert harness.supervisor.signals == [(0, signal.SIGINT, True)]
    harness.turn(m.Verdict(130, "stopped"), events=ended(signal.SIGINT))
    assert harness.agent.run() == 130


def test_a_stop_has_the_silent_scheduler_of_this_node_replaced(monkeypatch):
    monkeypatch.setattr(module, "STOP_ANSWER_SECONDS", 0.05)
    scheduler = FakeScheduler()
    with AgentHarness(scheduler_process=scheduler) as harness:
        started(harness)
        harness.link.silence = 2.0
        harness.agent._on_signal(signal.SIGINT)
        assert scheduler.hurried == 0
        time.sleep(0.06)
        harness.turn()
        assert scheduler.hurried == 1 and harness.supervisor.signals == []


def test_without_a_lease_silence_is_no_reason(harness):
    started(harness)
    harness.link.silence = 1e6
    harness.turn()
    assert harness.supervisor.signals == []


def test_what_the_event_log_tells_as_well_is_said_once(tmp_path):
    log = tmp_path / "events.jsonl"
    log.touch()
    with AgentHarness(plan=elastic_plan(), event_log=str(log)) as harness:
        harness.turn(WELCOME, m.Notice("rank 3 on b is slow"))
        log.write_text(
            '{"kind": "warning", "time": 1, "text": "rank 3 on b is slow"}\n'
            '{"kind": "warning", "time": 1, "text": "versions differ"}\n'
        )
        harness.agent._announcer._next_look = 0.0
        harness.turn(
            m.Notice("rank 1 on a hangs\nrank 0 is here:\n  File x\nrank 1 is elsewhere:\n  File x")
        )
        harness.agent._announcer._next_look = 0.0
        harness.turn()
        assert [line.removeprefix("pdrun: ") for line in harness.output.printed_lines] == [
            "rank 3 on b is slow",
            "rank 1 on a hangs",
            "rank 0 is here:",
            "  File x",
            "rank 1 is elsewhere:",
            "  File x",
            "warning: versions differ",
        ]


def test_who_is_here_of_a_job_that_may_begin_with_fewer(flexible):
    flexible.turn(WELCOME, m.Waiting(("a", "b"), ("1 more node",), 3, 6.0, 10.0, 2))
    assert flexible.output.printed_lines == [
        "pdrun: 2 of 3 nodes have joined (a, b); the job starts in 4.0 s unless more nodes join"
    ]


def test_a_hang_is_shown_once_in_full():
    cause = m.Cause(
        "hang",
        124,
        summary="no progress for 5 s (step 3)",
        traceback="ranks 0, 1 are here:\n  File x",
    )
    verdict = m.Verdict(
        124, "rank 0 on node0 hung: no progress for 5 s (step 3)", m.Failure(0, "node0", cause)
    )
    for noticed in (True, False):
        with AgentHarness(plan=make_plan(1, nodes=2)) as harness:
            harness.turn(
                WELCOME,
                *([m.Notice(f"rank 0 on node0 hangs\n{cause.traceback}")] if noticed else []),
                verdict,
            )
            text = "\n".join(harness.output.printed_lines)
            assert text.count("  File x") == 1
            assert ("the stacks of all ranks are shown above" in text) is noticed
            assert "--hang-timeout must be longer" in text
