"""
The scheduler's loop: envelopes in, the membership machine, actions out.

`Service` connects the pure machine to a transport, a clock, the event log and the journal. It runs
inside the agent (one node), as the agent's child (`pdrun.rendezvous.scheduler.child_main`) or
standalone (`pdrun.rendezvous.scheduler.standalone`).

Events that arrive together are handled together. The machine takes a step for each event, the
journal is written and synced once, and only then are the actions carried out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdrun.clock import Clock, SystemClock
from pdrun.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE
from pdrun.eventlog import LogEvent
from pdrun.rendezvous.journal.recovery import Recovery, begin_job
from pdrun.rendezvous.membership.machine import IllegalEvent
from pdrun.rendezvous.protocol.codec import CodecError
from pdrun.rendezvous.protocol.events import (
    Action,
    AgentLost,
    AgentsAlive,
    ClosePeer,
    JobDone,
    LocalStop,
    MembershipEvent,
    MessageReceived,
    Peer,
    PeerDisconnected,
    RecordEvent,
    SchedulerConfig,
    SchedulerResumed,
    SendMessage,
    SendStatus,
    Tick,
)
from pdrun.rendezvous.protocol.messages import (
    OPTIONAL_MESSAGES,
    Echo,
    Envelope,
    Heartbeat,
    Hello,
    Message,
    Notice,
    Refuse,
    StatusQuery,
    StatusReply,
    StopRequest,
)
from pdrun.rendezvous.transport.base import (
    EnvelopeArrived,
    FdReady,
    PeerGone,
    PeersAlive,
    ProtocolViolation,
    ServerTransport,
)

MAX_STATUS_CHARS = 400_000
"""Maximum characters of the event lines in a StatusReply; the newest lines are kept."""
MAX_REFUSALS = 20
REFUSAL_WINDOW_SECONDS = 10.0
"""
At most MAX_REFUSALS refusals are recorded within this time. Further ones are counted with the
violations.
"""
MIN_TICK_SECONDS = 0.02
TICK_SECONDS_PER_NODE = 20e-6
"""Minimum time between two ticks, plus TICK_SECONDS_PER_NODE for each node."""
COMPLAINT_SECONDS = 5.0
"""Time between two warnings about unknown connections."""


@dataclass(slots=True)
class _PeerState:
    """Message numbers of one connection."""

    hello: Hello | None = None
    received: int = 0
    sent: int = 0
    wants_status: bool = False
    """It has asked for the job's status or its end, so it gets the last status, too."""


class Service:
    """The scheduler of one job. Call `poll_once` in a loop, or with timeout 0 from another loop."""

    def __init__(
        self,
        config: SchedulerConfig,
        transport: ServerTransport,
        *,
        clock: Clock | None = None,
        record: Callable[[Sequence[LogEvent]], None] | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        """
        Args:
            record: called with the lines for the event log, one call for what happened together.
            recovery: a job that was begun or resumed; None: begin one here, without a journal.
        """
        self.clock = clock or SystemClock()
        self.transport = transport
        self._recovery = recovery or begin_job(config, self.clock)
        self.scheduler = self._recovery.scheduler
        self.machine = self._recovery.machine
        self.exit_code: int | None = None
        """The job's exit code, when every node knows the verdict (or had time for it)."""
        self.ready_fds: list[int] = []
        """Watched descriptors that were readable at the last poll."""
        self._on_events = record
        self._pending_actions: list[Action] = []
        """The machine's actions that wait for the journal."""
        self._ignored_peers: set[Peer] = set()
        """Connections that are being closed. Later messages from them are ignored."""
        self._peer_states: dict[Peer, _PeerState] = {}
        self._lines: deque[str] = deque()
        self._lines_chars = 0
        self._warned_at = float("-inf")
        self._muted_count = 0
        self._refusals: deque[float] = deque()
        # A tick looks at every node, so in a job of thousands there is not one per message.
        self._tick_every = min(
            self.machine.tick_every,
            MIN_TICK_SECONDS + (config.nodes + config.spares) * TICK_SECONDS_PER_NODE,
        )
        self._tick_at = 0.0
        self._resume_job()

    def _resume_job(self) -> None:
        """After the death of a predecessor: take over its events, and inform the machine."""
        found = self._recovery
        for event in found.past_events:
            self._add_line(event)
        if self._on_events and found.unwritten:
            self._on_events(found.unwritten)
        if found.warning:
            self.warn(found.warning)
        if self.machine.shutdown.is_done and self.machine.shutdown.verdict is not None:
            self.exit_code = self.machine.shutdown.verdict.code
        elif found.is_resumed:
            self._step_machine(SchedulerResumed(self.scheduler))
            self._perform_actions()

    def poll_once(self, timeout: float) -> None:
        """
        Wait for at most ``timeout`` seconds, never beyond the machine's next tick, and do what is
        due.
        """
        self.ready_fds = []
        for item in self.transport.poll(min(timeout, self.machine.tick_every)):
            if isinstance(item, EnvelopeArrived):
                self._on_envelope(item)
            elif isinstance(item, PeerGone):
                self._peer_states.pop(item.peer, None)
                self._step_machine(PeerDisconnected(item.peer, item.between))
            elif isinstance(item, ProtocolViolation):
                self._warn_limited(item.text)
            elif isinstance(item, PeersAlive):
                self._step_machine(AgentsAlive(item.peers))
            elif isinstance(item, FdReady):
                self.ready_fds.append(item.fd)
        if (now := self.clock.monotonic()) >= self._tick_at:
            self._tick_at = now + self._tick_every
            self._step_machine(Tick())
        self._perform_actions()

    @property
    def has_peers(self) -> bool:
        """Whether any peer is connected."""
        return bool(self._peer_states)

    def stop_job(self, number: int, by: str, *, force: bool = False) -> None:
        """Stop the job from the scheduler's own side."""
        self._step_machine(LocalStop(number, by, force))
        self._perform_actions()

    def on_agent_lost(self, reason: str) -> None:
        """The agent that runs this scheduler has died: end the job with this reason."""
        self._step_machine(AgentLost(reason))
        self._perform_actions()

    def finish(self) -> None:
        """The job is over: remove its journal."""
        self._recovery.discard_journal()

    def close(self) -> None:
        """Close the journal. A successor may resume it, except after `finish`."""
        self._recovery.close()

    def _on_envelope(self, item: EnvelopeArrived) -> None:
        if item.peer in self._ignored_peers:
            return None
        state = self._peer_states.get(item.peer)
        if state is None:
            state = _PeerState()
            self._peer_states[item.peer] = state
        envelope = item.envelope
        body = item.envelope.body
        if fault := _find_fault(state, item):
            return self._refuse_peer(item.peer, fault)
        state.received += not isinstance(body, Heartbeat)
        state.wants_status = state.wants_status or isinstance(body, StatusQuery | StopRequest)
        if isinstance(body, Hello) and state.hello is None:
            state.hello = body
            if self._recovery.has_lost_commits(body.scheduler, body.commit):
                why = "the scheduler's journal has lost its end, so the job cannot continue"
                return self._refuse_peer(item.peer, why, EXIT_UNAVAILABLE)
        try:
            self._step_machine(MessageReceived(item.peer, envelope.body))
        except IllegalEvent as error:
            self._refuse_peer(item.peer, str(error))
        return None

    def _refuse_peer(self, peer: Peer, why: str, code: int = EXIT_SOFTWARE) -> None:
        """A connection violated the protocol: refuse and close it. The machine treats it as cut."""
        self._warn_limited(f"a connection was refused: {why}")
        self._pending_actions += [SendMessage(peer, Refuse(code, why)), ClosePeer(peer)]
        self._ignored_peers.add(peer)
        self._step_machine(PeerDisconnected(peer))

    def _step_machine(self, event: MembershipEvent) -> None:
        """Step the machine. Its actions wait until the event is in the journal."""
        now = self.clock.monotonic() + self._recovery.clock_shift
        self._recovery.before_step(event)
        actions = self.machine.step(event, now)
        self._recovery.after_step(now)
        self._pending_actions += actions
        for action in actions:
            if isinstance(action, ClosePeer):
                self._ignored_peers.add(action.peer)

    def _perform_actions(self) -> None:
        """Carry out the actions, after the journal is safe."""
        if lost := self._recovery.commit():
            self.warn(lost, to_nodes=True)  # the event log is probably on the same disk
        due = self._pending_actions
        self._pending_actions = []
        self._ignored_peers.clear()
        self._record_events(
            [
                LogEvent(action.kind, self.clock.wall(), action.data)
                for action in due
                if isinstance(action, RecordEvent) and not self._is_muted(action)
            ]
        )
        for action in due:
            match action:
                case SendMessage(peer, message):
                    self._send_message(peer, message)
                case ClosePeer(peer):
                    self.transport.close_peer(peer)
                    self._peer_states.pop(peer, None)
                case SendStatus(peer):
                    self._send_message(peer, StatusReply(tuple(self._lines)))
                case JobDone(code):
                    self.exit_code = code
                    self._send_final_status()

    def _send_final_status(self) -> None:
        """Send viewers the last status: a moment later no scheduler answers."""
        for peer, state in list(
            self._peer_states.items()
        ):  # a copy: a peer that cannot be sent to is removed
            if state.wants_status:
                self._send_message(peer, StatusReply(tuple(self._lines)))

    def _send_message(self, peer: Peer, message: Message) -> None:
        if state := self._peer_states.get(peer):
            counted = not isinstance(message, Echo)
            number = state.sent if counted else 0
            try:
                self.transport.send(
                    peer, Envelope(self.scheduler, self._recovery.last_commit, number, message)
                )
                state.sent += counted
            except CodecError as error:
                self._warn_limited(f"a message was not sent: {error}")
                if not isinstance(message, OPTIONAL_MESSAGES):
                    self._end_peer(peer, f"the scheduler cannot send its next message: {error}")

    def _end_peer(self, peer: Peer, why: str) -> None:
        """End a conversation whose next message cannot be encoded; the job may continue."""
        state = self._peer_states.pop(peer)
        refusal = Envelope(self.scheduler, self._recovery.last_commit, state.sent, Refuse(70, why))
        self.transport.send(peer, refusal)
        self.transport.close_peer(peer)
        self._step_machine(PeerDisconnected(peer))

    def _record_events(self, events: Sequence[LogEvent]) -> None:
        for event in events:
            self._add_line(event)
        if self._on_events and events:
            self._on_events(events)

    def _add_line(self, event: LogEvent) -> None:
        line = event.to_line()
        self._lines.append(line)
        self._lines_chars += len(line)
        while self._lines_chars > MAX_STATUS_CHARS and len(self._lines) > 1:
            self._lines_chars -= len(self._lines.popleft())

    def warn(self, text: str, *, to_nodes: bool = False) -> None:
        """
        Warn in the event log; without one, or with ``to_nodes``, also at the terminals of the
        nodes.
        """
        self._record_events([LogEvent("warning", self.clock.wall(), {"text": text})])
        if self._on_events is None or to_nodes:
            self._pending_actions += [
                SendMessage(member.peer, Notice(text))
                for member in self.machine.roster.active_nodes
                if member.peer
            ]

    def _is_muted(self, action: RecordEvent) -> bool:
        """Whether there were so many refusals in a short time that one more is only counted."""
        if action.kind != "refused":
            return False
        now = self.clock.monotonic()
        while self._refusals and now - self._refusals[0] > REFUSAL_WINDOW_SECONDS:
            self._refusals.popleft()
        if len(self._refusals) >= MAX_REFUSALS:
            self._muted_count += 1
            return True
        self._refusals.append(now)
        return False

    def _warn_limited(self, text: str) -> None:
        """Warn about unknown connections, at a limited rate."""
        now = self.clock.monotonic()
        if now - self._warned_at < COMPLAINT_SECONDS:
            self._muted_count += 1
            return
        if self._muted_count:
            text += f" (and {self._muted_count} more like it before)"
        self._warned_at = now
        self._muted_count = 0
        self._record_events([LogEvent("warning", self.clock.wall(), {"text": text})])


def _find_fault(state: _PeerState, item: EnvelopeArrived) -> str:
    """Return how an envelope violates the order of its connection, or an empty string."""
    envelope = item.envelope
    hello = state.hello
    due = 0 if isinstance(envelope.body, Heartbeat) else state.received
    if envelope.sequence != due:
        return f"message {envelope.sequence} where {due} was due"
    if hello is None:
        hello = envelope.body if isinstance(envelope.body, Hello) else None
    if hello is None:
        return "the first message must be Hello"
    if item.role and item.role != hello.role:
        return f"a {item.role}'s key does not make a connection of role {hello.role}"
    if (envelope.sender, envelope.incarnation) != (hello.agent, hello.incarnation):
        return "the sender is not the one of its Hello"
    return ""
