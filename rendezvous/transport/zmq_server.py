"""
The scheduler's transport over TCP: one ZeroMQ ROUTER, with CURVE, whose keys are asked for in the
same loop (`door`).

Every limit is set: 1 MiB a frame, two frames a message, 1000 messages queued a connection, 3 s for
a handshake (more where thousands come at once, see `pace`), a token bucket a connection. Whoever
sends what is no envelope, or cannot take what is sent, is cut off; the service goes on. A
connection's end is learned from the socket monitor within milliseconds, and its owner by the
descriptor (SRCFD) from which its messages came. A relay's connection carries those of many agents
(see `relayed`), each a peer of its own. Limits: ROUTER has no call that ends one connection, so its
descriptor is shut down.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.rendezvous.protocol import security
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
from pdrun.rendezvous.transport.relay_frames import MAGIC, MAX_FRAME_BYTES
from pdrun.rendezvous.transport.relay_table import RelayTable
from pdrun.rendezvous.transport.timeouts import (
    MAX_PROBED_NODES,
    handshake_seconds,
    keepalive_options,
    probe_milliseconds,
)
from pdrun.rendezvous.transport.zap import ZapAuthenticator
from pdrun.rendezvous.transport.zmq_util import end_context, open_monitor, read_monitor_event
from pdrun.text import plural

if TYPE_CHECKING:
    import zmq

MAX_QUEUED_MESSAGES = 1000
LISTEN_BACKLOG = 4096
MESSAGES_PER_SECOND = 500.0
BURST_MESSAGES = 4000.0
"""Messages that a connection may send a second, and at once."""
MAX_MESSAGES_PER_POLL = 2000
REST_SECONDS_PER_CONNECTION = 2e-6
MAX_REST_SECONDS = 0.02
"""
Seconds that `poll` rests for each connection, and at most: of thousands who speak a word each, a
hundred are heard at one waking, not one. A few dozen connections are heard at once.
"""
MAX_CONNECTIONS_WITHOUT_REST = 200
"""Connections for which it does not rest."""
_ZERO_COPY_RECV = 10
"""
ZMQ_ZERO_COPY_RECV of zmq_ctx_set(3), which pyzmq does not name. With it each connection keeps
counters for 249 messages beside its buffer: 5 KB, for words of 200 bytes that are copied anyway.
"""
LINGER_SECONDS = 1.0
"""Seconds between the last word to a connection and its end."""


@dataclass(slots=True)
class PeerConnection:
    identity: bytes
    fd: int
    inode: int
    """The socket's, by which a descriptor is known to be still the same connection."""
    role: str
    tokens: float = BURST_MESSAGES
    refilled: float = field(default_factory=time.monotonic)

    def take_token(self, now: float) -> bool:
        self.tokens = (
            min(BURST_MESSAGES, self.tokens + (now - self.refilled) * MESSAGES_PER_SECOND) - 1
        )
        self.refilled = now
        return self.tokens >= 0


class ZmqServer:
    """A ServerTransport over TCP. Not for use by several threads."""

    roles: tuple[Literal["agent", "view", "relay"], ...] = ("agent", "view", "relay")
    """Whose keys open the door."""

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
            endpoint: where to listen; one address, never all of them.
            listen_fd: a listening TCP socket to adopt instead; it belongs to this object from now
                on.
            insecure: no CURVE at all: anybody who reaches the port is believed.
            crowd: connections that may come at once.
        """
        import zmq

        if (secret is None) != insecure:
            raise ConfigError(
                "either a secret or --insecure, not both and not neither", where="scheduler"
            )
        self._zmq = zmq
        # Plain numbers: pyzmq's own constants are members of enumerations, whose every | and look-up costs as much as
        # the call that they are for.
        self._noblock = int(zmq.NOBLOCK)
        self._send_flags = int(zmq.SNDMORE | zmq.NOBLOCK)
        self._more_flag = int(zmq.RCVMORE)
        _raise_fd_limit()
        self._connections: dict[Peer, PeerConnection] = {}
        self._by_fd: dict[int, Peer] = {}
        self._closing: dict[Peer, tuple[float, PeerConnection]] = {}
        self._relays = RelayTable(self._send_bytes)
        self._pending: list[TransportEvent] = []
        self._watched_fds: list[int] = []
        self._context = zmq.Context()
        if crowd > MAX_PROBED_NODES:
            self._context.set(_ZERO_COPY_RECV, 0)
        self._poller = zmq.Poller()
        self._authenticator = self._make_authenticator(secret) if secret else None
        self._router = self._context.socket(zmq.ROUTER)
        self._configure_router(secret, crowd)
        self._monitor = open_monitor(  # no other failure of a handshake: see `door`
            self._router,
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        )
        for one in (self._router, self._monitor):
            self._poller.register(one, zmq.POLLIN)
        try:
            self.endpoint = self._bind_router(endpoint, listen_fd)
        except BaseException:
            self.close(0.0)
            raise

    # Opening
    # ----------------------------------------------------------------------------------------------------------

    def _make_authenticator(self, secret: Secret) -> ZapAuthenticator:
        """Before any bind: a CURVE server without a ZAP handler lets every key in."""
        return ZapAuthenticator(
            self._context,
            self._poller,
            {security.derive_key_pair(secret, role).public: role for role in self.roles},
        )

    def _configure_router(self, secret: Secret | None, crowd: int) -> None:
        zmq = self._zmq
        router = self._router
        probe = probe_milliseconds(crowd)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.SNDHWM, MAX_QUEUED_MESSAGES),
            (zmq.RCVHWM, MAX_QUEUED_MESSAGES),
            (zmq.HANDSHAKE_IVL, int(handshake_seconds(crowd) * 1000)),
            (zmq.BACKLOG, LISTEN_BACKLOG),
            (zmq.HEARTBEAT_IVL, probe),
            (zmq.HEARTBEAT_TIMEOUT, 3 * probe),
            (zmq.LINGER, 1000),
            *keepalive_options(zmq),
        ):
            router.setsockopt(option, value)
        if secret:
            keys = security.derive_key_pair(secret, "server")
            router.curve_server = True
            router.curve_secretkey = keys.private
            assert self._authenticator is not None
            self._authenticator.guard_socket(router)

    def _bind_router(self, endpoint: Endpoint | None, listen_fd: int | None) -> Endpoint:
        if listen_fd is None:
            from pdrun.rendezvous.transport.listen import bind_listener

            if endpoint is None:
                raise ConfigError("no address to listen on", where="scheduler")
            listen_fd = bind_listener(endpoint, backlog=LISTEN_BACKLOG).detach()
        listener = socket.socket(fileno=listen_fd)
        listener.setblocking(False)
        listener.listen(LISTEN_BACKLOG)
        host, port = listener.getsockname()[:2]
        found = Endpoint(host, port)
        if ":" in host:
            self._router.setsockopt(self._zmq.IPV6, 1)
        self._router.setsockopt(self._zmq.USE_FD, listener.detach())
        self._router.bind(found.zmq_url)
        return found

    # The protocol
    # -----------------------------------------------------------------------------------------------------

    def watch_fd(self, fd: int) -> None:
        """Report Woken when ``fd`` is readable (or at its end)."""
        self._watched_fds.append(fd)
        self._poller.register(fd, self._zmq.POLLIN)

    def unwatch_fd(self, fd: int) -> None:
        """Stop watching ``fd``."""
        self._watched_fds.remove(fd)
        self._poller.unregister(fd)

    def poll(self, timeout: float) -> Sequence[TransportEvent]:
        """Wait for at most ``timeout`` seconds and return what came in."""
        self._relays.flush()
        if not self._pending:
            timeout -= self._rest_briefly(timeout)
        wait = 0 if self._pending else max(0, int(timeout * 1000))
        ready = dict(self._poller.poll(wait))
        if self._authenticator is not None:
            self._authenticator.answer_requests(ready)
        result = self._pending
        self._pending = []
        # The monitor first: what a connection sent before its end is then already in the queue, and
        # reported before it.
        ended = self._read_monitor(result)
        self._read_router(result)
        for fd in ended:
            self._on_closed(fd, result)
        self._shut_closing()
        result += [FdReady(fd) for fd in self._watched_fds if fd in ready]
        return result

    def _rest_briefly(self, most: float) -> float:
        if len(self._connections) <= MAX_CONNECTIONS_WITHOUT_REST or most <= 0:
            return 0.0
        rest = min(most, len(self._connections) * REST_SECONDS_PER_CONNECTION, MAX_REST_SECONDS)
        time.sleep(rest)
        return rest

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Send without waiting; a connection that cannot take it is ended and reported as Gone."""
        if peer in self._relays:
            self._relays.send(peer, encode(envelope))
        else:
            self._send_bytes(peer, encode(envelope))

    def _send_bytes(self, peer: Peer, data: bytes) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            return
        try:
            self._router.send(connection.identity, self._send_flags)
            self._router.send(data, self._noblock)
        except self._zmq.ZMQError as error:
            slow = error.errno == self._zmq.EAGAIN
            if slow:
                self._pending.append(
                    ProtocolViolation(f"{self._describe_peer(connection)} does not read: cut off")
                )
            self._drop_peer(peer)
            self._pending += self._relays.on_peer_ended(peer)

    def close_peer(self, peer: Peer) -> None:
        """
        End a connection after what was sent to it had time to leave; no Gone is reported for it.
        """
        if peer in self._relays:
            self._relays.close_agent(peer)
        elif connection := self._connections.pop(peer, None):
            self._closing[peer] = (time.monotonic() + LINGER_SECONDS, connection)

    def close(self, timeout: float) -> None:
        """End everything, giving what was sent at most ``timeout`` seconds to leave."""
        self._relays.flush()
        self._router.monitor(
            None, 0
        )  # first: a socket that outlives its monitor waits for ever at its end
        for one in (self._monitor, self._router):
            one.close(linger=max(0, int(timeout * 1000)))
        if self._authenticator is not None:
            self._authenticator.close()
        end_context(self._context, timeout)

    # Reading
    # ----------------------------------------------------------------------------------------------------------

    def _read_monitor(self, result: list[TransportEvent]) -> list[int]:
        zmq = self._zmq
        ended = []
        failed = 0
        while self._monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event, value = read_monitor_event(self._monitor)
            if event == zmq.EVENT_DISCONNECTED:
                ended.append(value)
            elif event != zmq.EVENT_MONITOR_STOPPED:
                failed += 1
        if failed:
            result.append(
                ProtocolViolation(
                    f"{plural(failed, 'connection')} failed the handshake: another token, or not of pdrun"
                )
            )
        return ended

    def _read_router(self, result: list[TransportEvent]) -> None:
        receive = self._router.recv
        noblock = self._noblock
        now = time.monotonic()
        for _ in range(MAX_MESSAGES_PER_POLL):
            try:
                identity = receive(noblock)
            except self._zmq.Again:
                return
            if not self._router.getsockopt(self._more_flag):
                continue
            peer = identity.hex()
            connection = self._connections.get(peer)
            if connection is not None:
                data = receive(noblock)
            else:
                frame = receive(
                    noblock, copy=False
                )  # dearer, but only it tells over which connection it came
                data = bytes(frame.buffer)
                if peer not in self._closing:
                    connection = self._add_connection(identity, frame)
            extra = 0
            while self._router.getsockopt(self._more_flag):
                receive(noblock)
                extra += 1
            if connection is not None:
                self._on_frame(peer, connection, data, extra, now, result)

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
                raise CodecError(f"more than {MESSAGES_PER_SECOND:g} messages a second")
            result += self._parse_frame(peer, connection.role, data)
        except CodecError as error:
            result.append(
                ProtocolViolation(f"{self._describe_peer(connection)} was cut off: {error}")
            )
            self._drop_peer(peer)
            result += self._relays.on_peer_ended(peer)

    def _parse_frame(self, peer: Peer, role: str, data: bytes) -> Sequence[TransportEvent]:
        """Return what a frame of a connection means."""
        if role == "relay" or (
            not role and data.startswith(MAGIC)
        ):  # a role is proved unless --insecure
            return self._relays.read_frame(peer, data)
        return (EnvelopeArrived(peer, role, decode(data)),)

    def _add_connection(self, identity: bytes, frame: zmq.Frame) -> PeerConnection:
        fd = int(frame.get(self._zmq.SRCFD))
        role = str(frame.get("User-Id")) if self._authenticator else ""
        connection = PeerConnection(identity, fd, socket_inode(fd), role)
        self._connections[identity.hex()] = connection
        self._by_fd[fd] = identity.hex()
        return connection

    # Ending one connection
    # --------------------------------------------------------------------------------------------

    def _on_closed(self, fd: int, result: list[TransportEvent]) -> None:
        """
        Report the end of the connection that had a descriptor.

        Should the number have been used again, and the event be about an earlier connection that
        never spoke, the wrong one is reported: it is shut down, too, so that its agent sees the cut
        and resumes within milliseconds.
        """
        peer = self._by_fd.pop(fd, None)
        if peer is None:
            return
        self._closing.pop(peer, None)
        if connection := self._connections.pop(peer, None):
            shut_connection(connection)
            result += self._relays.on_peer_ended(peer)

    def _drop_peer(self, peer: Peer) -> None:
        """End a connection now."""
        if connection := self._connections.pop(peer, None):
            self._closing[peer] = (0.0, connection)
            self._shut_closing()

    def _shut_closing(self) -> None:
        now = time.monotonic()
        for peer, (when, connection) in list(self._closing.items()):
            if 0 <= when <= now:
                shut_connection(connection)
                self._closing[peer] = (-1.0, connection)

    def _describe_peer(self, connection: PeerConnection) -> str:
        name = (
            remote_address(connection.fd)
            if socket_inode(connection.fd) == connection.inode
            else None
        )
        return f"a connection from {name[0]}" if name else "a connection"


def socket_inode(fd: int) -> int:
    """
    Return the number of the socket that a descriptor is, never used twice at a time; 0: it is none
    (any more).
    """
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return 0


def remote_address(fd: int) -> Any:
    """
    Return the remote address of a descriptor, or None when it is no connected socket (any more).
    """
    try:
        copy = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    try:
        return copy.getpeername()
    except OSError:
        return None
    finally:
        copy.close()


def shut_connection(connection: PeerConnection) -> None:
    """Shut a connection's descriptor down, unless the number means another connection by now."""
    if not connection.inode or socket_inode(connection.fd) != connection.inode:
        return
    try:
        copy = socket.socket(fileno=os.dup(connection.fd))
    except OSError:
        return
    try:
        copy.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        copy.close()


def _raise_fd_limit() -> None:
    """Every agent is one descriptor: take all that the system grants."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass
