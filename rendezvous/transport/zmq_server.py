"""
The scheduler's transport over TCP: connections, their limits, and relays.

Every limit is set: 1 MiB per frame, two frames per message, 1,000 queued messages per connection,
a time per handshake (`timeouts.server_handshake_seconds`), and a token bucket
per connection. A connection that sends anything but envelopes, or does not read, is closed; the
service continues. The socket monitor reports the end of a connection within milliseconds, by its
descriptor (SRCFD of its messages). The connection of a relay carries the connections of many agents
(`relay_frames`); each agent is a separate peer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.rendezvous.protocol.codec import CodecError, decode, encode
from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.protocol.messages import Envelope
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.transport.base import (
    EnvelopeArrived,
    FdReady,
    ProtocolViolation,
    TransportEvent,
)
from pdrun.rendezvous.transport.relay_frames import MAGIC
from pdrun.rendezvous.transport.relay_table import RelayTable
from pdrun.rendezvous.transport.zmq_router import (
    MESSAGES_PER_SECOND,
    PeerConnection,
    Role,
    ZmqRouter,
)
from pdrun.text import plural

if TYPE_CHECKING:
    import zmq

MAX_MESSAGES_PER_POLL = 2000
REST_SECONDS_PER_CONNECTION = 2e-6
MAX_REST_SECONDS = 0.02
"""
Rest of `poll` per connection, and its maximum. With thousands of connections that send one message
each, one wake-up then reads a hundred messages, not one.
"""
MAX_CONNECTIONS_WITHOUT_REST = 200
"""Up to this number of connections `poll` does not rest."""
LINGER_SECONDS = 1.0
"""Time between the last message to a connection and its end."""


class ZmqServer:
    """A ServerTransport over TCP. Not for use by several threads."""

    roles: tuple[Role, ...] = ("agent", "view", "relay")
    """Roles whose keys are accepted."""

    def __init__(
        self,
        secret: Secret | None,
        *,
        endpoint: Endpoint | None = None,
        listen_fd: int | None = None,
        insecure: bool = False,
        crowd: int = 0,
    ) -> None:
        """
        Args:
            secret: the user's secret; None only together with ``insecure``.
            endpoint: the address to listen on; one address, never all of them.
            listen_fd: a listening TCP socket to use instead; it belongs to this object from now on.
            insecure: no CURVE: every process that can connect to the port is trusted.
            crowd: number of connections that may be opened at the same time.
        """
        import zmq

        if (secret is None) != insecure:
            raise ConfigError("give either a secret or --insecure, not both", where="scheduler")
        self._zmq = zmq
        self._connections: dict[Peer, PeerConnection] = {}
        self._by_fd: dict[int, Peer] = {}
        self._closing: dict[Peer, tuple[float, PeerConnection]] = {}
        """Peer -> time of the shutdown (negative: it is shut down) and connection."""
        self._relays = RelayTable(self._send_bytes)
        self._pending: list[TransportEvent] = []
        self._watched_fds: list[int] = []
        self._router = ZmqRouter(secret, self.roles, crowd)
        try:
            self.endpoint = self._router.bind(endpoint, listen_fd)
        except BaseException:
            self.close(0.0)
            raise

    # The transport
    # -------------

    def watch_fd(self, fd: int) -> None:
        """Report FdReady when ``fd`` is readable, or at its end."""
        self._watched_fds.append(fd)
        self._router.poller.register(fd, self._zmq.POLLIN)

    def unwatch_fd(self, fd: int) -> None:
        """Stop watching ``fd``."""
        self._watched_fds.remove(fd)
        self._router.poller.unregister(fd)

    def poll(self, timeout: float) -> Sequence[TransportEvent]:
        """Wait for at most ``timeout`` seconds and return what has happened."""
        self._relays.flush()
        if self._pending:
            timeout = 0.0
        else:
            timeout -= self._rest_briefly(timeout)
        ready = self._router.poll(timeout)
        result = self._pending
        self._pending = []
        # The monitor first: what a connection sent before its end is then in the queue already, and
        # is reported before the end.
        ended, failed = self._router.read_monitor()
        if failed:
            text = "failed the handshake: another token, or not of pdrun"
            result.append(ProtocolViolation(f"{plural(failed, 'connection')} {text}"))
        self._read_router(result)
        for fd in ended:
            self._on_closed(fd, result)
        self._shut_closing()
        result += [FdReady(fd) for fd in self._watched_fds if fd in ready]
        return result

    def _rest_briefly(self, timeout: float) -> float:
        """Sleep for a moment if there are many connections; return the seconds."""
        count = len(self._connections)
        if count <= MAX_CONNECTIONS_WITHOUT_REST or timeout <= 0:
            return 0.0
        rest = min(timeout, count * REST_SECONDS_PER_CONNECTION, MAX_REST_SECONDS)
        time.sleep(rest)
        return rest

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Send without waiting. A connection that does not read ends, with PeerGone."""
        if peer in self._relays:
            self._relays.send(peer, encode(envelope))
        else:
            self._send_bytes(peer, encode(envelope))

    def _send_bytes(self, peer: Peer, data: bytes) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            return
        try:
            self._router.send(connection.identity, data)
        except self._zmq.ZMQError as error:
            if error.errno == self._zmq.EAGAIN:
                text = f"{connection.describe()} does not read: cut off"
                self._pending.append(ProtocolViolation(text))
            self._drop_peer(peer)
            self._pending += self._relays.on_peer_ended(peer)

    def close_peer(self, peer: Peer) -> None:
        """End a connection after a moment for queued messages; no PeerGone is reported for it."""
        if peer in self._relays:
            self._relays.close_agent(peer)
        elif connection := self._connections.pop(peer, None):
            self._closing[peer] = (time.monotonic() + LINGER_SECONDS, connection)

    def close(self, timeout: float) -> None:
        """End all connections, after at most ``timeout`` seconds for queued messages."""
        self._relays.flush()
        self._router.close(timeout)

    # Reading
    # -------

    def _read_router(self, result: list[TransportEvent]) -> None:
        router = self._router
        now = time.monotonic()
        for _ in range(MAX_MESSAGES_PER_POLL):
            identity = router.receive_identity()
            if identity is None:
                return
            peer = identity.hex()
            connection = self._connections.get(peer)
            if connection is not None:
                data = router.receive_data()
            else:
                frame = router.receive_frame()
                data = bytes(frame.buffer)
                if peer not in self._closing:
                    connection = self._add_connection(peer, identity, frame)
            extra = router.drop_extra_frames()
            if connection is not None:
                self._on_frame(peer, connection, data, extra, now, result)

    def _add_connection(
        self, peer: Peer, identity: bytes, frame: zmq.Frame
    ) -> PeerConnection | None:
        connection = self._router.make_connection(identity, frame)
        if connection is None:
            return None
        self._connections[peer] = connection
        self._by_fd[connection.fd] = peer
        return connection

    def _on_frame(
        self,
        peer: Peer,
        connection: PeerConnection,
        data: bytes,
        extra: int,
        now: float,
        result: list[TransportEvent],
    ) -> None:
        try:
            if extra:
                raise CodecError("a message has one frame")
            if connection.role != "relay" and not connection.take_token(now):
                raise CodecError(f"more than {MESSAGES_PER_SECOND:g} messages per second")
            result += self._parse_frame(peer, connection.role, data)
        except CodecError as error:
            text = f"{connection.describe()} was cut off: {error}"
            result.append(ProtocolViolation(text))
            self._drop_peer(peer)
            result += self._relays.on_peer_ended(peer)

    def _parse_frame(self, peer: Peer, role: str, data: bytes) -> Sequence[TransportEvent]:
        """Return the events of a frame."""
        # With --insecure no key proves a role, so the frame itself tells that it is a relay's.
        if role == "relay" or (not role and data.startswith(MAGIC)):
            return self._relays.read_frame(peer, data)
        return (EnvelopeArrived(peer, role, decode(data)),)

    # The end of a connection
    # -----------------------

    def _on_closed(self, fd: int, result: list[TransportEvent]) -> None:
        """
        Report the end of the connection that had a descriptor.

        If the number was used again, and the event is of an earlier connection that never sent
        anything, this reports the wrong connection. So it is shut down, too: its agent notices the
        cut and reconnects within milliseconds.
        """
        peer = self._by_fd.pop(fd, None)
        if peer is None:
            return
        self._closing.pop(peer, None)
        if connection := self._connections.pop(peer, None):
            connection.shut_down()
            result += self._relays.on_peer_ended(peer)

    def _drop_peer(self, peer: Peer) -> None:
        """End a connection now."""
        if connection := self._connections.pop(peer, None):
            self._closing[peer] = (0.0, connection)
            self._shut_closing()

    def _shut_closing(self) -> None:
        """Shut down the closing connections whose time is over."""
        now = time.monotonic()
        for peer, (when, connection) in list(self._closing.items()):
            if 0 <= when <= now:
                connection.shut_down()
                self._closing[peer] = (-1.0, connection)
