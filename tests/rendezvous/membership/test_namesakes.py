"""
A node whose name or rank another one has: an agent that was started again, or a second one by
mistake.

A machine that loses power closes no connection. So the earlier agent looks alive until it is found
silent, while its machine has booted and its agent asks to join.
"""

from __future__ import annotations

import itertools

import pytest

from pdrun.rendezvous.membership.machine import JobState
from pdrun.rendezvous.membership.nodes import Member, order_by_rank
from pdrun.rendezvous.protocol.events import LocalStop
from pdrun.rendezvous.protocol.messages import Join, Leave, Ready, Refuse, Verdict
from tests.rendezvous.helpers import Machine, config, hello

NUMBERS = itertools.count()


def running(**changes: object) -> Machine:
    """A job that runs on a and b."""
    machine = Machine(config(**{"nodes": 2, "max_restarts": 1, **changes}))
    machine.run("a", "b")
    if machine.membership.state is JobState.GATHERING:
        machine.beat(6.0, "a", "b")
        for name in ("a", "b"):
            machine.say(name, Ready(0))
    assert machine.membership.state is JobState.RUNNING
    return machine


def ask(machine: Machine, *, host: str = "host-b", node: str = "b", rank: int | None = None) -> str:
    """An agent asks to join, as it does again after a second; return its answer."""
    peer = f"p{next(NUMBERS)}"
    machine.say(peer, hello(peer, host=host), Join(node, rank, 1, store=f"{peer}:1"))
    if not (refused := machine.to(peer, Refuse)):
        return "accepted"
    assert machine.closed[-1] == peer
    return "later" if refused[0].retry else refused[0].reason


@pytest.mark.parametrize("least", [0, 1])
def test_a_machine_that_lost_power_joins_again_when_it_is_found_lost(least: int) -> None:
    machine = running(min_nodes=least, gather=5.0)
    machine.beat(2.0, "a")  # b is silent, but nothing has closed its connection
    answers = []
    while not answers or answers[-1] == "later":
        answers.append(ask(machine))
        machine.beat(1.0, "a")
    assert answers[-1] == "accepted" and 7 <= len(answers) <= 10
    assert sum(record.kind == "refused" for record in machine.records) == 0


def test_it_joins_at_once_when_the_connection_is_closed() -> None:
    machine = running(min_nodes=1)
    assert ask(machine) == "later"
    machine.cut("b")
    assert ask(machine) == "accepted"


def test_it_waits_for_the_fence_of_one_whose_silent_connection_has_ended() -> None:
    """Its agent may stand still, and its workers run on until the fence."""
    machine = running(min_nodes=1)
    machine.beat(6.0, "a")
    machine.cut("b")
    answers = []
    while not answers or answers[-1] == "later":
        answers.append(ask(machine))
        assert answers[-1] == "later" or machine.membership.state is JobState.RESTARTING
        machine.beat(1.0, "a")
    assert answers[-1] == "accepted" and 4 <= len(answers) <= 6


def test_a_second_agent_on_the_same_host_is_refused_when_the_first_one_has_spoken() -> None:
    machine = running(min_nodes=1)
    assert ask(machine) == "later"
    assert ask(machine) == "later", "nothing was heard since"
    machine.beat(1.0, "a", "b")
    assert "two nodes are called 'b'" in ask(machine)
    machine.beat(0.5, "a")
    assert ask(machine) == "later", "another request begins from the start"


def test_a_node_on_another_host_is_refused_at_once_unless_the_first_one_is_silent() -> None:
    machine = running(min_nodes=1)
    machine.beat(1.0, "a", "b")
    assert "two nodes are called 'b'" in ask(machine, host="other")
    machine.beat(4.0, "a")
    assert ask(machine, host="other") == "later"
    machine.beat(1.0, "a", "b")
    assert "two nodes are called 'b'" in ask(machine, host="other")


@pytest.mark.parametrize("closed", [False, True])
def test_a_rank_is_free_when_its_silent_node_is_lost(closed: bool) -> None:
    """A machine is replaced by one of another name, for the same rank."""
    machine = Machine(config(nodes=2, max_restarts=1))
    machine.enter("a", node_rank=0)
    machine.enter("b", node_rank=1)
    for name in ("a", "b"):
        machine.say(name, Ready(0))
    machine.beat(4.0, "a")
    if closed:
        machine.cut("b")
    answers = []
    while not answers or answers[-1] == "later":
        answers.append(ask(machine, host="new", node="new", rank=1))
        machine.beat(1.0, "a")
    assert answers[-1] == "accepted" and len(answers) > 3


def test_a_rank_that_another_living_node_has_is_refused() -> None:
    machine = Machine(config(nodes=3))
    machine.enter("a", node_rank=0)
    assert "node rank 0 is claimed twice" in ask(machine, host="new", node="new", rank=0)


def test_while_a_generation_is_assigned_the_one_that_was_cut_off_is_waited_for() -> None:
    machine = Machine(config(nodes=2, max_restarts=1))
    machine.enter("a")
    machine.enter("b")
    assert machine.membership.state is JobState.ASSIGNING
    machine.cut("b")
    assert ask(machine) == "later"
    machine.beat(1.0, "a")
    assert ask(machine) == "accepted"


def test_what_was_asked_meanwhile_changes_nothing_for_a_successor() -> None:
    machine = running(min_nodes=1)
    for _ in range(3):
        assert ask(machine) == "later"
    machine.succeed(0.5)
    machine.say("a1", hello("a", incarnation=1))
    machine.say("b1", hello("b", incarnation=1))
    assert ask(machine) == "later", "the successor has not heard it since"
    machine.beat(1.0, "a1", "b1")
    assert "two nodes are called 'b'" in ask(machine)


@pytest.mark.parametrize("how", ["no restarts", "heartbeats", "command"])
def test_who_cannot_join_in_any_case_hears_it_at_once(how: str) -> None:
    machine = running(
        max_restarts=int(how != "no restarts"), heartbeat=0.0 if how == "heartbeats" else 1.0
    )
    reason = {
        "no restarts": "job 'job' already has its 2 nodes",
        "heartbeats": "job 'job' already has its 2 nodes",
    }
    if how == "command":
        machine = Machine(config(nodes=3))
        machine.enter("a", facts={"command": "x"})
        machine.say("p", hello("p", host="host-a"), Join("a", None, 1, {"command": "y"}))
        assert "the commands differ" in machine.to("p", Refuse)[0].reason
    else:
        assert ask(machine) == reason[how]


@pytest.mark.parametrize(("unit", "order"), [("worker", ["c", "b"]), ("node", ["b", "c"])])
def test_a_worker_of_a_dynamic_cluster_keeps_the_place_it_asked_for(
    unit: str, order: list[str]
) -> None:
    """Rank 0 has left for a moment, to start again."""
    members = [
        Member(hello(name), Join(name, rank, 1), name, 0.0, 0.0, "", index=rank)
        for name, rank in (("b", 1), ("c", 2))
    ]
    assert [member.name for member in order_by_rank(config(unit=unit), members)] == order


@pytest.mark.parametrize("successor", [False, True])
@pytest.mark.parametrize("code", [0, 143])
def test_who_was_asked_to_come_again_is_sent_the_verdict(code: int, successor: bool) -> None:
    """The job ends in the second in which it waits; it asks too late to take part."""
    machine = running(min_nodes=1)
    machine.beat(5.0, "a")
    assert ask(machine) == "later"
    if successor:
        machine.succeed(0.5)
        machine.say("a1", hello("a", incarnation=1))
        machine.say("b1", hello("b", incarnation=1))
    a, b = ("a1", "b1") if successor else ("a", "b")
    if code:
        machine.step(LocalStop(15, "hand"))
        assert ask(machine) == "later", "its workers are being stopped"
    machine.finish(a, b)
    machine.say(a, Leave())
    machine.say(b, Leave())
    assert machine.membership.state is JobState.DONE and not machine.done
    machine.say("again", hello("again", host="host-b"), Join("b", None, 1))
    assert machine.to("again", Verdict)[0].code == code and not machine.done
    machine.say("again", Leave())
    assert machine.done == [code]


def test_the_end_waits_for_who_was_asked_to_come_again_for_seconds_only() -> None:
    machine = running(min_nodes=1)
    machine.beat(5.0, "a")
    assert ask(machine) == "later"
    machine.finish("a", "b")
    machine.say("a", Leave())
    machine.say("b", Leave())
    machine.tick(3.0)
    assert not machine.done
    machine.tick(2.0)
    assert machine.done == [0]
