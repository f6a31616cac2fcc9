"""
One attempt to connect to the scheduler: a DEALER socket, its monitor, and the message numbers.

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
from pdrun.rendezvous.transport.timeouts import (
    handshake_seconds,
    keepalive_options,
    probe_milliseconds,
)
from pdrun.rendezvous.transport.zmq_util import (
    NEVER_RECONNECT_MS,
    open_monitor,
    read_monitor_event,
)

if TYPE_CHECKING:
    import zmq


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
            (zmq.HANDSHAKE_IVL, int(handshake_seconds(crowd) * 1000)),
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
