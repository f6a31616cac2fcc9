"""What a connection may do: messages per second, bytes of a message, the role of its key."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from typing import Literal

import pytest
import zmq

from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol.codec import encode
from pdrun.rendezvous.protocol.messages import Envelope, Heartbeat, Hello, Message, Welcome
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.scheduler.relay import RelayUplink
from pdrun.rendezvous.transport.base import (
    EnvelopeArrived,
    ProtocolViolation,
    TransportEvent,
)
from pdrun.rendezvous.transport.listen import socket_inode
from pdrun.rendezvous.transport.relay_frames import MAX_FRAME_BYTES
from pdrun.rendezvous.transport.zmq_client import ZmqLink
from pdrun.rendezvous.transport.zmq_router import (
    BURST_MESSAGES,
    MESSAGES_PER_SECOND,
    PeerConnection,
)
from pdrun.rendezvous.transport.zmq_server import ZmqServer
from pdrun.rendezvous.transport.zmq_util import wait_readable

BURST = int(BURST_MESSAGES)
RATE = int(MESSAGES_PER_SECOND)
REFUSAL_SECONDS = 2.5
"""Less than the time after which ZeroMQ's own probes end a connection that does not answer them."""
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32


def ready_command(kind: bytes) -> bytes:
    """Return ZMTP's READY of a socket of this kind, without encryption."""
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return b"\x04" + bytes([len(body)]) + body


def long_frame(size: int) -> bytes:
    """Return the start of a frame of so many bytes, of which none follows."""
    return b"\x02" + struct.pack(">Q", size)


@contextlib.contextmanager
def insecure_server() -> Iterator[ZmqServer]:
    server = ZmqServer(None, endpoint=Endpoint("127.0.0.1", 0), insecure=True)
    try:
        yield server
    finally:
        server.close(0.0)


# Messages per second
# -------------------


def test_a_connection_may_send_a_burst_and_then_its_rate() -> None:
    connection = PeerConnection(b"i", -1, 0, "agent", refilled_at=100.0)
    assert all(connection.take_token(100.0) for _ in range(BURST))
    assert not connection.take_token(100.0)
    assert sum(connection.take_token(101.0) for _ in range(2 * RATE)) == RATE - 1


def test_a_long_rest_saves_up_one_burst() -> None:
    connection = PeerConnection(b"i", -1, 0, "agent", refilled_at=100.0)
    assert sum(connection.take_token(1e6) for _ in range(BURST + RATE)) == BURST


def test_who_sends_too_much_is_cut_off_for_it() -> None:
    """Nothing is answered here: a server that only notices a full queue lets it go on."""
    context = zmq.Context()
    flood = context.socket(zmq.DEALER)
    flood.setsockopt(zmq.SNDHWM, 0)
    data = encode(Envelope("f", 0, 0, Heartbeat(1, 0)))
    try:
        with insecure_server() as server:
            flood.connect(server.endpoint.zmq_url)
            for _ in range(BURST + RATE + 1000):
                flood.send(data, zmq.NOBLOCK)
            violations: list[ProtocolViolation] = []
            messages = 0
            deadline = time.monotonic() + 10.0
            while not violations and messages < BURST + RATE and time.monotonic() < deadline:
                found = server.poll(0.1)
                violations += [one for one in found if isinstance(one, ProtocolViolation)]
                messages += len(found)
            assert "messages per second" in violations[0].text
    finally:
        flood.close(linger=0)
        context.term()


# Bytes of a message
# ------------------


def is_closed(sock: socket.socket, seconds: float) -> bool:
    """Read and drop; return whether the other side closes the connection in time."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if wait_readable(sock.fileno(), wait=left):
            with contextlib.suppress(ConnectionError):
                if sock.recv(65536):
                    continue
            return True
    return False


def test_a_scheduler_refuses_a_frame_that_is_too_long_before_it_has_come() -> None:
    with insecure_server() as server:
        for size, refused in ((MAX_FRAME_BYTES, False), (MAX_FRAME_BYTES + 1, True)):
            address = (server.endpoint.host, server.endpoint.port)
            with socket.create_connection(address, timeout=10) as sock:
                sock.sendall(GREETING + ready_command(b"DEALER") + long_frame(size))
                assert is_closed(sock, REFUSAL_SECONDS if refused else 0.3) == refused


@contextlib.contextmanager
def listener() -> Iterator[tuple[socket.socket, Endpoint]]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(10)
        yield sock, Endpoint(*sock.getsockname()[:2])


def answer(sock: socket.socket, size: int) -> socket.socket:
    """Accept a connection as a scheduler that begins a frame of so many bytes."""
    inner, _ = sock.accept()
    inner.sendall(GREETING + ready_command(b"ROUTER") + long_frame(size))
    return inner


def test_an_agent_refuses_a_frame_that_is_too_long_before_it_has_come() -> None:
    for size, refused in ((Envelope.LIMIT, False), (Envelope.LIMIT + 1, True)):
        with listener() as (sock, endpoint):
            link = ZmqLink(endpoint, None, insecure=True)
            try:
                with answer(sock, size) as inner:
                    assert is_closed(inner, REFUSAL_SECONDS if refused else 0.3) == refused
            finally:
                link.close(0.0)


def test_a_relay_refuses_a_frame_that_is_too_long_before_it_has_come() -> None:
    for size, refused in ((MAX_FRAME_BYTES, False), (MAX_FRAME_BYTES + 1, True)):
        with listener() as (sock, endpoint):
            uplink = RelayUplink(endpoint, None)
            try:
                with answer(sock, size) as inner:
                    assert is_closed(inner, REFUSAL_SECONDS if refused else 0.3) == refused
            finally:
                uplink.close()


def test_a_message_has_one_frame() -> None:
    data = encode(Envelope("f", 0, 0, Heartbeat(1, 0)))
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    try:
        with insecure_server() as server:
            peer.connect(server.endpoint.zmq_url)
            found: list[TransportEvent] = []
            for frames in ([data], [data, b"more"]):
                peer.send_multipart(frames)
                found.clear()
                deadline = time.monotonic() + 10.0
                while not found and time.monotonic() < deadline:
                    found += server.poll(0.1)
                if len(frames) == 1:
                    assert isinstance(found[0], EnvelopeArrived)
            assert isinstance(found[0], ProtocolViolation) and "one frame" in found[0].text
    finally:
        peer.close(linger=0)
        context.term()


def test_an_agent_takes_messages_in_their_order_only() -> None:
    """After a gap it connects again, and the scheduler sends the present state once more."""
    welcome = Welcome("job", "run", "spec", "s" * 32, 1.0, 10.0)
    messages: list[Message] = []
    peers: list[str] = []
    with insecure_server() as server:
        link = ZmqLink(server.endpoint, None, insecure=True)
        try:
            deadline = time.monotonic() + 10.0
            while not messages and time.monotonic() < deadline:
                messages += link.poll()
                for one in server.poll(0.02):
                    if isinstance(one, EnvelopeArrived) and isinstance(one.envelope.body, Hello):
                        peers.append(one.peer)
                        sequence = 5 if len(peers) == 1 else 0
                        server.send(one.peer, Envelope("s" * 32, 0, sequence, welcome))
        finally:
            link.close(0.0)
    assert messages == [welcome] and len(peers) == 2


# Roles and the end of a connection
# ---------------------------------


@pytest.mark.parametrize("role", ["agent", "view"])
def test_a_key_proves_its_role(role: Literal["agent", "view"]) -> None:
    secret = Secret.random()
    server = ZmqServer(secret, endpoint=Endpoint("127.0.0.1", 0))
    link = ZmqLink(server.endpoint, secret, role=role)
    try:
        found: list[TransportEvent] = []
        deadline = time.monotonic() + 10.0
        while not found and time.monotonic() < deadline:
            link.poll()
            found += server.poll(0.05)
        assert isinstance(found[0], EnvelopeArrived) and found[0].role == role
    finally:
        link.close(0.0)
        server.close(0.0)


@pytest.mark.parametrize("is_own", [True, False])
def test_only_the_own_connection_is_shut_down(is_own: bool) -> None:
    """The number of a descriptor may be another connection's by now."""
    here, there = socket.socketpair()
    with here, there:
        inode = socket_inode(here.fileno())
        connection = PeerConnection(b"i", here.fileno(), inode if is_own else inode + 1, "agent")
        connection.shut_down()
        assert bool(wait_readable(there.fileno(), wait=0.0)) == is_own
