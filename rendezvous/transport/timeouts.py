"""
Limits of connections: handshakes of a crowd, probes of silent connections, the fence. Pure.

One process accepts about 400 connections per second with CURVE, on one core. A handshake limit for
a few nodes would end most handshakes of ten thousand before their turn, and these nodes would try
again: none would ever be accepted. So limits grow with the crowd.

ZeroMQ's own probes (PING, PONG) are for small jobs. Each answer cancels a timer, for which libzmq
4.3.5 walks through the timers of all connections (`poller_base_t::cancel_timer`); for ten thousand
connections that costs more than their messages. In a large job the kernel closes connections whose
other side is gone. The agents' heartbeats detect all other faults, as in a small job.
"""

from __future__ import annotations

from types import ModuleType

HANDSHAKE_SECONDS = 3.0
"""Limit of a handshake in a small job."""
SERVER_HANDSHAKE_SECONDS = 7.0
"""The same on the side that accepts: it does not know how slow the network is."""
HANDSHAKE_ROUND_TRIPS = 5
"""Round trips of a handshake, with a margin of one."""
MAX_ROUND_TRIP_SECONDS = SERVER_HANDSHAKE_SECONDS / HANDSHAKE_ROUND_TRIPS
"""Latency with which a handshake succeeds."""
HANDSHAKES_PER_SECOND = 200
"""Handshakes per second of one process, with a margin for a busy machine."""
PROBE_SECONDS = 1.0
"""Time between ZeroMQ's probes of a silent connection; three without an answer end it."""
MAX_PROBED_NODES = 1000
"""Largest job with ZeroMQ's probes."""
KEEPALIVE_SECONDS = 15
"""Time between the kernel's probes of a silent connection; three without an answer end it."""
FENCE_MARGIN_SECONDS = 1.0
"""
Time for the kernel to end the workers of a silent node before the others may start. At most a tenth
of the silence after which a node is lost.
"""


def fence_margin(dead: float) -> float:
    """Return the seconds between the end of a node's workers and its loss."""
    return min(FENCE_MARGIN_SECONDS, dead / 10)


def handshake_seconds(crowd: int) -> float:
    """Return the limit of a handshake if ``crowd`` connections may be opened at the same time."""
    return HANDSHAKE_SECONDS + crowd / HANDSHAKES_PER_SECOND


def server_handshake_seconds(crowd: int) -> float:
    """Return the limit of a handshake on the side that accepts."""
    return max(SERVER_HANDSHAKE_SECONDS, handshake_seconds(crowd))


def probe_milliseconds(crowd: int) -> int:
    """
    Return the milliseconds between ZeroMQ's probes of one of ``crowd`` connections; 0: no probes.
    """
    return int(PROBE_SECONDS * 1000) if crowd <= MAX_PROBED_NODES else 0


def keepalive_options(zmq: ModuleType) -> tuple[tuple[int, int], ...]:
    """Return the socket options for the kernel's probes; ``zmq`` is the module."""
    return (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_SECONDS),
        (zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_SECONDS),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    )
