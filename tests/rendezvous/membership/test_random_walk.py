"""
Random lives of a job: agents that join, fail, hang, die, depart, come back and are stopped, and a
scheduler that dies and is succeeded, in any order, driven by hypothesis.

After every step the invariants hold (`helpers.Machine` checks them), and no node starts workers
while others that can be reached run those of an older generation. At the end of every life: the
scheduler has gone, all who were still there heard the same verdict once, each generation gave each
rank once, nobody waited for ever, and the journal leads to the same state again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from pdrun.rendezvous.membership.machine import LocalStop
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Cause,
    CauseKind,
    Depart,
    Finished,
    Heartbeat,
    Hung,
    Join,
    Leave,
    Message,
    Progress,
    Ready,
    Refuse,
    ShowStacks,
    StackGroup,
    Stacks,
    Start,
    Step,
    StopRequest,
    StopWorkers,
    Unready,
    Verdict,
    WorkerExit,
)
from tests.rendezvous.helpers import Machine, config, durable, hello

KINDS: list[CauseKind] = ["ok", "exception", "signal", "exit", "communication"]
ACTIONS = [
    "pass",
    "pass",
    "pass",
    "fail",
    "fail",
    "fail",
    "fail",
    "end",
    "end",
    "cut",
    "cut",
    "freeze",
    "die",
    "die",
    "silent",
    "stop",
    "order",
    "unready",
    "stuck",
    "mute",
    "depart",
    "depart",
    "hang",
    "hang",
    "progress",
    "progress",
    "succeed",
    "succeed",
    "renew",
    "newcomer",
]


@dataclass
class Node:
    """
    An agent as it behaves: answers what it is told, in order, once a turn; comes back as a new one
    when asked.
    """

    name: str
    machine: Machine
    others: list[Node]
    agent: str = ""
    lives: int = 0
    peer: str = ""
    incarnation: int = -1
    workers: set[int] = field(default_factory=set)
    generation: int = -1
    alive: bool = True
    silent: bool = False
    stuck: bool = False
    unready: bool = False
    mute: bool = False
    departs: bool = False
    verdicts: list[Verdict] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    assigns: dict[int, Assign] = field(default_factory=dict)
    read: int = 0

    def begin(self) -> None:
        """A new agent on this node."""
        self.lives += 1
        self.agent, self.incarnation, self.generation = f"{self.name}~{self.lives}", -1, -1
        self.workers, self.departs, self.said = set(), False, []
        self.connect()
        self.say(Join(self.name, None, 2, store=f"{self.name}:1"))

    def connect(self) -> None:
        self.incarnation += 1
        self.peer = f"{self.agent}.{self.incarnation}"
        self.read = len(self.machine.sent)
        self.machine.say(self.peer, hello(self.agent, incarnation=self.incarnation))
        for message in list(self.said):
            if self.connected:
                self.machine.say(self.peer, message)

    def say(self, message: Message) -> None:
        self.said.append(message)
        if self.connected:
            self.machine.say(self.peer, message)

    @property
    def connected(self) -> bool:
        return self.peer in self.machine.membership.roster.sessions

    def turn(self) -> None:
        if not self.alive or self.silent:
            return
        sent = self.machine.sent
        while self.read < len(sent) and self.alive:
            each = sent[self.read]
            self.read += 1
            if each.peer == self.peer:
                self.hear(each.message)
        if self.alive and not self.connected:
            self.connect()
        if self.connected:
            self.machine.say(self.peer, Heartbeat(1, 1))

    def hear(self, message: Message) -> None:
        match message:
            case Assign(generation=generation) if generation > self.generation:
                assert not self.workers, (
                    "a place in a new generation while workers of the old one run"
                )
                self.generation, self.assigns[generation] = generation, message
                self.said = [old for old in self.said if isinstance(old, Join)]
                self.say(Unready(generation, 78, "no") if self.unready else Ready(generation))
            case Start(generation) if generation == self.generation:
                self.start(self.assigns[generation])
            case StopWorkers(generation=generation) if generation == self.generation:
                for rank in sorted(self.workers):
                    self.end(rank, Cause("stopped", 143, 15))
            case ShowStacks(generation) if not self.mute:
                self.say(Stacks(generation, (StackGroup(tuple(sorted(self.workers)), "x"),)))
            case Verdict():
                self.verdicts.append(message)
                self.say(Leave())
                self.alive = False
            case Refuse(rejoin=True) if self.lives < 4:
                self.begin()
            case Refuse():
                self.alive, self.workers = False, set()
            case _:
                pass

    def start(self, assign: Assign) -> None:
        if self.workers or any(isinstance(old, WorkerExit | Finished) for old in self.said):
            return
        for other in self.others:
            reached = other.alive and not other.silent and not other.stuck and other.connected
            assert not (reached and other.workers) or other.generation == assign.generation, (
                "two generations at once"
            )
        self.workers = {assign.first_rank, assign.first_rank + 1}

    def end(self, rank: int, cause: Cause) -> None:
        if rank not in self.workers or self.stuck:
            return
        self.workers.discard(rank)
        self.say(WorkerExit(self.generation, rank, cause))
        if not self.workers:
            self.say(Finished(self.generation, f"{self.name}:{self.generation + 2}"))
            if self.departs:
                self.say(Leave("departed"))
                self.alive = False


def act(action: str, node: Node, kind: CauseKind, machine: Machine, nodes: list[Node]) -> None:
    if action == "order":
        machine.step(LocalStop(15, "somebody"))
    elif action == "succeed" and not machine.done:
        machine.succeed()
    elif action == "newcomer" and len(nodes) < 8:
        nodes.append(Node(f"n{len(nodes)}", machine, nodes))
        nodes[-1].begin()
    elif not node.alive:
        if action == "renew" and not node.stuck:  # somebody starts the agent again
            node.alive = True
            node.begin()
    elif action == "die":
        node.alive, node.workers = False, set()
        if node.connected:
            machine.cut(node.peer)
    elif action in ("silent", "stuck", "unready", "mute"):
        setattr(node, action, True)
    elif node.connected and not node.silent:
        speak(action, node, kind, machine)


def speak(action: str, node: Node, kind: CauseKind, machine: Machine) -> None:
    """What a connected agent may say by itself."""
    if action in ("fail", "end") and node.workers:
        well = action == "end" or kind == "ok"
        node.end(
            min(node.workers),
            Cause("ok", 0) if well else Cause(kind, 7, retry=len(node.workers) > 1),
        )
    elif action == "cut":
        machine.cut(node.peer)
        node.connect()
    elif action == "freeze":
        machine.cut(node.peer)
    elif action == "stop":
        machine.say(node.peer, StopRequest(2, node.name))
    elif action == "depart" and not node.departs:
        node.departs = True
        node.say(Depart("it must"))
        if not node.workers:
            node.say(Leave("departed"))
            node.alive = False
    elif action == "hang" and node.workers:
        machine.say(node.peer, Hung(node.generation, min(node.workers), "no progress"))
    elif action == "progress" and node.workers:
        step = int(machine.now) - 1000
        machine.say(
            node.peer, Progress(node.generation, (Step(min(node.workers), step),), step // 2)
        )


steps = st.lists(
    st.tuples(
        st.sampled_from(ACTIONS), st.integers(0, 7), st.sampled_from(KINDS), st.floats(0.0, 1.5)
    ),
    max_size=40,
)
sizes = st.integers(1, 5).flatmap(
    lambda most: st.tuples(st.integers(0, most), st.just(most), st.integers(0, 2))
)


@given(
    sizes, st.integers(0, 3), st.integers(0, 2), st.booleans(), st.sampled_from([None, 3.0]), steps
)
def test_every_life_ends_with_one_verdict(
    size: tuple[int, int, int],
    late: int,
    restarts: int,
    limit: bool,
    grow: float | None,
    steps: list[tuple[str, int, CauseKind, float]],
) -> None:
    least, most, spares = size
    machine = Machine(
        config(
            nodes=most,
            min_nodes=least,
            spares=spares,
            gather=2.0,
            grow=grow,
            backoff=0.5,
            max_restarts=restarts,
            start_timeout=20.0,
            grace=2.0,
            time_limit=30.0 if limit else None,
        )
    )
    nodes: list[Node] = []
    for i in range(most + spares):
        nodes.append(Node(f"n{i}", machine, nodes))
        if i == late:
            machine.tick(1.0)
        nodes[-1].begin()
    for action, which, kind, pause in steps:
        for node in list(nodes):
            node.turn()
        act(action, nodes[which % len(nodes)], kind, machine, nodes)
        machine.tick(pause)
    live_on(machine, nodes)
    check_end(machine, nodes)


def live_on(machine: Machine, nodes: list[Node]) -> None:
    """From here on every worker ends well, in its time; the job must end by itself, bounded."""
    for _ in range(800):
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
        if machine.now > 1150 and stuck and machine.membership.state.value == "running":
            machine.step(
                LocalStop(15, "patience")
            )  # only a limit or a person ends a worker that runs for ever
    raise AssertionError(f"the job never ended: {machine.membership.state}")


def check_end(machine: Machine, nodes: list[Node]) -> None:
    assert machine.done == [machine.verdict.code]
    assert machine.kinds().count("verdict") == 1
    for node in nodes:
        assert all(verdict == machine.verdict for verdict in node.verdicts)
    for generation in range(machine.membership.generation.number + 1):
        assigns = [a for node in nodes if (a := node.assigns.get(generation))]
        firsts = [a.first_rank for a in assigns]
        assert len(set(firsts)) == len(firsts) and all(a.world_size == 2 * a.nodes for a in assigns)
        assert len({(a.master, a.nodes, a.restarts, a.agreed_step) for a in assigns}) <= 1
        least = machine.config.min_nodes or machine.config.nodes
        assert all(least <= a.nodes <= machine.config.nodes for a in assigns)
    assert durable(machine.replayed()) == durable(machine.membership)
