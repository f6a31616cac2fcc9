"""
The scheduler's ROUTER socket with CURVE, its monitor, its ZAP handler, and its connections.

ROUTER has no call to end one connection, so `PeerConnection.shut_down` uses its descriptor.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.rendezvous.protocol import security
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.transport.listen import (
    PendingHandshakes,
    remote_address,
    shut_down_socket,
    socket_inode,
)
from pdrun.rendezvous.transport.relay_frames import MAX_FRAME_BYTES
from pdrun.rendezvous.transport.timeouts import (
    MAX_PROBED_NODES,
    keepalive_options,
    probe_milliseconds,
    server_handshake_seconds,
)
from pdrun.rendezvous.transport.zap import ZapAuthenticator
from pdrun.rendezvous.transport.zmq_util import end_context, open_monitor, read_monitor_event

if TYPE_CHECKING:
    import zmq

Role = Literal["agent", "view", "relay"]
MAX_QUEUED_MESSAGES = 1000
"""Messages that libzmq queues per connection."""
LISTEN_BACKLOG = 4096
MESSAGES_PER_SECOND = 500.0
"""Rate limit per connection."""
BURST_MESSAGES = 4000.0
"""Messages that a connection may send at a time, above the rate."""
_ZERO_COPY_RECV = 10
"""
ZMQ_ZERO_COPY_RECV of zmq_ctx_set(3), which pyzmq does not name. With it each connection keeps
counters for 249 messages with its buffer: 5 KB, for messages of 200 bytes that are copied anyway.
"""


@dataclass(slots=True)
class PeerConnection:
    """One connection of the ROUTER socket, with its rate limit (a token bucket)."""

    identity: bytes
    fd: int
    inode: int
    """Inode of the socket. It shows whether the descriptor is still the same connection."""
    role: str
    tokens: float = BURST_MESSAGES
    refilled_at: float = field(default_factory=time.monotonic)

    def take_token(self, now: float) -> bool:
        """Count one message; return whether the connection keeps to its rate."""
        refill = (now - self.refilled_at) * MESSAGES_PER_SECOND
        self.tokens = min(BURST_MESSAGES, self.tokens + refill) - 1
        self.refilled_at = now
        return self.tokens >= 0

    def describe(self) -> str:
        """Return ``a connection from ADDRESS`` for messages."""
        if socket_inode(self.fd) == self.inode:
            address = remote_address(self.fd)
            if address:
                return f"a connection from {address[0]}"
        return "a connection"

    def shut_down(self) -> None:
        """Shut the descriptor down, unless its number belongs to another connection now."""
        shut_down_socket(self.fd, self.inode)


class ZmqRouter:
    """
    The sockets of a server. `poller` also serves descriptors of the caller.

    Args:
        roles: roles whose keys are accepted.
        crowd: number of connections that may be opened at the same time.
    """

    def __init__(self, secret: Secret | None, roles: Collection[Role], crowd: int) -> None:
        import zmq

        _raise_fd_limit()
        self._zmq = zmq
        # Plain numbers: pyzmq's constants are enumeration members, and each | or look-up of them
        # costs as much as the call that they are for.
        self._noblock = int(zmq.NOBLOCK)
        self._send_flags = int(zmq.SNDMORE | zmq.NOBLOCK)
        self._more_flag = int(zmq.RCVMORE)
        self._context = zmq.Context()
        if crowd > MAX_PROBED_NODES:
            self._context.set(_ZERO_COPY_RECV, 0)
        self.poller = zmq.Poller()
        self.authenticator: ZapAuthenticator | None = None
        if secret:
            # Before any bind: a CURVE server without a ZAP handler accepts every key.
            keys = {security.derive_key_pair(secret, role).public: role for role in roles}
            self.authenticator = ZapAuthenticator(self._context, self.poller, keys)
        self._socket = self._context.socket(zmq.ROUTER)
        self._configure_socket(secret, crowd)
        self._handshakes = PendingHandshakes(crowd)
        # Not HANDSHAKE_FAILED_NO_DETAIL: see `pdrun.rendezvous.transport.zap`.
        self._monitor = open_monitor(
            self._socket,
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_ACCEPTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        )
        for one in (self._socket, self._monitor):
            self.poller.register(one, zmq.POLLIN)

    def _configure_socket(self, secret: Secret | None, crowd: int) -> None:
        zmq = self._zmq
        probe = probe_milliseconds(crowd)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.SNDHWM, MAX_QUEUED_MESSAGES),
            (zmq.RCVHWM, MAX_QUEUED_MESSAGES),
            (zmq.HANDSHAKE_IVL, int(server_handshake_seconds(crowd) * 1000)),
            (zmq.BACKLOG, LISTEN_BACKLOG),
            (zmq.HEARTBEAT_IVL, probe),
            (zmq.HEARTBEAT_TIMEOUT, 3 * probe),
            (zmq.LINGER, 1000),
            *keepalive_options(zmq),
        ):
            self._socket.setsockopt(option, value)
        if secret:
            self._socket.curve_server = True
            self._socket.curve_secretkey = security.derive_key_pair(secret, "server").private
            assert self.authenticator is not None
            self.authenticator.guard_socket(self._socket)

    def bind(self, endpoint: Endpoint | None, listen_fd: int | None) -> Endpoint:
        """Listen on an address, or on a listening TCP socket; return the address."""
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
            self._socket.setsockopt(self._zmq.IPV6, 1)
        self._socket.setsockopt(self._zmq.USE_FD, listener.detach())
        self._socket.bind(found.zmq_url)
        return found

    def poll(self, timeout: float) -> Collection[Any]:
        """Wait for at most ``timeout`` seconds; return the sockets and descriptors with events."""
        ready = dict(self.poller.poll(max(0, int(timeout * 1000))))
        if self.authenticator is not None:
            self.authenticator.answer_requests(ready)
        return ready

    def send(self, identity: bytes, data: bytes) -> None:
        """
        Send a message without waiting.

        Raises:
            zmq.ZMQError: EAGAIN, the connection does not read; any other, it has ended.
        """
        self._socket.send(identity, self._send_flags)
        self._socket.send(data, self._noblock)

    def receive_identity(self) -> bytes | None:
        """Return the identity of the next message's connection; None if there is no message."""
        while True:
            try:
                identity = self._socket.recv(self._noblock)
            except self._zmq.Again:
                return None
            if self._socket.getsockopt(self._more_flag):
                return identity

    def receive_data(self) -> bytes:
        """Return the content of the message whose identity was received."""
        return self._socket.recv(self._noblock)

    def receive_frame(self) -> zmq.Frame:
        """As `receive_data`, for a new connection: slower, but a frame has the descriptor."""
        return self._socket.recv(self._noblock, copy=False)

    def drop_extra_frames(self) -> int:
        """Drop what follows the content of a message; return the number of frames."""
        count = 0
        while self._socket.getsockopt(self._more_flag):
            self._socket.recv(self._noblock)
            count += 1
        return count

    def make_connection(self, identity: bytes, frame: zmq.Frame) -> PeerConnection | None:
        """Return the connection of a frame; None: it is not known, so the frame is worthless."""
        try:
            fd = int(frame.get(self._zmq.SRCFD))
        except self._zmq.ZMQError:  # a peer that breaks the protocol has sent such a frame
            return None
        role = str(frame.get("User-Id")) if self.authenticator else ""
        found = PeerConnection(identity, fd, socket_inode(fd), role)
        self._handshakes.prove_connection(fd, found.inode)
        return found

    def read_monitor(self) -> tuple[list[int], int]:
        """Return the descriptors of ended connections, and the number of failed handshakes."""
        zmq = self._zmq
        ended = []
        failed = 0
        while self._monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event, value = read_monitor_event(self._monitor)
            if event == zmq.EVENT_ACCEPTED:
                self._handshakes.add_connection(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._handshakes.remove_connection(value)
                ended.append(value)
            elif event != zmq.EVENT_MONITOR_STOPPED:
                failed += 1
        return ended, failed

    def close(self, timeout: float) -> None:
        """Close all sockets, after at most ``timeout`` seconds for queued messages."""
        # The monitor first: a socket that outlives its monitor blocks for ever when it is closed.
        self._socket.monitor(None, 0)
        for one in (self._monitor, self._socket):
            one.close(linger=max(0, int(timeout * 1000)))
        if self.authenticator is not None:
            self.authenticator.close()
        end_context(self._context, timeout)


def _raise_fd_limit() -> None:
    """Every agent needs one descriptor: raise the soft limit to the hard limit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass
