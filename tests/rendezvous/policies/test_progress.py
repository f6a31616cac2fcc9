"""How far the workers are: the agreed step, stragglers, and the sparse record of it."""

from __future__ import annotations

import pytest

from pdrun.rendezvous.membership.machine import IllegalEvent, JobState
from pdrun.rendezvous.policies.progress import MAX_PLAN_CHARS, MAX_PLANS, ProgressTracker
from pdrun.rendezvous.protocol.messages import (
    Assign,
    NodeNumber,
    Notice,
    PlanFact,
    Progress,
    Ready,
    Step,
)
from tests.rendezvous.helpers import Machine, config


def running(*names: str, workers: int = 1, **changes: object) -> Machine:
    machine = Machine(config(nodes=len(names), heartbeat=0.0, **changes))
    machine.run(*names, workers=workers)
    return machine


def report(
    machine: Machine, name: str, *steps: tuple[int, int] | tuple[int, int, float], saved: int = -1
) -> None:
    machine.say(
        name,
        Progress(machine.membership.generation.number, tuple(Step(*each) for each in steps), saved),
    )


def restart(machine: Machine, *names: str) -> int:
    """Fail, start again, and return the step that the next generation was told."""
    machine.fail(names[0], machine.membership.roster.names[names[0]].ranks[0])
    machine.finish(*names)
    machine.tick(31.0)
    for name in names:
        machine.say(name, Ready(machine.membership.generation.number))
    assert machine.membership.state is JobState.RUNNING
    told = {machine.to(name, Assign)[-1].agreed_step for name in names}
    assert len(told) == 1
    return told.pop()


def test_the_agreed_step_is_the_one_that_every_node_has_saved() -> None:
    machine = running("a", "b", max_restarts=9)
    assert machine.to("a", Assign)[0].agreed_step == -1
    report(machine, "a", (0, 120), saved=100)
    assert restart(machine, "a", "b") == -1  # b has saved nothing
    report(machine, "a", (0, 120), saved=100)
    report(machine, "b", (1, 60), saved=50)
    assert restart(machine, "a", "b") == 50
    assert restart(machine, "a", "b") == 50  # nothing was saved since
    report(machine, "a", (0, 90), saved=80)
    report(machine, "b", (1, 90), saved=40)
    assert restart(machine, "a", "b") == 50
    report(machine, "a", saved=80)
    report(machine, "b", saved=70)
    report(machine, "b", saved=60)
    assert restart(machine, "a", "b") == 70


def test_a_lost_node_counts_with_what_it_had_saved() -> None:
    machine = Machine(config(nodes=3, min_nodes=2))
    machine.run("a", "b", "c")
    report(machine, "a", saved=9)
    report(machine, "b", saved=8)
    report(machine, "c", saved=7)
    machine.cut("c")
    machine.beat(1.0, "a", "b")
    machine.finish("a", "b")
    assert machine.to("a", Assign)[-1].agreed_step == 7


def test_sampled_steps_are_no_lag() -> None:
    tracker = ProgressTracker(0.0)
    tracker.add_report("a", Progress(1, (Step(0, 1000, 0.0, True),)), range(2))
    tracker.add_report("a", Progress(1, (Step(1, 500, 0.0, True),)), range(2))
    found = [tracker.find_stragglers(float(now)) for now in range(2, 40, 2)]
    assert not any(found)
    record = tracker.take_record(40.0)
    assert record == {"step": 500, "most": 1000, "saved": -1}
    tracker.add_report("a", Progress(1, (Step(0, 1000), Step(1, 500))), range(2))
    assert any(tracker.find_stragglers(float(now)) for now in range(42, 60, 2))


def test_reports_of_another_generation_or_another_nodes_ranks_count_for_nothing() -> None:
    machine = running("a", "b", max_restarts=2)
    report(machine, "a", (0, 5), (1, 99))
    report(machine, "b", (1, 5))
    machine.tick(6.0)
    data = next(record.data for record in machine.records if record.kind == "progress")
    assert (data["step"], data["most"]) == (5, 5)
    restart(machine, "a", "b")
    machine.say("a", Progress(0, (Step(0, 77),), 77))
    machine.say("b", Progress(0, (), 77))
    assert restart(machine, "a", "b") == -1
    with pytest.raises(IllegalEvent, match="does not exist yet"):
        machine.say("a", Progress(9))


def test_the_record_is_sparse_and_names_the_slowest() -> None:
    machine = running("a", "b", workers=2)
    for second in range(30):
        report(machine, "a", (0, second + 3), (1, second + 2))
        report(machine, "b", (2, second + 1), (3, second + 3), saved=second)
        machine.tick(1.0)
    found = [record.data for record in machine.records if record.kind == "progress"]
    assert 5 <= len(found) <= 7
    last = found[-1]
    assert (
        last["generation"] == 0
        and last["rank"] == 2
        and last["most"] - last["step"] == 2
        and last["saved"] == -1
    )
    machine.tick(30.0)
    assert (
        len([r for r in machine.records if r.kind == "progress"]) <= len(found) + 1
    )  # nothing new, nothing said


def warnings(machine: Machine) -> list[str]:
    return [record.data["text"] for record in machine.records if record.kind == "warning"]


def test_a_worker_that_stays_behind_is_named_once_a_minute() -> None:
    machine = running("a", "b", workers=2)
    for second in range(100):
        report(machine, "a", (0, second), (1, second))
        report(machine, "b", (2, max(0, second - 5)), (3, second))
        machine.tick(1.0)
        if second == 8:
            assert not warnings(machine)
        if second == 30:
            assert len(warnings(machine)) == 1
    assert len(warnings(machine)) == 2
    assert warnings(machine)[0].startswith("rank 2 on b is 5 steps behind the others")
    assert [notice.text for notice in machine.to("a", Notice)] == warnings(machine)


def test_who_catches_up_or_is_one_step_behind_or_has_ended_is_no_straggler() -> None:
    machine = running("a", "b", workers=2)
    for second in range(40):
        steps = second if second % 6 else second - 2
        report(machine, "a", (0, second), (1, steps))
        report(machine, "b", (2, second - 1))
        if second < 4:
            report(machine, "b", (3, 0))
        if second == 4:
            from pdrun.rendezvous.protocol.messages import Cause, WorkerExit

            machine.say("b", WorkerExit(0, 3, Cause("ok", 0)))
        machine.tick(1.0)
    assert not warnings(machine)


def test_a_worker_whose_own_work_takes_longer_is_named() -> None:
    machine = running("a", "b", workers=2)
    for step in range(6):
        report(machine, "a", (0, step, 0.10), (1, step, 0.11))
        report(machine, "b", (2, step, 0.16), (3, step, 0.1))
        machine.tick(1.0)
        if step == 3:
            assert not warnings(machine)
    machine.tick(2.0)
    assert warnings(machine) == ["rank 2 on b needs 0.16 s per step, the others 0.1 s"]


def test_more_work_that_is_little_of_a_step_is_no_straggler() -> None:
    machine = running("a", "b", workers=2)
    for step in range(12):
        report(machine, "a", (0, step, 0.010), (1, step, 0.011))
        report(machine, "b", (2, step, 0.040), (3, step, 0.010))
        machine.tick(1.0)
    assert not warnings(machine)


def test_a_sampled_worker_whose_own_work_takes_longer_is_named() -> None:
    """Of a `pdrun.Run`: a sample each five seconds, of steps that differ."""
    machine = running("a", "b")
    for second in range(0, 40, 5):
        steps = (Step(0, 50 * second, 0.01, True), Step(1, 50 * second - 7, 0.05, True))
        for agent, one in zip("ab", steps, strict=True):
            machine.say(agent, Progress(0, (one,)))
        machine.tick(5.0)
    assert warnings(machine) == ["rank 1 on b needs 0.05 s per step, the others 0.01 s"]


def test_one_slow_step_is_no_straggler() -> None:
    machine = running("a", "b")
    for step in range(20):
        report(machine, "a", (0, step, 0.1))
        report(machine, "b", (1, step, 5.0 if step % 3 == 0 else 0.1))
        machine.tick(1.0)
    assert not warnings(machine)


def test_many_stragglers_are_counted() -> None:
    machine = running("a", "b", workers=30)
    for second in range(14):
        report(machine, "a", *((rank, second) for rank in range(30)))
        report(machine, "b", *((rank, 0 if rank < 42 else second) for rank in range(30, 60)))
        machine.tick(1.0)
    assert (
        len(warnings(machine)) == 9
        and warnings(machine)[-1] == "4 more workers are slower than the others"
    )


def test_a_book_says_which_reports_must_not_be_forgotten() -> None:
    book = ProgressTracker(0.0)
    assert book.add_report("a", Progress(0, (Step(0, 1),)), range(1))
    assert not book.add_report("a", Progress(0, (Step(0, 2),)), range(1))
    assert book.add_report("a", Progress(0, (), 2), range(1))
    assert not book.add_report("a", Progress(0, (), 2), range(1))


def test_nobody_falls_behind_while_there_is_no_scheduler() -> None:
    tracker = ProgressTracker(0.0)
    tracker.add_report("a", Progress(0, (Step(0, 100), Step(1, 100), Step(2, 1)), -1), range(3))
    assert tracker.find_stragglers(2.0) == []
    tracker.shift_times(60.0)
    assert tracker.find_stragglers(70.0) == []
    assert [rank for rank, _ in tracker.find_stragglers(73.0)] == [2]


def test_use_is_on_record_with_the_last_values_of_all_nodes() -> None:
    tracker = ProgressTracker(0.0)
    low, high = NodeNumber("cpu", 1, 10.0, 10.0, 10.0, 0), NodeNumber("cpu", 1, 90.0, 90.0, 90.0, 1)
    assert not tracker.add_report("a", Progress(0, usage=(low,)), range(1)), "not for a journal"
    assert not tracker.has_reports, "a sample is no progress: restarts count without it"
    assert tracker.take_usage(3.0) is None, "the other nodes send theirs"
    tracker.add_report("b", Progress(0, usage=(high,)), range(1, 2))
    assert tracker.take_usage(4.0) == {"values": {"cpu": [50.0, 10.0, 90.0, 1, -1]}}
    tracker.add_report("b", Progress(0, usage=(low,)), range(1, 2))
    assert tracker.take_usage(20.0) is None
    ending = tracker.take_usage(20.0, is_ending=True)
    assert ending is not None and ending["values"]["cpu"][0] == 10.0
    assert tracker.take_usage(90.0) is None, "nothing is new"


def test_plans_are_on_record_once_and_bounded() -> None:
    tracker = ProgressTracker(0.0)
    plan = (PlanFact("mesh", "dp=2", "default"),)
    assert not tracker.add_report("a", Progress(0, plan=plan), range(1)), "not for a journal"
    assert not tracker.has_reports, "a plan is no progress: restarts count without it"
    assert tracker.take_plans() == [[["mesh", "dp=2", "default"]]]
    assert tracker.take_plans() == []
    tracker.add_report("a", Progress(0, plan=(PlanFact("x", "y" * MAX_PLAN_CHARS),)), range(1))
    assert tracker.take_plans() == [], "too long"
    for _ in range(2 * MAX_PLANS):
        tracker.add_report("a", Progress(0, plan=plan), range(1))
    assert len(tracker.take_plans()) == MAX_PLANS - 1


def test_numbers_are_on_record_with_the_last_step() -> None:
    tracker = ProgressTracker(0.0)
    low, high = NodeNumber("loss", 2, 5.0, 2.0, 3.0, 1), NodeNumber("loss", 1, 1.0, 1.0, 1.0, 2)
    tracker.add_report("a", Progress(0, (Step(0, 4),), -1, 100, (low,)), range(2))
    assert tracker.take_record(0.0) == {
        "step": 4,
        "rank": 0,
        "most": 4,
        "saved": -1,
        "total": 100,
        "values": {"loss": [2.5, 2.0, 3.0, 1, -1]},
    }
    tracker.add_report("b", Progress(0, (Step(2, 9),), -1, 100, (high,)), range(2, 3))
    assert tracker.take_record(1.0) is None, "at most one record in five seconds"
    ending = tracker.take_record(1.0, is_ending=True)
    assert ending is not None
    assert (ending["most"], ending["values"]["loss"][0]) == (9, 2.0)
    tracker.add_report("b", Progress(0, (Step(2, 10),)), range(2, 3))
    assert tracker.take_record(1.0, is_ending=True) is None, "once"


def test_the_last_worker_leaves_its_last_step_on_record() -> None:
    tracker = ProgressTracker(0.0)
    tracker.add_report("a", Progress(0, (Step(0, 99), Step(1, 30)), -1, 100), range(2))
    assert tracker.take_record(0.0, is_ending=True) is not None
    tracker.drop_worker(0)
    tracker.add_report("a", Progress(0, (Step(1, 99),), -1, 100), range(2))
    assert tracker.take_record(1.0) is None
    # after a cut, the node repeats what it has last said of both
    tracker.add_report("a", Progress(0, (Step(0, 98), Step(1, 99)), -1, 100), range(2))
    ending = tracker.take_record(1.0, is_ending=True)
    assert ending is not None
    assert (ending["step"], ending["rank"]) == (99, 1)
