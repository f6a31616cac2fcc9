"""
Who is let in: the handler of ZAP (RFC 27), which libzmq asks about each CURVE key that wants to
connect.

Each connection has its own pair of queues to the handler, and keeps it after its only question, for
its own life: more than 8 KB of memory, beside thousands of others. So the handler is replaced now
and then: the queues of those that were answered go with the old one, and a connection notices
nothing. One that asks in the very moment between the old handler and the new is refused, never let
in unasked, and comes again by itself.

That it is told so at once needs a monitor of the guarded socket that does not ask for
HANDSHAKE_FAILED_NO_DETAIL: telling that event, libzmq 4.3.5 forgets the error that it was about,
and the connection hangs for the time that a handshake may take. So who breaks off or goes silent in
the middle of a handshake is cut off as ever, but not told of: a wrong key, a wrong server and what
is no ZeroMQ are.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""Where libzmq looks for the handler."""
ZAP_DOMAIN = b"pdrun"
MAX_ANSWERS = 500
"""Questions after which a handler is replaced."""
DRAIN_SECONDS = 1.0
"""
Seconds in which the old one answers those that had begun to ask it; more than a thread of libzmq
stands still.
"""


class ZapAuthenticator:
    """
    Answers in the loop that polls: its sockets are registered there, and `answer` is called after
    each poll.

    Args:
        context: of the sockets that are guarded. To be made before any of them is bound.
        poller: where the handlers are registered.
        roles: CURVE public key in Z85 -> what connections with that key are; others are refused.
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
        """Have a socket, not bound yet, ask here; without a handler it lets nobody in."""
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(self._zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer_requests(self, ready: Collection[object]) -> None:
        """
        Answer what is asked on the sockets that are ready, and replace the handler where it is
        time.
        """
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
        """Answer nobody any more."""
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
        self._old, self._current, self._replaced_at = self._current, new, time.monotonic()
        self._old.unbind(ZAP_ADDRESS)
        new.bind(ZAP_ADDRESS)

    def _make_handler(self) -> zmq.Socket[bytes]:
        handler = self._context.socket(self._zmq.REP)
        self._poller.register(handler, self._zmq.POLLIN)
        return handler

    def _serve_handler(self, handler: zmq.Socket[bytes]) -> int:
        """Answer all that a handler has been asked; return how many that were."""
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
