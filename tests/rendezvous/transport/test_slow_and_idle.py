"""Networks with round trips of a second, and connections that never say anything."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from pdrun.endpoint import Endpoint
from pdrun.errors import AuthenticationError
from pdrun.rendezvous.clients.viewer import query_status
from pdrun.rendezvous.protocol.messages import Welcome
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.transport import listen, timeouts, zmq_connection
from pdrun.rendezvous.transport.base import EnvelopeArrived
from pdrun.rendezvous.transport.listen import PendingHandshakes
from pdrun.rendezvous.transport.zmq_client import ZmqLink
from pdrun.rendezvous.transport.zmq_server import ZmqServer
from tests.lib.delay_proxy import DelayProxy
from tests.rendezvous.helpers import agents


@pytest.fixture
def fast_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the limits of handshakes: a delay of 0.1 s is one of 0.5 s."""
    monkeypatch.setattr(timeouts, "HANDSHAKE_SECONDS", 0.6)
    monkeypatch.setattr(zmq_connection, "SERVER_HANDSHAKE_SECONDS", 2.0)


def test_a_handshake_that_is_too_slow_gets_more_time(
    fast_clock: None, scheduler: Callable[..., object], secret: Secret
) -> None:
    child = scheduler(nodes=2)
    with DelayProxy(child.endpoint, 0.1) as proxy:  # type: ignore[attr-defined]
        with agents(proxy.endpoint, secret, "job", start_timeout=20.0) as (agent,):
            assert agent.expect(Welcome, 20.0).run
            assert agent.link._connector.incarnation > 0, "the first handshake was too slow"


def test_a_viewer_waits_for_a_slow_handshake(
    fast_clock: None, scheduler: Callable[..., object], secret: Secret
) -> None:
    child = scheduler(nodes=2)
    with DelayProxy(child.endpoint, 0.1) as proxy:  # type: ignore[attr-defined]
        assert query_status(proxy.endpoint, secret, timeout=5.0)


def test_a_listener_that_says_nothing_may_be_too_far_away(
    fast_clock: None, monkeypatch: pytest.MonkeyPatch, secret: Secret
) -> None:
    from pdrun.rendezvous.transport import reconnect

    monkeypatch.setattr(reconnect, "MAX_SILENCE_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = ZmqLink(Endpoint("127.0.0.1", silent.getsockname()[1]), secret)
        try:
            with pytest.raises(AuthenticationError, match=r"a round trip takes more than 1\.4 s"):
                until = time.monotonic() + 15.0
                while time.monotonic() < until:
                    link.poll()
                    time.sleep(0.02)
        finally:
            link.close(0.0)


# Idle connections
# --------------------------------------------------------------------------------------------------


@contextmanager
def idle_connections(endpoint: Endpoint, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection((endpoint.host, endpoint.port), 10))
            for _ in range(count)
        ]


def test_idle_connections_are_bounded_and_no_agent_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, secret: Secret
) -> None:
    monkeypatch.setattr(listen, "MAX_PENDING_HANDSHAKES", 5)
    server = ZmqServer(secret, endpoint=Endpoint("127.0.0.1", 0), crowd=2)
    pending = server._router._handshakes
    link = None
    try:
        with idle_connections(server.endpoint, 30) as idle:
            until = time.monotonic() + 10.0
            while closed_of(idle) < 23 and time.monotonic() < until:
                server.poll(0.02)
            assert (closed_of(idle), len(pending)) == (23, 7)
            assert closed_of(idle[:23]) == 23, "the oldest ones"
            link = ZmqLink(server.endpoint, secret, job="job")
            until = time.monotonic() + 10.0
            found: list[object] = []
            while not found and time.monotonic() < until:
                link.poll()
                found += [one for one in server.poll(0.02) if isinstance(one, EnvelopeArrived)]
            assert found, "an agent gets in"
            server.poll(0.0)
            assert len(pending) == 6, "it took the place of the oldest, and is proven"
        until = time.monotonic() + 10.0
        while len(pending) and time.monotonic() < until:
            server.poll(0.02)
        assert len(pending) == 0
    finally:
        if link is not None:
            link.close(0.0)
        server.close(0.0)


def closed_of(sockets: list[socket.socket]) -> int:
    """Return how many of these the other side has closed."""
    count = 0
    for one in sockets:
        one.setblocking(False)
        try:
            while data := one.recv(4096):
                assert data
            count += 1
        except BlockingIOError:
            pass
        except OSError:
            count += 1
    return count


def test_a_number_that_is_used_again_is_another_connection() -> None:
    pending = PendingHandshakes(0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one:
            pending.add_connection(one.fileno())
            pending.add_connection(one.fileno())
            assert len(pending) == 1
            pending.prove_connection(one.fileno(), listen.socket_inode(one.fileno()))
            pending.add_connection(one.fileno())
            assert len(pending) == 0, "the event of a connection that has spoken comes late"
            fd = one.fileno()
        pending.remove_connection(fd)
        pending.remove_connection(fd)
        pending.add_connection(fd)
        assert len(pending) == 0, "it has ended"
