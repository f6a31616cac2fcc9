"""
From Start to the verdict: first cause, restarts, lost nodes, stops, limits. The machine alone, by
hand.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pdrun.rendezvous.membership.machine import AgentLost, JobState, LocalStop
from pdrun.rendezvous.policies.verdict import ReportedFailure, find_first_cause, make_verdict
from pdrun.rendezvous.protocol.events import PeerDisconnected
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Cause,
    CauseKind,
    Failure,
    Finished,
    Heartbeat,
    Leave,
    Ready,
    Refuse,
    Start,
    StopRequest,
    StopWorkers,
    Verdict,
    Welcome,
    WorkerExit,
)
from tests.rendezvous.helpers import Machine, cause, config, hello


def running(*names: str, workers: int = 1, **changes: object) -> Machine:
    machine = Machine(config(nodes=len(names), **changes))
    machine.run(*names, workers=workers)
    assert machine.membership.state is JobState.RUNNING
    return machine


def test_all_well() -> None:
    machine = running("a", "b")
    machine.say("a", WorkerExit(0, 0, Cause("ok", 0)))
    machine.finish("a")
    assert machine.membership.state is JobState.RUNNING
    machine.say("b", WorkerExit(0, 1, Cause("ok", 0)))
    machine.finish("b")
    assert machine.verdict == Verdict(0, "all 2 workers succeeded")
    assert machine.to("a", Verdict) == machine.to("b", Verdict) == [machine.verdict]
    assert not machine.done
    machine.say("a", Leave())
    machine.say("b", Leave())
    assert machine.done == [0]


def test_one_worker_is_no_plural() -> None:
    machine = running("a")
    machine.finish("a")
    assert machine.verdict == Verdict(0, "the worker succeeded")


def test_a_node_that_has_done_its_part_may_be_cut_off() -> None:
    machine = running("a", "b")
    machine.say("a", WorkerExit(0, 0, Cause("ok", 0)), Finished(0))
    machine.cut("a")
    machine.beat(30.0, "b")
    assert "left" in machine.kinds() and "lost" not in machine.kinds()
    assert machine.membership.state is JobState.RUNNING
    machine.say("b", WorkerExit(0, 1, Cause("ok", 0)), Finished(0))
    assert machine.verdict == Verdict(0, "all 2 workers succeeded")


def test_a_failure_stops_everybody_with_one_code() -> None:
    machine = running("a", "b", "c")
    machine.fail("b", 1, code=42, kind="exit")
    for peer in ("a", "b", "c"):
        (stop,) = machine.to(peer, StopWorkers)
        assert (stop.signal, stop.grace) == (15, 2.0) and "rank 1 on b failed" in stop.reason
    machine.fail("a", 0, kind="stopped", code=143)
    machine.finish("a", "b")
    assert machine.membership.shutdown.verdict is None
    machine.finish("c")
    assert (machine.verdict.code, machine.verdict.victims) == (42, 1)
    assert machine.verdict.first == Failure(1, "b", cause("exit", 42))
    assert {peer: machine.to(peer, Verdict) for peer in "abc"} == {
        peer: [machine.verdict] for peer in "abc"
    }


def test_the_broken_connection_is_never_the_cause() -> None:
    machine = running("a", "b")
    machine.fail("a", 0, kind="communication", at=1.0)
    machine.fail("b", 1, kind="exception", code=7, at=900.0)
    machine.finish("a", "b")
    assert machine.verdict.first is not None
    assert (machine.verdict.code, machine.verdict.first.rank, machine.verdict.victims) == (7, 1, 1)


@pytest.mark.parametrize(
    ("well", "told"),
    [
        ([], "rank 0 on a failed: peer"),
        (["b"], "rank 0 on a failed: peer; rank 1 on b had ended before, without an error"),
        (
            ["b", "c"],
            "rank 0 on a failed: peer; rank 1 on b and 1 other had ended before, without an error",
        ),
    ],
)
def test_who_ended_before_one_that_lost_its_peer(well: list[str], told: str) -> None:
    machine = running("a", "b", "c")
    for name in well:
        machine.say(name, WorkerExit(0, "abc".index(name), Cause("ok", 0)))
    machine.say("a", WorkerExit(0, 0, Cause("communication", 1, summary="peer")))
    for name in "abc":
        machine.say(
            name, WorkerExit(0, "abc".index(name), Cause("ok", 0))
        )  # they end well when they are told to stop
        machine.finish(name)
    assert machine.verdict is not None and machine.verdict.reason == told


def test_who_ended_before_is_told_whichever_victim_is_the_first_in_time() -> None:
    machine = running("a", "b", workers=2)
    machine.say("b", WorkerExit(0, 2, Cause("ok", 0)))
    machine.say("a", WorkerExit(0, 0, Cause("communication", 1, at=9.0, summary="late")))
    machine.say("a", WorkerExit(0, 1, Cause("communication", 1, at=8.0, summary="peer")))
    machine.say("b", WorkerExit(0, 3, Cause("stopped", 143)))
    for name in "ab":
        machine.finish(name)
    told = "rank 1 on a failed: peer; rank 2 on b had ended before, without an error"
    assert machine.verdict is not None and machine.verdict.reason == told


def test_one_that_failed_by_itself_was_not_left_alone() -> None:
    machine = running("a", "b")
    machine.say("b", WorkerExit(0, 1, Cause("ok", 0)))
    machine.say("a", WorkerExit(0, 0, Cause("exception", 1, summary="ValueError: x")))
    machine.finish("a")
    machine.finish("b")
    assert (
        machine.verdict is not None
        and machine.verdict.reason == "rank 0 on a failed: ValueError: x"
    )


ORDER: list[CauseKind] = ["exception", "signal", "exit", "communication", "stopped"]


@pytest.mark.parametrize("kinds", list(itertools.permutations(ORDER, 2)))
def test_kind_goes_before_time(kinds: tuple[CauseKind, CauseKind]) -> None:
    reports = [
        ReportedFailure(Failure(i, f"n{i}", cause(kind)), i, float(i))
        for i, kind in enumerate(kinds)
    ]
    found = find_first_cause(reports)
    assert found is not None and found.failure.cause.kind == min(kinds, key=ORDER.index)


def test_inside_a_node_its_clock_counts_between_nodes_the_arrival() -> None:
    reports = [
        ReportedFailure(Failure(2, "b", cause(at=5.0)), 0, 0.0),
        ReportedFailure(Failure(0, "a", cause(at=1.0)), 1, 0.1),
        ReportedFailure(Failure(3, "b", cause(at=4.0)), 2, 0.2),
    ]
    found = find_first_cause(reports)
    assert found is not None and found.failure.rank == 3
    verdict = make_verdict(reports, restarts=0)
    assert [other.rank for other in verdict.others] == [2, 0]


def test_a_verdict_fits_in_a_message() -> None:
    from pdrun.rendezvous.protocol.codec import encode
    from pdrun.rendezvous.protocol.messages import Envelope

    worst = replace(cause(), traceback="\x1b" * 65536, tail=("\x1b" * 500,) * 20)
    verdict = make_verdict(
        [ReportedFailure(Failure(i, "n" * 60, worst), i, 0.0) for i in range(100)], restarts=0
    )
    assert len(verdict.others) == 8
    encode(Envelope("s", 0, 0, verdict))


def test_a_zero_code_never_hides_a_failure() -> None:
    machine = running("a")
    machine.fail("a", 0, code=0)
    machine.finish("a")
    assert machine.verdict.code == 1


def test_restart_waits_for_all_and_uses_the_new_store() -> None:
    machine = running("a", "b", max_restarts=1)
    machine.fail("b", 1, code=5)
    assert machine.membership.state is JobState.RESTARTING
    machine.finish("a", store="a:2")
    assert len(machine.to("a", Assign)) == 1
    machine.finish("b", store="b:2")
    again = machine.to("b", Assign)[1]
    assert (again.generation, again.restarts, again.master, again.node_rank) == (1, 1, "a:2", 1)
    machine.say("a", Ready(1))
    machine.say("b", Ready(1))
    assert machine.to("a", Start)[-1] == Start(1)
    machine.fail("a", 0, code=6)
    machine.finish("a", "b")
    assert machine.verdict.code == 6 and machine.verdict.reason.endswith("after 1 restart")
    assert machine.kinds().count("restarting") == 1


def test_what_cannot_help_is_not_tried_again() -> None:
    machine = running("a", "b", max_restarts=3)
    machine.fail("a", 0, code=1, retry=False)
    machine.finish("a", "b")
    assert machine.verdict.code == 1 and machine.membership.generation.number == 0
    assert "stopping" in machine.kinds() and "restarting" not in machine.kinds()


def test_a_hopeless_first_cause_that_arrives_late_ends_the_restart() -> None:
    machine = running("a", "b", max_restarts=3)
    machine.fail("b", 1, kind="communication")
    assert machine.membership.state is JobState.RESTARTING
    machine.fail("a", 0, kind="exception", code=1, retry=False)
    machine.finish("a", "b")
    assert machine.verdict.first is not None and machine.verdict.first.rank == 0


def test_words_of_an_older_generation_count_for_nothing() -> None:
    machine = running("a", "b", max_restarts=1)
    machine.fail("b", 1)
    machine.finish("a", "b")
    machine.say("a", WorkerExit(0, 0, cause(code=99)), Finished(0), Ready(0))
    assert (
        machine.membership.state is JobState.ASSIGNING
        and not machine.membership.generation.failures
    )


def test_a_node_that_never_reports_its_end_is_not_waited_for() -> None:
    machine = running("a", "b", max_restarts=2)
    machine.fail("a", 0, code=3)
    machine.finish("a")
    machine.beat(8.0, "a", "b")
    assert machine.verdict.code == 3
    assert "b did not report" in next(
        r.data["text"] for r in machine.records if r.kind == "warning"
    )
    assert machine.verdict.notes == ("b did not report the end of its workers in time",)
    assert "(not restarted: a node did not report the end" in machine.verdict.reason


@pytest.mark.parametrize("stop", [None, LocalStop(2, "the user")])
def test_a_node_lost_while_the_workers_are_stopped_is_named_and_changes_no_code(
    stop: LocalStop | None,
) -> None:
    machine = running("a", "b", "c", "d", "e", "f", "g", grace=20.0)
    if stop is None:
        machine.fail("a", 0, code=3)
    else:
        machine.step(stop)
    machine.beat(1.0, *"abcdefg")
    for peer in "bcdef":
        machine.cut(peer)
    machine.beat(9.0, "a", "g")
    machine.finish("a", "g")
    assert machine.verdict.code == (3 if stop is None else 130)
    assert len(machine.verdict.notes) == 4
    assert machine.verdict.notes[0].startswith("node b (host host-b) was lost: ")


@pytest.mark.parametrize("silent_before", [0.0, 2.5])
def test_a_cut_node_is_lost_soon_when_it_was_talking_later_when_it_was_not(
    silent_before: float,
) -> None:
    machine = running("a", "b", "c")
    machine.beat(silent_before, "a", "c")
    machine.cut("b")
    start = machine.now
    while "lost" not in machine.kinds():
        machine.beat(0.1, "a", "c")
        assert machine.now - start < 11
    assert machine.now - start == pytest.approx(
        10.0 - silent_before if silent_before else 0.6, abs=0.3
    )
    assert machine.to("a", StopWorkers) and machine.to("c", StopWorkers)
    machine.finish("a", "c")
    assert machine.verdict.code == 69 and "node b (host host-b) was lost" in machine.verdict.reason


def test_silence_is_suspect_then_lost() -> None:
    machine = running("a", "b")
    machine.beat(3.5, "a")
    assert "suspect" in machine.kinds() and "lost" not in machine.kinds()
    machine.say("b", Heartbeat(1, 0))
    assert machine.kinds()[-1] == "recovered"
    machine.beat(9.5, "a")
    assert "lost" not in machine.kinds()
    machine.beat(1.0, "a")
    assert "lost" in machine.kinds() and machine.to("b", Refuse)[0].code == 69
    machine.finish("a")
    assert machine.verdict.code == 69 and "no message for" in machine.verdict.reason


@pytest.mark.parametrize(
    ("unit", "silent", "reason"),
    [
        ("worker", 0.0, ""),
        ("worker", 6.0, "no message for "),
        ("node", 0.0, "its connection was closed"),
    ],
)
def test_a_finished_worker_that_closes_its_connection_has_ended(
    unit: str, silent: float, reason: str
) -> None:
    machine = running("a", "b", unit=unit)
    talk(machine, 3.0, "a", "b")
    machine.say("a", WorkerExit(0, 0, Cause("ok", 0)), Finished(0))
    machine.beat(silent, "b")
    machine.cut("a")
    machine.beat(12.0, "b")
    (left,) = [record.data["reason"] for record in machine.records if record.kind == "left"]
    assert left.startswith(reason) and (reason or not left)
    machine.finish("b")
    assert machine.verdict == Verdict(0, "all 2 workers succeeded")


def talk(machine: Machine, seconds: float, *peers: str, deaf: str = "") -> None:
    """Heartbeats; no echo reaches the ``deaf`` node."""
    for beat in range(1, int(seconds) + 1):
        for peer in peers:
            machine.say(peer, Heartbeat(beat, 0 if peer == deaf else beat - 1))
        machine.tick(1.0)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("closed", "its connection was closed, and it did not connect again for 0.8 s"),
        ("silent", "no message for 10.0 s, the probes of its connection were not answered"),
        (
            "one way",
            "it closed a connection on which it received nothing, no answer of the scheduler has"
            " reached it for 10.",
        ),
        ("deaf", "its messages arrive, but no answer of the scheduler has reached it for 10."),
        ("mute", "no message for 10."),
        ("relay", "its relay ended, and it did not connect again for"),
        ("resumed", "the scheduler was started again, and it did not connect again for 10."),
    ],
)
def test_the_reason_of_a_loss_is_what_was_seen(how: str, reason: str) -> None:
    machine = running("a", "b")
    talk(machine, 3.0, "a", "b")
    if how == "closed":
        machine.cut("b")
    elif how in ("silent", "mute"):
        machine.beat(4.0, "a")
        if how == "silent":
            machine.cut("b")
    elif how == "one way":
        talk(machine, 4.0, "a", "b", deaf="b")
        machine.cut("b")
    elif how == "relay":
        machine.step(PeerDisconnected("b", between=True))
    elif how == "resumed":
        machine.succeed(away=0.0)
        machine.say("a2", hello("a", incarnation=1))
    if how == "deaf":
        talk(machine, 10.0, "a", "b", deaf="b")
    machine.beat(12.0, "a", "a2")
    (lost,) = [record for record in machine.records if record.kind == "lost"]
    assert lost.data["node"] == "b" and lost.data["reason"].startswith(reason)


def test_the_scheduler_does_not_take_its_own_sleep_for_the_nodes_silence() -> None:
    machine = running("a", "b")
    for _ in range(5):
        machine.now += 60.0
        machine.tick()
    assert "suspect" not in machine.kinds() and machine.membership.state is JobState.RUNNING
    machine.beat(11.0, "a", "b")
    machine.cut("a")
    machine.now += 60.0
    machine.tick()
    assert "lost" not in machine.kinds()
    machine.beat(1.0, "b")
    assert "lost" in machine.kinds()


def test_a_connection_that_is_closed_after_the_scheduler_stood_still_is_no_proof_of_an_end() -> (
    None
):
    """
    An agent may have dropped it as silent, and be cut off by now: its workers run until its lease
    is over.
    """
    machine = running("a", "b")
    machine.now += 15.0
    machine.tick()
    machine.cut("b")
    machine.beat(9.0, "a")
    assert "lost" not in machine.kinds()
    machine.beat(2.0, "a")
    assert "lost" in machine.kinds()


@pytest.mark.parametrize("how", ["communication", "exception"])
def test_a_lost_node_is_the_cause_of_what_comes_after_its_connection_was_cut(
    how: CauseKind,
) -> None:
    machine = running("a", "b", "c")
    machine.cut("b")
    machine.beat(0.2, "a", "c")
    machine.fail("a", 0, kind=how)
    machine.beat(1.0, "a", "c")
    machine.finish("a", "c")
    assert machine.verdict.code == 69 and machine.verdict.first is None


def test_a_node_lost_after_a_failure_does_not_hide_it() -> None:
    machine = running("a", "b", "c")
    machine.fail("a", 0, code=42)
    machine.beat(0.2, "a", "b", "c")
    machine.cut("b")
    machine.beat(1.0, "a", "c")
    machine.finish("a", "c")
    assert machine.verdict.code == 42


def test_leaving_early_is_a_loss_leaving_finished_is_not() -> None:
    machine = running("a", "b")
    machine.say("a", Leave("tired"))
    machine.finish("b")
    assert machine.verdict.code == 69 and "left before the end: tired" in machine.verdict.reason
    machine = running("a", "b")
    machine.finish("a")
    machine.say("a", Leave())
    assert machine.membership.state is JobState.RUNNING
    machine.finish("b")
    assert machine.verdict.code == 0


def test_a_node_back_on_a_new_connection_is_told_what_holds() -> None:
    machine = running("a", "b", max_restarts=1)
    machine.cut("b")
    machine.fail("a", 0)
    machine.say("b2", hello("b", incarnation=1))
    assert [type(each.message) for each in machine.sent if each.peer == "b2"] == [
        Welcome,
        Assign,
        Start,
        StopWorkers,
    ]
    machine.say("b2", Finished(0))
    machine.finish("a")
    assert machine.to("b2", Assign)[-1].generation == 1 and "lost" not in machine.kinds()


def test_the_greatest_incarnation_wins() -> None:
    machine = running("a", "b")
    machine.say("b5", hello("b", incarnation=5))
    assert "b" in machine.closed
    machine.say("b4", hello("b", incarnation=4))
    assert machine.to("b4", Refuse) and "b4" in machine.closed
    machine.cut("b")
    machine.beat(2.0, "a", "b5")
    assert machine.membership.state is JobState.RUNNING


def test_a_node_that_was_given_up_stays_out() -> None:
    machine = running("a", "b")
    machine.cut("b")
    machine.beat(1.0, "a")
    machine.say("b2", hello("b", incarnation=1))
    assert "b was given up" in machine.to("b2", Refuse)[0].reason


def test_a_stop_wins_over_exit_codes() -> None:
    machine = running("a", "b")
    machine.say("a", StopRequest(2, "Ctrl-C on a"))
    assert machine.to("b", StopWorkers) == [StopWorkers(0, 2, 2.0, "stopped by Ctrl-C on a")]
    machine.fail("a", 0, kind="stopped", code=130)
    machine.say("b", WorkerExit(0, 1, Cause("ok", 0)))
    machine.finish("a", "b")
    assert (machine.verdict.code, machine.verdict.reason) == (130, "stopped by Ctrl-C on a")


def test_a_second_stop_of_the_same_sender_shortens_others_do_not() -> None:
    machine = running("a", "b")
    machine.say("a", StopRequest(2, "a"))
    machine.say("b", StopRequest(2, "b"))
    assert len(machine.to("b", StopWorkers)) == 1
    machine.say("a", StopRequest(2, "a"))
    assert machine.to("b", StopWorkers)[1:] == [StopWorkers(0, 9, 0.0, "stopped by a")]
    machine.say("a", StopRequest(2, "a"))
    assert len(machine.to("b", StopWorkers)) == 2
    machine.beat(6.0, "a", "b")
    assert machine.verdict.code == 130


def test_force_has_no_grace() -> None:
    machine = running("a")
    machine.step(LocalStop(15, "x", force=True))
    assert machine.to("a", StopWorkers)[0].grace == 0.0


def test_a_stop_during_a_restart_ends_it() -> None:
    machine = running("a", "b", max_restarts=5)
    machine.fail("a", 0, code=9)
    machine.say("b", StopRequest(15, "b"))
    machine.finish("a", "b")
    assert machine.verdict.code == 143 and machine.membership.generation.number == 0


def test_the_time_limit() -> None:
    machine = running("a", time_limit=5.0, heartbeat=0.0)
    machine.tick(4.0)
    assert not machine.to("a", StopWorkers)
    machine.tick(2.0)
    machine.finish("a")
    assert machine.verdict == Verdict(124, "the time limit of 5 s has passed")


def test_the_time_limit_counts_over_restarts() -> None:
    machine = running("a", time_limit=5.0, max_restarts=9, heartbeat=0.0)
    for generation in range(1, 4):
        machine.tick(2.0)
        machine.fail("a", 0)
        machine.finish("a")
        if machine.membership.state is JobState.ASSIGNING:
            machine.say("a", Ready(generation))
    assert machine.verdict.code == 124
    assert machine.verdict.reason == "the time limit of 5 s has passed, after 2 restarts"


def test_an_orphaned_scheduler_ends_the_job_at_once() -> None:
    machine = running("a", "b")
    machine.step(AgentLost("the node of the scheduler was lost"))
    for peer in ("a", "b"):
        assert machine.to(peer, StopWorkers) and machine.to(peer, Verdict)[0].code == 69


@pytest.mark.parametrize("stop", [None, LocalStop(2, "the user")])
def test_a_scheduler_orphaned_while_the_workers_are_stopped_keeps_the_cause(
    stop: LocalStop | None,
) -> None:
    machine = running("a", "b")
    if stop is None:
        machine.fail("b", 1, code=3)
    else:
        machine.step(stop)
    machine.step(AgentLost("the node of the scheduler was lost"))
    (verdict,) = machine.to("b", Verdict)
    assert verdict.code == (3 if stop is None else 130)
    assert verdict.notes == ("the node of the scheduler was lost",)


def test_the_scheduler_goes_when_all_know_or_had_time() -> None:
    machine = running("a", "b")
    machine.finish("a", "b")
    machine.cut("a")
    for _ in range(
        5
    ):  # on a bad network it may take several seconds; whoever has not heard it calls the job lost
        machine.beat(1.9, "b")
        assert not machine.done
    machine.beat(1.0, "b")
    assert machine.done == [0]


def test_who_was_cut_at_the_end_can_come_back_for_the_verdict() -> None:
    machine = running("a", "b")
    machine.finish("a")
    machine.say("a", Leave())
    machine.finish("b")
    machine.cut("b")
    machine.say("b2", hello("b", incarnation=1))
    assert machine.to("b2", Verdict) == [machine.verdict]


def test_a_node_that_stood_still_for_eight_seconds_and_was_cut_may_come_back() -> None:
    machine = running("a", "b")
    machine.beat(4.0, "a")
    machine.cut("b")
    machine.beat(4.0, "a")
    assert "lost" not in machine.kinds()
    machine.say("b2", hello("b", incarnation=1))
    machine.beat(4.0, "a", "b2")
    assert "lost" not in machine.kinds() and machine.membership.shutdown.verdict is None
