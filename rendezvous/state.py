"""
The membership of one job, decided in one place, as a pure machine: ``step(event, now) -> actions``.

No socket, clock, thread, log or file: time arrives as an argument, everything to be done leaves as an action.

Rules of this file
1. `step` first checks the event against the present state (`legality.py`), which raises IllegalEvent with nothing
   changed; only then it acts. State changes go through `_move`, whose table is in `transitions.py`.
2. Nothing waits for ever: gathering and assigning end by ``start_timeout``, stopping and restarting by ``grace`` plus
   LATE, a silent node by ``dead``, and the end itself by FAREWELL. Running is bounded by ``time_limit`` only.
3. A repeated message changes nothing, so that an agent whose connection was cut may say everything again.
4. One verdict: once `verdict` is set it never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pdrun.rendezvous import verdict as judge
from pdrun.rendezvous import wording
from pdrun.rendezvous.events import (
    Action,
    Close,
    Disconnected,
    Done,
    Happening,
    Orphaned,
    Peer,
    Received,
    Record,
    Report,
    SchedulerConfig,
    Send,
    StopOrdered,
    Tick,
)
from pdrun.rendezvous.legality import check_message
from pdrun.rendezvous.members import Member, Phase, assignments, disagreement, missing, objection, ordered
from pdrun.rendezvous.messages import (
    PROTOCOL,
    Assign,
    Echo,
    Failure,
    Finished,
    Heartbeat,
    Hello,
    Join,
    Leave,
    Message,
    Ready,
    Refuse,
    Start,
    StatusQuery,
    StopRequest,
    StopWorkers,
    Unready,
    Verdict,
    Waiting,
    Welcome,
    WorkerExit,
)
from pdrun.rendezvous.transitions import TRANSITIONS, IllegalEvent, JobState, Trigger, after

__all__ = [
    "Action", "Close", "Disconnected", "Done", "IllegalEvent", "JobState", "Membership", "Orphaned", "Received",
    "Record", "Report", "SchedulerConfig", "Send", "StopOrdered", "TRANSITIONS", "Tick", "Trigger",
]  # fmt: skip

LATE = 5.0
"""Seconds beyond the grace in which a node must have reported the end of its workers."""
FAREWELL = 3.0
"""Seconds that agents get to hear the verdict and leave."""
SIGTERM, SIGKILL = 15, 9


@dataclass
class Ending:
    """How the workers of the present generation are being ended."""

    reason: str
    signal: int
    grace: float
    deadline: float
    code: int | None = None
    """The verdict's code, whatever the workers report (a signal, a limit, a lost node); None: the first cause's."""


@dataclass
class _Session:
    """A connection that has said Hello."""

    hello: Hello
    stops: int = 0
    """StopRequests that came over it."""


class Membership:
    """The job's state. Read its attributes freely; change them through `step` only."""

    def __init__(self, config: SchedulerConfig, scheduler: str, now: float) -> None:
        """
        Args:
            config: what to do.
            scheduler: incarnation of this scheduler, 32 hexadecimal digits.
            now: monotonic seconds.
        """
        self.config = config
        self.scheduler = scheduler
        self.job = config.job
        self.spec = config.spec
        self.command = config.command
        self.state = JobState.GATHERING
        self.generation = -1
        self.restarts = 0
        self.sessions: dict[Peer, _Session] = {}
        self.members: dict[str, Member] = {}
        """By the agent's random name; lost ones stay, so that they can be told."""
        self.failures: list[judge.Reported] = []
        self.verdict: Verdict | None = None
        self.done = False
        self.ending: Ending | None = None
        self._assigns: dict[str, Assign] = {}
        self._opened = False
        self._began = now
        self._since = now
        """When the present state was entered."""
        self._last = now
        self._waiting_at = now + config.waiting_every
        self._limit_at: float | None = None
        self._out: list[Action] = []

    @property
    def tick_every(self) -> float:
        """Seconds in which a Tick is due, at most."""
        return self.config.heartbeat / 4 if self.config.heartbeat else min(1.0, self.config.waiting_every)

    @property
    def nodes(self) -> list[Member]:
        """Those who take part now, in rank order once there is one."""
        return sorted((member for member in self.members.values() if member.here), key=lambda member: member.index)

    def step(self, event: Happening, now: float) -> list[Action]:
        """
        Take one event and return what is to be done, in order.

        Raises:
            IllegalEvent: the present state does not allow it; nothing was changed.
        """
        if isinstance(event, Received):
            session = self.sessions.get(event.peer)
            member = self.members.get(session.hello.agent) if session else None
            check_message(event.message, self.state, self.generation, session.hello if session else None, member)
        self._out = []
        self._absorb_stall(now)
        if not self._opened:
            self._opened = True
            self._record_created()
        match event:
            case Received(peer, message):
                self._received(peer, message, now)
            case Disconnected(peer):
                self._disconnected(peer, now)
            case Tick():
                self._tick(now)
            case StopOrdered(signal, by, force):
                self._stop_ordered(signal, by, force, now)
            case Orphaned(reason):
                self._orphaned(reason, now)
        self._settle(now)
        return self._out

    # Messages ---------------------------------------------------------------------------------------------------------

    def _received(self, peer: Peer, message: Message, now: float) -> None:
        if isinstance(message, Hello):
            return self._hello(peer, message, now)
        session = self.sessions[peer]
        member = self.members.get(session.hello.agent)
        if member is not None and member.peer == peer:
            self._heard(member, now)
        match message:
            case Heartbeat(number):
                self._send(peer, Echo(number))
            case StatusQuery():
                self._out.append(Report(peer))
            case StopRequest():
                self._stop_request(peer, session, message, now)
            case Leave():
                self._leave(peer, member, message, now)
            case Join():
                self._join(peer, session.hello, message, now)
            case Ready() | Unready() | WorkerExit() | Finished() if member is not None and member.here:
                if message.generation == self.generation:
                    self._progress(member, message, now)
        return None

    def _hello(self, peer: Peer, hello: Hello, now: float) -> None:
        if hello.version != PROTOCOL:
            return self._refuse(peer, hello, wording.other_protocol(hello))
        if hello.job and self.job and hello.job != self.job:
            return self._refuse(peer, hello, wording.other_job(self.config, self.job, self.command, hello))
        for other, session in list(self.sessions.items()):
            if session.hello.agent == hello.agent:
                if session.hello.incarnation >= hello.incarnation:
                    return self._refuse(peer, hello, Refuse(69, "a newer connection of the same agent is here"))
                del self.sessions[other]
                self._out.append(Close(other))
        member = self.members.get(hello.agent)
        if member is not None and (not member.here or member.hello.incarnation >= hello.incarnation):
            why = member.why_lost or "a newer connection of the same agent was here"
            return self._refuse(peer, hello, Refuse(69, f"{member.name} was given up: {why}"))
        if not self.job and hello.job and hello.role == "agent":
            self.job, self.command = hello.job, hello.command
            self._record_created()
        self.sessions[peer] = _Session(hello)
        self._welcome(peer)
        if member is not None:
            self._resume(member, peer, hello, now)
        return None

    def _welcome(self, peer: Peer) -> None:
        self._send(peer, Welcome(
            self.job, self.config.run, self.spec, self.scheduler, self.config.heartbeat, self.config.dead
        ))  # fmt: skip

    def _resume(self, member: Member, peer: Peer, hello: Hello, now: float) -> None:
        """A node is back on a new connection: tell it again all that holds now."""
        member.peer, member.hello = peer, hello
        self._heard(member, now)
        if assign := self._assigns.get(hello.agent):
            self._send(peer, assign)
            if self.state in (JobState.RUNNING, JobState.RESTARTING, JobState.STOPPING):
                self._send(peer, Start(self.generation))
        ending = self.state in (JobState.RESTARTING, JobState.STOPPING) and member.phase is not Phase.FINISHED
        if self.ending and ending:
            self._send(peer, self._stop_workers(self.ending))
        if self.verdict:
            self._send(peer, self.verdict)

    def _join(self, peer: Peer, hello: Hello, join: Join, now: float) -> None:
        if hello.agent in self.members:
            return
        taking_part = self.nodes
        if self.state is JobState.GATHERING:
            for old in taking_part:
                if old.peer is None and (old.name == join.node):
                    self._forget(old, "its agent was started again")
            taking_part = self.nodes
            refuse = objection(self.config, taking_part, hello, join)
            if refuse is None and len(taking_part) == self.config.nodes:
                refuse = wording.full(self.config, self.job)
        elif self.state is JobState.DONE:
            refuse = wording.over(self.config, self.job)
        else:
            refuse = wording.full(self.config, self.job)
        if refuse:
            self._refuse(peer, hello, refuse, node=join.node)
            return
        if taking_part:
            for key in disagreement(self.config.should_agree, taking_part[0], join):
                self._record("warning", text=wording.differs(key, taking_part[0].join, join))
        self.members[hello.agent] = Member(hello, join, peer, now, join.store)
        self.command = self.command or join.facts.get("command", "")
        if join.spec and not self.spec:
            self.spec = join.spec
            for other in self._visitors():
                self._welcome(other)
        self._record("joined", node=join.node, workers=join.workers, host=hello.host, pid=hello.pid)
        if len(self.nodes) < self.config.nodes:
            self._tell_waiting(now)

    def _progress(self, member: Member, message: Ready | Unready | WorkerExit | Finished, now: float) -> None:
        """A message of the present generation from a node that takes part."""
        match message:
            case Ready() if self.state is JobState.ASSIGNING:
                member.phase = Phase.READY
            case Unready(_, code, reason) if self.state is JobState.ASSIGNING:
                self._end(code or 70, f"{member.name} cannot start: {reason}", now)
            case WorkerExit() if message.rank not in member.exits:
                self._worker_exit(member, message, now)
            case Finished(_, store) if member.phase is Phase.RUNNING:
                member.phase = Phase.FINISHED
                member.store = store or member.store
            case _:
                pass

    def _worker_exit(self, member: Member, message: WorkerExit, now: float) -> None:
        cause = message.cause
        member.exits[message.rank] = cause.code
        self._record(
            "exited", generation=self.generation, rank=message.rank, node=member.name, code=cause.code,
            how=cause.kind, cause=cause.summary,
        )  # fmt: skip
        if not judge.failed(cause):
            return
        failure = Failure(message.rank, member.name, cause)
        self.failures.append(judge.Reported(failure, len(self.failures), now))
        if self.state is not JobState.RUNNING:
            return
        again = self.restarts < self.config.max_restarts and cause.retry
        self._stop_all(Trigger.FAILED if again else Trigger.STOP, judge.describe(failure), now)

    def _leave(self, peer: Peer, member: Member | None, message: Leave, now: float) -> None:
        self._out.append(Close(peer))
        del self.sessions[peer]
        if member is None or member.peer != peer or not member.here:
            return
        member.peer = None
        if self.state is JobState.GATHERING:
            self._forget(member, message.reason)
        elif self.state is JobState.DONE or member.phase is Phase.FINISHED:
            self._part(member, message.reason)
        else:
            member.cut_at = now
            self._lose(member, f"it left before the end{': ' + message.reason if message.reason else ''}", now)

    # Liveness ---------------------------------------------------------------------------------------------------------

    def _absorb_stall(self, now: float) -> None:
        """Move every deadline of the failure detector by the time in which this scheduler itself stood still."""
        late = now - self._last - self.tick_every
        self._last = now
        if late > 0:
            for member in self.members.values():
                member.heard += late
                if member.peer is None:
                    member.gone_at += late

    def _heard(self, member: Member, now: float) -> None:
        member.heard = now
        if member.suspect:
            member.suspect = False
            self._record("recovered", node=member.name)

    def _disconnected(self, peer: Peer, now: float) -> None:
        session = self.sessions.pop(peer, None)
        member = self.members.get(session.hello.agent) if session else None
        if member is None or member.peer != peer or not member.here:
            return
        member.peer, member.cut_at = None, now
        # An agent that talked a moment ago has ended, or is back at once. One that was silent before, as when its host
        # stands still or packets are lost, has the same time in which to be heard again as without the cut.
        talking = not self.config.heartbeat or now - member.heard < 2 * self.config.heartbeat
        member.gone_at = max(now + self.config.reconnect, 0.0 if talking else member.heard + self.config.dead)

    def _watch(self, member: Member, now: float) -> None:
        """Suspect or give up a node that is cut or silent."""
        if member.peer is None:
            if now >= member.gone_at:
                self._lose(member, "its agent ended or its connection was cut", now)
            return
        silent = now - member.heard
        if not self.config.heartbeat:
            return
        if silent > self.config.dead:
            member.cut_at = member.heard + 2 * self.config.heartbeat
            self._lose(member, f"nothing was heard of it for {silent:.1f} s", now)
        elif silent > self.config.suspect and not member.suspect:
            member.suspect = True
            self._record("suspect", node=member.name, silent=round(silent, 1))

    def _lose(self, member: Member, why: str, now: float) -> None:
        if self.state is JobState.GATHERING:
            return self._forget(member, why)
        if self.state is JobState.DONE or member.phase is Phase.FINISHED:
            return self._part(member, why)
        if member.peer is not None:
            self._send(member.peer, Refuse(69, f"{member.name} was given up: {why}"))
            self._out.append(Close(member.peer))
            self.sessions.pop(member.peer, None)
        member.peer, member.phase, member.why_lost = None, Phase.LOST, why
        self._record("lost", node=member.name, reason=why)
        reason = f"{self.config.unit} {member.place} was lost: {why}"
        if self.state is JobState.ASSIGNING:
            self._end(69, reason, now)
            return None
        earlier = any(judge.own(item.failure.cause) and item.at < member.cut_at for item in self.failures)
        if self.state in (JobState.RUNNING, JobState.RESTARTING):
            self._stop_all(Trigger.STOP, reason, now, code=None if earlier else 69)
        elif self.ending and self.ending.code is None and not earlier:
            self.ending = replace(self.ending, code=69, reason=reason)
        return None

    def _part(self, member: Member, why: str) -> None:
        """A node that has done its part goes; nothing is lost with it, but no further generation can begin."""
        if member.peer is not None:
            self._out.append(Close(member.peer))
            self.sessions.pop(member.peer, None)
        member.peer, member.phase = None, Phase.LEFT
        self._record("left", node=member.name, reason=why)

    def _forget(self, member: Member, why: str) -> None:
        """A node goes while the job is gathering: its place is free again."""
        if member.peer is not None:
            self._out.append(Close(member.peer))
            self.sessions.pop(member.peer, None)
        del self.members[member.hello.agent]
        self._record("left", node=member.name, reason=why)

    def _tick(self, now: float) -> None:
        for member in list(self.members.values()):
            if member.here and not self.done:
                self._watch(member, now)
        waited = now - self._since
        if self.state is JobState.GATHERING:
            if waited > self.config.start_timeout:
                absent = ", ".join(missing(self.config, self.nodes))
                self._end(69, f"{absent} did not come within {self.config.start_timeout:g} s", now)
            elif now >= self._waiting_at:
                self._tell_waiting(now)
        elif self.state is JobState.ASSIGNING and waited > self.config.start_timeout:
            slow = ", ".join(member.name for member in self.nodes if member.phase is not Phase.READY)
            self._end(69, f"{slow} did not become ready within {self.config.start_timeout:g} s", now)
        if self._limit_at is not None and now >= self._limit_at and self.verdict is None:
            self._limit_at = None
            self._give_up(124, f"the time limit of {self.config.time_limit:g} s has passed", SIGTERM, False, now)

    # Stopping ---------------------------------------------------------------------------------------------------------

    def _stop_request(self, peer: Peer, session: _Session, message: StopRequest, now: float) -> None:
        if session.hello.role == "view":
            self._refuse(peer, session.hello, Refuse(77, "a viewer may look at the job, not stop it"))
            return
        session.stops += 1
        self._stop_ordered(message.signal, message.by, message.force or session.stops > 1, now)

    def _stop_ordered(self, signal: int, by: str, force: bool, now: float) -> None:
        if self.verdict is None:
            self._give_up(128 + signal, f"stopped by {by}" if by else f"stopped by signal {signal}", signal, force, now)

    def _give_up(self, code: int, reason: str, signal: int, force: bool, now: float) -> None:
        """End the job for a reason that no worker's exit code changes; a repetition with ``force`` shortens the end."""
        if self.state in (JobState.GATHERING, JobState.ASSIGNING):
            self._end(code, reason, now)
        elif self.state in (JobState.RUNNING, JobState.RESTARTING):
            self._stop_all(Trigger.STOP, reason, now, code=code, signal=signal, grace=0.0 if force else None)
        elif force and self.ending and self.ending.grace > 0:
            self.ending = replace(self.ending, signal=SIGKILL, grace=0.0, deadline=now + LATE)
            self._tell_stop(self.ending)

    def _stop_all(
        self, trigger: Trigger, reason: str, now: float, *, code: int | None = None, signal: int = SIGTERM,
        grace: float | None = None,
    ) -> None:  # fmt: skip
        grace = self.config.grace if grace is None else grace
        self._move(trigger, now)
        self.ending = Ending(reason, signal, grace, now + grace + LATE, code)
        kind = "restarting" if trigger is Trigger.FAILED else "stopping"
        self._record(kind, reason=reason, generation=self.generation)
        self._tell_stop(self.ending)

    def _stop_workers(self, stop: Ending) -> StopWorkers:
        return StopWorkers(self.generation, stop.signal, stop.grace, stop.reason)

    def _tell_stop(self, stop: Ending) -> None:
        for member in self.nodes:
            if member.phase is not Phase.FINISHED:
                self._tell(member, self._stop_workers(stop))

    def _orphaned(self, reason: str, now: float) -> None:
        if self.verdict is not None:
            return
        if self.state in (JobState.RUNNING, JobState.RESTARTING):
            self._tell_stop(Ending(reason, SIGTERM, self.config.grace, now))
        self._conclude(Trigger.ORPHANED, Verdict(69, reason), now)

    # From generation to generation ------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Do what follows from the phases of all nodes together."""
        nodes = self.nodes
        finished = all(member.phase is Phase.FINISHED for member in nodes)
        if self.state is JobState.GATHERING:
            if len(nodes) == self.config.nodes and all(member.peer for member in nodes):
                self._move(Trigger.FULL, now)
                self._assign(ordered(self.config, nodes))
        elif self.state is JobState.ASSIGNING and all(member.phase is Phase.READY for member in nodes):
            self._start(nodes, now)
        elif self.state is JobState.RUNNING and finished:
            world = next(iter(self._assigns.values())).world_size
            every = f"all {world} workers" if world > 1 else "the worker"
            self._conclude(Trigger.FINISHED, Verdict(0, f"{every} succeeded"), now)
        elif self.state in (JobState.RESTARTING, JobState.STOPPING) and self.ending:
            if finished or now >= self.ending.deadline:
                self._stopped(nodes, self.ending, now)
        elif self.verdict and not self.done and (not nodes or now - self._since > FAREWELL):
            self.done = True
            self._out.append(Done(self.verdict.code))

    def _stopped(self, nodes: list[Member], stop: Ending, now: float) -> None:
        """Every worker has ended, or had its time."""
        late = [member.name for member in nodes if member.phase is not Phase.FINISHED]
        for name in late:
            self._record("warning", text=f"{name} did not report the end of its workers in time")
        first = judge.first_cause(self.failures)
        whole = not late and len(nodes) == self.config.nodes
        if self.state is JobState.RESTARTING and whole and not (first and not first.failure.cause.retry):
            self.restarts += 1
            self._move(Trigger.AGAIN, now)
            self._assign(nodes)
            return
        verdict = judge.worded(self.failures, restarts=self.restarts, code=stop.code, reason=stop.reason)
        self._conclude(Trigger.FINISHED, verdict, now)

    def _assign(self, nodes: list[Member]) -> None:
        """Number the nodes, which stand in rank order, and open the next generation."""
        self.generation += 1
        self.failures, self.ending = [], None
        assigns = assignments(nodes, self.generation, self.restarts)
        self._assigns = {member.hello.agent: assign for member, assign in zip(nodes, assigns, strict=True)}
        self._record(
            "assigned", generation=self.generation, restarts=self.restarts, master=nodes[0].store,
            nodes=[[member.name, member.first_rank, member.join.workers] for member in nodes],
        )  # fmt: skip
        for member, assign in zip(nodes, assigns, strict=True):
            member.phase = Phase.JOINED
            member.exits = {}
            self._tell(member, assign)

    def _start(self, nodes: list[Member], now: float) -> None:
        self._move(Trigger.READY, now)
        self._record("started", generation=self.generation)
        if self._limit_at is None and self.config.time_limit is not None:
            self._limit_at = now + self.config.time_limit
        for member in nodes:
            member.phase = Phase.RUNNING
            self._tell(member, Start(self.generation))

    # The end ----------------------------------------------------------------------------------------------------------

    def _end(self, code: int, reason: str, now: float) -> None:
        """End a job none of whose workers runs."""
        self._conclude(Trigger.END, Verdict(code, wording.after_restarts(reason, self.restarts)), now)

    def _conclude(self, trigger: Trigger, verdict: Verdict, now: float) -> None:
        self._move(trigger, now)
        self.verdict = verdict
        self._record("verdict", **wording.verdict_data(verdict))
        for member in self.members.values():
            if member.here:
                self._tell(member, verdict)
        if not self.spec:  # who waits to be told what the job runs waits in vain
            for peer in self._visitors():
                self._refuse(peer, self.sessions[peer].hello, wording.over(self.config, self.job))

    # Small words ------------------------------------------------------------------------------------------------------

    def _move(self, trigger: Trigger, now: float) -> None:
        self.state = after(self.state, trigger)
        self._since = now

    def _visitors(self) -> list[Peer]:
        """Connections of agents that have said nothing yet but Hello."""
        return [
            peer for peer, session in self.sessions.items()
            if session.hello.role == "agent" and session.hello.agent not in self.members and not session.stops
        ]  # fmt: skip

    def _send(self, peer: Peer, message: Message) -> None:
        self._out.append(Send(peer, message))

    def _tell(self, member: Member, message: Message) -> None:
        if member.peer is not None:
            self._send(member.peer, message)

    def _tell_waiting(self, now: float) -> None:
        nodes = self.nodes
        self._waiting_at = now + self.config.waiting_every
        waiting = Waiting(
            tuple(member.name for member in nodes), missing(self.config, nodes), self.config.nodes,
            round(now - self._began, 3), self.config.start_timeout,
        )  # fmt: skip
        for member in nodes:
            self._tell(member, waiting)

    def _refuse(self, peer: Peer, hello: Hello, refuse: Refuse, node: str = "") -> None:
        self._send(peer, refuse)
        self._out.append(Close(peer))
        self.sessions.pop(peer, None)
        self._record("refused", node=node, host=hello.host, job=hello.job, code=refuse.code, reason=refuse.reason)

    def _record_created(self) -> None:
        self._record("created", job=self.job, run=self.config.run, nodes=self.config.nodes, host=self.config.host)

    def _record(self, kind: str, **data: Any) -> None:
        self._out.append(Record(kind, data))
