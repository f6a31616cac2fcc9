"""
The membership of one job, decided in one place, as a pure machine: ``step(event, now) -> actions``.

No socket, clock, thread, log or file: time arrives as an argument, everything to be done leaves as
an action.

Rules of the machine, whose rooms `job.py` lists
1. `step` first checks the event against the present state (`legality.py`), which raises IllegalEvent with nothing
   changed; only then it acts. State changes go through `Job.move`, whose table is in `transitions.py`.
2. Nothing waits for ever: gathering and assigning end by ``start_timeout``, stopping and restarting by ``grace`` plus
   LATE and the longest back-off, a silent node by ``dead``, a hang by `hangs.WITHIN`, and the end itself by
   `events.FAREWELL`. Running is bounded by ``time_limit`` only.
3. A repeated message changes nothing, so that an agent whose connection was cut may say everything again.
4. One verdict: once `verdict` is set it never changes.
5. The same events at the same times lead to the same state: nothing depends on chance, or on the order of a set. Only
   the failure detector depends on more, the heartbeats; what it decides becomes an event of its own (`GivenUp`).
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
    """The machine: a job, and the one way to change it."""

    def __init__(self, config: SchedulerConfig, scheduler: str, now: float) -> None:
        """See `Job`."""
        super().__init__(config, scheduler, now)
        self.journal_events: list[MembershipEvent] = []
        """
        What a journal must keep of the last step, in order, so that `replay` leads to the same
        state: not heartbeats and ticks at which nothing was done.
        """
        self._has_recorded_creation = False
        self._is_replaying = False

    @property
    def tick_every(self) -> float:
        """Seconds in which a Tick is due, at most."""
        return self.detector.times.tick

    def step(self, event: MembershipEvent, now: float) -> list[Action]:
        """
        Take one event and return what is to be done, in order.

        Raises:
            IllegalEvent: the present state does not allow it; nothing was changed.
        """
        if isinstance(event, MessageReceived):
            session = self.roster.sessions.get(event.peer)
            member = self.roster.members.get(session.hello.agent) if session else None
            check_message(
                event.message,
                self.state,
                self.generation.number,
                session.hello if session else None,
                member,
            )
        self.outbox.actions = []
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
        for peer, told, code in self.outbox.fenced:
            self.outbox.send(peer, Refuse(code or 69, told, rejoin=not code and is_open(self)))
            self.outbox.close_peer(peer)
        self.outbox.fenced = []
        if isinstance(event, Tick) and self.outbox.actions:
            self.journal_events.append(event)
        return self.outbox.actions

    def replay(
        self, past: Iterable[tuple[float, MembershipEvent]]
    ) -> list[tuple[float, RecordEvent]]:
        """
        Take the events of a journal, each with its time, as `lasting` named them, and return what
        was recorded then. Nothing is to be done for them again. Afterwards `step` takes Resumed,
        and the machine goes on from there.

        Raises:
            IllegalEvent: the events do not follow from each other.
        """
        self._is_replaying = True
        said: list[tuple[float, RecordEvent]] = []
        try:
            for now, event in past:
                said += [
                    (now, action)
                    for action in self.step(event, now)
                    if isinstance(action, RecordEvent)
                ]
                self.detector.set_last_event(now)
        finally:
            self._is_replaying = False
        return said

    def _apply_event(self, event: MembershipEvent, now: float) -> bool:
        """
        Act; return whether a journal must keep the event even where it led to nothing that can be
        seen.
        """
        match event:
            case MessageReceived(peer, message):
                return self._on_message(peer, message, now)
            case AgentsAlive(peers):
                self._on_agents_alive(peers, now)
                return False
            case PeerDisconnected(peer, between):
                self._on_disconnect(peer, between, now)
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
    # ---------------------------------------------------------------------------------------------------------

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
            case Join():
                admission.handle_join(self, peer, session.hello, message, now)
            case _ if isinstance(message, GenerationMessage) and member is not None:
                if (
                    message.generation == self.generation.number
                    and self.state is not JobState.GATHERING
                ):
                    return self._on_generation_message(member, message, now)
                if isinstance(message, Finished):
                    handle_old_finished(self, member, message)
        return True

    def _on_agents_alive(self, peers: Iterable[Peer], now: float) -> None:
        """A relay tells who beats."""
        for peer in peers:
            session = self.roster.sessions.get(peer)
            member = self.roster.members.get(session.hello.agent) if session else None
            if member is not None:
                admission.mark_alive(self, member, now)
                self.detector.mark_reachable(member, now)

    def _on_generation_message(
        self, member: Member, message: GenerationMessage, now: float
    ) -> bool:
        """A message of the present generation from a node that is here."""
        match message:
            case Ready() | Unready():
                handle_ready(self, member, message, now)
            case WorkerExit():
                handle_worker_exit(self, member, message, now)
            case Finished():
                handle_finished(self, member, message)
            case Progress():
                return handle_progress(self, member, message)
            case Hung():
                handle_hung(self, member, message, now)
            case Stacks():
                handle_stacks(self, member, message, now)
        return True

    def _on_stop_request(
        self, peer: Peer, session: Session, message: StopRequest, now: float
    ) -> None:
        if session.hello.role == "view":
            self.refuse_peer(
                peer, session.hello, Refuse(77, "a viewer may look at the job, not stop it")
            )
            return
        session.stop_requests += 1
        generations.stop_job(
            self, message.signal, message.by, message.force or session.stop_requests > 1, now
        )

    def _on_disconnect(self, peer: Peer, between: bool, now: float) -> None:
        session = self.roster.forget_session(peer)
        member = self.roster.members.get(session.hello.agent) if session else None
        if member is None or member.peer != peer:
            return
        member.peer = None
        self.roster.cut[member.hello.agent] = member
        self.detector.on_disconnect(member, between, now)

    # Time
    # -------------------------------------------------------------------------------------------------------------

    def _detect_failures(self, now: float) -> None:
        """Ask the failure detector; what it has decided is an event."""
        if self.shutdown.is_done:
            return
        given_up, suspects = self.detector.find_overdue(self.roster.members.values(), now)
        for member, silent in suspects:
            self.outbox.record_event("suspect", node=member.name, silent=round(silent, 1))
        if given_up is not None:
            self._on_nodes_lost(given_up, now)
            generations.advance_job(self, now)
            self.journal_events.append(given_up)

    def _on_nodes_lost(self, event: NodesLost, now: float) -> None:
        for lost in event.nodes:
            if (member := self.roster.members.get(lost.agent)) is not None:
                member.cut_at = lost.cut_at
                mark_lost(self, member, lost.why, now)
