"""
Who takes part in an elastic job: forming, standing by, growing, losing nodes, departing, coming
back.
"""

from __future__ import annotations

import itertools

import pytest

from pdrun.rendezvous.membership.machine import JobState
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Depart,
    Finished,
    Hung,
    Join,
    Leave,
    Ready,
    Refuse,
    Standby,
    Start,
    StopRequest,
    StopWorkers,
    Unready,
    Verdict,
    Waiting,
    Welcome,
)
from tests.rendezvous.helpers import Machine, config, hello


def elastic(least: int = 2, most: int = 4, **changes: object) -> Machine:
    return Machine(config(**{"nodes": most, "min_nodes": least, "gather": 5.0, **changes}))


def running(*names: str, least: int = 2, most: int = 4, **changes: object) -> Machine:
    """An elastic job that runs with the named nodes."""
    machine = elastic(least, most, **changes)
    for name in names:
        machine.enter(name)
    if len(names) < most:
        machine.beat(6.0, *names)
    go(machine, *names)
    assert machine.membership.state is JobState.RUNNING
    return machine


def go(machine: Machine, *names: str) -> None:
    for name in names:
        machine.say(name, Ready(machine.membership.generation.number))


def places(machine: Machine) -> list[str]:
    """Names of the nodes of the present generation, in rank order."""
    found = sorted(
        (m.index, m.name) for m in machine.membership.roster.members.values() if m.index >= 0
    )
    return [name for _, name in found]


def last(machine: Machine, name: str) -> Assign:
    return machine.to(name, Assign)[-1]


# Forming
# -------


def test_it_forms_at_once_when_the_most_are_here() -> None:
    machine = elastic(1, 3)
    machine.enter("a")
    machine.enter("b")
    assert machine.membership.state is JobState.GATHERING
    machine.enter("c")
    assert machine.membership.state is JobState.ASSIGNING and last(machine, "c").nodes == 3


def test_it_forms_with_the_least_after_quiet_counted_from_the_last_join() -> None:
    machine = elastic(2, 4)
    machine.enter("a")
    machine.beat(30.0, "a")
    assert machine.membership.state is JobState.GATHERING
    machine.enter("b")
    machine.beat(4.0, "a", "b")
    machine.enter("c")
    machine.beat(4.5, "a", "b", "c")
    assert machine.membership.state is JobState.GATHERING
    machine.beat(1.0, "a", "b", "c")
    assert machine.membership.state is JobState.ASSIGNING
    assert [last(machine, name).node_rank for name in "abc"] == [0, 1, 2]
    assert last(machine, "a").world_size == 3


def test_a_stream_of_joiners_ends_the_gathering_by_the_start_timeout() -> None:
    machine = elastic(2, 50, start_timeout=20.0)
    names = []
    for number in range(12):
        names.append(f"n{number:02}")
        machine.enter(names[-1])
        machine.beat(2.0, *names)
        if machine.membership.state is not JobState.GATHERING:
            break
    assert machine.membership.state is JobState.ASSIGNING and len(names) == 11


def test_fewer_than_the_least_end_in_69_and_the_missing_are_counted() -> None:
    machine = elastic(3, 5, start_timeout=12.0)
    machine.enter("a")
    assert machine.to("a", Waiting)[0] == Waiting(("a",), ("2 more nodes",), 3, 0.0, 12.0, 1)
    machine.beat(13.0, "a")
    assert machine.verdict == Verdict(69, "2 more nodes did not join within 12 s")


def test_once_the_least_are_here_waiting_tells_how_long_the_quiet_lasts() -> None:
    machine = elastic(1, 3, waiting_every=2.0)
    machine.enter("a")
    machine.beat(3.0, "a")
    waiting = machine.to("a", Waiting)[-1]
    assert (waiting.expected, waiting.missing, waiting.timeout) == (3, ("2 more nodes",), 5.0)
    assert waiting.elapsed == pytest.approx(2.0, abs=0.3)


def test_a_node_that_is_cut_off_is_waited_for_before_the_generation_forms() -> None:
    machine = elastic(2, 4, dead=10.0)
    for name in "abc":
        machine.enter(name)
    machine.beat(3.0, "a", "b")  # c is silent
    machine.cut("c")
    machine.beat(4.0, "a", "b")
    assert machine.membership.state is JobState.GATHERING
    machine.say("c2", hello("c", incarnation=1))
    machine.beat(0.5, "a", "b", "c2")
    assert machine.membership.state is JobState.ASSIGNING and machine.to("c2", Assign)


def test_a_node_rank_is_respected_where_there_is_such_a_place() -> None:
    machine = elastic(2, 4)
    machine.enter("a", node_rank=3)
    machine.enter("b", node_rank=0)
    machine.enter("c")
    machine.beat(6.0, "a", "b", "c")
    assert places(machine) == ["b", "a", "c"]


# Standing by
# -----------


def test_who_comes_late_stands_by_and_what_comes_then_is_refused() -> None:
    machine = running("a", "b", least=2, most=2, spares=1)
    machine.enter("c")
    assert machine.to("c", Standby) == [
        Standby("the job runs with 2 nodes, the maximum: this one is a spare")
    ]
    assert not machine.to("c", Assign) and "standby" in machine.kinds()
    machine.enter("d")
    assert machine.to("d", Refuse) == [Refuse(69, "job 'job' already has its 2 nodes and 1 spare")]


def test_standby_is_said_again_after_a_reconnection_and_when_the_reason_changes() -> None:
    machine = running("a", "b", least=1, most=3, spares=1)
    machine.enter("c")
    (first,) = machine.to("c", Standby)
    assert (
        first.reason
        == "the job runs with 2 nodes: this one takes part when the next generation is formed"
    )
    machine.cut("c")
    machine.say("c2", hello("c", incarnation=1), Join("c", None, 1, store="c:1"))
    assert machine.to("c2", Standby) == [first] and not machine.to("c2", Refuse)
    machine.enter("d")
    machine.say("b", Leave("tired"))
    machine.enter("e")
    machine.finish("a")
    assert places(machine) == ["a", "c", "d"] and len(machine.to("c2", Standby)) == 1
    assert [standby.reason.split(": ")[1] for standby in machine.to("e", Standby)] == [
        "this one takes part when the next generation is formed",
        "this one is a spare",
    ]


def test_a_standby_node_that_goes_leaves_no_trace() -> None:
    machine = running("a", "b", most=3, spares=1)
    machine.enter("c")
    machine.cut("c")
    machine.beat(2.0, "a", "b")
    assert machine.membership.state is JobState.RUNNING and machine.kinds()[-1] == "left"
    machine.enter("d")
    machine.say("c2", hello("c", incarnation=1), Join("c", None, 1))
    assert machine.to("c2", Standby)
    machine.say("c2", Leave())
    assert "c" not in machine.membership.roster.names


def test_standby_nodes_hear_the_verdict() -> None:
    machine = running("a", "b", most=3)
    machine.enter("c")
    machine.finish("a", "b")
    assert machine.to("c", Verdict) == [machine.verdict] == [Verdict(0, "all 2 workers succeeded")]


def test_what_a_standby_node_says_about_the_generation_counts_for_nothing() -> None:
    machine = running("a", "b", most=3)
    machine.enter("c")
    machine.say("c", Finished(0, "x:1"), Ready(0))
    assert machine.membership.state is JobState.RUNNING
    assert machine.membership.roster.names["c"].store == "c:1"


# Growing
# -------


def test_it_grows_when_nobody_else_has_come_for_a_while() -> None:
    machine = running("a", "b", most=4, grow=8.0)
    machine.enter("c")
    assert (
        "a larger generation starts when no other node joins for 8 s"
        in machine.to("c", Standby)[0].reason
    )
    machine.beat(7.0, *"abc")
    machine.enter("d")
    machine.beat(7.0, *"abcd")
    assert machine.membership.state is JobState.RUNNING
    machine.beat(1.5, *"abcd")
    assert machine.membership.state is JobState.RESTARTING
    assert machine.to("a", StopWorkers)[0].reason == "2 more nodes can take part"
    assert not machine.to("c", StopWorkers)
    machine.finish("a", store="a:2")
    machine.finish("b", store="b:2")
    assert places(machine) == ["a", "b", "c", "d"] and last(machine, "d").master == "a:2"
    assert (last(machine, "d").generation, last(machine, "d").restarts) == (1, 0)


def test_without_grow_they_wait_for_the_next_generation() -> None:
    machine = running("a", "b", max_restarts=1)
    machine.enter("c")
    machine.beat(200.0, *"abc")
    assert machine.membership.state is JobState.RUNNING
    machine.fail("a", 0)
    machine.finish("a", "b")
    assert places(machine) == ["a", "b", "c"] and last(machine, "c").restarts == 1


def test_nothing_grows_where_it_cannot_or_the_end_is_near() -> None:
    machine = running("a", "b", most=2, spares=1, grow=5.0)
    machine.enter("c")
    machine.beat(10.0, *"abc")
    assert machine.membership.state is JobState.RUNNING
    machine = running("a", "b", most=3, grow=5.0)
    machine.enter("c")
    machine.finish("a")
    machine.beat(10.0, *"abc")
    assert machine.membership.state is JobState.RUNNING
    machine = running("a", "b", most=3, grow=5.0, dead=60.0)
    machine.enter("c")
    machine.beat(4.0, "a", "b")
    machine.cut("c")  # it may come back for a minute, and cannot take part before
    machine.beat(10.0, "a", "b")
    assert machine.membership.state is JobState.RUNNING


def test_nothing_grows_while_a_hang_is_looked_into() -> None:
    machine = running("a", "b", most=3, grow=3.0)
    machine.enter("c")
    machine.beat(2.0, *"abc")
    machine.say("a", Hung(0, 0, "no progress"))
    machine.beat(2.0, *"abc")
    assert machine.membership.state is JobState.RUNNING
    machine.beat(4.0, *"abc")
    assert machine.membership.state is JobState.STOPPING and "hang" in machine.kinds()


# Losing nodes
# ------------


def lose(machine: Machine, name: str, *others: str) -> None:
    machine.cut(name)
    machine.beat(1.0, *others)


def test_a_lost_node_is_no_restart_where_enough_are_left() -> None:
    machine = running("a", "b", "c", least=2, most=3)
    lose(machine, "b", "a", "c")
    assert machine.membership.state is JobState.RESTARTING
    assert "node b (host host-b) was lost" in machine.to("a", StopWorkers)[0].reason
    machine.finish("a", "c")
    assert places(machine) == ["a", "c"]
    assert (
        last(machine, "c").restarts,
        last(machine, "c").first_rank,
        last(machine, "c").nodes,
    ) == (0, 1, 2)
    go(machine, "a", "c")
    machine.finish("a", "c")
    assert machine.verdict == Verdict(0, "all 2 workers succeeded")


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    machine = running("a", "b", least=2, most=2, spares=1)
    machine.enter("s")
    lose(machine, "a", "b", "s")
    machine.finish("b")
    assert places(machine) == ["b", "s"] and last(machine, "s").restarts == 0
    assert last(machine, "s").master == "b:1"


def test_the_workers_die_of_a_lost_node_before_it_is_known() -> None:
    machine = running("a", "b", "c", least=2, most=3)
    machine.cut("c")
    machine.fail("a", 0, kind="communication")
    machine.fail("b", 1, kind="exception")
    assert machine.membership.state is JobState.STOPPING
    machine.finish("a", "b")
    machine.beat(1.0, "a", "b")
    assert machine.membership.state is JobState.ASSIGNING and places(machine) == ["a", "b"]
    assert machine.membership.shutdown.restarts == 0


def test_a_silent_node_explains_failures_even_when_its_death_is_known_after_the_grace() -> None:
    machine = running("a", "b", "c", least=2, most=3, grace=1.0)
    machine.beat(3.0, "a", "b")
    machine.fail("a", 0, kind="communication")
    machine.fail("b", 1, kind="communication")
    machine.finish("a", "b")
    machine.beat(10.0, "a", "b")
    assert machine.membership.state is JobState.ASSIGNING and places(machine) == ["a", "b"]
    assert machine.membership.shutdown.restarts == 0 and machine.to("c", Refuse)[-1].rejoin


def test_a_failure_before_the_loss_stays_the_cause() -> None:
    machine = running("a", "b", "c", least=2, most=3)
    machine.fail("a", 0, code=7)
    machine.beat(0.3, "a", "b", "c")
    lose(machine, "c", "a", "b")
    machine.finish("a", "b")
    assert machine.verdict.code == 7


def test_too_few_left_without_restarts_is_69() -> None:
    machine = running("a", "b", least=2, most=3)
    lose(machine, "b", "a")
    machine.finish("a")
    assert machine.verdict.code == 69 and "node b (host host-b) was lost" in machine.verdict.reason


def test_too_few_left_with_a_restart_waits_for_a_replacement() -> None:
    machine = running("a", "b", least=2, most=2, max_restarts=1)
    lose(machine, "b", "a")
    assert machine.membership.state is JobState.RESTARTING
    machine.finish("a", store="a:2")
    assert (
        machine.membership.state is JobState.GATHERING and machine.membership.shutdown.restarts == 1
    )
    assert (
        machine.to("a", Waiting)[-1].missing == ("1 more node",) and "gathering" in machine.kinds()
    )
    machine.say("a", Ready(0), Finished(0))  # said late: the generation is over
    machine.beat(20.0, "a")
    machine.enter("c")
    assert places(machine) == ["a", "c"] and last(machine, "c").master == "a:2"
    assert (last(machine, "c").generation, last(machine, "c").restarts) == (1, 1)
    go(machine, "a", "c")
    lose(machine, "c", "a")
    machine.finish("a")
    assert machine.verdict.code == 69 and machine.verdict.reason.endswith("after 1 restart")


def test_no_replacement_comes() -> None:
    machine = running("a", "b", least=2, most=2, max_restarts=1, start_timeout=10.0)
    lose(machine, "b", "a")
    machine.finish("a")
    machine.beat(11.0, "a")
    assert machine.verdict.code == 69
    assert machine.verdict.reason == (
        "node b (host host-b) was lost: its connection was closed, and it did not connect again"
        " for 0.8 s; 1 more node did not join within 10 s, after 1 restart"
    )


def test_a_node_lost_before_anything_runs_means_a_new_assignment_at_once() -> None:
    machine = elastic(2, 3)
    for name in "abc":
        machine.enter(name)
    machine.say("a", Ready(0))
    lose(machine, "b", "a", "c")
    assert places(machine) == ["a", "c"] and last(machine, "c") != machine.to("c", Assign)[0]
    machine.say("a", Ready(0))  # of the void one
    machine.say("c", Ready(1))
    assert not machine.to("a", Start)
    machine.say("a", Ready(1))
    assert machine.to("a", Start) == [Start(1)]


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_node_lost_before_anything_runs_and_too_few_are_left(restarts: int) -> None:
    machine = elastic(2, 2, max_restarts=restarts)
    machine.enter("a")
    machine.enter("b")
    lose(machine, "b", "a")
    if not restarts:
        assert machine.verdict.code == 69
        return
    assert (
        machine.membership.state is JobState.GATHERING and machine.membership.shutdown.restarts == 1
    )
    machine.say("a", Ready(0))
    machine.enter("c")
    assert places(machine) == ["a", "c"]


def test_many_nodes_lost_at_one_tick_are_one_new_generation() -> None:
    names = [f"n{number}" for number in range(8)]
    machine = elastic(2, 8)
    for name in names:
        machine.enter(name)
    machine.beat(12.0, *names[:3])
    assert places(machine) == names[:3] and machine.membership.generation.number == 1


def test_a_fenced_node_comes_back_as_a_new_one() -> None:
    machine = running("a", "b", "c", least=2, most=3)
    machine.beat(11.0, "a", "b")
    assert machine.to("c", Refuse) == [Refuse(69, machine.to("c", Refuse)[0].reason, rejoin=True)]
    machine.say("c2", hello("c", incarnation=1))
    assert (
        machine.to("c2", Refuse)[0].rejoin
        and "c was given up" in machine.to("c2", Refuse)[0].reason
    )
    machine.say("c3", hello("c-new"), Join("c", None, 1, store="c:9"))
    assert machine.to("c3", Standby)
    machine.finish("a", "b")
    assert places(machine) == ["a", "b", "c"] and last(machine, "c3").node_rank == 2


def test_a_job_that_cannot_use_it_does_not_ask_a_fenced_node_back() -> None:
    machine = Machine(config(nodes=2))
    machine.run("a", "b")
    machine.beat(11.0, "a")
    assert not machine.to("b", Refuse)[0].rejoin
    machine = running("a", "b", least=1, most=2)
    machine.beat(11.0, "a")
    machine.say("a", StopRequest(2, "me"))
    machine.say("b2", hello("b", incarnation=1))
    assert not machine.to("b2", Refuse)[0].rejoin


def test_an_agent_that_was_started_again_takes_its_own_place() -> None:
    machine = running("a", "b", least=2, most=2, max_restarts=1, spares=1)
    machine.cut("b")
    machine.say("b9", hello("b-new"), Join("b", None, 1, store="b:9"))
    assert machine.membership.state is JobState.RESTARTING and machine.to("b9", Standby)
    machine.finish("a")
    assert places(machine) == ["a", "b"] and machine.membership.shutdown.restarts == 0


def test_in_a_job_of_fixed_size_that_is_one_of_its_restarts() -> None:
    for restarts in (0, 1):
        machine = Machine(config(nodes=2, max_restarts=restarts))
        machine.run("a", "b")
        machine.cut("b")
        machine.say("b9", hello("b-new"), Join("b", None, 1, store="b:9"))
        if not restarts:
            assert machine.to("b9", Refuse)[0].reason == "job 'job' already has its 2 nodes"
            assert machine.membership.state is JobState.RUNNING
            continue
        machine.finish("a")
        assert places(machine) == ["a", "b"] and machine.membership.shutdown.restarts == 1


def test_a_connected_namesake_is_refused_in_an_elastic_job_too() -> None:
    machine = running("a", "b")
    machine.say("p", hello("x"), Join("b", None, 1))
    assert (
        machine.to("p", Refuse)[0].code == 78
        and "two nodes are called 'b'" in machine.to("p", Refuse)[0].reason
    )


def come_again(machine: Machine, agent: str, name: str = "b") -> str:
    """A pod of this name joins in another instance; return its answer."""
    machine.say(agent, hello(agent), Join(name, None, 1, store=f"{agent}:1", is_pod=True))
    if not (refuse := machine.to(agent, Refuse)):
        return "accepted"
    return "later" if refuse[0].retry else refuse[0].reason


@pytest.mark.parametrize("how", ["silent", "cut while silent"])
def test_a_pod_that_comes_again_waits_until_the_earlier_one_is_lost(how: str) -> None:
    machine = running("a", "b", least=1, most=2)
    machine.beat(4.0, "a")
    if how != "silent":
        machine.cut("b")
    for second in range(5):
        assert come_again(machine, f"b{second}") == "later"
        assert machine.membership.state is JobState.RUNNING
        assert machine.closed[-1] == f"b{second}"
        machine.beat(1.0, "a")
    machine.succeed(0.0)  # what a waiting pod said changed nothing that a journal keeps
    machine.say("a1", hello("a", incarnation=1))
    machine.beat(11.0, "a1")
    assert machine.membership.state is JobState.RESTARTING
    assert come_again(machine, "b9") == "accepted"
    machine.finish("a1")
    machine.beat(11.0, "a1", "b9")
    assert machine.to("b9", Assign)[-1].node_rank == 1


def test_a_pod_takes_the_place_of_one_that_has_left_or_died() -> None:
    machine = running("a", "b", least=1, most=2)
    machine.say("b", Depart("SIGTERM on b"))
    assert come_again(machine, "b1") == "later", "it saves"
    machine.say("b", Finished(0), Leave("it was asked to leave"))
    assert come_again(machine, "b2") == "accepted"
    machine = running("a", "b", least=1, most=2)
    machine.cut("b")
    assert come_again(machine, "b1") == "accepted", "the kernel closed its connection"


@pytest.mark.parametrize("restarts", [0, 1])
def test_in_a_job_of_fixed_size_a_pod_waits_only_if_it_can_be_used(restarts: int) -> None:
    machine = Machine(config(nodes=2, max_restarts=restarts))
    machine.run("a", "b")
    machine.beat(4.0, "a")
    if not restarts:
        assert come_again(machine, "b1") == "job 'job' already has its 2 nodes"
        return
    assert come_again(machine, "b1") == "later"
    machine.beat(8.0, "a")
    assert come_again(machine, "b2") == "accepted"
    machine.finish("a")
    assert machine.membership.shutdown.restarts == 1


def test_ranks_keep_their_order_and_newcomers_stand_behind() -> None:
    machine = running("b", "c", "d", least=2, most=4)
    machine.enter("a")
    lose(machine, "c", "a", "b", "d")
    machine.finish("b", "d")
    assert places(machine) == ["b", "d", "a"]
    go(machine, "b", "d", "a")
    machine.enter("aa", node_rank=0)
    lose(machine, "d", "a", "b", "aa")
    machine.finish("a", "b")
    assert places(machine) == ["aa", "b", "a"]
    firsts = [last(machine, name).first_rank for name in ("aa", "b", "a")]
    assert firsts == [0, 1, 2] and last(machine, "a").master == "aa:1"


def test_a_node_that_does_not_report_its_end_is_left_behind() -> None:
    machine = running("a", "b", "c", least=2, most=3, max_restarts=1)
    machine.fail("a", 0)
    machine.finish("a", "b")
    machine.beat(16.0, "a", "b", "c")
    assert places(machine) == ["a", "b"] and machine.membership.shutdown.restarts == 1
    assert (
        machine.to("c", Refuse)[0].rejoin and "did not report" in machine.to("c", Refuse)[0].reason
    )


@pytest.mark.parametrize("how", ["says so", "says nothing"])
def test_a_newcomer_that_cannot_start_does_not_end_the_others_job(how: str) -> None:
    machine = running("a", "b", least=2, most=3, grow=1.0, start_timeout=20.0)
    machine.enter("c")
    machine.beat(2.0, *"abc")
    machine.finish("a", "b")
    assert places(machine) == ["a", "b", "c"]
    if how == "says so":
        machine.say("c", Unready(1, 127, "train.py is not there"))
    else:
        go(machine, "a", "b")
        machine.beat(21.0, *"abc")
    assert places(machine) == ["a", "b"] and machine.membership.generation.number == 2
    assert ("train.py is not there" if how == "says so" else "ready within 20 s") in machine.to(
        "c", Refuse
    )[0].reason
    go(machine, "a", "b")
    assert machine.membership.state is JobState.RUNNING


def test_a_node_that_cannot_start_before_anything_has_run_ends_it_for_all() -> None:
    machine = elastic(1, 2)
    machine.enter("a")
    machine.enter("b")
    machine.say("b", Unready(0, 127, "train.py is not there"))
    assert machine.verdict == Verdict(127, "b cannot start: train.py is not there")


# Departing
# ---------


def test_a_node_departs_in_order() -> None:
    machine = running("a", "b", "c", least=2, most=3)
    machine.say("b", Depart("SIGTERM on b"))
    assert machine.membership.state is JobState.RESTARTING
    for name in "abc":
        assert machine.to(name, StopWorkers)[0].reason == "node b departs: SIGTERM on b"
    machine.say("b", Depart("SIGTERM on b"))
    machine.finish("b")
    machine.say("b", Leave("SIGTERM on b"))
    assert "left" in machine.kinds() and "lost" not in machine.kinds()
    machine.finish("a", "c")
    assert places(machine) == ["a", "c"] and machine.membership.shutdown.restarts == 0
    go(machine, "a", "c")
    machine.finish("a", "c")
    assert machine.verdict.code == 0


def test_a_departing_node_that_stays_a_while_is_not_chosen_again() -> None:
    machine = running("a", "b", "c", least=2, most=3)
    machine.say("b", Depart("going"))
    machine.finish("a", "b", "c")
    assert places(machine) == ["a", "c"] and not machine.to("b", Standby)
    machine.say("b", Leave())
    assert machine.membership.state is JobState.ASSIGNING


@pytest.mark.parametrize("least", [2, 1])
def test_departing_where_too_few_would_stay_stops_the_job(least: int) -> None:
    machine = running("a", "b", least=2, most=3) if least == 2 else running("a", least=1, most=3)
    machine.say("a", Depart("SIGTERM on a"))
    assert machine.membership.state is JobState.STOPPING
    machine.finish(*("a", "b")[: len(machine.membership.roster.active_nodes)])
    assert machine.verdict == Verdict(143, "stopped by SIGTERM on a")


def test_departing_from_a_job_of_fixed_size_stops_it() -> None:
    machine = Machine(config(nodes=2, max_restarts=3))
    machine.run("a", "b")
    machine.say("a", Depart("SIGTERM on a"))
    machine.finish("a", "b")
    assert machine.verdict.code == 143


def test_departing_before_anything_runs() -> None:
    machine = elastic(2, 3)
    for name in "abc":
        machine.enter(name)
    machine.say("b", Depart("going"))
    assert places(machine) == ["a", "c"]
    machine = elastic(2, 3)
    machine.enter("a")
    machine.enter("b")
    machine.say("b", Depart("going"))
    machine.beat(10.0, "a", "b")
    assert machine.membership.state is JobState.GATHERING
    machine.say("b", Leave())
    machine.enter("c")
    machine.beat(6.0, "a", "c")
    assert places(machine) == ["a", "c"]


def test_departing_when_all_have_ended_and_too_few_would_stay() -> None:
    machine = running("a", "b", least=2, most=3, max_restarts=2)
    machine.fail("a", 0)
    machine.finish("a")
    machine.say("a", Depart("SIGTERM on a"))
    machine.finish("b")
    assert (machine.verdict.code, machine.verdict.reason) == (143, "stopped by SIGTERM on a")


def test_a_node_that_has_done_its_part_departs_and_nobody_minds() -> None:
    machine = running("a", "b", least=2, most=3)
    machine.finish("a")
    machine.say("a", Depart("going"), Leave())
    assert machine.membership.state is JobState.RUNNING
    machine.finish("b")
    assert machine.verdict.code == 0


def test_the_store_of_a_node_that_was_away_while_others_gathered() -> None:
    machine = running("b", "c", least=2, most=2, max_restarts=1)
    machine.say("c", Leave())
    machine.say("b", Finished(0, "b:2"))
    machine.cut("b")
    machine.tick(12.0)
    assert machine.membership.state is JobState.GATHERING and not machine.membership.roster.members
    machine.say(
        "b2", hello("b", incarnation=1), Join("b", None, 1, store="b:1"), Finished(0, "b:2")
    )
    machine.enter("d")
    assert last(machine, "d").master == "b:2"


def test_a_departing_node_that_is_cut_is_not_lost_twice() -> None:
    machine = running("a", "b", "c", least=2, most=3)
    machine.say("b", Depart("going"))
    lose(machine, "b", "a", "c")
    machine.finish("a", "c")
    assert places(machine) == ["a", "c"] and machine.membership.generation.number == 1


# What agents are told
# --------------------


@pytest.mark.parametrize(
    ("changes", "lease"),
    [
        ({"nodes": 2}, 0.0),
        ({"nodes": 2, "max_restarts": 1}, 6.0),
        ({"nodes": 2, "min_nodes": 1}, 6.0),
        ({"nodes": 2, "spares": 1}, 6.0),
        ({"nodes": 2, "min_nodes": 1, "heartbeat": 0.0}, 0.0),
    ],
)
def test_the_lease_is_two_thirds_of_dead_where_a_generation_may_form_without_the_node(
    changes: dict[str, object], lease: float
) -> None:
    machine = Machine(config(**{"dead": 9.0, "patience": 33.0, **changes}))
    machine.say("a", hello("a"))
    (welcome,) = machine.to("a", Welcome)
    assert (welcome.lease, welcome.patience, welcome.dead) == (lease, 33.0, 9.0)


def test_every_order_of_loss_and_failure_ends_in_a_generation_or_a_verdict() -> None:
    """
    Three nodes, one is lost, one fails, one departs, in every order; whoever is left reports and is
    ready.
    """
    happenings = ("lose c", "fail b", "depart a")
    for order in itertools.permutations(happenings):
        machine = running("a", "b", "c", "d", least=1, most=4, max_restarts=1)
        for happening in order:
            verb, name = happening.split()
            member = machine.membership.roster.names.get(name)
            if verb == "lose":
                lose(machine, name, *(each for each in "abd" if each != name))
            elif verb == "depart":
                machine.say(name, Depart("going"))
            elif member is not None:
                machine.fail(name, member.ranks[0])
        machine.finish(*machine.membership.roster.names)
        assert machine.membership.state is JobState.ASSIGNING, order
        assert places(machine) == ["b", "d"] and machine.membership.generation.number == 1
