"""
The handler that libzmq asks about keys: who comes in, and that replacing it is felt by nobody but
the memory.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol import security
from pdrun.rendezvous.protocol.codec import encode
from pdrun.rendezvous.protocol.messages import Envelope, Leave
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.transport import zap as door
from pdrun.rendezvous.transport.base import EnvelopeArrived, ProtocolViolation
from pdrun.rendezvous.transport.zap import ZapAuthenticator
from pdrun.rendezvous.transport.zmq_server import ZmqServer
from pdrun.rendezvous.transport.zmq_util import end_context, open_monitor, read_monitor_event
from tests.rendezvous.helpers import until

WORD = encode(Envelope("a" * 32, 0, 0, Leave()))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Of the clients."""
    found = zmq.Context()
    yield found
    end(found)


def end(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Close the sockets and wait for the end no longer than `end_context` does."""
    for socket in list(context._sockets):
        socket.close(linger=0)
    end_context(context, 0.0)


def client(
    context: zmq.Context[zmq.Socket[bytes]],
    server: ZmqServer,
    secret: Secret,
    theirs: Secret | None = None,
) -> zmq.Socket[bytes]:
    """Connect as an agent with ``secret`` to the server of ``theirs``, and say a word."""
    keys = security.derive_key_pair(secret, "agent")
    socket = context.socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.private
    socket.curve_serverkey = security.derive_key_pair(theirs or secret, "server").public
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(server.endpoint.zmq_url)
    socket.send(WORD)
    return socket


def heard(server: ZmqServer, count: int) -> set[str]:
    """Poll until so many connections have spoken; return who."""
    peers: set[str] = set()

    def all_have() -> bool:
        for one in server.poll(0.02):
            assert not isinstance(one, ProtocolViolation), one
            if isinstance(one, EnvelopeArrived):
                assert one.role == "agent"
                peers.add(one.peer)
        return len(peers) == count

    until(all_have, f"{count} connections speak", 20)
    return peers


def test_replaced_after_every_question_it_lets_the_same_in(
    context: zmq.Context[zmq.Socket[bytes]], secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is in stays in; a foreign key is refused as ever."""
    monkeypatch.setattr(door, "MAX_ANSWERS", 1)
    monkeypatch.setattr(door, "DRAIN_SECONDS", 0.2)
    with serving(secret) as server:
        early = [client(context, server, secret) for _ in range(3)]
        first = heard(server, 3)
        later = [client(context, server, secret) for _ in range(20)]
        assert not first & heard(
            server, 20
        )  # some are refused between two handlers, and come again
        assert server._router.authenticator is not None

        def closed() -> bool:
            server.poll(0.02)
            return (
                server._router.authenticator is not None
                and server._router.authenticator._old is None
            )

        until(closed, "the old handler is closed")
        for socket in (*early, *later):
            socket.send(WORD)
        assert first < heard(server, 23)
        foreign = client(context, server, Secret.random(), secret)
        told: list[object] = []

        def refused() -> bool:
            told.extend(server.poll(0.02))
            return bool(told)

        until(refused, "the foreign key is refused")
        assert {type(one) for one in told} == {ProtocolViolation} and "another token" in str(
            told[0]
        )
        foreign.close()


def test_without_its_handler_nobody_is_let_in(
    context: zmq.Context[zmq.Socket[bytes]], secret: Secret
) -> None:
    """By default libzmq would let everybody in then."""
    with serving(secret) as server:
        assert server._router.authenticator is not None
        server._router.authenticator._current.unbind(door.ZAP_ADDRESS)
        socket = client(context, server, secret)
        seen = open_monitor(socket)
        heard: list[object] = []

        def cut_twice() -> bool:
            heard.extend(server.poll(0.02))
            while seen.poll(0):
                events.append(read_monitor_event(seen)[0])
            return (
                events.count(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
                + events.count(zmq.EVENT_DISCONNECTED)
                > 1
            )

        events: list[int] = []
        until(cut_twice, "it is refused, and comes again")
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
        assert heard == [], "and that is no fault of its own"
        socket.monitor(None, 0)
        seen.close()


def test_without_a_descriptor_for_a_new_handler_the_old_one_stays(
    context: zmq.Context[zmq.Socket[bytes]], secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_ANSWERS", 1)

    def none_left(self: ZapAuthenticator) -> zmq.Socket[bytes]:
        raise zmq.ZMQError(errno.EMFILE)

    with serving(secret) as server:
        monkeypatch.setattr(ZapAuthenticator, "_make_handler", none_left)
        sockets = [client(context, server, secret) for _ in range(3)]
        heard(server, 3)
        sockets.append(client(context, server, secret))
        heard(server, 1)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc what is allocated")
def test_a_connection_does_not_keep_its_queues_to_the_handler(
    secret: Secret, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two queues of 16 KB for each connection; they are given up a moment after the handler."""
    monkeypatch.setattr(door, "DRAIN_SECONDS", 0.0)
    kept = taken(secret, tmp_path / "malloc")
    monkeypatch.setattr(door, "MAX_ANSWERS", 1)
    taken(secret, tmp_path / "malloc", kept - 30_000)


def taken(secret: Secret, path: Path, enough: int | None = None, count: int = 100) -> int:
    """
    Return what a connection takes, both ends together; not before it is as little as ``enough``,
    where given.
    """
    with ExitStack() as stack:
        server = stack.enter_context(serving(secret))
        context = zmq.Context()
        stack.callback(end, context)
        sockets = [client(context, server, secret)]
        heard(server, 1)
        before = allocated(path)
        sockets += [client(context, server, secret) for _ in range(count)]
        heard(server, count)

        def each() -> int:
            server.poll(0.02)
            return (allocated(path) - before) // count

        if enough is not None:
            until(lambda: each() < enough, f"a connection takes less than {enough} bytes")
        return each()


def allocated(path: Path) -> int:
    """Return the bytes that malloc has handed out in this process."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fopen(bytes(path), b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    total = path.read_text().rpartition("</heap>")[2]
    system = int(re.findall(r'<system type="current" size="(\d+)"', total)[0])
    return system - sum(
        map(int, re.findall(r'<total type="(?:fast|rest)" count="\d+" size="(\d+)"', total))
    )


@contextmanager
def serving(secret: Secret) -> Iterator[ZmqServer]:
    """A server on loopback, ended at once when the block is left."""
    server = ZmqServer(secret, endpoint=Endpoint("127.0.0.1", 0))
    try:
        yield server
    finally:
        server.close(0.0)
