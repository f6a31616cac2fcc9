"""
Connections to the scheduler: `ZmqConnection` is one, `Connector` opens one after another.

Each attempt has a new socket. libzmq's own reconnection would continue a conversation that
the scheduler has closed.
"""

from __future__ import annotations

import select
from enum import Enum
from typing import TYPE_CHECKING, Literal

from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol import security
from pdrun.rendezvous.protocol.codec import CodecError, decode, encode
from pdrun.rendezvous.protocol.messages import Echo, Envelope, Heartbeat, Message
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.transport.dns import NameLookup
from pdrun.rendezvous.transport.reconnect import ReconnectPolicy
from pdrun.rendezvous.transport.timeouts import (
    SERVER_HANDSHAKE_SECONDS,
    handshake_seconds,
    keepalive_options,
    probe_milliseconds,
)
from pdrun.rendezvous.transport.zmq_util import (
    NEVER_RECONNECT_MS,
    end_context,
    open_monitor,
    read_monitor_event,
)

if TYPE_CHECKING:
    import zmq


RETRY_SECONDS = 0.2
"""Time between two attempts if no process listens."""
RETRY_UNKNOWN_NAME_SECONDS = 1.0
"""The same, if the host's name is not known (yet)."""
RETRY_REFUSED_SECONDS = 0.5
"""The same, after a refused handshake."""
RETRY_WELCOMED_SECONDS = 0.1
"""The same, once there has been a Welcome."""


class LinkStage(Enum):
    """State of the present connection."""

    IDLE = "no socket"
    CONNECTING = "TCP"
    SHAKING = "handshake"
    GREETING = "Hello sent"
    UP = "welcomed"
    OVER = "closed, refused or after the verdict"


class ConnectionEvent(Enum):
    """What the socket monitor reports."""

    CONNECTED = "TCP is connected"
    HANDSHAKE_DONE = "the handshake succeeded"
    HANDSHAKE_FAILED = "the handshake failed"
    DISCONNECTED = "the connection ended"
    CLOSED = "the attempt to connect failed"
    NO_ADDRESS = "the host's name has no address"
    OTHER = "an event of no interest"


class ZmqConnection:
    """
    A DEALER socket that connects to the scheduler. Its descriptors are registered in ``epoll``.

    Args:
        crowd: number of connections that may be opened at the same time.
        handshake: seconds for the handshake.
        use_ipv6: whether a host name is resolved to an IPv6 address. libzmq resolves a name in its
            own thread, for one address family per attempt.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        epoll: select.epoll,
        endpoint: Endpoint,
        secret: Secret | None,
        role: Literal["agent", "view"],
        *,
        crowd: int,
        handshake: float,
        connect_timeout: float,
        use_ipv6: bool,
    ) -> None:
        import zmq

        self._zmq = zmq
        self._epoll = epoll
        self._sent_count = 0
        self._received_count = 0
        probe = probe_milliseconds(crowd)
        sock = context.socket(zmq.DEALER)
        self._socket = sock
        for option, value in (
            (zmq.RECONNECT_IVL, NEVER_RECONNECT_MS),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, Envelope.LIMIT),
            (zmq.SNDHWM, 0),
            (zmq.HANDSHAKE_IVL, int(handshake * 1000)),
            (zmq.CONNECT_TIMEOUT, int(connect_timeout * 1000)),
            *keepalive_options(zmq),
            (zmq.HEARTBEAT_IVL, probe),
            (zmq.HEARTBEAT_TIMEOUT, 3 * probe),
            (zmq.IPV6, int(":" in endpoint.host or use_ipv6)),
        ):
            sock.setsockopt(option, value)
        if secret:
            keys = security.derive_key_pair(secret, role)
            sock.curve_publickey = keys.public
            sock.curve_secretkey = keys.private
            sock.curve_serverkey = security.derive_key_pair(secret, "server").public
        self._monitor = open_monitor(sock)
        sock.connect(endpoint.zmq_url)
        for one in (sock, self._monitor):
            epoll.register(int(one.getsockopt(zmq.FD)), select.EPOLLIN)

    def send(self, sender: str, incarnation: int, message: Message) -> bool:
        """
        Send a message; return False if the connection has ended.

        Raises:
            CodecError: the message cannot be encoded.
        """
        is_counted = not isinstance(message, Heartbeat)
        sequence = self._sent_count if is_counted else 0
        data = encode(Envelope(sender, incarnation, sequence, message))
        self._sent_count += is_counted
        try:
            self._socket.send(data, self._zmq.NOBLOCK)
        except self._zmq.Again:
            return False
        return True

    def receive(self) -> Envelope | None:
        """
        Return the next envelope, or None if it has not arrived.

        Raises:
            CodecError: it is not a message, or not the next one of this connection.
        """
        try:
            data = self._socket.recv(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None
        if self._socket.getsockopt(self._zmq.RCVMORE):
            raise CodecError("a message has one frame")
        envelope = decode(data)
        is_counted = not isinstance(envelope.body, Echo)
        expected = self._received_count if is_counted else 0
        if envelope.sequence != expected:
            raise CodecError(f"message {envelope.sequence} arrived instead of {expected}")
        self._received_count += is_counted
        return envelope

    def read_event(self) -> ConnectionEvent | None:
        """Return the next event of the socket monitor, or None."""
        zmq = self._zmq
        if not self._monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            return None
        event, _ = read_monitor_event(self._monitor)
        if event == zmq.EVENT_CONNECTED:
            return ConnectionEvent.CONNECTED
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return ConnectionEvent.HANDSHAKE_DONE
        if event in (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH,
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        ):
            return ConnectionEvent.HANDSHAKE_FAILED
        if event == zmq.EVENT_DISCONNECTED:
            return ConnectionEvent.DISCONNECTED
        if event == zmq.EVENT_CLOSED:
            return ConnectionEvent.CLOSED
        # Without an EVENT_CLOSED before it: there was no address to open a socket for.
        if event == zmq.EVENT_CONNECT_RETRIED:
            return ConnectionEvent.NO_ADDRESS
        return ConnectionEvent.OTHER

    def close(self, linger: float = 0.0) -> None:
        """Close the socket, after at most ``linger`` seconds for what is queued."""
        for one in (self._socket, self._monitor):
            self._epoll.unregister(int(one.getsockopt(self._zmq.FD)))
        self._socket.monitor(None, 0)
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger * 1000))


class Connector:
    """
    Opens one connection after another until the link is over. It knows nothing of messages.

    All connections share one epoll descriptor. ZeroMQ's descriptors only report that *something*
    happened since they were last read empty, so the caller must read until there is nothing left.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        secret: Secret | None,
        role: Literal["agent", "view"],
        policy: ReconnectPolicy,
        *,
        crowd: int,
        connect_timeout: float,
    ) -> None:
        import zmq

        self.connection: ZmqConnection | None = None
        self.stage = LinkStage.IDLE
        self.incarnation = -1
        """Number of the present connection."""
        self.retry_at = 0.0
        """While idle: monotonic time of the next attempt."""
        self.is_known = False
        """Whether there has been a Welcome: the address and the token are right."""
        self._handshake = handshake_seconds(crowd)
        """Limit of the next handshake. It grows while handshakes end without an answer."""
        self._handshake_limits = (
            self._handshake,
            max(self._handshake, SERVER_HANDSHAKE_SECONDS),
        )
        self._endpoint = endpoint
        self._secret = secret
        self._role = role
        self._policy = policy
        self._crowd = crowd
        self._connect_timeout = connect_timeout
        self._name_lookup = NameLookup(endpoint)
        self._attempt_at = 0.0
        self._context = zmq.Context()
        self._epoll = select.epoll()

    @property
    def name_fault(self) -> str:
        """Why the host's name cannot be resolved; empty: it can, or is not known yet."""
        return self._name_lookup.fault

    def fileno(self) -> int:
        """Return the descriptor of all connections."""
        return self._epoll.fileno()

    def is_retry_due(self, now: float) -> bool:
        """Whether it is time for the next attempt."""
        return self.stage is LinkStage.IDLE and now >= self.retry_at

    def open_connection(self, now: float) -> None:
        """Start an attempt to connect."""
        self.incarnation += 1
        # A name that leads to no listener may have an address of the other family.
        is_retry = self._policy.no_listener_since is not None
        self.connection = ZmqConnection(
            self._context,
            self._epoll,
            self._endpoint,
            self._secret,
            self._role,
            crowd=self._crowd,
            handshake=self._handshake,
            connect_timeout=self._connect_timeout,
            use_ipv6=is_retry and self.incarnation % 2 == 1,
        )
        self.stage = LinkStage.CONNECTING
        self._attempt_at = now

    def lose_connection(self, now: float, wait: float) -> None:
        """The connection has ended: try again in ``wait`` seconds, unless the link is over."""
        if self.stage is not LinkStage.OVER:
            if self.is_known:
                self._policy.on_disconnect(now)
            self._drop_connection()
            self.stage = LinkStage.IDLE
            self.retry_at = now + wait

    def restart(self, now: float) -> None:
        """Drop the connection; the next one is the first of another agent."""
        self._drop_connection()
        self.incarnation = -1
        self.stage = LinkStage.IDLE
        self.retry_at = now
        self._policy.on_disconnect(now)

    def close(self, linger: float) -> None:
        """Close, after at most ``linger`` seconds for queued messages."""
        if self._epoll.closed:
            return
        self.stage = LinkStage.OVER
        self._drop_connection(linger)
        end_context(self._context, linger)
        self._epoll.close()

    def read_event(self) -> ConnectionEvent | None:
        """Return the next event of the present connection, or None."""
        return self.connection.read_event() if self.connection is not None else None

    def handle_event(self, event: ConnectionEvent, now: float) -> None:
        """Take an event of the present connection."""
        match event:
            case ConnectionEvent.CONNECTED:
                self.stage = LinkStage.SHAKING
                self._attempt_at = now
                self._policy.on_connected(now)
            case ConnectionEvent.HANDSHAKE_DONE:
                self.stage = LinkStage.GREETING
                low, high = self._handshake_limits
                self._handshake = min(max(low, 2 * (now - self._attempt_at)), high)
                self._policy.on_handshake()
            case ConnectionEvent.HANDSHAKE_FAILED:
                self._on_handshake_refused(now)
            case ConnectionEvent.DISCONNECTED:
                self._on_disconnect(now)
            case ConnectionEvent.CLOSED | ConnectionEvent.NO_ADDRESS:
                if self.stage is LinkStage.CONNECTING:
                    self._on_no_listener(event, now)

    def _drop_connection(self, linger: float = 0.0) -> None:
        if self.connection is not None:
            self.connection.close(linger)
        self.connection = None

    def _on_no_listener(self, event: ConnectionEvent, now: float) -> None:
        self._policy.on_no_listener(now, self._name_lookup.failure)
        self._name_lookup.start_lookup()
        if self.is_known:
            wait = RETRY_WELCOMED_SECONDS
        elif event is ConnectionEvent.NO_ADDRESS:
            wait = RETRY_UNKNOWN_NAME_SECONDS
        else:
            wait = RETRY_SECONDS
        self.lose_connection(now, wait)

    def _on_disconnect(self, now: float) -> None:
        if self.stage is LinkStage.SHAKING:
            self._on_handshake_refused(now)
        elif self.stage is LinkStage.OVER:
            self._drop_connection()
        elif self.stage is LinkStage.UP:
            self.lose_connection(now, 0.0)
        elif self.connection is not None:
            self.lose_connection(now, RETRY_SECONDS)

    def _on_handshake_refused(self, now: float) -> None:
        if self._policy.on_handshake_failed(now, self._attempt_at, self._handshake):
            # The network may be slow: a handshake takes four round trips.
            self._handshake = min(2 * self._handshake, self._handshake_limits[1])
        wait = RETRY_WELCOMED_SECONDS if self.is_known else RETRY_REFUSED_SECONDS
        self.lose_connection(now, wait)
