"""
Random lives of a job: agents that join, fail, die, come back and are stopped in any order, driven by hypothesis.

After every step the invariants hold (`helpers.Machine` checks them). At the end of every life: the scheduler has gone,
all who were still there heard the same verdict once, each generation gave each rank once, and nobody waited for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from pdrun.rendezvous.messages import (
    Assign,
    Cause,
    CauseKind,
    Heartbeat,
    Join,
    Leave,
    Message,
    Ready,
    Refuse,
    Start,
    StopRequest,
    StopWorkers,
    Unready,
    Verdict,
    WorkerExit,
)
from pdrun.rendezvous.state import StopOrdered

from .helpers import Machine, config, hello

KINDS: list[CauseKind] = ["ok", "exception", "signal", "exit", "communication"]
ACTIONS = [
    "pass", "pass", "fail", "fail", "fail", "fail", "end", "end", "cut", "cut", "die", "stop", "unready", "silent",
    "stuck", "order",
]  # fmt: skip


@dataclass
class Node:
    """An agent as it behaves: answers what it is told, in order, once a turn."""

    name: str
    machine: Machine
    peer: str = ""
    incarnation: int = -1
    workers: set[int] = field(default_factory=set)
    generation: int = -1
    alive: bool = True
    silent: bool = False
    stuck: bool = False
    unready: bool = False
    verdicts: list[Verdict] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    assigns: dict[int, Assign] = field(default_factory=dict)
    read: int = 0

    def connect(self) -> None:
        self.incarnation += 1
        self.peer = f"{self.name}.{self.incarnation}"
        self.read = len(self.machine.sent)
        self.machine.say(self.peer, hello(self.name, incarnation=self.incarnation))
        for message in list(self.said):
            self.machine.say(self.peer, message)

    def say(self, message: Message) -> None:
        self.said.append(message)
        if self.connected:
            self.machine.say(self.peer, message)

    @property
    def connected(self) -> bool:
        return self.peer in self.machine.membership.sessions

    def turn(self) -> None:
        if not self.alive or self.silent:
            return
        if self.connected:
            self.machine.say(self.peer, Heartbeat(1, 1))
        sent = self.machine.sent
        while self.read < len(sent):
            each = sent[self.read]
            self.read += 1
            if each.peer == self.peer:
                self.hear(each.message)

    def hear(self, message: Message) -> None:
        match message:
            case Assign(generation=generation) if generation > self.generation:
                self.generation, self.assigns[generation] = generation, message
                self.said = [old for old in self.said if isinstance(old, Join)]
                self.say(Unready(generation, 78, "no") if self.unready else Ready(generation))
            case Start(generation) if generation == self.generation and generation in self.assigns:
                first = self.assigns[generation].first_rank
                started = {old.generation for old in self.said if isinstance(old, WorkerExit)}
                if not self.workers and generation not in started:
                    self.workers = {first, first + 1}
            case StopWorkers():
                for rank in sorted(self.workers):
                    self.end(rank, Cause("stopped", 143, 15))
            case Verdict():
                self.verdicts.append(message)
                self.say(Leave())
                self.alive = False
            case Refuse():
                self.alive = False
            case _:
                pass

    def end(self, rank: int, cause: Cause) -> None:
        from pdrun.rendezvous.messages import Finished

        if rank not in self.workers or self.stuck:
            return
        self.workers.discard(rank)
        self.say(WorkerExit(self.generation, rank, cause))
        if not self.workers:
            self.say(Finished(self.generation, f"{self.name}:{self.generation + 2}"))


def act(action: str, node: Node, kind: CauseKind, machine: Machine) -> None:
    if action == "order":
        machine.step(StopOrdered(15, "somebody"))
    if not node.alive:
        return
    if action in ("fail", "end") and node.workers and not node.silent:
        well = action == "end" or kind == "ok"
        node.end(min(node.workers), Cause("ok", 0) if well else Cause(kind, 7, retry=len(node.workers) > 1))
    elif action == "die":
        node.alive = False
        machine.cut(node.peer)
    elif action == "cut" and node.connected and not node.silent:
        machine.cut(node.peer)
        node.connect()
    elif action == "stop" and node.connected and not node.silent:
        node.machine.say(node.peer, StopRequest(2, node.name))
    elif action in ("silent", "stuck", "unready"):
        setattr(node, action, True)


steps = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), st.sampled_from(KINDS), st.floats(0.0, 1.5)), max_size=30
)


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 2), st.booleans(), steps)
@settings(max_examples=400, deadline=None)
def test_every_life_ends_with_one_verdict(
    count: int, late: int, restarts: int, limit: bool, steps: list[tuple[str, int, CauseKind, float]]
) -> None:
    machine = Machine(config(
        nodes=count, max_restarts=restarts, start_timeout=20.0, grace=2.0, time_limit=30.0 if limit else None,
    ))  # fmt: skip
    nodes = [Node(f"n{i}", machine) for i in range(count)]
    for i, node in enumerate(nodes):
        if i == late:
            machine.tick(1.0)
        node.connect()
        node.say(Join(node.name, None, 2, store=f"{node.name}:1"))
    for action, which, kind, pause in steps:
        for node in nodes:
            node.turn()
        act(action, nodes[which % count], kind, machine)
        machine.tick(pause)
    live_on(machine, nodes)
    check_end(machine, nodes)


def live_on(machine: Machine, nodes: list[Node]) -> None:
    """From here on every worker ends well, in its time; the job must end by itself, bounded."""
    for _ in range(600):
        for node in nodes:
            node.turn()
            if node.alive and not node.silent:
                for rank in sorted(node.workers):
                    node.end(rank, Cause("ok", 0))
                    break
        if machine.done:
            return
        machine.tick(0.25)
        stuck = [node for node in nodes if node.stuck and node.alive and not node.silent]
        if machine.now > 1100 and stuck and machine.membership.state.value == "running":
            machine.step(StopOrdered(15, "patience"))  # only a limit or a person ends a worker that runs for ever
    raise AssertionError(f"the job never ended: {machine.membership.state}")


def check_end(machine: Machine, nodes: list[Node]) -> None:
    assert machine.done == [machine.verdict.code]
    assert machine.kinds().count("verdict") == 1
    for node in nodes:
        assert all(verdict == machine.verdict for verdict in node.verdicts)
    for generation in range(machine.membership.generation + 1):
        assigns = [a for node in nodes if (a := node.assigns.get(generation))]
        firsts = [a.first_rank for a in assigns]
        assert len(set(firsts)) == len(firsts) and all(a.world_size == 2 * len(nodes) for a in assigns)
        assert len({a.master for a in assigns}) <= 1
