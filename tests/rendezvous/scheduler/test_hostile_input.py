"""Whatever comes to the port: it is dropped, the log says so, and the service goes on."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol import security
from pdrun.rendezvous.protocol.codec import encode
from pdrun.rendezvous.protocol.messages import (
    PROTOCOL,
    Envelope,
    Heartbeat,
    Hello,
    Join,
    Message,
    Refuse,
    StatusReply,
    Waiting,
    Welcome,
)
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.transport.base import (
    EnvelopeArrived,
    PeerGone,
    ProtocolViolation,
    TransportEvent,
)
from pdrun.rendezvous.transport.zmq_server import ZmqServer
from pdrun.rendezvous.transport.zmq_util import NEVER_RECONNECT_MS, wait_readable
from tests.rendezvous.conftest import Scheduler
from tests.rendezvous.helpers import Agent, agents, connect, until

Start = Callable[..., Scheduler]

GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00"
NULL = GREETING + b"NULL".ljust(20, b"\0") + b"\0" + b"\0" * 31
CURVE = GREETING + b"CURVE".ljust(20, b"\0") + b"\0" + b"\0" * 31
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
HELLO_OF_NOBODY = (
    b"\x04\xc8\x05HELLO\x01\x00" + b"\0" * 72 + b"\x11" * 32 + b"\0" * 8 + b"\x22" * 80
)


@pytest.fixture
def served(scheduler: Start, secret: Secret) -> Iterator[tuple[Scheduler, Agent]]:
    """A scheduler, and an honest agent that is here before, during and after."""
    child = scheduler(nodes=3, waiting_every=0.5)
    with agents(child.endpoint, secret, "job") as (agent,):
        agent.join("honest")
        agent.expect(Waiting)
        yield child, agent
        agent.inbox.clear()
        agent.expect(Waiting, timeout=5.0)
        with agents(child.endpoint, secret, "job") as (new,):
            new.expect(Welcome, timeout=5.0)
        assert child.returncode is None


def closed_by_peer(sock: socket.socket, timeout: float = 12.0) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if wait_readable(sock.fileno(), wait=0.1):
            try:
                if not sock.recv(65536):
                    return True
            except ConnectionError:
                return True
    return False


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="http"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x55" * 500, id="tls"),
        pytest.param(bytes(range(256)) * 64, id="bytes"),
        pytest.param(b"\x80\x04\x95" + b"cos\nsystem\n(S'true'\ntR." * 9, id="pickle"),
        pytest.param(NULL + READY + b"\x00\x02{}", id="null-mechanism"),
        pytest.param(GREETING + b"PLAIN".ljust(20, b"\0") + b"\0" * 32, id="plain-mechanism"),
        pytest.param(CURVE + HELLO_OF_NOBODY, id="curve-of-a-stranger"),
        pytest.param(
            CURVE + b"\x06" + struct.pack(">Q", 8 << 30) + b"\x05HELLO", id="8-gib-command"
        ),
        pytest.param(CURVE + b"\x02" + struct.pack(">Q", 8 << 30) + b"x" * 4096, id="8-gib-frame"),
        pytest.param(CURVE[:20], id="half-a-greeting"),
        pytest.param(b"", id="silence"),
    ],
)
def test_strangers_are_dropped(served: tuple[Scheduler, Agent], data: bytes) -> None:
    child, agent = served
    with connect(child.endpoint) as sock:
        try:
            sock.sendall(data)
        except ConnectionError:
            return
        assert closed_by_peer(sock), "the connection is still open after 12 s"
    agent.turn()


def test_a_slow_loris_has_seven_seconds(served: tuple[Scheduler, Agent]) -> None:
    child, agent = served
    with connect(child.endpoint) as sock:
        started = time.monotonic()
        for byte in CURVE:
            try:
                sock.send(bytes([byte]))
            except ConnectionError:
                break
            agent.turn(0.1)
            if closed_by_peer(sock, 0.1):
                break
        else:
            pytest.fail("it may take its time over every byte of its greeting")
        assert time.monotonic() - started < 12


def test_many_idle_connections_leave_room(served: tuple[Scheduler, Agent], secret: Secret) -> None:
    child, _ = served
    idle = [connect(child.endpoint) for _ in range(300)]
    try:
        with agents(child.endpoint, secret, "job") as (new,):
            new.expect(Welcome, timeout=5.0)
        assert all(closed_by_peer(sock) for sock in idle)
    finally:
        for sock in idle:
            sock.close()


class Tap:
    """Sits between an agent and the scheduler, keeps what the agent sent, and can play it again."""

    def __init__(self, to: Endpoint) -> None:
        self.to, self.recorded = to, bytearray()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(*self.listener.getsockname())
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        inner, _ = self.listener.accept()
        outer = connect(self.to)
        while True:
            ready = wait_readable(inner.fileno(), outer.fileno())
            for sock in (each for each in (inner, outer) if each.fileno() in ready):
                data = sock.recv(65536)
                if not data:
                    inner.close()
                    outer.close()
                    return
                if sock is inner:
                    self.recorded += data
                (outer if sock is inner else inner).sendall(data)


def test_a_replayed_session_gets_nowhere(served: tuple[Scheduler, Agent], secret: Secret) -> None:
    child, _ = served
    tap = Tap(child.endpoint)
    with agents(tap.endpoint, secret, "job") as (victim,):
        victim.join("victim")
        victim.expect(Waiting)
    tap.listener.close()
    joined = len(child.events("joined"))
    assert joined == 2 and b"victim" not in tap.recorded, "the session is readable"
    with connect(child.endpoint) as sock:
        sock.sendall(bytes(tap.recorded))
        assert closed_by_peer(sock)
    assert len(child.events("joined")) == joined


class Insider:
    """Somebody with the token who does not keep to the protocol."""

    def __init__(self, endpoint: Endpoint, secret: Secret, room: int = 0) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        keys = security.derive_key_pair(secret, "agent")
        self.socket.curve_publickey, self.socket.curve_secretkey = keys.public, keys.private
        self.socket.curve_serverkey = security.derive_key_pair(secret, "server").public
        self.socket.setsockopt(zmq.RECONNECT_IVL, NEVER_RECONNECT_MS)
        self.socket.setsockopt(zmq.RCVHWM, room)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(endpoint.zmq_url)
        self.sequence = 0

    def say(self, body: Message, **changes: object) -> None:
        number = (
            0 if isinstance(body, Heartbeat) else self.sequence
        )  # heartbeats are outside the count
        values: dict[str, object] = {
            "sender": "i" * 32,
            "incarnation": 0,
            "sequence": number,
            **changes,
        }
        self.sequence += not isinstance(body, Heartbeat)
        envelope = Envelope(body=body, **values)  # type: ignore[arg-type]
        self.socket.send(encode(envelope), zmq.NOBLOCK)

    def hello(self, **changes: object) -> None:
        values: dict[str, object] = {
            "version": PROTOCOL,
            "role": "agent",
            "job": "job",
            "agent": "i" * 32,
            "incarnation": 0,
            "host": "h",
            "pid": 1,
        } | changes
        self.say(Hello(**values))  # type: ignore[arg-type]

    def dropped(self, timeout: float = 5000) -> bool:
        return bool(self.monitor.poll(timeout))


@contextmanager
def insider(endpoint: Endpoint, secret: Secret, room: int = 0) -> Iterator[Insider]:
    found = Insider(endpoint, secret, room)
    try:
        yield found
    finally:
        # In this order: a socket that is closed after its monitor waits for ever for somebody who
        # hears of it.
        found.socket.disable_monitor()
        found.monitor.close(linger=0)
        found.socket.close(linger=0)
        found.context.term()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"x"],
        [b"{}", b"{}"],
        [b"a"] * 9,
        [b"[" * 100_000],
        [b"\x80\x04\x95."],
        [b"\xff" * 100],
        [b"x" * (1 << 20)],
        [b"x" * ((1 << 20) + 1)],
        [b"x"] * 3000,
    ],
    ids=lambda frames: f"{len(frames)}x{len(frames[0])}",
)
def test_garbage_from_inside_is_cut_off(
    served: tuple[Scheduler, Agent], secret: Secret, frames: list[bytes]
) -> None:
    child, _ = served
    with insider(child.endpoint, secret) as bad:
        bad.hello()
        assert bad.socket.poll(5000)
        bad.socket.send_multipart(frames)
        assert bad.dropped()


@pytest.mark.parametrize(
    ("name", "speak"),
    [
        ("the first message must be Hello", lambda bad: bad.say(Heartbeat(1, 1))),
        ("the first message must be Hello", lambda bad: bad.say(Join("n", None, 1))),
        ("has sent it before", lambda bad: (bad.hello(), bad.hello())),
        (
            "message 5 where 1 was due",
            lambda bad: (bad.hello(), bad.say(Join("n", None, 1), sequence=5)),
        ),
        (
            "message 0 where 1 was due",
            lambda bad: (bad.hello(), bad.say(Join("n", None, 1), sequence=0)),
        ),
        (
            "message 1 where 0 was due",
            lambda bad: (bad.hello(), bad.say(Heartbeat(1, 1), sequence=1)),
        ),
        ("message 1 where 0 was due", lambda bad: bad.say(Join("n", None, 1), sequence=1)),
        (
            "not the one of its Hello",
            lambda bad: (bad.hello(), bad.say(Heartbeat(1, 1), sender="j" * 32)),
        ),
        (
            "not the one of its Hello",
            lambda bad: (bad.hello(), bad.say(Heartbeat(1, 1), incarnation=1)),
        ),
        ("key does not make", lambda bad: bad.hello(role="view")),
        ("only the scheduler sends it", lambda bad: (bad.hello(), bad.say(Refuse(1, "you")))),
    ],
)
def test_words_out_of_order_are_refused(
    served: tuple[Scheduler, Agent], secret: Secret, name: str, speak: Callable[[Insider], object]
) -> None:
    child, _ = served
    with insider(child.endpoint, secret) as bad:
        speak(bad)
        answers = []
        while not any(name.encode() in answer for answer in answers):
            assert bad.socket.poll(5000), f"no refusal: {answers}"
            answers.append(bad.socket.recv())
        assert bad.dropped(), "the connection goes on after the refusal"


def test_a_flood_is_cut_off_and_others_are_served(
    served: tuple[Scheduler, Agent], secret: Secret
) -> None:
    child, agent = served
    with insider(child.endpoint, secret) as bad:
        bad.hello()
        for number in range(20_000):
            bad.say(Heartbeat(number, 0))
        started = time.monotonic()
        agent.inbox.clear()
        agent.expect(Waiting, timeout=5.0)
        assert bad.dropped(), "nobody stopped the flood"
        assert time.monotonic() - started < 12
    until(
        lambda: any("cut off" in event.data["text"] for event in child.events("warning")),
        "a warning",
    )


def test_one_who_never_reads_is_cut_off(secret: Secret) -> None:
    server = ZmqServer(secret, endpoint=Endpoint("127.0.0.1", 0))
    try:
        with insider(server.endpoint, secret, room=1) as bad:
            bad.hello()
            found: list[TransportEvent] = []
            until(lambda: found.extend(server.poll(0.1)) or found, "the first message")
            assert isinstance(found[0], EnvelopeArrived)
            reply = Envelope("s", 0, 0, StatusReply(("x" * 20_000,)))
            for _ in range(5000):
                server.send(found[0].peer, reply)
                if PeerGone(found[0].peer) in (now := server.poll(0.0)):
                    break
            assert [type(item) for item in now] == [
                ProtocolViolation,
                PeerGone,
            ] and "does not read" in now[0].text
    finally:
        server.close(0.0)


def test_warnings_about_strangers_are_few(served: tuple[Scheduler, Agent]) -> None:
    child, agent = served
    before = len(child.events("warning"))
    for _ in range(50):
        with connect(child.endpoint) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            closed_by_peer(sock)
        agent.turn(0.0)
    assert len(child.events("warning")) - before <= 2
