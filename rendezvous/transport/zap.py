"""
The ZAP handler (RFC 27): libzmq asks it about the CURVE key of each new connection.

Each connection has its own pair of queues to the handler and keeps it after its only request, for
its whole life: more than 8 KB of memory, which adds up over thousands. So the handler is replaced
regularly. The queues of answered connections end with the old handler, and the connections do not
notice. A connection that asks in the moment between the two handlers is refused, never accepted
without a check, and tries again.

To be refused immediately, such a connection needs a monitor of the guarded socket *without* the
event HANDSHAKE_FAILED_NO_DETAIL: when libzmq 4.3.5 reports this event, it loses the error, and the
connection hangs until its handshake limit. So a peer that breaks off during the handshake is closed
as usual, but not reported; a wrong key, a wrong server and a peer without ZeroMQ are reported.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""The address that libzmq uses for the handler."""
ZAP_DOMAIN = b"pdrun"
MAX_ANSWERS = 500
"""A handler is replaced after so many answers."""
DRAIN_SECONDS = 1.0
"""
Time in which the old handler answers requests that were sent to it. Longer than a stall of libzmq's
thread.
"""


class ZapAuthenticator:
    """
    The handler. It is part of the caller's loop: its sockets are registered in the caller's poller,
    and the caller calls `answer_requests` after each poll.

    Args:
        context: of the guarded sockets. Create the handler before any of them is bound.
        poller: for the handler's sockets.
        roles: CURVE public key in Z85 -> role of its connections. Other keys are refused.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        roles: Mapping[bytes, str],
    ) -> None:
        import zmq

        self._zmq = zmq
        self._context = context
        self._poller = poller
        self._roles = roles
        self._answered = 0
        self._replaced_at = 0.0
        self._old: zmq.Socket[bytes] | None = None
        self._current = self._make_handler()
        self._current.bind(ZAP_ADDRESS)

    def guard_socket(self, socket: zmq.Socket[bytes]) -> None:
        """
        Make a socket, before it is bound, ask this handler. Without a handler it accepts no
        connection.
        """
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(self._zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer_requests(self, ready: Collection[object]) -> None:
        """Answer requests on the sockets in ``ready``, and replace the handler if it is time."""
        if self._current in ready:
            self._answered += self._serve_handler(self._current)
        if self._old is not None:
            self._serve_handler(self._old)
            if time.monotonic() - self._replaced_at >= DRAIN_SECONDS:
                self._poller.unregister(self._old)
                self._old.close(linger=0)
                self._old = None
        elif self._answered >= MAX_ANSWERS:
            self._replace_handler()

    def close(self) -> None:
        """Close the handler."""
        self._current.close(linger=0)
        if self._old is not None:
            self._old.close(linger=0)

    def _replace_handler(self) -> None:
        self._answered = 0
        try:
            new = self._make_handler()
        except (
            self._zmq.ZMQError
        ):  # no descriptor is left: nobody comes in either, and what is there goes on
            return
        self._old = self._current
        self._current = new
        self._replaced_at = time.monotonic()
        self._old.unbind(ZAP_ADDRESS)
        new.bind(ZAP_ADDRESS)

    def _make_handler(self) -> zmq.Socket[bytes]:
        handler = self._context.socket(self._zmq.REP)
        self._poller.register(handler, self._zmq.POLLIN)
        return handler

    def _serve_handler(self, handler: zmq.Socket[bytes]) -> int:
        """Answer all requests to a handler; return their number."""
        answered = 0
        while True:
            try:
                request = handler.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return answered
            version, number = (request + [b"", b""])[:2]
            known = (
                len(request) == 7
                and version == b"1.0"
                and request[5] == b"CURVE"
                and len(request[6]) == 32
            )
            role = self._roles.get(_encode_z85(request[6])) if known else None
            reply = (
                [b"200", b"OK", role.encode(), b""] if role else [b"400", b"unknown key", b"", b""]
            )
            handler.send_multipart([b"1.0", number, *reply])
            answered += 1


def _encode_z85(key: bytes) -> bytes:
    from zmq.utils import z85

    return z85.encode(key)
