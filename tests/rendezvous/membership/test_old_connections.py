"""Connections that are no proof of a node: deaf ones, and those that an agent has replaced."""

from __future__ import annotations

from pdrun.rendezvous.protocol.events import PeerDisconnected
from pdrun.rendezvous.protocol.messages import Heartbeat, Refuse, Welcome
from tests.rendezvous.helpers import Machine, config, hello


def running(*names: str) -> Machine:
    machine = Machine(config(nodes=len(names)))
    machine.run(*names)
    return machine


def test_a_node_that_sends_and_receives_nothing_is_lost() -> None:
    """Its host cannot hear the scheduler: its own heartbeats say so."""
    machine = running("a", "b")
    for number in range(1, 11):
        machine.say("a", Heartbeat(number, number - 1))
        machine.say("b", Heartbeat(number, 0))
        machine.tick(1.0)
    assert "lost" not in machine.kinds() and "suspect" not in machine.kinds()
    for number in range(11, 13):
        machine.say("a", Heartbeat(number, number - 1))
        if "lost" not in machine.kinds():
            machine.say("b", Heartbeat(number, 0))
        machine.tick(1.0)
    assert "lost" in machine.kinds() and machine.to("b", Refuse)[0].code == 69
    assert not machine.to("a", Refuse)
    machine.finish("a")
    assert machine.verdict.code == 69 and "node b (host host-b) was lost" in machine.verdict.reason


def test_an_older_connection_is_refused_before_the_agent_has_joined() -> None:
    machine = Machine(config(nodes=2))
    machine.say("new", hello("a", incarnation=5))
    machine.say("old", hello("a", incarnation=4))
    assert machine.to("old", Refuse) and "old" in machine.closed and "new" not in machine.closed
    machine.say("same", hello("a", incarnation=5))
    assert machine.to("same", Refuse) and "new" not in machine.closed


def test_an_older_connection_is_refused_after_the_newer_one_was_cut() -> None:
    machine = running("a", "b")
    machine.say("b5", hello("b", incarnation=5))
    machine.cut("b5")
    machine.say("b4", hello("b", incarnation=4))
    assert machine.to("b4", Refuse) and not machine.to("b4", Welcome)
    machine.say("b6", hello("b", incarnation=6))
    assert machine.to("b6", Welcome) and not machine.to("b6", Refuse)


def test_the_end_of_a_relay_tells_nothing_about_its_nodes() -> None:
    machine = running("a", "b")
    machine.beat(2.0, "a", "b")
    machine.step(PeerDisconnected("b", between=True))
    machine.beat(9.0, "a")
    assert "lost" not in machine.kinds()
    machine.beat(2.0, "a")
    assert "lost" in machine.kinds()
