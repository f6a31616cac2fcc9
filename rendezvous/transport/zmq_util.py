"""
Helpers for ZeroMQ sockets: bounded end of a context, socket monitors, waiting for descriptors.
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
RECONNECT_IVL of a socket that must never reconnect itself. Not -1, which means the same: with -1,
libzmq 4.3.5 was seen never to end the context of a socket whose connection was cut while messages
were queued.
"""
SPARE_SECONDS = 1.0
"""Time beyond the linger time after which a context is left to the end of the process."""
MAX_POLL_SECONDS = 1e6
"""`poll` cannot count more."""


def end_context(context: zmq.Context[zmq.Socket[bytes]], linger: float) -> None:
    """
    End a context whose sockets are all closed, after at most ``linger`` seconds for queued
    messages.
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
    Monitor a socket; return the socket for `read_monitor_event`. ``socket.monitor(None, 0)`` ends
    it.

    Unlike pyzmq's ``get_monitor_socket`` it has no limit on queued events. With a limit, libzmq's
    own thread waits for room with a lock that the end of monitoring needs: if thousands of
    connections end together and the events are not read, both block for ever.
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

    ``zmq.utils.monitor`` does the same but imports asyncio and ssl: 60 ms in every agent and
    scheduler.
    """
    first, *_ = monitor.recv_multipart()
    event, value = struct.unpack("=Hi", first)
    return event, value


def wait_readable(*descriptors: int, wait: float | None = None) -> set[int]:
    """
    Return the ``descriptors`` that are readable or at their end, as soon as there is one.

    `select.select` refuses descriptors from 1024 on, and a user's process may have many.

    Args:
        wait: seconds after which the result is empty; 0 or less: do not wait; None: no limit.

    Raises:
        ValueError: one of them is not open.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    # Rounded up, so that a caller does not return just before its deadline again and again.
    found = dict(
        poll.poll(None if wait is None else math.ceil(min(max(0.0, wait), MAX_POLL_SECONDS) * 1000))
    )
    if closed := [number for number, event in found.items() if event & select.POLLNVAL]:
        raise ValueError(f"not open: descriptor {closed[0]}")
    return set(found)
