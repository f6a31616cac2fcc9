"""
Faults of workers, on three hosts: one verdict everywhere, at once where workers obey, and nothing
left over.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos.groups import Group, Unavailable
from tests.chaos.jobs import WORKER, Bed
from tests.lib.tiers import thorough

OLD_FREEZER = Path("/sys/fs/cgroup/freezer/cgroup.procs")


@pytest.mark.parametrize(
    ("order", "code", "words"),
    [
        thorough("exit 3", 3, "exit code 3"),
        ("raise lost my way", 1, "RuntimeError: lost my way"),
        (f"signal {signal.SIGKILL}", 137, "SIGKILL"),
        thorough(f"signal {signal.SIGSEGV}", 139, "SIGSEGV"),
    ],
)
def test_a_worker_that_fails_ends_the_job_everywhere_at_once(
    bed: Bed, order: str, code: int, words: str
) -> None:
    jobs = bed.job()
    bed.running()
    bed.order(1, order)
    assert bed.codes() == [code] * 3, bed.said()
    (failed,), stopped = bed.notes("order"), bed.notes("signal")
    assert [note.number for note in stopped] == [signal.SIGTERM] * 2
    assert stopped[-1].at - failed.at < 5, "a second on a quiet machine"
    assert all(words in job.err and "rank 1 on h2" in job.err for job in jobs), bed.said()
    bed.clean()


@pytest.mark.thorough
def test_a_worker_that_ends_well_early_ends_nobody(bed: Bed) -> None:
    bed.job()
    bed.running()
    bed.order(1, "exit 0")
    bed.event("exited")
    assert not bed.notes("signal")
    bed.order("all", "exit 0")
    assert bed.codes() == [0] * 3, bed.said()
    bed.clean()


@pytest.mark.thorough
def test_workers_that_ignore_sigterm_are_killed_at_grace_on_every_node(bed: Bed) -> None:
    bed.job("--grace", "1.5", worker=["ignore"])
    bed.running()
    bed.order(2, "exit 5")
    assert bed.codes(timeout=20) == [5] * 3, bed.said()
    bed.clean(timeout=3)


def test_children_of_workers_go_with_them_wherever_they_hide(bed: Bed) -> None:
    bed.job(worker=["family"])
    bed.running()
    assert (
        sum("sleep 3600" in words for host in bed.cluster for words in host.processes().values())
        == 6
    )
    bed.order(0, "exit 4")
    assert bed.codes() == [4] * 3, bed.said()
    bed.clean(timeout=3)


def test_the_kernels_memory_killer_is_named(bed: Bed) -> None:
    try:
        bed["h2"].group.limit("memory", 200 << 20)
    except Unavailable as reason:
        pytest.skip(str(reason))
    jobs = bed.job()
    bed.running()
    bed.order(1, f"eat {400 << 20}")
    assert bed.codes() == [137] * 3, bed.said()
    assert all("memory" in job.err for job in jobs), bed.said()
    bed.clean()


def test_a_worker_that_nothing_can_kill_is_named_and_left(bed: Bed) -> None:
    """
    As one in the middle of a transfer to a disk that hangs (state D): the old freezer holds SIGKILL
    back as well.
    """
    if not OLD_FREEZER.exists():
        pytest.skip(f"no {OLD_FREEZER}: a process that the unified hierarchy freezes can be killed")
    jobs = bed.job("--grace", "1")
    bed.running()
    found = bed["h2"].processes().items()
    (worker,) = (pid for pid, words in found if f"{WORKER} " in words and "-m pdrun" not in words)
    stuck = Group(f"{bed['h2'].group.name}-stuck")
    stuck.make_freezable()
    try:
        Path(stuck.joins()[0]).write_text(str(worker))
        stuck.freeze()
        bed.order(0, "exit 3")
        assert bed.codes(timeout=60) == [3] * 3, bed.said()
        assert "cannot be killed" in jobs[1].err, bed.said()
    finally:
        stuck.freeze(on=False)
    bed.clean()
    stuck.remove()


@pytest.mark.thorough
def test_two_failures_at_once_on_two_nodes_are_one_verdict(bed: Bed) -> None:
    jobs = bed.job()
    bed.running()
    bed.order(1, "exit 7")
    bed.order(2, "exit 8")
    codes = set(bed.codes())
    assert len(codes) == 1 and codes <= {7, 8}, bed.said()
    assert len(bed.events("assigned")) == 1
    assert len({job.err.count("first cause") for job in jobs}) == 1
    bed.clean()


def test_two_failures_at_once_cost_one_restart(bed: Bed) -> None:
    bed.job("--max-restarts", "3")
    bed.running()
    bed.order(1, "exit 7", when="g0")
    bed.order(2, "exit 8", when="g0")
    again = bed.running(generation=1)
    assert [note.restarts for note in again] == [1, 1, 1]
    bed.order("all", "exit 0", when="g1")
    assert bed.codes() == [0] * 3, bed.said()
    assert len(bed.events("assigned")) == 2
    bed.clean()


@pytest.mark.thorough
def test_restarts_that_are_used_up_leave_the_last_workers_code(bed: Bed) -> None:
    jobs = bed.job("--max-restarts", "2")
    for generation in range(3):
        bed.running(generation=generation)
        bed.order(1, f"exit {40 + generation}", when=f"g{generation}")
    assert bed.codes() == [42] * 3, bed.said()
    assert all("2 restarts" in job.err for job in jobs), bed.said()
    assert sorted({note.restarts for note in bed.notes("start")}) == [0, 1, 2]
    bed.clean()


@pytest.mark.thorough
def test_a_failure_during_a_restart_is_no_second_one(bed: Bed) -> None:
    """Rank 1 fails; while rank 2 is slow to obey, it fails, too: still the first restart."""
    bed.job("--max-restarts", "1", "--grace", "2", worker=["ignore"])
    bed.running()
    bed.order(1, "exit 7", when="g0")
    bed.event("restarting")
    bed.order(2, "exit 9", when="g0")
    again = bed.running(generation=1)
    assert [note.restarts for note in again] == [1, 1, 1]
    bed.order("all", "exit 0", when="g1")
    assert bed.codes() == [0] * 3, bed.said()
    bed.clean()


@pytest.mark.thorough
def test_a_failure_during_the_stop_changes_no_verdict(bed: Bed) -> None:
    bed.job("--grace", "3", worker=["ignore"])
    bed.running()
    bed.order(1, "exit 7")
    bed.event("stopping")
    bed.order(2, "exit 9")
    assert bed.codes() == [7] * 3, bed.said()
    bed.clean()


@pytest.mark.parametrize("stop", [signal.SIGINT, thorough(signal.SIGTERM), thorough(signal.SIGHUP)])
def test_a_stop_on_any_node_stops_all_with_its_code(bed: Bed, stop: int) -> None:
    jobs = bed.job("--grace", "5")
    bed.running()
    jobs[2].signal(stop)
    assert bed.codes(timeout=20) == [128 + stop] * 3, bed.said()
    assert len(bed.notes("signal")) == 3
    bed.clean()


@pytest.mark.thorough  # e2e/test_failure.py has it: `whose_agent_is_killed`
def test_an_agent_killed_leaves_nothing_on_its_host(bed: Bed) -> None:
    jobs = bed.job(worker=["family"])
    bed.running()
    killed = jobs[1].signal(signal.SIGKILL)
    bed.clean("h2", timeout=5)
    assert bed.codes(jobs[0], jobs[2]) == [69] * 2, bed.said()
    assert bed.notes("signal")[-1].at - killed < 8, "two seconds on a quiet machine"
    assert all("h2" in job.err and "lost" in job.err for job in (jobs[0], jobs[2])), bed.said()
    bed.clean()
