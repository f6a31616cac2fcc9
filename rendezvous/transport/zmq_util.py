"""
What pyzmq leaves open: a context's end that is bounded, and a monitor without a limit and without
asyncio.
"""

from __future__ import annotations

import secrets
import struct
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

FAR_AWAY = 3_600_000
"""
RECONNECT_IVL, milliseconds, of a socket that is never to reconnect by itself. Not -1, which says
just that: with it libzmq 4.3.5 was seen never to end the context of a socket whose connection was
cut while messages were queued.
"""
SPARE = 1.0
"""Seconds beyond the linger time after which a context is left to the end of the process."""


def end_context(context: zmq.Context[zmq.Socket[bytes]], linger: float) -> None:
    """
    End a context, all of whose sockets are closed; gives what is queued ``linger`` seconds to
    leave.
    """
    thread = threading.Thread(target=context.term, name="pdrun-zmq-end", daemon=True)
    try:
        thread.start()
    except (
        RuntimeError
    ):  # an interpreter on its way out starts no thread (Python 3.12): one that may hang does it
        if threading.current_thread().daemon:
            context.term()
        return
    thread.join(linger + SPARE)


def monitor(socket: zmq.Socket[bytes], events: int | None = None) -> zmq.Socket[bytes]:
    """
    Begin to monitor a socket; return where `monitor_event` reads. ``socket.monitor(None, 0)`` ends
    it.

    Unlike pyzmq's ``get_monitor_socket`` it holds any number of events. With a limit libzmq's own
    thread waits for room in a full one, with a lock that the end of monitoring wants: thousands of
    connections that end together, and nobody who reads any more, wait for ever.
    """
    import zmq

    address = f"inproc://monitor-{secrets.token_hex(8)}"
    socket.monitor(address, zmq.EVENT_ALL if events is None else events)
    reader: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    reader.setsockopt(zmq.RCVHWM, 0)
    reader.setsockopt(zmq.LINGER, 0)
    reader.connect(address)
    return reader


def monitor_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """
    Read one message of a socket monitor; return event and value (zmq_socket_monitor(3)).

    ``zmq.utils.monitor`` does as much and imports asyncio and ssl, 60 ms in every agent and
    scheduler.
    """
    first, *_ = monitor.recv_multipart()
    event, value = struct.unpack("=Hi", first)
    return event, value
