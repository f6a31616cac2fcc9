"""Cut off, or only without a scheduler: what a node's lease counts."""

from __future__ import annotations

from pdrun.net import Endpoint
from pdrun.rendezvous.patience import OWN_STALL, Patience


def turned(patience: Patience, begin: float, end: float) -> float:
    """Call as a loop would, each half second; return ``end``."""
    now = begin
    while now < end:
        now += 0.5
        patience.turn(now)
    return now


def test_a_machine_that_takes_connections_is_not_cut_off() -> None:
    patience = Patience(Endpoint("10.0.0.1", 1), 60.0, None, 100.0)
    now = turned(patience, 100.0, 105.0)
    assert (patience.silent_for(now), patience.cut_off_for(now)) == (5.0, 5.0)
    patience.somebody(now)
    now = turned(patience, now, 108.0)
    assert (patience.silent_for(now), patience.cut_off_for(now)) == (8.0, 3.0)
    patience.nobody(now)  # refused, or no route: that tells nothing
    assert patience.cut_off_for(now) == 3.0
    patience.heard(now)
    assert (patience.silent_for(now), patience.cut_off_for(now)) == (0.0, 0.0)


def test_what_this_process_slept_through_is_no_cut() -> None:
    patience = Patience(Endpoint("10.0.0.1", 1), 60.0, None, 100.0)
    assert patience.cut_off_for(130.0) == OWN_STALL
    patience.turn(130.0)
    assert patience.cut_off_for(130.0) == OWN_STALL
