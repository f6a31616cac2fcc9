"""Who is missing in a collective: by sequence numbers, by names, and when nobody is."""

from __future__ import annotations

from typing import Any

import pytest

from pdrun.rendezvous.membership.machine import JobState
from pdrun.rendezvous.policies.collectives import describe_collective, find_missing
from pdrun.rendezvous.protocol.messages import (
    CollectiveReport,
    Hung,
    Notice,
    ShowStacks,
    StackGroup,
    Stacks,
)
from tests.rendezvous.helpers import Machine, config

ALL = tuple(range(4))


def state(
    *ranks: int,
    sequence: int = 9,
    operation: str = "all_reduce",
    group: str = "0 (default_pg)",
    is_waiting: bool = True,
    members: tuple[int, ...] = ALL,
) -> CollectiveReport:
    return CollectiveReport(ranks, group, sequence, operation, is_waiting, members)


def by_stack(*ranks: int, operation: str = "all_reduce") -> CollectiveReport:
    return CollectiveReport(ranks, "", 0, operation, True)


@pytest.mark.parametrize(
    ("states", "missing"),
    [
        ([state(0, 1, 2), state(3, sequence=8, is_waiting=False)], [(3,)]),
        ([state(0, 1, 2)], [(3,)]),  # of rank 3 nothing is known
        ([state(0, 1, 2, 3)], []),  # a long kernel before it, or a slow network
        ([state(0, 1, 2), state(3, sequence=9, is_waiting=False)], []),  # it was faster
        ([state(0, 1, 2), state(3, operation="barrier")], [(3,), (0, 1, 2)]),
        ([state(0, 1, members=(0, 1))], []),  # ranks 2 and 3 are not of this group
        ([state(0, members=(0, 1)), state(1, sequence=8, group="1", members=(1, 2))], [(2,)]),
        ([by_stack(0, 1, 2)], [(3,)]),
        ([by_stack(*ALL)], []),
        ([by_stack(0, 1, 2), by_stack(3, operation="barrier")], [(3,), (0, 1, 2)]),
        ([by_stack(0, 1), by_stack(2, 3, operation="recv")], []),  # for each other, perhaps
        ([by_stack(0, operation="recv 0<-3"), by_stack(1, 2)], [(3,), (3,)]),
    ],
)
def test_who_is_missing(states: list[CollectiveReport], missing: list[tuple[int, ...]]) -> None:
    assert [found.missing for found in find_missing(states, ALL)] == missing


def test_who_works_may_still_come() -> None:
    assert find_missing([state(0, 1, 2)], ALL, active=[3]) == []


def test_a_collective_is_described_with_its_number_and_group() -> None:
    assert describe_collective(state(0)) == "all_reduce (sequence 9, group 0 (default_pg))"
    assert describe_collective(by_stack(0)) == "all_reduce"


def running() -> Machine:
    machine = Machine(config(nodes=2))
    machine.run("a", "b", workers=2)
    return machine


def report(machine: Machine, name: str, *ranks: int, why: str = "no CPU time for 8 s") -> None:
    for rank in ranks:
        machine.say(name, Hung(0, rank, why, waits=True, timeout=8.0))


def answer(machine: Machine, name: str, *states: CollectiveReport, **more: Any) -> None:
    ranks = (0, 1) if name == "a" else (2, 3)
    machine.say(name, Stacks(0, (StackGroup(ranks, "here"),), collectives=states, **more))


def test_the_report_names_the_collective_and_who_is_missing() -> None:
    machine = running()
    report(machine, "b", 3)
    answer(machine, "a", state(0, 1), spinning=(0, 1))
    answer(machine, "b", state(2), state(3, sequence=8, is_waiting=False), spinning=(2,))
    assert machine.membership.state is JobState.STOPPING
    text = machine.to("a", Notice)[0].text.splitlines()
    assert text[0] == (
        "rank 3 on b hangs: no CPU time for 8 s; it is missing in all_reduce (sequence 9, group"
        " 0 (default_pg)), in which ranks 0-2 wait"
    )
    assert text[1] == (
        "ranks 0-2 wait in all_reduce (sequence 9, group 0 (default_pg)): rank 3 is missing"
    )
    machine.finish("a", "b")
    assert machine.verdict.code == 124 and "it is missing in all_reduce" in machine.verdict.reason


def test_one_that_was_not_reported_is_blamed_if_it_is_missing() -> None:
    machine = running()
    report(machine, "a", 0, 1, why="it has waited in all_reduce")
    answer(machine, "a", by_stack(0, 1), spinning=(0, 1))
    answer(machine, "b", by_stack(3), spinning=(3,))
    assert machine.to("a", Notice)[0].text.startswith(
        "rank 2 on b hangs: it is missing in all_reduce, in which ranks 0-1, 3 wait\n"
    )


def test_all_in_one_collective_may_wait_for_a_kernel_and_are_asked_once_per_timeout() -> None:
    machine = running()
    for _ in range(3):
        report(machine, "a", 0, 1)
        report(machine, "b", 2, 3)
        before = len(machine.to("a", ShowStacks))
        answer(machine, "a", state(0, 1), spinning=(0, 1))
        answer(machine, "b", state(2, 3), spinning=(2, 3))
        machine.beat(7.5, "a", "b")
        assert machine.membership.state is JobState.RUNNING
        assert len(machine.to("a", ShowStacks)) == before
    assert "hang" not in machine.kinds()


def test_ranks_without_cpu_time_hang_in_any_collective() -> None:
    """gloo waits without CPU time: no kernel runs before it."""
    machine = running()
    report(machine, "a", 0)
    answer(machine, "a", state(0, 1))
    answer(machine, "b", state(2, 3))
    assert machine.membership.state is JobState.STOPPING


def test_a_node_tells_only_of_its_own_ranks() -> None:
    machine = running()
    report(machine, "a", 0)
    answer(machine, "a", state(0, 1), state(2, 3, sequence=1), spinning=(0, 1, 2))
    answer(machine, "b", state(2, 3), spinning=(2, 3))
    machine.beat(1.5, "a", "b")
    assert machine.membership.state is JobState.RUNNING
