"""
What pyzmq leaves open: a context's end that is bounded, and a monitor without a limit and without
asyncio.
"""

from __future__ import annotations

import math
import secrets
import select
import struct
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

NEVER_RECONNECT_MS = 3_600_000
"""
RECONNECT_IVL, milliseconds, of a socket that is never to reconnect by itself. Not -1, which says
just that: with it libzmq 4.3.5 was seen never to end the context of a socket whose connection was
cut while messages were queued.
"""
SPARE_SECONDS = 1.0
"""Seconds beyond the linger time after which a context is left to the end of the process."""
MAX_POLL_SECONDS = 1e6
"""Seconds: more than this is what `poll` cannot count."""


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
    thread.join(linger + SPARE_SECONDS)


def open_monitor(socket: zmq.Socket[bytes], events: int | None = None) -> zmq.Socket[bytes]:
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


def read_monitor_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """
    Read one message of a socket monitor; return event and value (zmq_socket_monitor(3)).

    ``zmq.utils.monitor`` does as much and imports asyncio and ssl, 60 ms in every agent and
    scheduler.
    """
    first, *_ = monitor.recv_multipart()
    event, value = struct.unpack("=Hi", first)
    return event, value


def wait_readable(*descriptors: int, wait: float | None = None) -> set[int]:
    """
    Return those of ``descriptors`` that can be read, or whose other end is gone, as soon as there
    is one.

    ``wait``: seconds after which the answer is the empty set; 0 or less: at once; None: as long as
    it takes.

    Raises:
        ValueError: one of them is not open.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    # rounded up: a caller that waits for a moment must not come back just before it, again and
    # again
    found = dict(
        poll.poll(None if wait is None else math.ceil(min(max(0.0, wait), MAX_POLL_SECONDS) * 1000))
    )
    if closed := [number for number, event in found.items() if event & select.POLLNVAL]:
        raise ValueError(f"not open: descriptor {closed[0]}")
    return set(found)
