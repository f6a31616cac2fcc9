"""
Limits of connections grow with the number that may come at once, and stay what they are for few.
"""

from __future__ import annotations

import pytest

from pdrun.rendezvous.transport import timeouts as pace


@pytest.mark.parametrize(
    ("crowd", "handshake", "probe"),
    [(0, 3.0, 1000), (8, 3.04, 1000), (1000, 8.0, 1000), (1200, 9.0, 0), (12500, 65.5, 0)],
)
def test_limits(crowd: int, handshake: float, probe: float) -> None:
    assert (pace.handshake_seconds(crowd), pace.probe_milliseconds(crowd)) == (handshake, probe)


def test_nobody_is_cut_off_for_waiting_his_turn() -> None:
    """At 400 handshakes a second, the last of a crowd has twice the time that he needs."""
    assert all(pace.handshake_seconds(crowd) > 2 * crowd / 400 for crowd in range(0, 100_000, 500))
