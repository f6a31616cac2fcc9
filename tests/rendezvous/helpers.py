"""
A membership machine with hands: agents that answer as real ones do, links over real sockets,
bounded waits.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pdrun.endpoint import Endpoint
from pdrun.rendezvous.membership.invariants import check_invariants
from pdrun.rendezvous.membership.machine import Membership, Tick
from pdrun.rendezvous.protocol.events import (
    Action,
    ClosePeer,
    JobDone,
    MembershipEvent,
    MessageReceived,
    PeerDisconnected,
    RecordEvent,
    SchedulerConfig,
    SchedulerResumed,
    SendMessage,
)
from pdrun.rendezvous.protocol.messages import (
    PROTOCOL,
    Assign,
    Cause,
    CauseKind,
    Finished,
    Hello,
    Join,
    Message,
    Ready,
    Start,
    Verdict,
    Welcome,
    WorkerExit,
)
from pdrun.rendezvous.scheduler.local_link import ZmqLink
from pdrun.rendezvous.transport.zmq_util import wait_readable

CONFIG = SchedulerConfig(
    job="job", run="run-1", nodes=2, host="head", grace=2.0, start_timeout=60.0
)
M = TypeVar("M", bound=Message)


def config(**changes: Any) -> SchedulerConfig:
    return replace(CONFIG, **changes)


def hello(agent: str = "a", **changes: Any) -> Hello:
    return replace(Hello(PROTOCOL, "agent", "job", agent, 0, f"host-{agent}", 1), **changes)


def cause(kind: CauseKind = "exception", code: int = 1, at: float = 0.0, **changes: Any) -> Cause:
    return Cause(kind, code, at=at, summary=f"{kind} {code}", **changes)


@dataclass
class Machine:
    """A machine, its time, and what it did; checks the invariants after every step."""

    config: SchedulerConfig = CONFIG
    now: float = 1000.0
    records: list[RecordEvent] = field(default_factory=list)
    sent: list[SendMessage] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    journal: list[tuple[float, MembershipEvent]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began = self.now
        self.membership = Membership(self.config, "s" * 32, self.now)

    def step(self, event: MembershipEvent) -> list[Action]:
        actions = self.membership.step(event, self.now)
        check_invariants(self.membership)
        self.journal += [(self.now, each) for each in self.membership.journal_events]
        for action in actions:
            match action:
                case SendMessage():
                    self.sent.append(action)
                case RecordEvent():
                    self.records.append(action)
                case ClosePeer(peer):
                    self.closed.append(peer)
                case JobDone(code):
                    self.done.append(code)
        return actions

    def replayed(self) -> Membership:
        """What a successor of the scheduler finds in the journal."""
        machine = Membership(self.config, "s" * 32, self.began)
        machine.replay(self.journal)
        return machine

    def succeed(self, away: float = 2.0) -> None:
        """The scheduler dies; after so many seconds its successor goes on from the journal."""
        machine = self.replayed()
        assert durable(machine) == durable(self.membership)
        self.now += away
        self.membership = machine
        self.step(SchedulerResumed("t" * 32))

    def say(self, peer: str, *messages: Message) -> None:
        for message in messages:
            self.step(MessageReceived(peer, message))

    def cut(self, peer: str) -> None:
        self.step(PeerDisconnected(peer))

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass as a live loop does: in ticks."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + self.membership.tick_every)
            self.step(Tick())
        if not seconds:
            self.step(Tick())

    def beat(self, seconds: float, *peers: str) -> None:
        """Let time pass while ``peers`` go on talking."""
        from pdrun.rendezvous.protocol.messages import Heartbeat

        end = self.now + seconds
        while self.now < end:
            for peer in peers:
                if peer in self.membership.roster.sessions:
                    self.say(peer, Heartbeat(1, 0))
            self.tick(min(0.5, end - self.now))

    def to(self, peer: str, kind: type[M]) -> list[M]:
        """Every message of a kind that was sent to a peer."""
        return [
            each.message
            for each in self.sent
            if each.peer == peer and isinstance(each.message, kind)
        ]

    def kinds(self) -> list[str]:
        return [record.kind for record in self.records]

    def enter(self, name: str, workers: int = 1, **join: Any) -> None:
        """A node says Hello and joins; its connection, agent and node all have one name."""
        self.say(
            name,
            hello(name),
            Join(name, **{"node_rank": None, "workers": workers, "store": f"{name}:1", **join}),
        )

    def run(self, *names: str, workers: int = 1) -> None:
        """Bring the named nodes to a running job."""
        for name in names:
            self.enter(name, workers)
        for name in names:
            self.say(name, Ready(self.membership.generation.number))

    def fail(self, peer: str, rank: int, **how: Any) -> None:
        self.say(peer, WorkerExit(self.membership.generation.number, rank, cause(**how)))

    def finish(self, *peers: str, store: str = "") -> None:
        for peer in peers:
            self.say(peer, Finished(self.membership.generation.number, store))

    @property
    def verdict(self) -> Verdict:
        assert self.membership.shutdown.verdict is not None, (
            f"no verdict, job is {self.membership.state}"
        )
        return self.membership.shutdown.verdict


PASSING = ("alive_at", "answered_at", "lost_at", "is_suspect", "cut_at", "cut_kind", "challenge")
"""What the failure detector knows of a member."""


def durable(machine: Membership) -> dict[str, Any]:
    """
    All of a machine's state that must survive the death of its scheduler; not who was heard when.
    """
    found = dict(vars(machine))
    roster = dict(vars(found.pop("roster")))
    generation = dict(vars(found.pop("generation")))
    progress = generation.pop("progress")
    shutdown = dict(vars(found.pop("shutdown")))
    fenced = found.pop("outbox").fenced
    for passing in ("detector", "journal_events", "next_waiting_at", "_is_replaying"):
        found.pop(passing)
    members = {
        agent: [value for name, value in vars(member).items() if name not in PASSING]
        for agent, member in roster.pop("members").items()
    }
    places = {name: list(roster.pop(name)) for name in ("names", "claims", "cut", "departing")}
    return {
        **found,
        **roster,
        **generation,
        **shutdown,
        **places,
        "members": members,
        "fenced": fenced,
        "failures": list(generation["failures"]),
        "saved": progress.saved_steps,
        "progressed": progress.has_reports,
    }


# Real sockets
# ------------


def until(condition: Callable[[], object], what: str, timeout: float = 60.0) -> None:
    """Wait for a condition, bounded."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.005)


@dataclass
class Agent:
    """The simplest agent on a real link: does what it is asked at once."""

    link: ZmqLink
    inbox: list[Message] = field(default_factory=list)

    def turn(self, timeout: float = 0.05) -> None:
        due = self.link.deadline()
        wait = timeout if due is None else min(timeout, max(0.0, due - time.monotonic()))
        wait_readable(self.link.fileno(), wait=wait)
        self.inbox += self.link.poll()

    def expect(self, kind: type[M], timeout: float = 60.0) -> M:
        """Wait for a message of a kind; earlier ones of other kinds are dropped."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            while self.inbox:
                message = self.inbox.pop(0)
                if isinstance(message, kind):
                    return message
            self.turn()
        raise AssertionError(f"no {kind.__name__} within {timeout} s")

    def join(self, node: str, workers: int = 1, **join: Any) -> Welcome:
        welcome = self.expect(Welcome)
        self.link.send(
            Join(node, **{"node_rank": None, "workers": workers, "store": "127.0.0.1:9", **join})
        )
        return welcome


def start_all(*agents: Agent) -> list[Assign]:
    """Take joined agents to Start, each in its turn."""
    assigns = []
    for agent in agents:
        assigns.append(agent.expect(Assign))
        agent.link.send(Ready(assigns[-1].generation))
    for agent in agents:
        agent.expect(Start)
    return assigns


@contextlib.contextmanager
def agents(endpoint: Endpoint, secret: Any, *jobs: str, **options: Any) -> Iterator[list[Agent]]:
    """One agent a job name, all closed afterwards."""
    found = [
        Agent(
            ZmqLink(
                endpoint, secret, job=job, host=f"host{i}", **{"start_timeout": 20.0, **options}
            )
        )
        for i, job in enumerate(jobs)
    ]
    try:
        yield found
    finally:
        for agent in found:
            agent.link.close(0.2)


def connect(endpoint: Endpoint) -> socket.socket:
    """A plain TCP connection to the port."""
    return socket.create_connection((endpoint.host, endpoint.port), timeout=10)
