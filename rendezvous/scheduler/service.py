"""
The scheduler at work: envelopes in, the membership machine, actions out.

`Service` ties the pure machine to a transport, a clock, the event log and the journal. It runs
inside the agent (one node), as the agent's child (`pdrun.rendezvous.scheduler.child_main`) or alone
(`pdrun.rendezvous.scheduler.standalone`).

What came in together is taken together: the machine is stepped for each event, what a successor
would need is written into the journal and synced once, and only then are the actions carried out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdrun.clock import Clock, SystemClock
from pdrun.eventlog import Event
from pdrun.rendezvous.journal.recovery import Recovery, begin
from pdrun.rendezvous.membership.machine import IllegalEvent
from pdrun.rendezvous.protocol.codec import CodecError
from pdrun.rendezvous.protocol.events import (
    Action,
    Close,
    Disconnected,
    Done,
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
    BESIDE,
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
from pdrun.rendezvous.transport.base import Alive, Arrived, Complaint, Gone, ServerTransport, Woken

MOST_LINES = 400_000
"""Characters of event lines that a StatusReply holds: the newest."""
MOST_REFUSALS = 20
REFUSALS_IN = 10.0
"""
Refusals that are recorded one by one in so many seconds; beyond that they are counted with the
complaints.
"""
TICK = 0.02
TICK_NODE = 20e-6
"""Seconds between two ticks at least, and so many more for each node."""
COMPLAIN_EVERY = 5.0
"""Seconds between two warnings about what strangers do at the port."""


@dataclass(slots=True)
class _Conversation:
    """What one connection may say next, and what it is told next."""

    hello: Hello | None = None
    heard: int = 0
    said: int = 0
    asked: bool = False
    """It has asked for the job's status, or for its end, and is told the last status, too."""


class Service:
    """The scheduler of one job. Call `poll_once` in a loop, or with timeout 0 from another loop."""

    def __init__(
        self,
        config: SchedulerConfig,
        transport: ServerTransport,
        *,
        clock: Clock | None = None,
        record: Callable[[Sequence[Event]], None] | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        """
        Args:
            record: is given what goes into the event log; what happened together in one call.
            recovery: how the job was begun or resumed; None: begun here, without a journal.
        """
        self.clock = clock or SystemClock()
        self.transport = transport
        self._recovery = recovery or begin(config, self.clock)
        self.scheduler = self._recovery.scheduler
        self.machine = self._recovery.machine
        self.done: int | None = None
        """The job's code, once everybody knows the verdict (or had time to)."""
        self.woken: list[int] = []
        """Watched descriptors that were readable at the last poll."""
        self._record_events = record
        self._due: list[Action] = []
        """What the machine has asked for and waits for the journal."""
        self._deaf: set[Peer] = set()
        """
        Connections that are to be closed: what else came from them together with the reason is not
        heard.
        """
        self._conversations: dict[Peer, _Conversation] = {}
        self._lines: deque[str] = deque()
        self._size = 0
        self._complained = float("-inf")
        self._muted = 0
        self._refusals: deque[float] = deque()
        # A tick looks at every node: not at each message of a job of thousands.
        self._tick_every = min(
            self.machine.tick_every, TICK + (config.nodes + config.spares) * TICK_NODE
        )
        self._tick_at = 0.0
        self._enter()

    def _enter(self) -> None:
        """Where a predecessor died: take up what it had said and done, and tell the machine."""
        found = self._recovery
        for event in found.said:
            self._note_line(event)
        if self._record_events and found.unwritten:
            self._record_events(found.unwritten)
        if found.warning:
            self.warn(found.warning)
        if self.machine.done and self.machine.verdict is not None:
            self.done = self.machine.verdict.code
        elif found.resumed:
            self._step(Resumed(self.scheduler))
            self._carry_out()

    def poll_once(self, timeout: float) -> None:
        """
        Wait for at most ``timeout`` seconds (never beyond the machine's next tick) and do all that
        is due.
        """
        self.woken = []
        for item in self.transport.poll(min(timeout, self.machine.tick_every)):
            if isinstance(item, Arrived):
                self._arrived(item)
            elif isinstance(item, Gone):
                self._conversations.pop(item.peer, None)
                self._step(Disconnected(item.peer, item.between))
            elif isinstance(item, Complaint):
                self._complain(item.text)
            elif isinstance(item, Alive):
                self._step(Heard(item.peers))
            elif isinstance(item, Woken):
                self.woken.append(item.fd)
        if (now := self.clock.monotonic()) >= self._tick_at:
            self._tick_at = now + self._tick_every
            self._step(Tick())
        self._carry_out()

    @property
    def talks(self) -> bool:
        """Whether anybody is connected."""
        return bool(self._conversations)

    def stop(self, number: int, by: str, *, force: bool = False) -> None:
        """Stop the job from the scheduler's own side."""
        self._step(StopOrdered(number, by, force))
        self._carry_out()

    def orphaned(self, reason: str) -> None:
        """The agent that runs this scheduler is gone: end the job with the verdict that says so."""
        self._step(Orphaned(reason))
        self._carry_out()

    def finish(self) -> None:
        """The job is over: nobody is to go on from its journal."""
        self._recovery.forget()

    def close(self) -> None:
        """Let the journal go; unless `finish` came before, a successor may go on from it."""
        self._recovery.close()

    def _arrived(self, item: Arrived) -> None:
        if item.peer in self._deaf:
            return None
        talk = self._conversations.get(item.peer)
        if talk is None:
            talk = self._conversations[item.peer] = _Conversation()
        envelope = item.envelope
        body = item.envelope.body
        if fault := _fault(talk, item):
            return self._refuse(item.peer, fault)
        talk.heard += not isinstance(body, Heartbeat)
        talk.asked = talk.asked or isinstance(body, StatusQuery | StopRequest)
        if isinstance(body, Hello) and talk.hello is None:
            talk.hello = body
        try:
            self._step(Received(item.peer, envelope.body))
        except IllegalEvent as error:
            self._refuse(item.peer, str(error))
        return None

    def _refuse(self, peer: Peer, why: str) -> None:
        """A connection broke the protocol: tell it, end it, and let the machine treat it as cut."""
        self._complain(f"a connection was refused: {why}")
        self._due += [Send(peer, Refuse(70, why)), Close(peer)]
        self._deaf.add(peer)
        self._step(Disconnected(peer))

    def _step(self, event: Happening) -> None:
        """Let the machine take an event; what it asks for is due once it is in the journal."""
        now = self.clock.monotonic() + self._recovery.shift
        self._recovery.before(event)
        actions = self.machine.step(event, now)
        self._recovery.after(now)
        self._due += actions
        for action in actions:
            if isinstance(action, Close):
                self._deaf.add(action.peer)

    def _carry_out(self) -> None:
        """Do what is due, after the journal is safe."""
        if lost := self._recovery.commit():
            self.warn(lost, aloud=True)  # the event log is likely to lie on the same disk
        due = self._due
        self._due = []
        self._deaf.clear()
        self._record(
            [
                Event(action.kind, self.clock.wall(), action.data)
                for action in due
                if isinstance(action, Record) and not self._muffled(action)
            ]
        )
        for action in due:
            match action:
                case Send(peer, message):
                    self._send(peer, message)
                case Close(peer):
                    self.transport.close_peer(peer)
                    self._conversations.pop(peer, None)
                case Report(peer):
                    self._send(peer, StatusReply(tuple(self._lines)))
                case Done(code):
                    self.done = code
                    self._tell_the_end()

    def _tell_the_end(self) -> None:
        """
        Those who look at the job learn how it ended: asked a moment later, nobody would be there to
        say it.
        """
        for peer, talk in list(
            self._conversations.items()
        ):  # one that cannot be told is parted with
            if talk.asked:
                self._send(peer, StatusReply(tuple(self._lines)))

    def _send(self, peer: Peer, message: Message) -> None:
        if talk := self._conversations.get(peer):
            counted = not isinstance(message, Echo)
            try:
                self.transport.send(
                    peer, Envelope(self.scheduler, 0, talk.said if counted else 0, message)
                )
                talk.said += counted
            except CodecError as error:
                self._complain(f"a message was not sent: {error}")
                if not isinstance(message, BESIDE):
                    self._part(peer, f"the scheduler cannot say what comes next: {error}")

    def _part(self, peer: Peer, why: str) -> None:
        """
        End a conversation in which a word that the other side waits for cannot be said; the job may
        go on.
        """
        talk = self._conversations.pop(peer)
        self.transport.send(peer, Envelope(self.scheduler, 0, talk.said, Refuse(70, why)))
        self.transport.close_peer(peer)
        self._step(Disconnected(peer))

    def _record(self, events: Sequence[Event]) -> None:
        for event in events:
            self._note_line(event)
        if self._record_events and events:
            self._record_events(events)

    def _note_line(self, event: Event) -> None:
        line = event.to_line()
        self._lines.append(line)
        self._size += len(line)
        while self._size > MOST_LINES and len(self._lines) > 1:
            self._size -= len(self._lines.popleft())

    def warn(self, text: str, *, aloud: bool = False) -> None:
        """Tell people, in the event log; where there is none, or ``aloud``, at their terminals."""
        self._record([Event("warning", self.clock.wall(), {"text": text})])
        if self._record_events is None or aloud:
            self._due += [
                Send(member.peer, Notice(text)) for member in self.machine.nodes if member.peer
            ]

    def _muffled(self, action: Record) -> bool:
        """Whether so many were refused in a short time that one more is only counted."""
        if action.kind != "refused":
            return False
        now = self.clock.monotonic()
        while self._refusals and now - self._refusals[0] > REFUSALS_IN:
            self._refusals.popleft()
        if len(self._refusals) >= MOST_REFUSALS:
            self._muted += 1
            return True
        self._refusals.append(now)
        return False

    def _complain(self, text: str) -> None:
        """Warn about strangers, at a rate that no flood of them raises."""
        now = self.clock.monotonic()
        if now - self._complained < COMPLAIN_EVERY:
            self._muted += 1
            return
        if self._muted:
            text += f" (and {self._muted} more like it before)"
        self._complained = now
        self._muted = 0
        self._record([Event("warning", self.clock.wall(), {"text": text})])


def _fault(talk: _Conversation, item: Arrived) -> str:
    """Return how an envelope breaks the order of its connection, or the empty string."""
    envelope = item.envelope
    hello = talk.hello
    due = 0 if isinstance(envelope.body, Heartbeat) else talk.heard
    if envelope.sequence != due:
        return f"message {envelope.sequence} where {due} was due"
    if hello is None:
        hello = envelope.body if isinstance(envelope.body, Hello) else None
    if hello is None:
        return "nothing goes before Hello"
    if item.role and item.role != hello.role:
        return f"a {item.role}'s key does not make a connection of role {hello.role}"
    if (envelope.sender, envelope.incarnation) != (hello.agent, hello.incarnation):
        return "the sender is not the one of its Hello"
    return ""
