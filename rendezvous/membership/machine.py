"""
The membership of one job as a pure state machine: ``step(event, now) -> actions``.

It has no socket, clock, thread, log or file. Time is an argument; everything to be done is returned
as an action. `job.py` lists the modules of this room. The rules:

1. `Membership.step` first checks the event against the present state (`transitions.check_message`).
   IllegalEvent means that nothing was changed. The state changes only in `Job.change_state`, by the
   table in `transitions.py`.
2. Every wait is bounded. Gathering and assigning end by ``start_timeout``, stopping and restarting
   by ``grace`` plus `STOP_REPORT_SECONDS` and the longest back-off, a silent node by ``dead``, a
   hang by `STACK_SECONDS`, and the end itself by `FAREWELL_SECONDS`. Running is bounded by
   ``time_limit`` only.
3. A repeated message changes nothing, so an agent can repeat everything after a reconnection.
4. One verdict: once set, it never changes.
5. The same events at the same times lead to the same state: nothing depends on chance or on the
   order of a set. Only the failure detector depends on more, the heartbeats. Its decisions become
   events (`NodesLost`).
"""

from __future__ import annotations

from collections.abc import Iterable

from pdrun.rendezvous.membership import admission, generations
from pdrun.rendezvous.membership.departures import handle_depart, handle_leave, mark_lost
from pdrun.rendezvous.membership.job import Job
from pdrun.rendezvous.membership.nodes import Member
from pdrun.rendezvous.membership.roster import Session
from pdrun.rendezvous.membership.sizing import is_open
from pdrun.rendezvous.membership.timers import resume_job, run_timers
from pdrun.rendezvous.membership.transitions import (
    TRANSITIONS,
    GenerationMessage,
    IllegalEvent,
    JobState,
    Trigger,
    check_message,
    is_late,
)
from pdrun.rendezvous.membership.worker_reports import (
    handle_finished,
    handle_hung,
    handle_old_finished,
    handle_progress,
    handle_ready,
    handle_stacks,
    handle_worker_exit,
)
from pdrun.rendezvous.protocol.events import (
    Action,
    AgentLost,
    AgentsAlive,
    ClosePeer,
    JobDone,
    JoinDeferred,
    LocalStop,
    MembershipEvent,
    MessageReceived,
    NodesLost,
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
    Depart,
    Echo,
    Finished,
    Heartbeat,
    Hello,
    Hung,
    Join,
    Leave,
    Message,
    Progress,
    Ready,
    Refuse,
    Stacks,
    StatusQuery,
    StopRequest,
    Unready,
    WorkerExit,
)

__all__ = [
    "Action",
    "ClosePeer",
    "PeerDisconnected",
    "JobDone",
    "IllegalEvent",
    "JobState",
    "Membership",
    "AgentLost",
    "MessageReceived",
    "RecordEvent",
    "SendStatus",
    "SchedulerConfig",
    "SendMessage",
    "LocalStop",
    "TRANSITIONS",
    "Tick",
    "Trigger",
]


class Membership(Job):
    """The machine: a job, and the only way to change it (`step`)."""

    def __init__(self, config: SchedulerConfig, scheduler: str, now: float) -> None:
        """See `Job`."""
        super().__init__(config, scheduler, now)
        self.journal_events: list[MembershipEvent] = []
        """
        Events of the last step that a journal must keep, in order, so that `replay` leads to the
        same state. Heartbeats, and ticks without an action, are not kept.
        """
        self._has_recorded_creation = False
        self._is_replaying = False

    @property
    def tick_every(self) -> float:
        """Longest time between two Ticks, in seconds."""
        return self.detector.times.tick

    def step(self, event: MembershipEvent, now: float) -> list[Action]:
        """
        Take one event and return the actions, in order.

        Raises:
            IllegalEvent: the present state does not allow the event. Nothing was changed.
        """
        if isinstance(event, MessageReceived):
            session = self.roster.sessions.get(event.peer)
            check_message(
                event.message,
                self.state,
                self.generation.number,
                session.hello if session else None,
                self.roster.find_member(event.peer),
            )
        self.outbox.actions = []
        self.outbox.has_changed_state = False
        self.journal_events = []
        if isinstance(event, SchedulerResumed):
            resume_job(self, event.scheduler, now)
        elif not self._is_replaying:
            self.detector.advance_clock(now)
        if not self._has_recorded_creation:
            self._has_recorded_creation = True
            self.record_created()
        if isinstance(event, Tick) and not self._is_replaying:
            self._detect_failures(now)
        if self._apply_event(event, now):
            self.journal_events.append(event)
        generations.advance_job(self, now)
        self._refuse_fenced()
        if isinstance(event, Tick) and (self.outbox.actions or self.outbox.has_changed_state):
            self.journal_events.append(event)
        return self.outbox.actions

    def _refuse_fenced(self) -> None:
        """Refuse the nodes that this step has marked lost."""
        for peer, reason, code in self.outbox.fenced:
            rejoin = not code and is_open(self.config, self.state)
            self.outbox.send(peer, Refuse(code or 69, reason, rejoin=rejoin))
            self.outbox.close_peer(peer)
        self.outbox.fenced = []

    def replay(
        self, past: Iterable[tuple[float, MembershipEvent]]
    ) -> list[tuple[float, RecordEvent]]:
        """
        Take the events of a journal (`journal_events` of each step, with its time).

        Return what was recorded at each of them. No action is carried out again. Afterwards `step`
        takes SchedulerResumed, and the machine continues from there.

        Raises:
            IllegalEvent: an event does not follow from the events before it.
        """
        self._is_replaying = True
        records: list[tuple[float, RecordEvent]] = []
        try:
            for now, event in past:
                for action in self.step(event, now):
                    if isinstance(action, RecordEvent):
                        records.append((now, action))
                self.detector.set_last_event(now)
        finally:
            self._is_replaying = False
        return records

    def _apply_event(self, event: MembershipEvent, now: float) -> bool:
        """Act; return whether a journal must keep the event even if it led to no action."""
        match event:
            case MessageReceived(peer, message):
                return self._on_message(peer, message, now)
            case AgentsAlive(peers):
                self._on_agents_alive(peers, now)
                return False
            case PeerDisconnected(peer, between):
                self._on_disconnect(peer, between, now)
            case JoinDeferred(peer, node):
                admission.note_deferred(self.roster, peer, node, now)
            case Tick():
                run_timers(self, now)
                return False
            case LocalStop(signal, by, force):
                generations.stop_job(self, signal, by, force, now)
            case AgentLost(reason):
                generations.on_agent_lost(self, reason, now)
            case NodesLost():
                self._on_nodes_lost(event, now)
            case SchedulerResumed():
                pass
        return True

    # Messages
    # --------

    def _on_message(self, peer: Peer, message: Message, now: float) -> bool:
        if isinstance(message, Hello):
            admission.handle_hello(self, peer, message, now)
            return True
        session = self.roster.sessions[peer]
        member = self.roster.members.get(session.hello.agent)
        if member is not None:
            admission.mark_alive(self, member, now)
        match message:
            case Heartbeat(number):
                if member is not None:
                    self.detector.on_heartbeat(member, message, now)
                self.outbox.send(peer, Echo(number))
                return False
            case StatusQuery():
                self.outbox.actions.append(SendStatus(peer))
                return False
            case StopRequest():
                self._on_stop_request(peer, session, message, now)
            case Leave():
                handle_leave(self, peer, member, message, now)
            case Depart(reason) if member is not None:
                handle_depart(self, member, reason, now)
            case Join() if not self._is_replaying and member is None:
                deferred = admission.defer_join(self, peer, session.hello, message, now)
                if deferred is not None:
                    self.journal_events.append(deferred)
                    return False
                admission.handle_join(self, peer, session.hello, message, now)
            case Join():
                admission.handle_join(self, peer, session.hello, message, now)
            case _ if isinstance(message, GenerationMessage) and member is not None:
                if not is_late(message, self.state, self.generation.number, member):
                    return self._on_generation_message(member, message, now)
                is_old = message.generation < self.generation.number
                if isinstance(message, Finished) and (is_old or self.state is JobState.GATHERING):
                    handle_old_finished(self, member, message)
        return True

    def _on_agents_alive(self, peers: Iterable[Peer], now: float) -> None:
        """A relay reports agents that send heartbeats."""
        for peer in peers:
            member = self.roster.find_member(peer)
            if member is not None:
                admission.mark_alive(self, member, now)
                self.detector.mark_reachable(member, now)

    def _on_generation_message(
        self, member: Member, message: GenerationMessage, now: float
    ) -> bool:
        """Handle a message of the present generation from a node of the job."""
        match message:
            case Ready() | Unready():
                handle_ready(self, member, message, now)
            case WorkerExit():
                handle_worker_exit(self, member, message, now)
            case Finished():
                handle_finished(self.roster, member, message)
            case Progress():
                return handle_progress(self.generation, member, message)
            case Hung():
                handle_hung(self, member, message, now)
            case Stacks():
                handle_stacks(self, member, message, now)
        return True

    def _on_stop_request(
        self, peer: Peer, session: Session, message: StopRequest, now: float
    ) -> None:
        if session.hello.role == "view":
            refuse = Refuse(77, "a viewer may look at the job, not stop it")
            self.refuse_peer(peer, session.hello, refuse)
            return
        session.stop_requests += 1
        force = message.force or session.stop_requests > 1
        generations.stop_job(self, message.signal, message.by, force, now)

    def _on_disconnect(self, peer: Peer, between: bool, now: float) -> None:
        session = self.roster.forget_session(peer)
        member = self.roster.members.get(session.hello.agent) if session else None
        if member is None or member.peer != peer:
            return
        member.peer = None
        self.roster.cut[member.hello.agent] = member
        self.detector.on_disconnect(member, between, now)

    # Time
    # ----

    def _detect_failures(self, now: float) -> None:
        """Ask the failure detector, and take its decision as an event."""
        if self.shutdown.is_done:
            return
        lost_nodes, suspects = self.detector.find_overdue(self.roster.members.values(), now)
        for member, silent in suspects:
            self.outbox.record_event("suspect", node=member.name, silent=round(silent, 1))
        if lost_nodes is not None:
            self._on_nodes_lost(lost_nodes, now)
            generations.advance_job(self, now)
            self.journal_events.append(lost_nodes)

    def _on_nodes_lost(self, event: NodesLost, now: float) -> None:
        for lost in event.nodes:
            if (member := self.roster.members.get(lost.agent)) is not None:
                member.cut_at = lost.cut_at
                mark_lost(self, member, lost.why, now)
