"""A worker hangs: everybody's stacks, one picture, then a failure like any other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.rendezvous.membership.machine import IllegalEvent, JobState
from pdrun.rendezvous.policies.hang_report import HangInquiry, format_ranks
from pdrun.rendezvous.protocol.codec import MAX_TEXT_CHARS
from pdrun.rendezvous.protocol.messages import (
    Cause,
    Hung,
    Notice,
    Ready,
    ShowStacks,
    StackGroup,
    Stacks,
    StopRequest,
    StopWorkers,
    WorkerExit,
)
from tests.rendezvous.helpers import Machine, config, hello

REDUCE = (
    "Thread 0x{0:x} (most recent call first):\n"
    '  File "/x/torch/distributed.py", line 10 in all_reduce\n'
)
LOAD = (
    'Thread 0x1 (most recent call first):\n  File "/x/data.py", line 3 in read\n'
    '  File "/x/train.py", line 9 in <module>'
)


def running(*names: str, workers: int = 2, **changes: object) -> Machine:
    machine = Machine(config(nodes=len(names), **changes))
    machine.run(*names, workers=workers)
    return machine


def hang(machine: Machine, name: str, rank: int) -> None:
    machine.say(
        name, Hung(machine.membership.generation.number, rank, "no progress for 300 s (step 1200)")
    )


def test_three_nodes_are_asked_and_one_never_answers() -> None:
    machine = running("a", "b", "c")
    hang(machine, "a", 1)
    assert [machine.to(name, ShowStacks) for name in "abc"] == [[ShowStacks(0)]] * 3
    hang(machine, "b", 2)  # only the first one counts
    machine.say("a", Stacks(0, (StackGroup((0, 1), REDUCE.format(7)),)))
    machine.say("b", Stacks(0, (StackGroup((2,), REDUCE.format(9)), StackGroup((3,), LOAD))))
    machine.beat(4.0, "a", "b", "c")
    assert machine.membership.state is JobState.RUNNING and not machine.to("a", StopWorkers)
    machine.beat(1.5, "a", "b", "c")
    assert machine.membership.state is JobState.STOPPING
    (notice,) = machine.to("c", Notice)
    assert notice.text == (
        "rank 3 on b hangs: no progress for 300 s (step 1200)\n"  # the only one that is elsewhere
        "ranks 0-2 are here:\n"
        "  Thread 0x7 (most recent call first):\n"
        '    File "/x/torch/distributed.py", line 10 in all_reduce\n'
        "rank 3 is elsewhere:\n"
        "  Thread 0x1 (most recent call first):\n"
        '    File "/x/data.py", line 3 in read\n'
        '    File "/x/train.py", line 9 in <module>\n'
        "no answer within 5 s from c (ranks 4-5)"
    )
    (record,) = [record for record in machine.records if record.kind == "hang"]
    assert (record.data["rank"], record.data["node"]) == (
        3,
        "b",
    ) and "rank 3 is elsewhere" in record.data["text"]
    for name, ranks in (("a", (0, 1)), ("b", (2, 3)), ("c", (4, 5))):
        for rank in ranks:
            machine.say(name, WorkerExit(0, rank, Cause("stopped", 143, 15)))
        machine.finish(name)
    assert machine.verdict.code == 124 and machine.verdict.reason == (
        "rank 3 on b hung: no progress for 300 s (step 1200)"
    )
    first = machine.verdict.first
    assert first is not None and first.cause.kind == "hang" and first.cause.traceback in notice.text
    assert machine.verdict.victims == 5  # not the one that hung


def test_all_have_answered_and_nobody_waits() -> None:
    machine = running("a", "b")
    hang(machine, "b", 3)
    machine.say("b", Stacks(0, (StackGroup((2, 3), LOAD),)))
    machine.say("b", Stacks(0, (StackGroup((2, 3), "another"),)))
    machine.say(
        "a", Stacks(0, (StackGroup((0, 1, 2, 3), LOAD),))
    )  # of ranks 2 and 3 it knows nothing
    assert machine.membership.state is JobState.STOPPING
    text = machine.to("a", Notice)[0].text
    assert "ranks 0-3 are here" in text and "another" not in text and "no answer" not in text


def test_a_hang_is_tried_again_as_any_failure() -> None:
    machine = running("a", max_restarts=1)
    hang(machine, "a", 0)
    machine.say("a", Stacks(0, ()))
    assert machine.membership.state is JobState.RESTARTING
    machine.finish("a")
    machine.say("a", Ready(1))
    assert (
        machine.membership.state is JobState.RUNNING and machine.membership.shutdown.restarts == 1
    )
    hang(machine, "a", 0)
    machine.say("a", Stacks(0, ()))  # an answer of the older generation
    assert machine.membership.state is JobState.RUNNING
    machine.say("a", Stacks(1, ()))
    machine.finish("a")
    assert machine.verdict.code == 124


def test_the_hang_stays_the_first_cause_when_a_worker_dies_meanwhile() -> None:
    machine = running("a", "b")
    hang(machine, "a", 0)
    machine.fail("b", 2, code=7)
    assert machine.membership.state is JobState.STOPPING and "hang" in machine.kinds()
    machine.finish("a", "b")
    assert machine.verdict.code == 124 and [other.rank for other in machine.verdict.others] == [2]


def test_a_worker_that_ends_well_does_not_end_the_asking() -> None:
    machine = running("a", "b")
    hang(machine, "a", 0)
    machine.say("b", WorkerExit(0, 2, Cause("ok", 0)))
    assert machine.membership.generation.hang is not None


@pytest.mark.parametrize("how", ["stop", "loss", "end"])
def test_what_ends_the_generation_ends_the_asking(how: str) -> None:
    machine = running("a", "b", workers=1)
    hang(machine, "a", 0)
    if how == "stop":
        machine.say("a", StopRequest(2, "me"))
    elif how == "loss":
        machine.cut("b")
        machine.beat(1.0, "a")
    else:
        machine.finish("a", "b")
    assert machine.membership.generation.hang is None
    machine.finish(*machine.membership.roster.names)
    machine.beat(6.0, *machine.membership.roster.sessions)
    assert machine.verdict.code == {"stop": 130, "loss": 69, "end": 0}[how]
    assert "hang" not in machine.kinds()


def test_a_node_that_comes_back_is_asked_again() -> None:
    machine = running("a", "b")
    hang(machine, "a", 0)
    machine.cut("b")
    machine.say("b2", hello("b", incarnation=1))
    assert machine.to("b2", ShowStacks) == [ShowStacks(0)]
    machine.say("b2", Stacks(0, ()))
    machine.cut("b2")
    machine.say("b3", hello("b", incarnation=2))
    assert not machine.to("b3", ShowStacks)


@pytest.mark.parametrize("active", [(), (3,)])
def test_who_is_only_quiet_hangs_when_nobody_is_at_work(active: tuple[int, ...]) -> None:
    machine = running("a", "b")
    wait(machine, "a", 0)
    machine.say(
        "a", Stacks(0, (StackGroup((0, 1), LOAD),), active=(3,))
    )  # not its own: counts for nothing
    machine.say("b", Stacks(0, (StackGroup((2, 3), LOAD),), active=active))
    machine.beat(1.3, "a", "b")
    assert machine.membership.generation.hang is None
    assert machine.membership.state is (JobState.RUNNING if active else JobState.STOPPING)
    assert bool(machine.to("a", Notice)) is not bool(active)


def wait(machine: Machine, name: str, *ranks: int) -> None:
    """Ranks of a node have been idle for the timeout."""
    number = machine.membership.generation.number
    for rank in ranks:
        machine.say(name, Hung(number, rank, "no CPU time for 300 s", waits=True, timeout=300.0))


def answer(machine: Machine, name: str, *ranks: int, active: tuple[int, ...] = ()) -> None:
    number = machine.membership.generation.number
    machine.say(name, Stacks(number, (StackGroup(ranks, LOAD),), active))


def test_one_inquiry_decides_when_the_nodes_notice_at_different_times() -> None:
    machine = running("a", "b")
    wait(machine, "a", 0, 1)
    answer(machine, "a", 0, 1)
    answer(machine, "b", 2, 3, active=(2, 3))  # a moment later they have been idle for as long
    machine.tick(0.3)
    wait(machine, "b", 2)
    assert machine.membership.state is JobState.RUNNING
    wait(machine, "b", 3)
    assert machine.membership.state is JobState.STOPPING
    assert len(machine.to("a", ShowStacks)) == 1


def test_the_last_one_that_becomes_idle_decides_and_nobody_is_asked_before() -> None:
    machine = running("a", "b")
    wait(machine, "a", 0, 1)
    answer(machine, "a", 0, 1)
    answer(machine, "b", 2, 3, active=(2, 3))
    machine.beat(40.0, "a", "b")
    wait(machine, "a", 0, 1)  # they are reported again while they wait
    wait(machine, "b", 2)
    machine.beat(40.0, "a", "b")
    assert len(machine.to("b", ShowStacks)) == 1
    wait(machine, "b", 3)
    assert len(machine.to("b", ShowStacks)) == 2
    answer(machine, "b", 2, 3)
    answer(machine, "a", 0, 1)
    assert machine.membership.state is JobState.STOPPING
    assert machine.to("a", Notice)[0].text.startswith("rank 3 on b hangs")


def test_a_report_during_the_inquiry_is_not_lost() -> None:
    machine = running("a", "b")
    wait(machine, "a", 0)
    wait(machine, "b", 3)
    answer(machine, "b", 2, 3, active=(2,))
    hang(machine, "b", 2)  # a certain one: it waits for nobody
    answer(machine, "a", 0, 1)
    assert machine.membership.state is JobState.STOPPING
    assert machine.to("a", Notice)[0].text.startswith("rank 2 on b hangs: no progress for 300 s")


def test_who_waited_for_a_worker_that_ends_gets_the_timeout_again() -> None:
    machine = running("a", "b")
    wait(machine, "a", 0, 1)
    answer(machine, "a", 0, 1)
    machine.say("b", WorkerExit(0, 2, Cause("ok", 0)))  # nobody has told that it worked
    answer(machine, "b", 3)
    machine.beat(290.0, "a", "b")
    wait(machine, "a", 0, 1)
    assert machine.membership.state is JobState.RUNNING and len(machine.to("a", ShowStacks)) == 1
    machine.beat(11.0, "a", "b")
    assert len(machine.to("a", ShowStacks)) == 2
    answer(machine, "a", 0, 1)
    answer(machine, "b", 3)
    assert machine.membership.state is JobState.STOPPING


def test_a_node_that_does_not_answer_may_be_at_work() -> None:
    machine = running("a", "b")
    wait(machine, "a", 0, 1)
    answer(machine, "a", 0, 1)
    machine.beat(6.0, "a", "b")
    assert machine.membership.generation.hang is None
    assert machine.membership.state is JobState.RUNNING
    wait(machine, "b", 2, 3)
    assert len(machine.to("a", ShowStacks)) == 2


def test_a_worker_that_fails_while_others_wait_is_the_cause() -> None:
    machine = running("a", "b")
    wait(machine, "a", 0)
    machine.fail("b", 2, code=7)
    machine.finish("a", "b")
    assert machine.verdict.code == 7 and "hang" not in machine.kinds()


def test_a_successor_knows_who_waits_and_who_works() -> None:
    machine = running("a", "b")
    wait(machine, "a", 0, 1)
    answer(machine, "a", 0, 1)
    answer(machine, "b", 2, 3, active=(3,))
    machine.beat(1.3, "a", "b")  # a tick without an action ends the inquiry
    assert machine.membership.generation.idle.active == {3}
    machine.succeed()
    assert machine.membership.generation.idle.active == {3}
    for name in "ab":
        machine.say(f"{name}2", hello(name, incarnation=1))
    wait(machine, "b2", 3)
    assert machine.to("a2", ShowStacks) == [ShowStacks(0)]


def test_a_rank_of_another_node_cannot_hang_here() -> None:
    machine = running("a", "b")
    with pytest.raises(IllegalEvent, match="rank 3 is not on a"):
        hang(machine, "a", 3)
    machine.say("a", WorkerExit(0, 0, Cause("ok", 0)))
    hang(machine, "a", 0)  # it has ended meanwhile
    assert machine.membership.generation.hang is None


@given(st.lists(st.tuples(st.integers(0, 40), st.text(max_size=300)), max_size=120))
def test_a_picture_is_bounded_and_names_each_rank_once(found: list[tuple[int, str]]) -> None:
    inquiry = HangInquiry(0, "a", "why", 0.0, {f"n{node}": f"n{node}" for node in range(41)})
    for node in range(41):
        ranks = [place for place, (where, _) in enumerate(found) if where == node]
        inquiry.add_answer(
            f"n{node}",
            [StackGroup((rank, rank, -1), found[rank][1]) for rank in ranks],
            range(len(found)),
        )
    counted = [
        rank for _, ranks in inquiry.groups.values() for rank in ranks
    ] + inquiry.ungrouped_ranks
    assert sorted(counted) == list(range(len(found)))
    assert len(inquiry.groups) <= 64
    assert (
        len(inquiry.render_report({f"n{i}" * 50: range(i, i + 2) for i in range(100)}))
        < MAX_TEXT_CHARS
    )


def test_ranks_are_named_in_pieces() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([8, 0, 1, 2]) == "ranks 0-2, 8"
    assert format_ranks(range(0, 100, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 ..."
