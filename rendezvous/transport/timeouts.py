"""
How patient connections are when many come at once, and how silent ones are probed. Pure.

One process takes in some 400 connections a second with CURVE, on one core. A handshake's limit that
suits a few nodes would cut off most of ten thousand while they wait for their turn, and these would
come again and wait once more: nobody would ever be in. So limits grow with the crowd.

ZeroMQ's own probes (PING, PONG) are for small jobs. Each answer cancels a timer, for which libzmq
4.3.5 walks through the timers of all connections (`poller_base_t::cancel_timer`): for ten thousand
that is more work than their messages. In a large job the kernel looks after connections whose other
end is gone, and the agents' heartbeats after the rest, as they do whatever the size of the job.
"""

from __future__ import annotations

from types import ModuleType

HANDSHAKE_SECONDS = 3.0
"""Seconds that a connection has to prove its key where few are expected."""
HANDSHAKES_PER_SECOND = 200
"""Handshakes a second of one process, with room for a busy machine."""
PROBE_SECONDS = 1.0
"""Seconds between ZeroMQ's probes of a silent connection; three without an answer end it."""
MAX_PROBED_NODES = 1000
"""Nodes up to which there are such probes."""
KEEPALIVE_SECONDS = 15
"""Seconds between the kernel's probes of a silent connection; three without an answer end it."""


def handshake_seconds(crowd: int) -> float:
    """Return the seconds that a handshake may take where ``crowd`` connections may come at once."""
    return HANDSHAKE_SECONDS + crowd / HANDSHAKES_PER_SECOND


def probe_milliseconds(crowd: int) -> int:
    """
    Return the milliseconds between two of ZeroMQ's probes of one of ``crowd`` connections; 0: there
    are none.
    """
    return int(PROBE_SECONDS * 1000) if crowd <= MAX_PROBED_NODES else 0


def keepalive_options(zmq: ModuleType) -> tuple[tuple[int, int], ...]:
    """
    Return the options of a socket that have the kernel probe its connections; ``zmq`` is the module
    of that name.
    """
    return (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS),
        (zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_SECONDS),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    )
