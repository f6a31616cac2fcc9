"""
Elastic jobs on hosts that die, vanish, freeze and come back: never two generations at once, never a
worker too many.

Each fault is a function of a bed; they mostly wait, so the module runs them side by side.
"""

from __future__ import annotations

import signal
import time
from concurrent.futures import Future

import pytest

from tests.chaos.jobs import Bed, NodeJob
from tests.e2e.conftest import until
from tests.lib.tiers import thorough

BOUND = 25.0
"""Seconds for what takes at most ten on a quiet machine, with the start of the next generation."""
AWAKE = 8.0
"""Seconds for what takes at most two: the end of the workers of a machine that wakes up."""


def elastic(bed: Bed, *options: str) -> list[NodeJob]:
    """Two or three nodes; three are there and run."""
    jobs = bed.job("--grace", "3", *options, nodes="2:3")
    bed.running(3)
    return jobs


def crash_and_return(bed: Bed) -> None:
    """
    The others go on at once, without counting a restart; the node, booted again, makes it three.
    """
    jobs = elastic(bed, "--grow", "1")
    crashed = time.monotonic()
    bed["h2"].crash()
    again = bed.running(2, generation=1)
    assert again[-1].at - crashed < BOUND
    assert [(note.host, note.restarts, note.world) for note in again] == [
        ("h1", 0, 2),
        ("h3", 0, 2),
    ]
    bed["h2"].boot()
    back = bed.start("h2", "--grace", "3", "--grow", "1", nodes="2:3")
    full = bed.running(3, generation=2)
    assert sorted(note.host for note in full) == ["h1", "h2", "h3"]
    _ends_well(bed, jobs[0], jobs[2], back)


def power_off(bed: Bed) -> None:
    """Ten seconds of silence, then the others go on."""
    jobs = elastic(bed)
    gone = time.monotonic()
    bed["h3"].power_off()
    again = bed.running(2, generation=1)
    assert again[-1].at - gone < BOUND and {note.host for note in again} == {"h1", "h2"}
    _ends_well(bed, jobs[0], jobs[1])


def agent_started_beside_one_that_stands_still(bed: Bed) -> None:
    """
    The new one waits until the earlier one is lost: as when its machine loses power and is back at
    once, the scheduler has an open connection that says nothing.
    """
    jobs = elastic(bed, "--grow", "1")
    jobs[2].signal(signal.SIGSTOP)
    back = bed.start("h3", "--grace", "3", "--grow", "1", nodes="2:3")
    until(
        lambda: any(len(bed.notes("start", generation=count)) == 3 for count in (1, 2)),
        "three nodes run again",
        BOUND,
    )
    assert not bed.events("refused"), bed.said()
    jobs[2].signal(signal.SIGKILL)
    jobs[2].process.send_signal(signal.SIGCONT)
    _ends_well(bed, jobs[0], jobs[1], back)


def cut_of_thirty_seconds(bed: Bed) -> None:
    """
    The node that is cut off ends its workers before the others begin anew; healed, it comes back by
    itself.
    """
    jobs = elastic(bed, "--grow", "1")
    bed.cluster.cut("h1", "h2")
    again = bed.running(2, generation=1)
    ended = [note.at for note in bed.notes("signal") if note.host == "h2"]
    assert ended and ended[0] <= again[0].at, "the old generation has ended when the new one starts"
    time.sleep(10)
    bed.cluster.heal()
    bed.running(3, generation=2)
    _ends_well(bed, *jobs)


def freeze_of_twenty_seconds(bed: Bed) -> None:
    """
    A machine that stands still cannot end its workers; it does so before anything else when it
    wakes.
    """
    jobs = elastic(bed, "--grow", "1")
    (old,) = (note for note in bed.notes("start") if note.host == "h2")
    bed["h2"].freeze()
    bed.running(2, generation=1)
    time.sleep(5)
    bed["h2"].thaw()
    thawed = time.monotonic()
    full = bed.running(3, generation=2)
    (life,) = (life for life in bed.lives() if life.host == "h2" and life.pid == old.pid)
    assert life.last - thawed < AWAKE and life.last <= full[0].at
    _ends_well(bed, *jobs)


def sigterm_is_leaving(bed: Bed) -> None:
    """
    A node whose machine is to be taken away ends its workers in order; the others go on without it.
    """
    jobs = elastic(bed)
    jobs[2].signal(signal.SIGTERM)
    again = bed.running(2, generation=1)
    assert [note.restarts for note in again] == [0, 0]
    jobs[2].wait(30)
    assert not bed.events("lost") and bed.event("left").data["node"] == "h3"
    bed.clean("h3")
    _ends_well(bed, jobs[0], jobs[1])


def spare_takes_the_place(bed: Bed) -> None:
    """One more than needed stands by, and takes part when another is lost."""
    jobs = bed.job("--spares", "1", nodes="2")
    victim = next(note.host for note in bed.running(2) if note.host != "h1")
    bed.event("standby")
    bed[victim].crash()
    again = bed.running(2, generation=1)
    assert {note.host for note in again} == {"h1", "h2", "h3"} - {victim} and again[0].world == 2
    _ends_well(bed, *(job for job in jobs if job.host.name != victim))


def late_node_waits_for_the_next_generation(bed: Bed) -> None:
    """
    Two form a job after the quiet; the third stands by, and takes part after the next failure.
    """
    jobs = [
        bed.start(name, "--gather", "1", "--max-restarts", "1", nodes="2:3")
        for name in ("h1", "h2")
    ]
    bed.running(2)
    late = bed.start("h3", "--gather", "1", "--max-restarts", "1", nodes="2:3")
    bed.event("standby")
    assert not bed.notes("signal")
    bed.order(1, "exit 3", when="g0")
    full = bed.running(3, generation=1)
    assert [note.restarts for note in full] == [1, 1, 1]
    _ends_well(bed, *jobs, late)


def node_that_starts_while_the_first_host_stands_still(bed: Bed) -> None:
    """
    Somebody takes its connections and says nothing, then the link is cut: nothing of that is
    another token.
    """
    options = ("--gather", "1", "--grow", "1")
    jobs = bed.job(*options, hosts=("h1", "h2"), nodes="2:3")
    bed.running(2)
    bed["h1"].freeze()
    late = bed.start("h3", *options, nodes="2:3")
    time.sleep(5.5)
    bed.cluster.cut("h1", "h3")
    time.sleep(5.5)
    bed["h1"].thaw()
    time.sleep(5)
    bed.cluster.heal()
    bed.running(3, generation=1)
    _ends_well(bed, *jobs, late)


def agent_killed_and_started_again(bed: Bed) -> None:
    """Its workers are gone, the new agent is a new member, and takes part again."""
    jobs = elastic(bed, "--grow", "1")
    jobs[1].signal(signal.SIGKILL)
    bed.clean("h2", timeout=10)
    back = bed.start("h2", "--grace", "3", "--grow", "1", nodes="2:3")
    until(
        lambda: any(note.host == "h2" and note.generation for note in bed.notes("start")),
        "h2 is back",
        60,
    )
    _ends_well(bed, jobs[0], back, jobs[2])


def too_few_left_is_the_end(bed: Bed) -> None:
    """Two crash at once: one is less than two, and no restarts are left to wait with."""
    jobs = elastic(bed)
    bed["h2"].crash()
    bed["h3"].crash()
    assert jobs[0].wait(60) == 69, bed.said()
    bed.clean("h1")


def replacement_is_waited_for(bed: Bed) -> None:
    """A job of fixed size with a restart left waits for the lost node to come back."""
    jobs = bed.job("--max-restarts", "1", "--grace", "3")
    bed.running()
    bed["h2"].crash()
    bed.event("lost")
    bed["h2"].boot()
    back = bed.start("h2", "--max-restarts", "1", "--grace", "3")
    again = bed.running(3, generation=1)
    assert [note.restarts for note in again] == [1, 1, 1]
    _ends_well(bed, jobs[0], back, jobs[2])


def _ends_well(bed: Bed, *jobs: NodeJob) -> None:
    """
    The job ends with 0 on the nodes that are in; no generation had started before the last one had
    ended.
    """
    bed.order("all", "exit 0")
    assert bed.codes(*jobs, timeout=90) == [0] * len(jobs), bed.said()
    for event in bed.events("assigned"):
        nodes = [name for name, _, _ in event.data["nodes"]]
        assert len(nodes) == len(set(nodes))
    bed.clean(*(job.host.name for job in jobs))


FAULTS = (
    cut_of_thirty_seconds,
    freeze_of_twenty_seconds,
    power_off,
    agent_started_beside_one_that_stands_still,
    crash_and_return,
    replacement_is_waited_for,
    node_that_starts_while_the_first_host_stands_still,
    agent_killed_and_started_again,
    late_node_waits_for_the_next_generation,
    spare_takes_the_place,
    sigterm_is_leaving,
    too_few_left_is_the_end,
)
"""The longest first."""
SIBLINGS = (
    freeze_of_twenty_seconds,
    power_off,
    agent_started_beside_one_that_stands_still,
    agent_killed_and_started_again,
    node_that_starts_while_the_first_host_stands_still,
    late_node_waits_for_the_next_generation,
    spare_takes_the_place,
    sigterm_is_leaving,
    too_few_left_is_the_end,
)
"""Only in the thorough run; `test_standstill`, `test_silence` and e2e/test_elastic.py have them."""
CASES = [thorough(fault.__name__) if fault in SIBLINGS else fault.__name__ for fault in FAULTS]


@pytest.mark.slow
@pytest.mark.parametrize("fault", CASES)
def test_elastic(fault: str, side_by_side: dict[str, Future[None]]) -> None:
    side_by_side[fault].result(timeout=170)
