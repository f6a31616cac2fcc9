"""
What goes into the membership machine and what comes out: its configuration, its events, its
actions.

Plain frozen values. `pdrun.rendezvous.membership.machine` gives them meaning,
`pdrun.rendezvous.scheduler.service` carries them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pdrun.rendezvous.protocol.messages import Message

Peer = str
"""Name that a transport gives to one connection; never used twice."""

FAREWELL_SECONDS = 10.0
"""
Seconds that agents get to hear the verdict and leave. Whoever does not hear it waits for a
scheduler that is gone, and calls the job lost: on a network that loses a third of all packets a
message may take as long.
"""


@dataclass(frozen=True)
class SchedulerConfig:
    """All that a scheduler is told when it starts. Times in seconds."""

    job: str
    """Key of the job; empty: the first agent's job is adopted."""
    run: str
    """Unique name of this run."""
    nodes: int
    """How many nodes take part at most, at least 1."""
    spec: str = ""
    """The job's specification as JSON, handed to joiners; empty: the first Join's is kept."""
    start_timeout: float = 600.0
    """For the nodes to come together, and again for each generation to become ready."""
    grace: float = 30.0
    max_restarts: int = 0
    """Restarts after failures, of the whole job; membership changes of an elastic job are none."""
    restart_window: float | None = None
    """Only restarts of the last so many seconds count against ``max_restarts``; None: all."""
    restart_on: tuple[int, ...] = ()
    """
    Exit codes (as a shell shows them) after which to restart; empty: all but ``no_restart_on``.
    """
    no_restart_on: tuple[int, ...] = ()
    backoff: float = 1.0
    """
    Seconds before the second of two restarts in quick succession, doubled for each further one, at
    most 30.
    """
    min_nodes: int = 0
    """The job runs with at least so many nodes; 0: with ``nodes`` only."""
    gather: float = 10.0
    """
    With fewer than ``nodes``: seconds in which nobody has joined, after which a generation is
    formed.
    """
    spares: int = 0
    """Nodes beyond ``nodes`` that may join and stand by."""
    grow: float | None = None
    """
    With fewer than ``nodes`` running and nodes standing by: seconds after the last of them came in
    which a new, larger generation is opened; None: they wait for the next one.
    """
    relays: int | None = None
    """
    Relay processes beside the scheduler, which take the agents in; None: as many as the job's size
    asks for.
    """
    patience: float = 60.0
    """Handed out in Welcome: how long agents wait for a lost scheduler; 0: not at all."""
    time_limit: float | None = None
    """Counted from the first Start, restarts included."""
    command: str = ""
    """What the job runs, for messages; empty: what the first agent says."""
    unit: Literal["node", "worker"] = "node"
    """What the members are called in messages: in a dynamic cluster each is one worker."""
    host: str = ""
    """Name of the host that the scheduler runs on, for messages."""
    hosts: tuple[str, ...] = ()
    """Node names in rank order, where the user gave one."""
    must_agree: tuple[str, ...] = ("command", "pdrun")
    """Facts that must be equal on all nodes: a node that differs is refused."""
    should_agree: tuple[str, ...] = ("script", "python", "torch", "device")
    """Facts whose difference is a warning."""
    waiting_every: float = 5.0
    heartbeat: float = 1.0
    """
    Between two heartbeats of an agent, and more in a job of thousands of nodes (`watch.times`); 0:
    nobody beats and nobody is suspected (all in one process).
    """
    suspect: float = 3.0
    """
    Silence after which a node is called suspect; also how long a cut connection may take to come
    back.
    """
    dead: float = 10.0
    """Silence after which a node is lost."""
    reconnect: float = 0.6
    """
    How long a node may take to come back when its connection was *closed* while it was still
    talking: a kernel does that for a process that died, and a live agent whose connection was reset
    comes back at once.
    """


@dataclass(frozen=True)
class MessageReceived:
    """A message came in."""

    peer: Peer
    message: Message


@dataclass(frozen=True)
class AgentsAlive:
    """
    Connections behind a relay were heard, and hear what they are answered: in place of a Heartbeat
    of each.
    """

    peers: tuple[Peer, ...]


@dataclass(frozen=True)
class PeerDisconnected:
    """A connection has ended, by whichever side."""

    peer: Peer
    between: bool = False
    """True: a relay between has ended, which says nothing about the node."""


@dataclass(frozen=True)
class Tick:
    """Time has passed. Due at least every `Membership.tick_every` seconds."""


@dataclass(frozen=True)
class LocalStop:
    """Somebody at the scheduler itself (a signal) stops the job, as StopRequest does from afar."""

    signal: int
    by: str
    force: bool = False


@dataclass(frozen=True)
class AgentLost:
    """The agent that runs this scheduler has died; the job cannot go on."""

    reason: str


@dataclass(frozen=True)
class LostNode:
    """A node that the failure detector has given up."""

    agent: str
    why: str
    cut_at: float
    """
    When it was last known to talk, on the scheduler's clock: failures after that may be its doing.
    """


@dataclass(frozen=True)
class NodesLost:
    """
    The failure detector has given nodes up. The machine says this to itself at a Tick; a journal
    keeps it, since the heartbeats that it follows from are not kept.
    """

    nodes: tuple[LostNode, ...]


@dataclass(frozen=True)
class SchedulerResumed:
    """
    This scheduler is the successor of one that died, and has replayed its journal: every connection
    is gone, every deadline starts afresh.
    """

    scheduler: str
    """Incarnation of the successor."""


MembershipEvent = (
    MessageReceived
    | AgentsAlive
    | PeerDisconnected
    | Tick
    | LocalStop
    | AgentLost
    | NodesLost
    | SchedulerResumed
)

JOURNAL_TAGS: Mapping[type[MembershipEvent], str] = {
    MessageReceived: "Received",
    AgentsAlive: "Heard",
    PeerDisconnected: "Disconnected",
    Tick: "Tick",
    LocalStop: "StopOrdered",
    AgentLost: "Orphaned",
    NodesLost: "GivenUp",
    SchedulerResumed: "Resumed",
}
"""
The name of each event class in a journal. The tags are older than the class names. Journals that
exist contain them, so they do not change.
"""


@dataclass(frozen=True)
class SendMessage:
    """Give a message to a connection; one that is gone is no error."""

    peer: Peer
    message: Message


@dataclass(frozen=True)
class ClosePeer:
    """End a connection once everything sent to it is out."""

    peer: Peer


@dataclass(frozen=True)
class SendStatus:
    """Answer a StatusQuery with the event lines so far."""

    peer: Peer


@dataclass(frozen=True)
class RecordEvent:
    """Append to the event log; kinds and data are those that `pdrun.eventlog.apply` reads."""

    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobDone:
    """Everybody knows the verdict, or had time to: the scheduler can go. Said once."""

    code: int


Action = SendMessage | ClosePeer | SendStatus | RecordEvent | JobDone
