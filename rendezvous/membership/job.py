"""
What the membership machine knows of its job, and the small words with which its rooms change it.

The rooms are modules of functions over one `Job`, each using only those above it:

    job          what is known; who is here, counted by phase; what is to be sent and recorded
    elastic      who may come in, and who takes part in a generation
    generations  from generation to generation, and to the end
    loss         nodes that are given up, leave or depart
    reports      what nodes tell of their workers: exits, progress, hangs
    admission    Hello and Join: who comes in, and what a node that is back is told
    due          what time brings
    hangs, progress, policy, watch    know nothing of a Job: they are given what they need
    state        takes the events: `Membership.step`

No room scans all nodes for an event of one node: what must be known of all of them is counted while
it changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdrun.rendezvous.membership.failure_detector import Watch
from pdrun.rendezvous.membership.nodes import Member, Phase
from pdrun.rendezvous.membership.transitions import JobState, Trigger, after
from pdrun.rendezvous.policies.hang_report import Inquiry
from pdrun.rendezvous.policies.progress import ProgressBook
from pdrun.rendezvous.policies.restart import Attempts
from pdrun.rendezvous.policies.verdict import Failures
from pdrun.rendezvous.protocol.events import Action, Close, Peer, Record, SchedulerConfig, Send
from pdrun.rendezvous.protocol.messages import Assign, Hello, Message, Notice, Refuse, Verdict

SIGTERM = 15
SIGKILL = 9


@dataclass(frozen=True)
class Ending:
    """How, and what for, the workers of the present generation are being ended."""

    reason: str
    signal: int
    grace: float
    deadline: float
    code: int | None = None
    """
    The verdict's code, whatever the workers report (a signal, a limit, a lost node); None: the
    first cause's.
    """
    change: bool = False
    """Nodes have come or gone: another generation follows, whatever the workers report."""
    counts: bool = False
    """The next generation counts as a restart."""
    again_at: float | None = None
    """Every worker has ended: when the next generation begins. It has been counted."""


@dataclass
class Session:
    """A connection that has said Hello."""

    hello: Hello
    stops: int = 0
    """StopRequests that came over it."""


class Job:
    """The job's state. Read its attributes freely; only `Membership.step` changes them."""

    def __init__(self, config: SchedulerConfig, scheduler: str, now: float) -> None:
        """
        Args:
            config: what to do.
            scheduler: incarnation of this scheduler, 32 hexadecimal digits.
            now: monotonic seconds.
        """
        self.config = config
        self.scheduler = scheduler
        self.key = config.job
        """Name of the job; of a scheduler that was started without one, the first agent's."""
        self.spec = config.spec
        self.command = config.command
        self.state = JobState.GATHERING
        self.generation = -1
        self.verdict: Verdict | None = None
        self.done = False
        # who is here
        self.sessions: dict[Peer, Session] = {}
        self.agents: dict[str, Peer] = {}
        """The connection of each agent that has one."""
        self.members: dict[str, Member] = {}
        """Nodes that are here, by the agent's random name, in the order in which they came."""
        self.names: dict[str, Member] = {}
        self.claims: dict[int, Member] = {}
        """Those who asked for a node rank, by it."""
        self.cut: dict[str, Member] = {}
        """Those whose connection is cut."""
        self.departing: dict[str, Member] = {}
        self.counts = dict.fromkeys(Phase, 0)
        """How many of them are in each phase."""
        self.gone: dict[str, str] = {}
        """
        Agents that were given up or have left, and how they are told: nothing that they say counts
        any more.
        """
        # the present generation, or the last one while another is formed
        self.assigns: dict[str, Assign] = {}
        self.failures = Failures()
        self.ending: Ending | None = None
        self.inquiry: Inquiry | None = None
        self.progress = ProgressBook(now)
        self.agreed = -1
        """The last step that every worker of an earlier generation had saved."""
        self.attempts = Attempts()
        self.changed = ""
        """While assigning: why this generation must be formed anew."""
        self.short = ""
        """While gathering: why the last generation could not go on."""
        # times, on the scheduler's clock
        self.since = now
        """When the present state was entered."""
        self.started_at = now
        self.joined_at = now
        """When the last node came in."""
        self.waiting_at = now + config.waiting_every
        self.limit_at: float | None = None
        self.watch = Watch(config, now)
        self.fenced: list[tuple[Peer, str, int]] = []
        """Connections of nodes that this step gave up, and what they are told at its end."""
        self.out: list[Action] = []

    @property
    def restarts(self) -> int:
        """How often the whole job was tried again after a failure."""
        return self.attempts.restarts

    @property
    def nodes(self) -> list[Member]:
        """Those who take part now, in rank order once there is one."""
        found = [member for member in self.members.values() if member.phase is not Phase.STANDBY]
        return sorted(found, key=lambda member: (member.index < 0, member.index))

    # Who is here
    # ------------------------------------------------------------------------------------------------------

    def add(self, member: Member) -> None:
        """A node has come in."""
        self.members[member.hello.agent] = self.names[member.name] = member
        if member.join.node_rank is not None:
            self.claims[member.join.node_rank] = member
        self.counts[member.phase] += 1

    def remove(self, member: Member, phase: Phase) -> Peer | None:
        """
        A node is gone, its connection with it; return that connection, which is still to be closed.
        """
        agent = member.hello.agent
        peer = member.peer
        self.counts[member.phase] -= 1
        del self.members[agent], self.names[member.name]
        if member.join.node_rank is not None:
            del self.claims[member.join.node_rank]
        self.cut.pop(agent, None)
        self.departing.pop(agent, None)
        member.phase = phase
        member.peer = None
        if peer is not None:
            self.forget_session(peer)
        return peer

    def set_phase(self, member: Member, phase: Phase) -> None:
        """Every change of the phase of a node that is here goes through this."""
        self.counts[member.phase] -= 1
        self.counts[phase] += 1
        member.phase = phase

    def forget_session(self, peer: Peer) -> Session | None:
        """A connection is over."""
        session = self.sessions.pop(peer, None)
        if session is not None and self.agents.get(session.hello.agent) == peer:
            del self.agents[session.hello.agent]
        return session

    def visitors(self) -> list[Peer]:
        """Connections of agents that have said nothing yet but Hello."""
        return [
            peer
            for peer, session in self.sessions.items()
            if session.hello.role == "agent"
            and session.hello.agent not in self.members
            and not session.stops
        ]

    # What is to be done
    # -----------------------------------------------------------------------------------------------

    def move(self, trigger: Trigger, now: float) -> None:
        """Every change of the state goes through this."""
        self.state = after(self.state, trigger)
        self.since = now

    def send(self, peer: Peer, message: Message) -> None:
        """Give a message to a connection."""
        self.out.append(Send(peer, message))

    def close(self, peer: Peer) -> None:
        """End a connection."""
        self.out.append(Close(peer))

    def tell(self, member: Member, message: Message) -> None:
        """Give a message to a node; one that is cut off is told when it is back."""
        if member.peer is not None:
            self.send(member.peer, message)

    def tell_all(self, message: Message) -> None:
        """Give a message to every node."""
        for member in self.members.values():
            self.tell(member, message)

    def notice(self, text: str) -> None:
        """Say something to the people at all terminals."""
        self.tell_all(Notice(text))

    def refuse(self, peer: Peer, hello: Hello, refuse: Refuse, node: str = "") -> None:
        """Turn a connection away that brought no node in."""
        self.send(peer, refuse)
        self.close(peer)
        self.forget_session(peer)
        self.record(
            "refused",
            node=node,
            host=hello.host,
            job=hello.job,
            code=refuse.code,
            reason=refuse.reason,
        )

    def record(self, kind: str, **data: Any) -> None:
        """Add to the event log."""
        self.out.append(Record(kind, data))

    def record_created(self) -> None:
        """Say which job this is."""
        self.record(
            "created",
            job=self.key,
            run=self.config.run,
            nodes=self.config.nodes,
            host=self.config.host,
        )
