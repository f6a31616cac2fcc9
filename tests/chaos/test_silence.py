"""
Nodes that fall silent, links that are cut, machines that stand still: jobs of a fixed size.

Each fault is a function of a bed; they mostly wait, so the module runs them side by side.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future

import pytest

from tests.chaos.groups import Unavailable
from tests.chaos.jobs import Bed
from tests.e2e.conftest import until
from tests.lib.tiers import thorough

BOUND = 20.0
"""Seconds for what takes at most ten on a quiet machine, with the stop of the others."""


def node_crash(bed: Bed) -> None:
    """Its kernel tells the others: one second."""
    jobs = bed.job()
    bed.running()
    crashed = time.monotonic()
    bed["h2"].crash()
    lost = bed.event("lost")
    assert lost.data["node"] == "h2"
    assert lost.data["reason"].startswith("its connection was closed, and it did not connect")
    assert bed.codes(jobs[0], jobs[2]) == [69] * 2, bed.said()
    assert bed.notes("signal")[-1].at - crashed < 8, "one second on a quiet machine"
    bed.clean()


def power_off(bed: Bed) -> None:
    """Nobody tells anybody anything: ten seconds of silence."""
    jobs = bed.job()
    bed.running()
    gone = time.monotonic()
    bed["h2"].power_off()
    assert bed.codes(jobs[0], jobs[2]) == [69] * 2, bed.said()
    assert bed.notes("signal")[-1].at - gone < BOUND
    assert all("h2" in job.err and "lost" in job.err for job in (jobs[0], jobs[2])), bed.said()
    assert_silence(bed)
    bed.clean()


def assert_silence(bed: Bed) -> None:
    """The reason is what was seen, not what may have happened."""
    reason = bed.event("lost").data["reason"]
    assert reason.startswith(("no message for 9.", "no message for 10.")), reason
    assert reason.endswith("s, the probes of its connection were not answered"), reason


def agent_that_stands_still(bed: Bed) -> None:
    """Its kernel accepts what is sent, and nothing answers."""
    jobs = bed.job()
    bed.running()
    os.kill(jobs[1].pid, signal.SIGSTOP)
    assert bed.codes(jobs[0], jobs[2]) == [69] * 2, bed.said()
    assert_silence(bed)
    os.kill(jobs[1].pid, signal.SIGCONT)
    jobs[1].process.send_signal(signal.SIGCONT)  # nsenter stops with its child
    assert bed.codes(jobs[1], timeout=90) == [69], bed.said()
    bed.clean()


def one_way_to_the_scheduler(bed: Bed) -> None:
    """The scheduler no longer hears h2, which still hears it: both come to the same end."""
    _cut_off(bed, "h2", "h1")
    assert_silence(bed)


def one_way_from_the_scheduler(bed: Bed) -> None:
    """h2 no longer hears the scheduler. Without acknowledgements its messages stop soon, too."""
    _cut_off(bed, "h1", "h2")
    reason = bed.event("lost").data["reason"]
    seen = (
        "no message for 9.",
        "no message for 10.",
        "it closed a connection on which it received nothing",
    )
    assert reason.startswith(seen), reason


def _cut_off(bed: Bed, sender: str, receiver: str) -> None:
    bed.job("--on-scheduler-loss", "wait=5")
    bed.running()
    cut = time.monotonic()
    bed.cluster.one_way(sender, receiver)
    until(lambda: len(bed.notes("signal")) == 3, "workers on both sides of the cut are stopped", 60)
    ends = {note.host: note.at - cut for note in bed.notes("signal")}
    assert max(ends["h1"], ends["h3"]) < BOUND, ends
    assert ends["h2"] < BOUND + 10, "it waits five seconds more for a scheduler that may come back"
    assert bed.codes() == [69] * 3, bed.said()
    bed.clean()


def partition_of_five_seconds(bed: Bed) -> None:
    """Nothing happens."""
    bed.job()
    bed.running()
    bed.cluster.cut("h1", "h2")
    time.sleep(5)
    bed.cluster.heal()
    _ends_well(bed)


def partition_of_thirty_seconds(bed: Bed) -> None:
    """
    A job that needs all nodes ends on both sides, and does not wake up again when the link is back.
    """
    bed.job("--on-scheduler-loss", "wait=30")
    bed.running()
    bed.cluster.cut("h1", "h2")
    bed.event("lost", timeout=30)
    assert_silence(bed)
    assert bed.codes(bed.jobs[0], bed.jobs[2]) == [69] * 2, bed.said()
    time.sleep(15)
    bed.cluster.heal()
    assert bed.codes(timeout=90) == [69] * 3, bed.said()
    assert len(bed.notes("signal")) == 3
    bed.clean()


def link_that_flaps(bed: Bed) -> None:
    """One second on, one second off: nobody is given up, whatever is cut or lost in between."""
    bed.job()
    bed.running()
    for _ in range(8):
        bed["h2"].link(False)
        time.sleep(1)
        bed["h2"].link(True)
        time.sleep(1)
    _ends_well(bed)


def freeze_of_five_seconds(bed: Bed) -> None:
    """Called suspect, and forgotten."""
    bed.job()
    bed.running()
    bed["h2"].freeze()
    time.sleep(5)
    bed["h2"].thaw()
    _ends_well(bed)
    assert bed.events("suspect"), "five seconds are noticed"


def freeze_of_twenty_seconds(bed: Bed) -> None:
    """The others go on without it; when it wakes, it is told, and ends its workers."""
    jobs = bed.job()
    bed.running()
    bed["h2"].freeze()
    assert bed.codes(jobs[0], jobs[2]) == [69] * 2, bed.said()
    time.sleep(8)
    bed["h2"].thaw()
    assert bed.codes(jobs[1], timeout=90) == [69], bed.said()
    bed.clean()


def power_off_of_the_first_node(bed: Bed) -> None:
    """
    The scheduler is gone for good: the others wait for it as they were told, then end with 69.
    """
    jobs = bed.job("--on-scheduler-loss", "wait=5")
    bed.running()
    bed["h1"].power_off()
    assert bed.codes(jobs[1], jobs[2], timeout=60) == [69] * 2, bed.said()
    bed.clean("h2", "h3")


def scheduler_that_stands_still(bed: Bed) -> None:
    """Four seconds without a scheduler are its own fault, not the nodes': nobody is given up."""
    jobs = bed.job()
    bed.running()
    scheduler = jobs[0].scheduler()
    os.kill(scheduler, signal.SIGSTOP)
    time.sleep(4)
    os.kill(scheduler, signal.SIGCONT)
    time.sleep(3)
    assert jobs[0].scheduler() == scheduler and not bed.events("resumed")
    _ends_well(bed)


def link_that_loses_a_third(bed: Bed) -> None:
    """Slower, and nothing else: from before the start to the end."""
    for name in ("h1", "h2", "h3"):
        bed[name].loss(30)
    bed.job()
    bed.running(timeout=90)
    time.sleep(12)
    bed.order("all", "exit 0")
    assert bed.codes(timeout=60) == [0] * 3, bed.said()
    assert not bed.events("lost")
    bed.clean()


def link_of_two_hundred_kilobits(bed: Bed) -> None:
    """A line that is slow, while a worker prints a megabyte."""
    for name in ("h2", "h3"):
        bed[name].rate("200kbit")
    bed.job()
    bed.running(timeout=60)
    bed.order(1, "write 1000000")
    until(lambda: bool(bed.notes("written")), "a megabyte is printed", 60)
    time.sleep(5)
    _ends_well(bed)


def path_that_swallows_large_packets(bed: Bed) -> None:
    """A path MTU of 1300 that nobody tells about: what must be small to get through is."""
    for name in ("h1", "h2", "h3"):
        bed[name].black_hole(1300)
    bed.job()
    bed.running(timeout=60)
    time.sleep(5)
    _ends_well(bed)


def node_short_of_cpu(bed: Bed) -> None:
    """A tenth of one CPU for everything on a host: slow to start, and nothing else."""
    try:
        bed["h2"].group.limit("cpu", 10_000)
    except Unavailable as reason:
        pytest.skip(str(reason))
    bed.job()
    bed.running(timeout=120)
    time.sleep(12)
    _ends_well(bed)


def workers_that_cannot_reach_each_other(bed: Bed) -> None:
    """
    The scheduler hears everybody: that two workers do not is theirs to find out, and no node is
    lost.
    """
    bed.job()
    bed.running()
    bed.cluster.cut("h2", "h3")
    time.sleep(12)
    _ends_well(bed)


def _ends_well(bed: Bed) -> None:
    """No worker has noticed anything; the job ends with 0."""
    assert all(job.process.poll() is None for job in bed.jobs), bed.said()
    assert not bed.notes("signal") and not bed.events("lost"), bed.said()
    bed.order("all", "exit 0")
    assert bed.codes(timeout=60) == [0] * 3, bed.said()
    assert len(bed.events("assigned")) == 1
    bed.clean()


FAULTS = (
    link_that_loses_a_third,
    node_short_of_cpu,
    partition_of_thirty_seconds,
    freeze_of_twenty_seconds,
    power_off_of_the_first_node,
    link_that_flaps,
    power_off,
    agent_that_stands_still,
    one_way_to_the_scheduler,
    one_way_from_the_scheduler,
    scheduler_that_stands_still,
    workers_that_cannot_reach_each_other,
    link_of_two_hundred_kilobits,
    path_that_swallows_large_packets,
    freeze_of_five_seconds,
    partition_of_five_seconds,
    node_crash,
)
"""The longest first."""
SIBLINGS = (
    link_that_loses_a_third,
    freeze_of_twenty_seconds,
    partition_of_thirty_seconds,
    one_way_from_the_scheduler,
    agent_that_stands_still,
    link_of_two_hundred_kilobits,
    node_short_of_cpu,
    scheduler_that_stands_still,
)
"""Only in the thorough run; the others, and `test_standstill`, have each end of a silence."""
CASES = [thorough(fault.__name__) if fault in SIBLINGS else fault.__name__ for fault in FAULTS]


@pytest.mark.slow
@pytest.mark.parametrize("fault", CASES)
def test_silence(fault: str, side_by_side: dict[str, Future[None]]) -> None:
    side_by_side[fault].result(timeout=170)
