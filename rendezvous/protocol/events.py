"""
Configuration, events and actions of the membership machine: plain frozen values.

`pdrun.rendezvous.membership.machine` takes the events and returns the actions.
`pdrun.rendezvous.scheduler.service` carries the actions out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from pdrun.quick_dataclass import dataclass
from pdrun.rendezvous.protocol.messages import Message

Peer = str
"""The transport's name of a connection, never used twice."""

FAREWELL_SECONDS = 10.0
"""
Time for agents to receive the verdict and leave. An agent that does not receive it waits for a
scheduler that has exited, and reports the job as lost. On a network that loses a third of all
packets a message may take this long.
"""


@dataclass(frozen=True)
class ChosenSetting:
    """A setting of the job that is not the default."""

    path: str
    """``resources.nodes``."""
    value: str
    source: str
    """``--nodes``, ``job.yaml:3``."""


@dataclass(frozen=True)
class SchedulerConfig:
    """The settings of a scheduler. Times in seconds."""

    job: str
    """Key of the job; empty: the first agent's job."""
    run: str
    """Unique name of this run."""
    nodes: int
    """Maximum number of nodes of a generation, at least 1."""
    spec: str = ""
    """The job's specification as JSON, for joining nodes; empty: the first Join's."""
    start_timeout: float = 600.0
    """Limit for the nodes to join, and again for each generation to become ready."""
    grace: float = 30.0
    max_restarts: int = 0
    """
    Restarts of the whole job after failures. Membership changes of an elastic job do not count.
    """
    restart_window: float | None = None
    """Only restarts within this time count against ``max_restarts``; None: all."""
    restart_on: tuple[int, ...] = ()
    """
    Exit codes (as a shell shows them) after which to restart; empty: all but ``no_restart_on``.
    """
    no_restart_on: tuple[int, ...] = ()
    backoff: float = 1.0
    """Seconds before the second of two quick restarts; doubled for each further one, at most 30."""
    min_nodes: int = 0
    """Minimum number of nodes of a generation; 0: ``nodes``."""
    gather: float = 10.0
    """
    With fewer than ``nodes``: a generation is formed when no node has joined for so many seconds.
    """
    spares: int = 0
    """Number of nodes beyond ``nodes`` that may join and stand by."""
    grow: float | None = None
    """
    With fewer than ``nodes`` running and nodes standing by: seconds after the last join until a
    larger generation is formed; None: they wait for the next one.
    """
    relays: int | None = None
    """
    Number of relay processes that accept the agents' connections; None: chosen by the job's size.
    """
    patience: float = 60.0
    """Sent in Welcome: seconds that agents wait for a lost scheduler; 0: they do not wait."""
    keeps_port: bool = False
    """Sent in Welcome: an agent holds the scheduler's listening socket as long as it lives."""
    time_limit: float | None = None
    """Counted from the first Start, with restarts."""
    command: str = ""
    """The job's command, for messages; empty: the first agent's."""
    unit: Literal["node", "worker"] = "node"
    """What a member is called in messages. In a dynamic cluster each is one worker."""
    host: str = ""
    """Name of the scheduler's host, for messages."""
    settings: tuple[ChosenSetting, ...] = ()
    """What the user or the environment chose: for the record."""
    hosts: tuple[str, ...] = ()
    """Node names in rank order, if the user gave a list of hosts."""
    must_agree: tuple[str, ...] = ("command", "pdrun")
    """Facts that must be equal on all nodes: a node that differs is refused."""
    should_agree: tuple[str, ...] = ("script", "python", "torch", "device")
    """Facts whose difference is a warning."""
    waiting_every: float = 5.0
    heartbeat: float = 1.0
    """
    Time between two heartbeats of an agent; more in a job of thousands of nodes (`detector_times`).
    0: no heartbeats and no failure detector (all in one process).
    """
    suspect: float = 3.0
    """Silence after which a node is suspect, and time for a cut connection to come back."""
    dead: float = 10.0
    """Silence after which a node is lost."""
    reconnect: float = 0.6
    """
    Time for a node to reconnect if its connection was *closed* while it sent heartbeats. The kernel
    closes the connections of a process that died. A live agent whose connection was reset
    reconnects immediately.
    """


@dataclass(frozen=True)
class MessageReceived:
    """A message has arrived."""

    peer: Peer
    message: Message


@dataclass(frozen=True)
class AgentsAlive:
    """
    Connections behind a relay that have sent heartbeats and received the answers. One event
    replaces a Heartbeat of each.
    """

    peers: tuple[Peer, ...]


@dataclass(frozen=True)
class PeerDisconnected:
    """A connection has ended, from either side."""

    peer: Peer
    between: bool = False
    """True: a relay in between has ended, which means nothing about the node."""


@dataclass(frozen=True)
class JoinDeferred:
    """
    A node was refused for now and asks again. The machine creates this event at a Join. A journal
    keeps it, because the decision depends on the failure detector.
    """

    peer: Peer
    node: str


@dataclass(frozen=True)
class Tick:
    """Time has passed. Sent at least every `Membership.tick_every` seconds."""


@dataclass(frozen=True)
class LocalStop:
    """A signal to the scheduler itself stops the job, as StopRequest does from a node."""

    signal: int
    by: str
    force: bool = False


@dataclass(frozen=True)
class AgentLost:
    """The agent that runs this scheduler has died; the job cannot continue."""

    reason: str


@dataclass(frozen=True)
class LostNode:
    """A node that the failure detector marks lost."""

    agent: str
    why: str
    cut_at: float
    """
    Time of its last sign of life, on the scheduler's clock. A failure after that may be a
    consequence of the loss.
    """


@dataclass(frozen=True)
class NodesLost:
    """
    The failure detector marks nodes lost. The machine creates this event at a Tick. A journal keeps
    it, because the heartbeats that it follows from are not kept.
    """

    nodes: tuple[LostNode, ...]


@dataclass(frozen=True)
class SchedulerResumed:
    """
    This scheduler is the successor of one that died, and has replayed its journal. Every connection
    has ended, and every deadline starts again.
    """

    scheduler: str
    """Incarnation of the successor."""


MembershipEvent = (
    MessageReceived
    | AgentsAlive
    | PeerDisconnected
    | JoinDeferred
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
    JoinDeferred: "JoinDeferred",
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
    """Send a message to a connection. A connection that has ended is not an error."""

    peer: Peer
    message: Message


@dataclass(frozen=True)
class ClosePeer:
    """End a connection after everything sent to it is out."""

    peer: Peer


@dataclass(frozen=True)
class SendStatus:
    """Answer a StatusQuery with the event lines so far."""

    peer: Peer


@dataclass(frozen=True)
class RecordEvent:
    """Append to the event log. `pdrun.eventlog` reads these kinds and data."""

    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobDone:
    """Every node knows the verdict, or had time for it: the scheduler can exit. Emitted once."""

    code: int


Action = SendMessage | ClosePeer | SendStatus | RecordEvent | JobDone
