"""
The state of one job. The modules of this room are functions over it; each uses only those above it:

    nodes, roster     nodes and connections; counts per phase
    transitions       legal states and messages
    failure_detector  which nodes are silent or cut off
    job               the state, in four groups: roster, generation, shutdown, outbox
    sizing            who may join, and who takes part in a generation
    generations       from one generation to the next, and to the verdict
    departures        nodes that are lost, leave or depart
    worker_reports    exits, progress and hangs of workers
    admission         Hello and Join, and nodes that reconnect
    timers            what a tick does
    machine           takes the events: `Membership.step`

The rules in `policies/` know no Job: they get plain values.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from pdrun.quick_dataclass import dataclass
from pdrun.rendezvous.membership.failure_detector import FailureDetector
from pdrun.rendezvous.membership.nodes import Member
from pdrun.rendezvous.membership.roster import Roster
from pdrun.rendezvous.membership.transitions import JobState, Trigger, next_state
from pdrun.rendezvous.policies.hang_report import HangInquiry, IdleWorkers
from pdrun.rendezvous.policies.progress import ProgressTracker
from pdrun.rendezvous.policies.restart import RestartHistory, restarts_left
from pdrun.rendezvous.policies.verdict import FailureLog
from pdrun.rendezvous.protocol.events import (
    Action,
    ClosePeer,
    Peer,
    RecordEvent,
    SchedulerConfig,
    SendMessage,
)
from pdrun.rendezvous.protocol.messages import Assign, Hello, Message, Notice, Refuse, Verdict

SIGTERM = 15
SIGKILL = 9
MAX_STOP_NOTES = 4


@dataclass
class Generation:
    """The present generation, or the last one while the next is formed."""

    progress: ProgressTracker
    started_at: float
    """Time of Start, on the scheduler's clock."""
    number: int = -1
    assigns: dict[str, Assign] = field(default_factory=dict)
    """agent -> its place."""
    failures: FailureLog = field(default_factory=FailureLog)
    hang: HangInquiry | None = None
    """The hang whose stacks are being collected."""
    idle: IdleWorkers = field(default_factory=IdleWorkers)
    agreed_step: int = -1
    """The last step that every worker of an earlier generation had saved."""
    reform_reason: str = ""
    """While assigning: why this generation must be formed again."""
    shortage_reason: str = ""
    """While gathering: why the last generation could not continue."""
    stop_notes: list[str] = field(default_factory=list)
    """Nodes that were lost, or late, while its workers were being stopped, for the verdict."""

    def note_stop(self, text: str) -> None:
        """Add a line about a node to what the verdict says about the stop."""
        if len(self.stop_notes) < MAX_STOP_NOTES:
            self.stop_notes.append(text)


@dataclass(frozen=True)
class StopPlan:
    """How and why the workers of the present generation are stopped."""

    reason: str
    signal: int
    grace: float
    deadline: float
    code: int | None = None
    """
    The verdict's code for any exit of the workers (a signal, a limit, a lost node). None: the code
    of the first cause.
    """
    is_change: bool = False
    """The membership has changed: another generation follows, for any exit of the workers."""
    counts_as_restart: bool = False
    """The next generation counts as a restart."""
    next_at: float | None = None
    """Start time of the next generation, set when every worker has ended. It is counted already."""


@dataclass
class Shutdown:
    """How the present generation and the job end: the stop in progress, restarts, the verdict."""

    stop: StopPlan | None = None
    """The stop in progress."""
    restart_history: RestartHistory = field(default_factory=RestartHistory)
    time_limit_at: float | None = None
    """End of the job's time limit, known from the first Start on."""
    verdict: Verdict | None = None
    is_done: bool = False
    """The scheduler can exit: `JobDone` was emitted."""

    @property
    def restarts(self) -> int:
        """Number of restarts of the whole job after failures."""
        return self.restart_history.restarts


@dataclass
class ActionOutbox:
    """What the present step emits."""

    actions: list[Action] = field(default_factory=list)
    fenced: list[tuple[Peer, str, int]] = field(default_factory=list)
    """
    Connection, reason and exit code of each node that this step marked lost. They are refused at
    the end of the step.
    """
    has_changed_state: bool = False
    """A tick has changed the state without an action: a journal must keep it."""

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message to a connection."""
        self.actions.append(SendMessage(peer, message))

    def send_to(self, member: Member, message: Message) -> None:
        """Send a message to a node. A node without a connection gets it when it reconnects."""
        if member.peer is not None:
            self.send(member.peer, message)

    def close_peer(self, peer: Peer) -> None:
        """End a connection."""
        self.actions.append(ClosePeer(peer))

    def record_event(self, kind: str, **data: Any) -> None:
        """Add a line to the event log."""
        self.actions.append(RecordEvent(kind, data))


class Job:
    """
    The state of a job. Other modules may read all of it; only `Membership.step` changes it.

    Functions that need one group take that group (`Roster`, `Generation`, `Shutdown`,
    `ActionOutbox`). Functions that need several take the Job.
    """

    def __init__(self, config: SchedulerConfig, scheduler: str, now: float) -> None:
        """
        Args:
            config: the settings.
            scheduler: incarnation of this scheduler, 32 hexadecimal digits.
            now: monotonic seconds.
        """
        self.config = config
        self.scheduler = scheduler
        self.key = config.job
        """Name of the job. A scheduler without one takes the first agent's."""
        self.spec = config.spec
        self.command = config.command
        self.first_versions: dict[str, str] = {}
        """Versions of the first node; the records of other nodes have what differs."""
        self.differences: dict[tuple[str, str], str] = {}
        """(name, value) of what differs between nodes and should not -> a line about it."""
        self.state = JobState.GATHERING
        self.state_since = now
        """Start of the present state, on the scheduler's clock."""
        self.next_waiting_at = now + config.waiting_every
        """While gathering: time of the next Waiting message."""
        self.detector = FailureDetector(config, now)
        self.roster = Roster(now)
        self.generation = Generation(ProgressTracker(now), now)
        self.shutdown = Shutdown()
        self.outbox = ActionOutbox()

    def restarts_left(self, now: float) -> int:
        """Return how many restarts are left."""
        return restarts_left(self.config, self.shutdown.restart_history, now)

    def change_state(self, trigger: Trigger, now: float) -> None:
        """Change the state. No other code sets it."""
        self.state = next_state(self.state, trigger)
        self.state_since = now

    def broadcast(self, message: Message) -> None:
        """Send a message to every node."""
        for member in self.roster.members.values():
            self.outbox.send_to(member, message)

    def send_notice(self, text: str) -> None:
        """Show a text at the terminals of all nodes."""
        self.broadcast(Notice(text))

    def refuse_peer(self, peer: Peer, hello: Hello, refuse: Refuse, node: str = "") -> None:
        """Refuse and close a connection that has no node."""
        self.outbox.send(peer, refuse)
        self.outbox.close_peer(peer)
        self.roster.forget_session(peer)
        self.outbox.record_event(
            "refused",
            node=node,
            host=hello.host,
            job=hello.job,
            code=refuse.code,
            reason=refuse.reason,
        )

    def record_created(self) -> None:
        """Record which job this is."""
        settings = [[one.path, one.value, one.source] for one in self.config.settings]
        self.outbox.record_event(
            "created",
            job=self.key,
            run=self.config.run,
            nodes=self.config.nodes,
            host=self.config.host,
            **({"settings": settings} if settings else {}),
        )
