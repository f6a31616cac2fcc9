"""
The scheduler at work: envelopes in, the membership machine, actions out.

`Service` ties the pure machine to a transport, a clock and the event log. It runs inside the agent (one node), as the
agent's child (``python -m pdrun.rendezvous.server``, see `main`) or alone (`pdrun scheduler`, see `serve_standalone`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pdrun import early
from pdrun.clock import Clock, SystemClock
from pdrun.eventlog import Event, EventLog
from pdrun.net import Endpoint
from pdrun.rendezvous.events import Happening, Orphaned, Peer, Received, SchedulerConfig, StopOrdered
from pdrun.rendezvous.messages import Envelope, Hello, Message, Refuse, StatusReply
from pdrun.rendezvous.state import Close, Disconnected, Done, IllegalEvent, Membership, Record, Report, Send, Tick
from pdrun.rendezvous.transport import Arrived, Complaint, Gone, ServerTransport
from pdrun.rendezvous.wording import count, how_to_start

if TYPE_CHECKING:
    from pdrun.rendezvous.security import Secret

MOST_LINES = 400_000
"""Characters of event lines that a StatusReply holds: the newest."""
FEWEST_FILES = 40
MOST_REFUSALS, REFUSALS_IN = 20, 10.0
"""Refusals that are recorded one by one in so many seconds; beyond that they are counted with the complaints."""
COMPLAIN_EVERY = 5.0
"""Seconds between two warnings about what strangers do at the port."""


@dataclass
class _Conversation:
    """What one connection may say next, and what it is told next."""

    hello: Hello | None = None
    heard: int = 0
    said: int = 0


class Service:
    """The scheduler of one job. Call `poll_once` in a loop, or with timeout 0 from another loop."""

    def __init__(
        self, config: SchedulerConfig, transport: ServerTransport, *, clock: Clock | None = None,
        record: Callable[[Event], None] | None = None,
    ) -> None:  # fmt: skip
        self.clock = clock or SystemClock()
        self.transport = transport
        self.scheduler = os.urandom(16).hex()
        self.machine = Membership(config, self.scheduler, self.clock.monotonic())
        self.done: int | None = None
        """The job's code, once everybody knows the verdict (or had time to)."""
        self.woken: list[int] = []
        """Watched descriptors that were readable at the last poll."""
        self._record_event = record
        self._conversations: dict[Peer, _Conversation] = {}
        self._lines: deque[str] = deque()
        self._size = 0
        self._complained = float("-inf")
        self._muted = 0
        self._refusals: deque[float] = deque()

    def poll_once(self, timeout: float) -> None:
        """Wait for at most ``timeout`` seconds (never beyond the machine's next tick) and do all that is due."""
        self.woken = []
        for item in self.transport.poll(min(timeout, self.machine.tick_every)):
            if isinstance(item, Arrived):
                self._arrived(item)
            elif isinstance(item, Gone):
                self._conversations.pop(item.peer, None)
                self._step(Disconnected(item.peer))
            elif isinstance(item, Complaint):
                self._complain(item.text)
            else:
                self.woken.append(item.fd)
        self._step(Tick())

    @property
    def talks(self) -> bool:
        """Whether anybody is connected."""
        return bool(self._conversations)

    def stop(self, number: int, by: str, *, force: bool = False) -> None:
        """Stop the job from the scheduler's own side."""
        self._step(StopOrdered(number, by, force))

    def orphaned(self, reason: str) -> None:
        """The agent that runs this scheduler is gone: end the job with the verdict that says so."""
        self._step(Orphaned(reason))

    def _arrived(self, item: Arrived) -> None:
        talk = self._conversations.setdefault(item.peer, _Conversation())
        envelope, body = item.envelope, item.envelope.body
        if fault := _fault(talk, item):
            return self._refuse(item.peer, fault)
        talk.heard += 1
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
        self._send(peer, Refuse(70, why))
        self.transport.close_peer(peer)
        self._conversations.pop(peer, None)
        self._step(Disconnected(peer))

    def _step(self, event: Happening) -> None:
        for action in self.machine.step(event, self.clock.monotonic()):
            match action:
                case Send(peer, message):
                    self._send(peer, message)
                case Close(peer):
                    self.transport.close_peer(peer)
                    self._conversations.pop(peer, None)
                case Record("refused", _) if self._refused_often():
                    self._muted += 1
                case Record(kind, data):
                    self._record(Event(kind, self.clock.wall(), data))
                case Report(peer):
                    self._send(peer, StatusReply(tuple(self._lines)))
                case Done(code):
                    self.done = code

    def _send(self, peer: Peer, message: Message) -> None:
        if talk := self._conversations.get(peer):
            self.transport.send(peer, Envelope(self.scheduler, 0, talk.said, message))
            talk.said += 1

    def _record(self, event: Event) -> None:
        line = event.to_line()
        self._lines.append(line)
        self._size += len(line)
        while self._size > MOST_LINES and len(self._lines) > 1:
            self._size -= len(self._lines.popleft())
        if self._record_event:
            self._record_event(event)

    def _refused_often(self) -> bool:
        """Whether so many were refused in a short time that one more is only counted."""
        now = self.clock.monotonic()
        while self._refusals and now - self._refusals[0] > REFUSALS_IN:
            self._refusals.popleft()
        if len(self._refusals) >= MOST_REFUSALS:
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
        self._complained, self._muted = now, 0
        self._record(Event("warning", self.clock.wall(), {"text": text}))


def _fault(talk: _Conversation, item: Arrived) -> str:
    """Return how an envelope breaks the order of its connection, or the empty string."""
    envelope, hello = item.envelope, talk.hello
    if envelope.sequence != talk.heard:
        return f"message {envelope.sequence} where {talk.heard} was due"
    if hello is None:
        hello = envelope.body if isinstance(envelope.body, Hello) else None
    if hello is None:
        return "nothing goes before Hello"
    if item.role and item.role != hello.role:
        return f"a {item.role}'s key does not make a connection of role {hello.role}"
    if (envelope.sender, envelope.incarnation) != (hello.agent, hello.incarnation):
        return "the sender is not the one of its Hello"
    return ""


# Running it -----------------------------------------------------------------------------------------------------------


def serve_standalone(
    config: SchedulerConfig, secret: Secret | None, endpoint: Endpoint, *, insecure: bool = False,
    events_path: Path | None = None, say: Callable[[str], None] | None = None, how_to_join: str = "",
) -> int:  # fmt: skip
    """
    Serve one job in the foreground (`pdrun scheduler`) and return its code.

    SIGINT and SIGTERM stop the job, a second one at once. ``say`` gets lines for the user, stderr by default;
    ``how_to_join`` is one of them.
    """
    from pdrun.rendezvous.zmq_server import ZmqServer

    say = say or _say
    transport = ZmqServer(secret, endpoint=endpoint, insecure=insecure)
    log = EventLog(events_path) if events_path else None

    def record(event: Event) -> None:
        if log:
            log.append(event)
        if event.kind not in ("created", "assigned", "exited", "verdict"):
            say(_shown(event))

    service = Service(config, transport, record=record)
    named = f"job '{config.job}'" if config.job else "the first job that comes"
    awaited = count(config.nodes, config.unit)
    say(f"scheduler of {named} (run {config.run}) on {transport.endpoint}, waiting for {awaited}")
    say(how_to_join or how_to_start(config, transport.endpoint, insecure=insecure))
    if insecure:
        say("INSECURE: no token is asked for; anybody who reaches this port can take part in the job")
    signals: list[int] = []
    restore, stops = _catch(signals), 0
    try:
        while service.done is None:
            service.poll_once(0.2)
            while signals:
                where = f"a signal at the scheduler{' on ' + config.host if config.host else ''}"
                service.stop(signals.pop(0), where, force=stops > 0)
                stops += 1
    finally:
        restore()
        transport.close(1.0)
        if log:
            log.close()
    verdict = service.machine.verdict
    if verdict and verdict.code:
        say(f"job ended with code {verdict.code}: {verdict.reason}")
    return service.done


def _shown(event: Event) -> str:
    data = event.data
    parts = [str(data[key]) for key in ("node", "host", "text", "reason") if data.get(key)]
    return f"{event.kind}: {', '.join(dict.fromkeys(parts))}" if parts else event.kind


def _say(text: str) -> None:
    print(f"pdrun: {text}", file=sys.stderr, flush=True)


def _catch(signals: list[int]) -> Callable[[], None]:
    """Collect SIGINT and SIGTERM in ``signals``; return what puts the old handlers back."""

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us watches signals
        return lambda: None

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, early.afterwards(handler))  # type: ignore[arg-type]

    return restore


def main() -> int:
    """
    Serve as an agent's child.

    stdin: one JSON line {config, secret, listen_fd, host, port, events, insecure}, then nothing; its end means that the
    agent has died. stdout: one JSON line {"endpoint": "HOST:PORT"} or {"error": ..., "code": ...}.
    """
    early.begin()
    for number in (*early.STOP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a terminal's and a batch system's signals are the agents' business
    try:
        order = _read_order(sys.stdin.buffer.readline())
        transport, service, log = _start(order)
    except Exception as error:  # whatever it is, the agent says it to the user
        ours = early.too_few("the scheduler", FEWEST_FILES) if early.ran_out(error) else error
        _answer({"error": str(ours), "code": getattr(ours, "exit_code", 70)})
        return 1
    _answer({"endpoint": str(transport.endpoint)})
    transport.watch(0)
    try:
        _serve_until_done(service, order["config"])
    finally:
        transport.close(1.0)
        if log:
            log.close()
    return 0


def _answer(what: dict[str, Any]) -> None:
    """Tell the agent; that it is gone already is told once more by the end of stdin."""
    import json

    data = json.dumps(what).encode() + b"\n"
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        pass


def _read_order(line: bytes) -> dict[str, Any]:
    from pdrun.rendezvous import codec

    order = codec.load_json(line, limit=4 << 20)
    if not isinstance(order, dict):
        raise ValueError("the scheduler's order is no object")
    order["config"] = codec.from_plain(SchedulerConfig, order["config"], "config")
    return order


def _start(order: dict[str, Any]) -> tuple[Any, Service, EventLog | None]:
    from pdrun.rendezvous.security import Secret
    from pdrun.rendezvous.zmq_server import ZmqServer

    transport = ZmqServer(
        Secret.from_hex(order["secret"]) if order["secret"] else None,
        endpoint=Endpoint(order["host"], order["port"]) if order["listen_fd"] is None else None,
        listen_fd=order["listen_fd"],
        insecure=order["insecure"],
    )
    log = EventLog(Path(order["events"])) if order["events"] else None
    return transport, Service(order["config"], transport, record=log.append if log else None), log


def _serve_until_done(service: Service, config: SchedulerConfig) -> None:
    clock, leave_at = service.clock, float("inf")
    while service.done is None and clock.monotonic() < leave_at:
        service.poll_once(0.25)
        if service.woken and not os.read(0, 4096):
            service.transport.unwatch(0)  # type: ignore[attr-defined]
            if service.machine.verdict is None:
                service.orphaned(f"the node of the scheduler{f' ({config.host})' if config.host else ''} was lost")
                leave_at = clock.monotonic() + (0.9 if service.talks else 0.0)


if __name__ == "__main__":
    sys.exit(main())
