"""
How patient connections are when many come at once. Pure.

One process takes in some 400 connections a second with CURVE, on one core. A handshake's limit that suits a few nodes
would cut off most of ten thousand while they wait for their turn, and these would come again and wait once more: nobody
would ever be in. So limits grow with the crowd. Probes of silent connections grow more seldom: between them and the
agents' own heartbeats, which every node sends whatever the size of the job, nothing is learned later.
"""

from __future__ import annotations

HANDSHAKE = 3.0
"""Seconds that a connection has to prove its key where few are expected."""
TAKEN_A_SECOND = 200
"""Handshakes a second of one process, with room for a busy machine."""
PROBE, SELDOM = 1.0, 10.0
"""Seconds between probes of a silent connection in a small job, and at most."""
PROBED_A_SECOND = 1000


def handshake(crowd: int) -> float:
    """Return the seconds that a handshake may take where ``crowd`` connections may come at once."""
    return HANDSHAKE + crowd / TAKEN_A_SECOND


def probe(crowd: int) -> float:
    """Return the seconds between two probes of a silent connection, of ``crowd``; three without answer end it."""
    return min(SELDOM, max(PROBE, crowd / PROBED_A_SECOND))
