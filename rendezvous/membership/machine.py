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
from pdrun.rendezvous.membership import departures as loss
from pdrun.rendezvous.membership import sizing as elastic
from pdrun.rendezvous.membership import timers as due
from pdrun.rendezvous.membership import worker_reports as reports
from pdrun.rendezvous.membership.job import Job, Session
from pdrun.rendezvous.membership.legality import OfGeneration, check_message
from pdrun.rendezvous.membership.nodes import Member
from pdrun.rendezvous.membership.transitions import TRANSITIONS, IllegalEvent, JobState, Trigger
from pdrun.rendezvous.protocol.events import (
    Action,
    Close,
    Disconnected,
    Done,
    GivenUp,
    Happening,
    Heard,
    Orphaned,
    Peer,
    Received,
    Record,
    Report,
    Resumed,
    SchedulerConfig,
    Send,
    StopOrdered,
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
    "Close",
    "Disconnected",
    "Done",
    "IllegalEvent",
    "JobState",
    "Membership",
    "Orphaned",
    "Received",
    "Record",
    "Report",
    "SchedulerConfig",
    "Send",
    "StopOrdered",
    "TRANSITIONS",
    "Tick",
    "Trigger",
]


class Membership(Job):
    """The machine: a job, and the one way to change it."""

    def __init__(self, config: SchedulerConfig, scheduler: str, now: float) -> None:
        """See `Job`."""
        super().__init__(config, scheduler, now)
        self.lasting: list[Happening] = []
        """
        What a journal must keep of the last step, in order, so that `replay` leads to the same
        state: not heartbeats and ticks at which nothing was done.
        """
        self._opened = False
        self._replaying = False

    @property
    def tick_every(self) -> float:
        """Seconds in which a Tick is due, at most."""
        return self.watch.times.tick

    def step(self, event: Happening, now: float) -> list[Action]:
        """
        Take one event and return what is to be done, in order.

        Raises:
            IllegalEvent: the present state does not allow it; nothing was changed.
        """
        if isinstance(event, Received):
            session = self.sessions.get(event.peer)
            member = self.members.get(session.hello.agent) if session else None
            check_message(
                event.message,
                self.state,
                self.generation,
                session.hello if session else None,
                member,
            )
        self.out = []
        self.lasting = []
        if isinstance(event, Resumed):
            due.resumed(self, event.scheduler, now)
        elif not self._replaying:
            self.watch.passed(now)
        if not self._opened:
            self._opened = True
            self.record_created()
        if isinstance(event, Tick) and not self._replaying:
            self._detect(now)
        if self._take(event, now):
            self.lasting.append(event)
        generations.settle(self, now)
        for peer, told, code in self.fenced:
            self.send(peer, Refuse(code or 69, told, rejoin=not code and elastic.is_open(self)))
            self.close(peer)
        self.fenced = []
        if isinstance(event, Tick) and self.out:
            self.lasting.append(event)
        return self.out

    def replay(self, past: Iterable[tuple[float, Happening]]) -> list[tuple[float, Record]]:
        """
        Take the events of a journal, each with its time, as `lasting` named them, and return what
        was recorded then. Nothing is to be done for them again. Afterwards `step` takes Resumed,
        and the machine goes on from there.

        Raises:
            IllegalEvent: the events do not follow from each other.
        """
        self._replaying = True
        said: list[tuple[float, Record]] = []
        try:
            for now, event in past:
                said += [
                    (now, action) for action in self.step(event, now) if isinstance(action, Record)
                ]
                self.watch.seen(now)
        finally:
            self._replaying = False
        return said

    def _take(self, event: Happening, now: float) -> bool:
        """
        Act; return whether a journal must keep the event even where it led to nothing that can be
        seen.
        """
        match event:
            case Received(peer, message):
                return self._received(peer, message, now)
            case Heard(peers):
                self._heard(peers, now)
                return False
            case Disconnected(peer, between):
                self._disconnected(peer, between, now)
            case Tick():
                due.tick(self, now)
                return False
            case StopOrdered(signal, by, force):
                generations.stop_ordered(self, signal, by, force, now)
            case Orphaned(reason):
                generations.orphaned(self, reason, now)
            case GivenUp():
                self._given_up(event, now)
            case Resumed():
                pass
        return True

    # Messages
    # ---------------------------------------------------------------------------------------------------------

    def _received(self, peer: Peer, message: Message, now: float) -> bool:
        if isinstance(message, Hello):
            admission.hello(self, peer, message, now)
            return True
        session = self.sessions[peer]
        member = self.members.get(session.hello.agent)
        if member is not None:
            admission.heard(self, member, now)
        match message:
            case Heartbeat(number):
                if member is not None:
                    self.watch.beaten(member, message, now)
                self.send(peer, Echo(number))
                return False
            case StatusQuery():
                self.out.append(Report(peer))
                return False
            case StopRequest():
                self._stop_request(peer, session, message, now)
            case Leave():
                loss.leave(self, peer, member, message, now)
            case Depart(reason) if member is not None:
                loss.depart(self, member, reason, now)
            case Join():
                admission.join(self, peer, session.hello, message, now)
            case _ if isinstance(message, OfGeneration) and member is not None:
                if message.generation == self.generation and self.state is not JobState.GATHERING:
                    return self._of_generation(member, message, now)
                if isinstance(message, Finished):
                    reports.finished_before(self, member, message)
        return True

    def _heard(self, peers: Iterable[Peer], now: float) -> None:
        """A relay tells who beats."""
        for peer in peers:
            session = self.sessions.get(peer)
            member = self.members.get(session.hello.agent) if session else None
            if member is not None:
                admission.heard(self, member, now)
                self.watch.met(member, now)

    def _of_generation(self, member: Member, message: OfGeneration, now: float) -> bool:
        """A message of the present generation from a node that is here."""
        match message:
            case Ready() | Unready():
                reports.ready(self, member, message, now)
            case WorkerExit():
                reports.worker_exit(self, member, message, now)
            case Finished():
                reports.finished(self, member, message)
            case Progress():
                return reports.progress(self, member, message)
            case Hung():
                reports.hung(self, member, message, now)
            case Stacks():
                reports.stacks(self, member, message, now)
        return True

    def _stop_request(self, peer: Peer, session: Session, message: StopRequest, now: float) -> None:
        if session.hello.role == "view":
            self.refuse(
                peer, session.hello, Refuse(77, "a viewer may look at the job, not stop it")
            )
            return
        session.stops += 1
        generations.stop_ordered(
            self, message.signal, message.by, message.force or session.stops > 1, now
        )

    def _disconnected(self, peer: Peer, between: bool, now: float) -> None:
        session = self.forget_session(peer)
        member = self.members.get(session.hello.agent) if session else None
        if member is None or member.peer != peer:
            return
        member.peer = None
        self.cut[member.hello.agent] = member
        self.watch.cut(member, between, now)

    # Time
    # -------------------------------------------------------------------------------------------------------------

    def _detect(self, now: float) -> None:
        """Ask the failure detector; what it has decided is an event."""
        if self.done:
            return
        given_up, suspects = self.watch.overdue(self.members.values(), now)
        for member, silent in suspects:
            self.record("suspect", node=member.name, silent=round(silent, 1))
        if given_up is not None:
            self._given_up(given_up, now)
            generations.settle(self, now)
            self.lasting.append(given_up)

    def _given_up(self, event: GivenUp, now: float) -> None:
        for lost in event.nodes:
            if (member := self.members.get(lost.agent)) is not None:
                member.cut_at = lost.cut_at
                loss.give_up(self, member, lost.why, now)
