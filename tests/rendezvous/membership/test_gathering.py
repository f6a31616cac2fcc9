"""From nothing to Start: who may come in, in which order, and what those who wait are told."""

from __future__ import annotations

import itertools

import pytest

from pdrun.rendezvous.membership.machine import IllegalEvent, JobState, LocalStop
from pdrun.rendezvous.membership.transitions import TRANSITIONS, Trigger, next_state
from pdrun.rendezvous.protocol.events import MessageReceived, SendMessage, SendStatus
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Echo,
    Finished,
    Heartbeat,
    Join,
    Leave,
    Notice,
    Ready,
    Refuse,
    Start,
    StatusQuery,
    StopRequest,
    Unready,
    Verdict,
    Waiting,
    Welcome,
    WorkerExit,
)
from tests.rendezvous.helpers import Machine, cause, config, hello


def refused(machine: Machine, peer: str) -> Refuse:
    (message,) = machine.to(peer, Refuse)
    assert peer in machine.closed
    return message


def test_two_nodes_come_together() -> None:
    machine = Machine()
    machine.enter("node1", 2)
    assert machine.to("node1", Waiting)[0].missing == ("1 more node",)
    machine.enter("node0", 1)
    (first,), (second,) = machine.to("node0", Assign), machine.to("node1", Assign)
    assert (first.node_rank, first.first_rank, first.world_size, first.master) == (
        0,
        0,
        3,
        "node0:1",
    )
    assert (second.node_rank, second.first_rank, second.world_size, second.master) == (
        1,
        1,
        3,
        "node0:1",
    )
    machine.say("node0", Ready(0))
    assert not machine.to("node0", Start)
    machine.say("node1", Ready(0))
    assert machine.to("node0", Start) == machine.to("node1", Start) == [Start(0)]
    assert machine.kinds() == ["created", "joined", "joined", "assigned", "started"]


def test_ranks_do_not_depend_on_who_came_first() -> None:
    names = ("node10", "node2", "node1", "other")
    orders = set()
    for order in itertools.permutations(names):
        machine = Machine(config(nodes=4))
        for name in order:
            machine.enter(name)
        orders.add(tuple(node.name for node in machine.membership.roster.active_nodes))
    assert orders == {("node1", "node2", "node10", "other")}


def test_a_host_list_orders_and_a_node_rank_wins() -> None:
    machine = Machine(config(nodes=3, hosts=("c", "b", "a")))
    machine.enter("a", node_rank=0)
    assert machine.to("a", Waiting)[0].missing == ("c", "b")
    machine.enter("b")
    machine.enter("c")
    assert [node.name for node in machine.membership.roster.active_nodes] == ["a", "c", "b"]


def test_a_missing_host_of_a_list_has_the_name_that_the_list_has() -> None:
    """The hosts call themselves otherwise; each knows its rank in the list."""
    machine = Machine(config(nodes=3, hosts=("10.0.0.1", "gpu-2", "gpu-3"), start_timeout=9.0))
    machine.enter("a", node_rank=0)
    assert machine.to("a", Waiting)[-1].missing == ("gpu-2", "gpu-3")
    machine.enter("c", node_rank=2)
    machine.tick(10.0)
    assert machine.verdict == Verdict(69, "gpu-2 did not join within 9 s")


def test_local_ranks_count_the_workers_of_one_host() -> None:
    machine = Machine(config(nodes=3))
    for name, host in (("w1", "x"), ("w2", "y"), ("w3", "x")):
        machine.enter(name, facts={"host": host})
    places = [
        (a.local_rank, a.local_world_size)
        for name in ("w1", "w2", "w3")
        for a in machine.to(name, Assign)
    ]
    assert places == [(0, 2), (0, 1), (1, 2)]


def test_another_job_is_refused_naming_both() -> None:
    machine = Machine()
    machine.say("p", hello("x", job="other"))
    refuse = refused(machine, "p")
    assert refuse.code == 69
    assert "'job' (run run-1, started on head), not job 'other' on host-x" in refuse.reason
    assert "refused" in machine.kinds()


@pytest.mark.parametrize(
    "config_command", ["pdrun slow.py 2", ""], ids=["told", "heard of the first agent"]
)
def test_another_command_is_refused_showing_both(config_command: str) -> None:
    machine = Machine(config(command=config_command))
    machine.enter("a", facts={"command": "pdrun slow.py 2"})
    machine.say("p", hello("x", job="other", command="pdrun slow.py 3"))
    reason = refused(machine, "p").reason
    assert "'job' (run run-1, started on head) with `pdrun slow.py 2`, not job 'other'" in reason
    assert reason.endswith(
        "`pdrun slow.py 3`: use the same command on every node, or another port for one of the jobs"
    )
    machine.say("q", hello("y", job="other", command="pdrun slow.py 2"))
    assert refused(machine, "q").reason.endswith(
        "use the same --job for both, or another port for one of them"
    )


def test_who_came_before_the_specification_is_told_it() -> None:
    machine = Machine(config(job="", spec=""))
    machine.say("early", hello("e", job=""))
    machine.say("view", hello("v", job="", role="view"))
    machine.enter("a", spec="{}")
    assert [welcome.spec for welcome in machine.to("early", Welcome)] == ["", "{}"]
    assert machine.to("early", Welcome)[1].job == "job"
    assert [len(machine.to(peer, Welcome)) for peer in ("a", "view")] == [1, 1]
    machine.say("early", Join("b", None, 1))
    assert machine.membership.state is JobState.ASSIGNING


def test_who_waits_for_a_specification_hears_the_end() -> None:
    machine = Machine(config(job="", spec="", start_timeout=3.0, heartbeat=0.0))
    machine.say("early", hello("e", job=""))
    machine.say("view", hello("v", job="", role="view"))
    machine.tick(4.0)
    assert refused(machine, "early").code == 69 and not machine.to("view", Refuse)


def test_members_of_a_dynamic_cluster_are_called_workers() -> None:
    machine = Machine(config(nodes=3, unit="worker"))
    machine.enter("a")
    assert machine.to("a", Waiting)[0].missing == ("2 more workers",)
    machine.enter("a2", node_rank=3)
    assert "rank 3, but the job has 3 workers: 0 to 2" in refused(machine, "a2").reason
    machine.say("a3", hello("a3"), Join("a", None, 1))
    assert "two workers are called 'a'" in refused(machine, "a3").reason
    assert "PDRUN_WORKER_ID" in refused(machine, "a3").reason
    machine.run("b", "c")
    machine.enter("d")
    assert refused(machine, "d").reason == "job 'job' already has its 3 workers"
    assert not any("node" in str(record.data.get("reason", "")) for record in machine.records)


def test_an_empty_job_means_whichever() -> None:
    machine = Machine()
    machine.say("p", hello("x", job=""))
    assert machine.to("p", Welcome)[0].job == "job"
    machine = Machine(config(job="", spec=""))
    machine.say("p", hello("x", job="mine"), Join("n", None, 1, spec="{}"))
    machine.say("q", hello("y", job=""))
    assert (machine.to("q", Welcome)[0].job, machine.to("q", Welcome)[0].spec) == ("mine", "{}")
    machine.say("r", hello("z", job="yours"))
    assert "serves job 'mine'" in refused(machine, "r").reason


def test_another_protocol_is_refused() -> None:
    machine = Machine()
    machine.say("p", hello(version=99))
    assert refused(machine, "p").code == 78 and "99" in refused(machine, "p").reason


@pytest.mark.parametrize(
    ("join", "words"),
    [
        (Join("a", None, 1), ("two nodes are called 'a'", "host-a", "host-b")),
        (Join("b", 0, 1), ("node rank 0 is claimed twice", "host-a", "host-b")),
        (Join("b", 5, 1), ("node rank 5", "0 to 2")),
        (Join("b", -1, 1), ("node rank -1",)),
        (Join("b", None, 0), ("1 to 65536 workers",)),
        (Join("b", None, 10**9), ("1 to 65536 workers",)),
        (Join("", None, 1), ("must have a name",)),
        (Join("a/b", None, 1), ("must have a name", "a/b")),
        (Join("..", None, 1), ("must have a name",)),
        (Join("a\x1b[31m", None, 1), ("must have a name",)),
        (
            Join("b", None, 1, {"command": "y"}),
            ("the commands differ: `x` on a, `y` on b: use the same command", "another port"),
        ),
        (Join("a", None, 1, {"command": "y"}), ("the commands differ: `x` on a, `y` on a",)),
        (
            Join("b", None, 1, {"command": "x", "pdrun": "2"}),
            ("pdrun differs: '1' on a, '2' on b",),
        ),
    ],
)
def test_a_node_that_cannot_be_right_is_refused(join: Join, words: tuple[str, ...]) -> None:
    machine = Machine(config(nodes=3))
    machine.enter("a", node_rank=0, facts={"command": "x", "pdrun": "1"})
    machine.say("b", hello("b"), join)
    refuse = refused(machine, "b")
    assert refuse.code == 78
    for word in words:
        assert word in refuse.reason
    machine.enter("c", facts={"command": "x"})
    assert len(machine.membership.roster.active_nodes) == 2


def test_facts_that_should_agree_are_a_warning() -> None:
    machine = Machine()
    machine.enter("a", facts={"python": "3.11", "only": "here"})
    machine.enter("b", facts={"python": "3.12"})
    (warning,) = [record.data["text"] for record in machine.records if record.kind == "warning"]
    assert warning == "python differs: '3.11' on a, '3.12' on b"
    assert machine.membership.state is JobState.ASSIGNING
    assert [notice.text for notice in machine.to("a", Notice)] == [warning], "at the terminal"


def test_a_job_that_fails_names_what_its_nodes_differ_in() -> None:
    machine = Machine(config(nodes=3))
    machine.enter("a", facts={"torch": "2.13.0", "command": "x", "pdrun": "1"})
    machine.enter("b", facts={"torch": "2.12.1", "command": "x", "pdrun": "1"})
    machine.enter("c", facts={"torch": "2.12.1", "command": "x", "pdrun": "1"})
    machine.say("a", Unready(0, "no store", 70))
    note = "torch differs: '2.13.0' on a, '2.12.1' on b"
    assert machine.verdict.notes == (note,), "once for each other value"
    joined = [record.data for record in machine.records if record.kind == "joined"]
    first = {"torch": "2.13.0", "pdrun": "1"}
    assert [data.get("versions") for data in joined] == [first, {"torch": "2.12.1"}] + [
        {"torch": "2.12.1"}
    ]


def test_an_extra_node_and_a_late_one_are_refused() -> None:
    machine = Machine()
    machine.run("a", "b")
    machine.enter("c")
    assert refused(machine, "c") == Refuse(69, "job 'job' already has its 2 nodes")
    machine.finish("a", "b")
    machine.enter("d")
    assert refused(machine, "d").code == 69 and "is over" in refused(machine, "d").reason


def test_waiting_is_said_again_and_ends() -> None:
    machine = Machine(config(nodes=3, start_timeout=12.0, heartbeat=0.0))
    machine.enter("a", node_rank=1)
    machine.tick(11.0)
    waiting = machine.to("a", Waiting)
    assert [round(each.elapsed) for each in waiting] == [0, 5, 10]
    assert waiting[-1].missing == ("node rank 0", "node rank 2")
    machine.tick(2.0)
    assert machine.verdict == Verdict(69, "node rank 0, node rank 2 did not join within 12 s")
    assert machine.to("a", Verdict) == [machine.verdict]


def test_a_scheduler_without_nodes_gives_up_too() -> None:
    machine = Machine(config(start_timeout=3.0))
    machine.tick(4.0)
    assert machine.verdict.code == 69 and machine.done == [69]


def test_a_node_that_goes_while_gathering_frees_its_place() -> None:
    machine = Machine(config(nodes=2))
    machine.enter("a")
    machine.cut("a")
    machine.say("a2", hello("a2"), Join("a", None, 1))
    assert len(machine.membership.roster.active_nodes) == 1 and not machine.to("a2", Refuse)
    machine.say("a2", Leave())
    assert not machine.membership.roster.active_nodes
    machine.run("a", "b")
    assert machine.membership.state is JobState.RUNNING


def test_a_job_waits_for_a_cut_node_before_it_assigns() -> None:
    machine = Machine()
    machine.enter("a")
    machine.cut("a")
    machine.enter("b")
    assert machine.membership.state is JobState.GATHERING
    machine.say("a-again", hello("a", incarnation=1))
    assert machine.membership.state is JobState.ASSIGNING
    assert machine.to("a-again", Assign) and machine.to("b", Assign)


def test_a_node_that_is_not_ready_ends_it_for_all() -> None:
    machine = Machine()
    machine.enter("a")
    machine.enter("b")
    machine.say("a", Ready(0))
    machine.say("b", Unready(0, 127, "train.py is not there"))
    for peer in ("a", "b"):
        assert machine.to(peer, Verdict) == [Verdict(127, "b cannot start: train.py is not there")]
        assert not machine.to(peer, Start)


def test_readiness_is_bounded() -> None:
    machine = Machine(config(start_timeout=5.0))
    machine.enter("a")
    machine.enter("b")
    machine.say("a", Ready(0))
    machine.beat(7.0, "a", "b")
    assert machine.verdict == Verdict(69, "b did not become ready within 5 s")


def test_a_stop_before_the_start_starts_nothing() -> None:
    for nodes in ((), ("a",), ("a", "b")):
        machine = Machine()
        for name in nodes:
            machine.enter(name)
        machine.step(LocalStop(2, "Ctrl-C"))
        assert machine.verdict == Verdict(130, "stopped by Ctrl-C")
        assert not any(machine.to(name, Start) for name in nodes)


def test_heartbeats_are_echoed_and_status_is_answered() -> None:
    machine = Machine()
    machine.say("p", hello("x"), Heartbeat(7, 0))
    assert machine.to("p", Echo) == [Echo(7)]
    assert SendStatus("p") in machine.step(MessageReceived("p", StatusQuery()))


def test_a_viewer_only_looks() -> None:
    machine = Machine()
    machine.say("v", hello("v", role="view", job=""))
    assert SendStatus("v") in machine.step(MessageReceived("v", StatusQuery()))
    with pytest.raises(IllegalEvent, match="a viewer cannot send it"):
        machine.say("v", Join("v", None, 1))
    machine.say("v", StopRequest(15, "v"))
    assert refused(machine, "v").code == 77
    assert machine.membership.state is JobState.GATHERING


@pytest.mark.parametrize(
    ("state", "messages"),
    [
        (
            "stranger",
            [Heartbeat(1, 1), Join("z", None, 1), Ready(0), StopRequest(15, "z"), Leave()],
        ),
        (
            "visitor",
            [
                hello("v"),
                Ready(0),
                WorkerExit(0, 0, cause()),
                Finished(0),
                Welcome("", "", "", "", 1, 1),
                Echo(1),
                StopRequest(0, "v"),
                StopRequest(65, "v"),
                Verdict(0, ""),
            ],
        ),
        ("gathering", [Ready(-1), Ready(0), Finished(-1), Unready(0, 1, "")]),
        ("assigning", [WorkerExit(0, 0, cause()), Finished(0), Ready(1)]),
        (
            "running",
            [
                WorkerExit(0, 1, cause()),
                WorkerExit(0, -1, cause()),
                WorkerExit(1, 0, cause()),
                Unready(0, 1, ""),
            ],
        ),
    ],
)
def test_an_illegal_event_raises_and_changes_nothing(state: str, messages: list[object]) -> None:
    for message in messages:
        machine = Machine()
        if state == "visitor":
            machine.say("a", hello("a"))
        if state in ("gathering", "assigning"):
            machine.enter("a")
        if state == "assigning":
            machine.enter("b")
        if state == "running":
            machine.run("a", "b")
        before = (machine.membership.state, repr(vars(machine.membership)))
        with pytest.raises(IllegalEvent) as caught:
            machine.step(MessageReceived("a", message))  # type: ignore[arg-type]
        assert (
            type(message).__name__ in str(caught.value)
            and caught.value.state is machine.membership.state
        )
        assert (machine.membership.state, repr(vars(machine.membership))) == before


def test_the_table_is_the_whole_truth() -> None:
    for state, trigger in itertools.product(JobState, Trigger):
        if (state, trigger) in TRANSITIONS:
            assert next_state(state, trigger) is TRANSITIONS[state, trigger]
        else:
            with pytest.raises(IllegalEvent, match=state.value):
                next_state(state, trigger)
    assert not any(state is JobState.DONE for state, _ in TRANSITIONS)
    reached = {JobState.GATHERING}
    for _ in JobState:
        reached |= {target for (source, _), target in TRANSITIONS.items() if source in reached}
    assert reached == set(JobState)


def test_repeating_the_join_changes_nothing() -> None:
    machine = Machine()
    machine.enter("a")
    before = len(machine.sent)
    assert machine.step(MessageReceived("a", Join("a", None, 1))) == []
    assert len(machine.sent) == before
    assert not [
        each
        for each in machine.sent
        if isinstance(each, SendMessage) and isinstance(each.message, Refuse)
    ]
