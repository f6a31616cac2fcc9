"""
A scheduler dies, its successor replays the journal: whatever was going on goes on, and nothing is
late by that.
"""

from __future__ import annotations

import pytest

from pdrun.rendezvous.membership.machine import JobState, Tick
from pdrun.rendezvous.protocol.events import MessageReceived, NodesLost, SchedulerResumed
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Depart,
    Finished,
    Heartbeat,
    Hung,
    Join,
    Leave,
    Progress,
    Ready,
    ShowStacks,
    StackGroup,
    Stacks,
    Standby,
    Start,
    StatusQuery,
    Step,
    StopRequest,
    StopWorkers,
    Verdict,
    Welcome,
)
from tests.rendezvous.helpers import Machine, config, durable, hello


def back(machine: Machine, *names: str) -> None:
    """The agents come back on new connections, and say again that they want to take part."""
    for name in names:
        member = machine.membership.roster.members[name]
        machine.say(
            f"{name}+", hello(name, incarnation=member.hello.incarnation + 1), Join(name, None, 1)
        )


def test_gathering_goes_on_with_who_was_there() -> None:
    machine = Machine(config(nodes=3, start_timeout=30.0))
    machine.enter("a")
    machine.beat(20.0, "a")
    machine.succeed(away=25.0)
    machine.tick()
    assert machine.membership.shutdown.verdict is None
    back(machine, "a")
    assert machine.to("a+", Welcome)[0].scheduler == "t" * 32
    machine.enter("b")
    machine.enter("c")
    assert machine.membership.state is JobState.ASSIGNING and machine.to("a+", Assign)


def test_assigning_goes_on_with_who_was_ready() -> None:
    machine = Machine()
    machine.enter("a")
    machine.enter("b")
    machine.say("a", Ready(0))
    machine.succeed()
    back(machine, "a", "b")
    assert machine.to("a+", Assign) == machine.to("a", Assign)
    machine.say("b+", Ready(0))
    assert machine.to("a+", Start) == machine.to("b+", Start) == [Start(0)]


def test_running_goes_on_and_nobody_is_lost_before_the_full_time() -> None:
    machine = Machine()
    machine.run("a", "b")
    machine.beat(3.5, "a")
    assert machine.kinds()[-1] == "suspect"
    machine.succeed(away=40.0)
    back(machine, "a")
    machine.beat(9.0, "a+")
    assert machine.membership.state is JobState.RUNNING and "lost" not in machine.kinds()
    machine.beat(1.5, "a+")
    assert "lost" in machine.kinds()
    machine.finish("a+")
    assert machine.verdict.code == 69


def test_who_is_back_in_time_loses_nothing() -> None:
    machine = Machine(config(nodes=2, max_restarts=1))
    machine.run("a", "b")
    machine.say("a", Progress(0, (Step(0, 5),), 4))
    machine.say("b", Progress(0, (Step(1, 5),), 4))
    machine.fail("a", 0)
    machine.succeed()
    back(machine, "a", "b")
    assert machine.to("b+", StopWorkers) == machine.to("b", StopWorkers)
    machine.say("a+", Finished(0, "a:2"))
    machine.succeed()
    for name in ("a", "b"):
        machine.say(f"{name}++", hello(name, incarnation=2))
    machine.say("b++", Finished(0))
    again = machine.to("b++", Assign)[-1]
    assert (again.generation, again.restarts, again.master, again.agreed_step) == (1, 1, "a:2", 4)


def test_the_back_off_is_not_begun_anew() -> None:
    machine = Machine(config(nodes=1, max_restarts=5, backoff=8.0))
    machine.run("a")
    machine.fail("a", 0)
    machine.finish("a")
    machine.say("a", Ready(1))
    machine.fail("a", 0)
    machine.finish("a")
    machine.beat(4.0, "a")
    machine.succeed(away=3.0)
    back(machine, "a")
    machine.beat(9.0, "a+")
    assert (
        machine.membership.state is JobState.ASSIGNING and machine.membership.shutdown.restarts == 2
    )


def test_stopping_keeps_its_deadline() -> None:
    machine = Machine()
    machine.run("a", "b")
    machine.say("a", StopRequest(2, "me"))
    machine.succeed(away=60.0)
    back(machine, "a", "b")
    assert machine.to("b+", StopWorkers) == machine.to("b", StopWorkers)
    machine.beat(5.0, "a+", "b+")
    assert machine.membership.shutdown.verdict is None
    machine.beat(3.0, "a+", "b+")
    assert machine.verdict.code == 130


def test_the_verdict_is_said_again() -> None:
    machine = Machine()
    machine.run("a", "b")
    machine.finish("a", "b")
    machine.say("a", Leave())
    machine.succeed(away=30.0)
    assert not machine.done
    back(machine, "b")
    assert machine.to("b+", Verdict) == [Verdict(0, "all 2 workers succeeded")]
    machine.say("b+", Leave())
    assert machine.done == [0]


def test_a_hang_is_still_looked_into() -> None:
    machine = Machine()
    machine.run("a", "b")
    machine.say("a", Hung(0, 0, "no progress"), Stacks(0, (StackGroup((0,), "x"),)))
    machine.succeed(away=30.0)
    back(machine, "a", "b")
    machine.beat(1.0, "a+", "b+")
    assert machine.membership.state is JobState.RUNNING
    assert machine.to("b+", ShowStacks) and not machine.to("a+", ShowStacks)
    machine.say("b+", Stacks(0, (StackGroup((1,), "y"),)))
    assert (
        machine.membership.state is JobState.STOPPING
        and machine.membership.generation.failures[0].failure.cause.kind == "hang"
    )


def test_elastic_lives_go_on() -> None:
    machine = Machine(config(nodes=3, min_nodes=2, spares=1, gather=4.0, grow=10.0))
    machine.run("a", "b", "c")
    machine.enter("d")
    machine.beat(11.0, "a", "c", "d")  # b is silent
    assert any(isinstance(event, NodesLost) for _, event in machine.journal)
    machine.say("c", Depart("going"))
    machine.succeed()
    assert "b" in machine.membership.roster.gone
    machine.say("b+", hello("b", incarnation=1))
    assert not machine.to("b+", Welcome)
    back(machine, "a", "c", "d")
    assert machine.to("d+", Standby) == machine.to("d", Standby)
    machine.finish("c+", "a+")
    assert machine.to("d+", Assign)[-1].nodes == 2
    machine.succeed()
    assert machine.membership.state is JobState.ASSIGNING


def test_the_time_limit_is_the_users_and_goes_on() -> None:
    machine = Machine(config(nodes=1, time_limit=20.0))
    machine.run("a")
    machine.beat(10.0, "a")
    machine.succeed(away=11.0)
    machine.tick(0.5)
    assert machine.membership.state is JobState.STOPPING


def test_what_a_journal_keeps() -> None:
    machine = Machine()
    machine.run("a", "b")
    machine.beat(1.0, "a", "b")
    kept = len(machine.journal)
    for _ in range(20):
        machine.beat(0.5, "a", "b")
        machine.say("a", StatusQuery())
    machine.say("a", Progress(0, (Step(0, 1),)))
    machine.say("a", Progress(0, (Step(0, 2),)))
    machine.say("a", Progress(0, (), 2))
    machine.say("a", Progress(0, (), 2))
    new = [event for _, event in machine.journal[kept:] if not isinstance(event, Tick)]
    assert new == [
        MessageReceived("a", Progress(0, (Step(0, 1),))),
        MessageReceived("a", Progress(0, (), 2)),
    ]
    assert len(machine.journal) - kept <= 4  # a tick at which progress was recorded
    with pytest.raises(Exception, match="the first message must be Hello"):
        machine.say("stranger", Heartbeat(1, 1))


def test_a_journal_that_is_replayed_piece_by_piece_tells_the_same() -> None:
    machine = Machine(config(nodes=2, max_restarts=2))
    machine.run("a", "b")
    machine.fail("a", 0)
    machine.cut("b")
    machine.beat(2.0, "a")
    machine.finish("a")
    whole, pieces = machine.replayed(), Machine(machine.config).membership
    said = [record for entry in machine.journal for record in pieces.replay([entry])]
    assert durable(pieces) == durable(whole) == durable(machine.membership)
    kinds = [record.kind for _, record in said]
    assert kinds == [kind for kind in machine.kinds() if kind not in ("suspect", "recovered")]
    assert pieces.step(SchedulerResumed("u" * 32), machine.now)
