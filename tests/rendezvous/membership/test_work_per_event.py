"""
Thousands of nodes: the work of an event does not grow with the size of the job. Counted, not timed.

Counted are the members that are visited (`Counting`) and the lines of the machine that run
(`sys.settrace`): between a job of 500 nodes and one of 2,000 each grows as the number of events
does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from pdrun.rendezvous.membership.failure_detector import detector_times
from pdrun.rendezvous.membership.machine import JobState, Membership, Tick
from pdrun.rendezvous.membership.nodes import Member
from pdrun.rendezvous.protocol.events import (
    Action,
    MessageReceived,
    PeerDisconnected,
    SchedulerConfig,
    SendMessage,
)
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Cause,
    Finished,
    Heartbeat,
    Join,
    Leave,
    Message,
    Progress,
    Ready,
    Step,
    StopWorkers,
    Waiting,
    WorkerExit,
)
from tests.rendezvous.helpers import config, hello

SMALL, LARGE = 500, 2000


class Counting(dict[str, Member]):
    """A table of members that counts how many are looked at one after the other."""

    visits = 0

    def _count(self, found: Iterator[Any]) -> Iterator[Any]:
        for each in found:
            type(self).visits += 1
            yield each

    def __iter__(self) -> Iterator[str]:
        return self._count(super().__iter__())

    def values(self) -> Any:
        return self._count(iter(super().values()))

    def items(self) -> Any:
        return self._count(iter(super().items()))


class Crowd:
    """A machine with many nodes, each a name and a connection."""

    def __init__(self, count: int, **changes: object) -> None:
        self.names = [f"n{number}" for number in range(count)]
        self.machine = Membership(config(nodes=count, heartbeat=1.0, **changes), "s" * 32, 0.0)
        self.machine.roster.members = Counting()
        self.sent = 0

    def say(self, name: str, message: Message) -> None:
        self.sent += len(self.machine.step(MessageReceived(name, message), 0.1))

    def join(self) -> None:
        for name in self.names:
            self.say(name, hello(name))
            self.say(name, Join(name, None, 8, {"command": "x", "python": "3"}, f"{name}:1"))
            self.say(name, Heartbeat(1, 1))

    def ready(self) -> None:
        for name in self.names:
            self.say(name, Ready(self.machine.generation.number))

    def work(self) -> None:
        for number, name in enumerate(self.names):
            self.say(name, Progress(0, (Step(8 * number, 5, 0.1),), 3))
            self.say(name, Heartbeat(2, 2))

    def cut(self) -> None:
        for name in self.names:
            self.machine.step(PeerDisconnected(name), 0.1)
            self.say(f"{name}+", hello(name, incarnation=1))
        self.names = [f"{name}+" for name in self.names]

    def exit(self) -> None:
        for number, name in enumerate(self.names):
            self.say(name, WorkerExit(0, 8 * number, Cause("ok", 0)))
            self.say(name, Finished(0))

    def fail(self) -> None:
        for number, name in enumerate(self.names):
            how = Cause("exception", 1, summary="boom", traceback="x" * 4000)
            self.say(name, WorkerExit(0, 8 * number, how))
            self.say(name, Finished(0))

    def tick(self, begin: float, end: float) -> None:
        while begin < end:
            self.machine.step(Tick(), begin)
            begin += self.machine.tick_every

    def leave(self) -> None:
        for name in self.names:
            self.say(name, Leave())


def counted(act: Callable[[], None]) -> tuple[int, int]:
    """Return (members visited, lines of the machine run) while ``act`` runs."""
    lines = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return local if "/rendezvous/" in frame.f_code.co_filename else None

    Counting.visits = 0
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return Counting.visits, lines


LIVES: list[list[str]] = [
    ["join", "ready", "work", "cut", "exit", "leave"],
    ["join", "ready", "work", "fail", "leave"],
]


@pytest.mark.parametrize("life", LIVES, ids=["well", "failing"])
def test_the_work_of_a_life_grows_with_the_number_of_events(life: list[str]) -> None:
    small, large = Crowd(SMALL), Crowd(LARGE)
    for act in life:
        (few, short), (many, long) = counted(getattr(small, act)), counted(getattr(large, act))
        events = 4 * LARGE
        assert many <= 6 * LARGE, f"{act}: {many} visits of {LARGE} nodes for about {events} events"
        assert long <= 1.3 * short * LARGE / SMALL, (
            f"{act}: {short} lines for {SMALL} nodes, {long} for {LARGE}"
        )
        assert few <= 6 * SMALL
    assert large.machine.shutdown.verdict is not None and large.machine.shutdown.is_done
    assert large.sent <= 14 * LARGE


def test_a_tick_looks_at_each_node_a_few_times_at_most() -> None:
    crowd = Crowd(LARGE)
    crowd.join()
    crowd.ready()
    crowd.work()
    assert crowd.machine.state is JobState.RUNNING
    for now in (5.0, 5.25, 5.5):
        visits, _ = counted(lambda now=now: crowd.machine.step(Tick(), now) and None)
        assert visits <= 2 * LARGE


def test_many_nodes_are_told_who_is_here_at_intervals_and_a_few_names() -> None:
    crowd = Crowd(300)
    crowd.names = crowd.names[:299]
    crowd.join()
    assert crowd.sent < 299 * 5 + 32 * 33
    sent = [a for a in crowd.machine.step(Tick(), 6.0) if isinstance(a, SendMessage)]
    waiting = {action.message for action in sent if isinstance(action.message, Waiting)}
    assert len(sent) == 299 and len(waiting) == 1
    (one,) = waiting
    assert (len(one.present), one.missing, one.here) == (16, ("1 more node",), 299)


def test_nodes_lost_together_are_one_change() -> None:
    crowd = Crowd(LARGE, min_nodes=10)
    crowd.join()
    actions: list[Action] = []
    for name in crowd.names[LARGE // 2 :]:
        crowd.machine.step(PeerDisconnected(name), 0.2)
    crowd.tick(0.3, 0.75)
    visits, _ = counted(lambda: actions.extend(crowd.machine.step(Tick(), 0.9)))
    assert crowd.machine.generation.number == 1 and visits <= 12 * LARGE
    assert (
        sum(isinstance(a, SendMessage) and isinstance(a.message, Assign) for a in actions)
        == LARGE // 2
    )
    crowd.names = crowd.names[: LARGE // 2]
    crowd.ready()
    for name in crowd.names[500:]:
        crowd.machine.step(PeerDisconnected(name), 1.0)
    actions.clear()
    crowd.tick(1.2, 1.6)
    visits, _ = counted(lambda: actions.extend(crowd.machine.step(Tick(), 1.8)))
    assert crowd.machine.state is JobState.RESTARTING and visits <= 6 * LARGE
    assert (
        sum(isinstance(a, SendMessage) and isinstance(a.message, StopWorkers) for a in actions)
        <= LARGE
    )


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(1, (1.0, 3.0, 10.0)), (2500, (1.0, 3.0, 10.0)), (12500, (5.0, 15.0, 17.5))],
)
def test_heartbeats_grow_rarer_with_the_size(
    nodes: int, expected: tuple[float, float, float]
) -> None:
    found = detector_times(SchedulerConfig("job", "run", nodes))
    assert (
        found.heartbeat,
        found.suspect,
        found.dead,
    ) == expected and found.tick == found.heartbeat / 4


def test_a_hundred_thousand_failures_need_little_memory() -> None:
    from pdrun.rendezvous.policies.verdict import FailureLog, find_first_cause
    from pdrun.rendezvous.protocol.messages import Failure

    failures = FailureLog()
    for rank in range(3000):
        text = str(rank) * 3000
        failures.add(
            Failure(rank, f"n{rank % 7}", Cause("exception", 1, at=float(-rank), traceback=text)),
            float(rank),
        )
    assert failures.first == find_first_cause(failures) and failures.first.failure.rank == 2996
    assert failures.first.failure.cause.traceback == "2996" * 3000
    assert sum(len(item.failure.cause.traceback) for item in failures) < 12_000 + 10 * 4096
