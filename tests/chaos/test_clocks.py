"""
Clocks of hosts that differ or jump: no decision is taken by a wall clock, or by another host's
clock.
"""

from __future__ import annotations

import time

import pytest

from tests.chaos import clocks
from tests.chaos.jobs import Bed
from tests.lib.tiers import thorough

HOUR = 3600
moved = pytest.mark.skipif(bool(clocks.why_not()), reason=clocks.why_not())


def stays_up(bed: Bed, seconds: float) -> None:
    """
    Nothing happens for so long, which includes heartbeats and their deadlines; then the job ends
    well.
    """
    time.sleep(seconds)
    assert not bed.events("lost") and not bed.events("suspect") and not bed.notes("signal"), (
        bed.said()
    )
    bed.order("all", "exit 0")
    assert bed.codes() == [0] * 3, bed.said()
    assert len(bed.events("assigned")) == 1
    bed.clean()


@moved
@pytest.mark.parametrize("host", [thorough("h1"), "h2"])
def test_a_wall_clock_that_is_an_hour_off(bed: Bed, host: str) -> None:
    """On the scheduler's node, and on another."""
    bed[host].skew(HOUR if host == "h2" else -HOUR)
    bed.job("--time-limit", "10m")
    walls = {note.host: note.wall for note in bed.running()}
    assert max(walls.values()) - min(walls.values()) > HOUR / 2
    stays_up(bed, 5)


@pytest.mark.thorough
@moved
def test_wall_clocks_that_jump_during_the_run(bed: Bed) -> None:
    for host in bed.cluster:
        host.skew(0)
    bed.job("--time-limit", "10m")
    bed.running()
    for name, offset in (("h1", HOUR), ("h2", -HOUR), ("h1", -2 * HOUR), ("h3", 86400 * 365)):
        bed[name].skew(offset)
        time.sleep(1.2)
    stays_up(bed, 3)


def test_monotonic_clocks_with_other_beginnings(bed: Bed) -> None:
    """A host that has been up for months beside one that was just started."""
    for name, ahead in (("h1", 10_000_000), ("h3", 1000)):
        bed[name].crash()
        bed[name].boot(monotonic=ahead)
    bed.job()
    starts = {note.host: note.at for note in bed.running()}
    assert starts["h1"] - starts["h2"] > 9_000_000
    stays_up(bed, 5)
