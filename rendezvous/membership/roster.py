"""
The roster: connections and nodes of the job, with their counts per phase.

Counts are kept up to date at each change, so that an event of one node never looks at all nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdrun.rendezvous.membership.nodes import Member, Phase
from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.protocol.messages import Hello


@dataclass
class Session:
    """A connection after its Hello."""

    hello: Hello
    stop_requests: int = 0
    """StopRequests that this connection has sent."""
    deferred_node: str = ""
    """Name of a deferred node that was sent the verdict here."""


@dataclass
class Roster:
    """Connections and nodes. Only the methods change `members`, `names`, `claims` and `counts`."""

    joined_at: float
    """Time of the last join, on the scheduler's clock."""
    sessions: dict[Peer, Session] = field(default_factory=dict)
    agents: dict[str, Peer] = field(default_factory=dict)
    """agent -> its open connection."""
    members: dict[str, Member] = field(default_factory=dict)
    """agent -> node, in the order of their joins."""
    names: dict[str, Member] = field(default_factory=dict)
    """node name -> node."""
    claims: dict[int, Member] = field(default_factory=dict)
    """Requested node rank -> node."""
    cut: dict[str, Member] = field(default_factory=dict)
    """agent -> node without a connection."""
    departing: dict[str, Member] = field(default_factory=dict)
    """agent -> node that will leave (`Member.depart_reason`)."""
    counts: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    """Number of nodes in each phase."""
    gone: dict[str, str] = field(default_factory=dict)
    """
    agent -> reason, of nodes that are lost or have left. Later messages of these agents are
    refused with the reason.
    """
    deferred: dict[str, float] = field(default_factory=dict)
    """node name -> time at which it was refused for now. It asks again within seconds."""

    @property
    def active_nodes(self) -> list[Member]:
        """Nodes that take part in the present generation, in rank order if they have ranks."""
        found = [member for member in self.members.values() if member.phase is not Phase.STANDBY]
        return sorted(found, key=lambda member: (member.index < 0, member.index))

    @property
    def staying_count(self) -> int:
        """Number of nodes that are not about to leave."""
        return len(self.members) - len(self.departing)

    def find_member(self, peer: Peer) -> Member | None:
        """Return the node of a connection, or None if it has not joined."""
        session = self.sessions.get(peer)
        return self.members.get(session.hello.agent) if session else None

    def find_visitors(self) -> list[Peer]:
        """Return connections of agents that have sent nothing but Hello."""
        return [
            peer
            for peer, session in self.sessions.items()
            if session.hello.role == "agent"
            and session.hello.agent not in self.members
            and not session.stop_requests
        ]

    def add_member(self, member: Member) -> None:
        """Add a node."""
        self.members[member.hello.agent] = member
        self.names[member.name] = member
        self.deferred.pop(member.name, None)
        if member.join.node_rank is not None:
            self.claims[member.join.node_rank] = member
        self.counts[member.phase] += 1

    def remove_member(self, member: Member, phase: Phase) -> Peer | None:
        """Remove a node and its session; return its connection, which the caller closes."""
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
        """Change the phase of a node. No other code sets the phase of a node in the roster."""
        self.counts[member.phase] -= 1
        self.counts[phase] += 1
        member.phase = phase

    def forget_session(self, peer: Peer) -> Session | None:
        """Remove a connection that has ended or is being closed."""
        session = self.sessions.pop(peer, None)
        if session is not None and self.agents.get(session.hello.agent) == peer:
            del self.agents[session.hello.agent]
        if session is not None and session.deferred_node:
            self.deferred.pop(session.deferred_node, None)
        return session
