"""
Disks that are full or hang, files that vanish, limits on processes: what a node lacks is said, and
ends soon.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.groups import Unavailable
from tests.chaos.jobs import Bed, NodeJob
from tests.e2e.conftest import until
from tests.lib.tiers import thorough

DISK = "/mnt"
"""Where a host has a file system of its own mounted; on the machine it is not touched."""
HUNGFS = str(Path(__file__).with_name("hungfs.py"))


def small_disk(bed: Bed, host: str, size: str, where: str = DISK) -> None:
    bed[host].run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where)


def fill(bed: Bed, host: str, where: str = DISK) -> None:
    bed[host].run("sh", "-c", f"cat /dev/zero >{where}/ballast", check=False)


def two(bed: Bed, *options: str, **more: object) -> list[NodeJob]:
    return bed.job(*options, hosts=("h1", "h2"), nodes="2", **more)


def test_a_log_disk_that_fills_up_costs_the_log_and_nothing_else(
    make_bed: Callable[[int], Bed],
) -> None:
    bed = make_bed(2)
    for name in ("h1", "h2"):
        small_disk(bed, name, "1m")
    jobs = two(bed, "--log-dir", DISK, "--show-ranks", "0")
    bed.running(2)
    bed.order(1, "write 3000000")
    until(lambda: bool(bed.notes("written")), "the worker is not held up", 60)
    bed.order("all", "exit 0")
    assert bed.codes() == [0, 0], bed.said()
    assert "not written (No space left on device)" in jobs[1].err, bed.said()
    bed.clean()


@pytest.mark.thorough
def test_a_full_disk_of_the_scheduler_costs_the_record_and_nothing_else(
    make_bed: Callable[[int], Bed],
) -> None:
    """Its event log and its journal; a restart, and the end, are as with a disk that has room."""
    bed = make_bed(2)
    small_disk(bed, "h1", "1m")
    jobs = two(bed, "--log-dir", DISK, "--max-restarts", "1")
    bed.running(2)
    fill(bed, "h1")
    bed.order(1, "exit 7", when="g0")
    bed.running(2, generation=1)
    bed.order("all", "exit 0", when="g1")
    assert bed.codes() == [0, 0], bed.said()
    assert "not written (No space left on device)" in jobs[0].err, bed.said()
    bed.clean()


@pytest.mark.thorough
def test_a_scheduler_killed_after_its_disk_was_full_is_given_up(
    make_bed: Callable[[int], Bed],
) -> None:
    """Once its journal cannot be written, which is said; no successor goes on from half of it."""
    bed = make_bed(2)
    small_disk(bed, "h1", "1m")
    jobs = two(bed, "--log-dir", DISK, "--max-restarts", "1", "--grace", "2")
    bed.running(2)
    fill(bed, "h1")
    bed.order(1, "exit 7", when="g0")
    bed.running(2, generation=1)
    words = r"journal .* cannot be written \(No space left on device\): the job continues, but ends"
    for _ in range(2):  # the last page of the file may have room for some events
        if jobs[0].process.poll() is None and (pid := jobs[0].scheduler()):
            os.kill(pid, signal.SIGKILL)
        jobs[0].expect(words, 60)
    assert bed.codes(timeout=60) == [69, 69], bed.said()
    bed.clean()


def hung_disk(bed: Bed, host: str) -> Callable[[], None]:
    """
    Mount a file system on a host, as of a network whose server can go; return what makes it hang.
    """
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse to make a file system that hangs")
    server = bed[host].start(
        sys.executable, HUNGFS, DISK, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert server.stdout is not None
    if (said := server.stdout.readline()) != b"mounted\n":
        pytest.skip(f"a FUSE file system cannot be mounted here: {said.decode()}")
    (pid,) = (pid for pid, words in bed[host].processes().items() if "hungfs" in words)

    def hang() -> None:
        """
        Stop it when it has nothing in hand: the kernel lets nobody go whose request it was at.
        """
        log = ("sh", "-c", f"cat {DISK}/*/0/rank_*.out")
        until(
            lambda: "runs on" in bed[host].run(*log, check=False), "the first line is written", 30
        )
        os.kill(pid, signal.SIGSTOP)

    return hang


@pytest.mark.parametrize("host", ["h1", thorough("h2")])
def test_a_log_disk_that_hangs_holds_up_neither_the_worker_nor_the_end(
    make_bed: Callable[[int], Bed], host: str
) -> None:
    """
    Whoever touches it waits for ever; on h1 those are the scheduler's journal and its event log,
    too.
    """
    bed = make_bed(2)
    hang = hung_disk(bed, host)
    jobs = two(bed, "--log-dir", DISK, "--show-ranks", "0" if host == "h2" else "1", "--grace", "3")
    bed.running(2)
    hang()
    rank = int(host == "h2")
    bed.order(rank, "write 8000000")
    until(lambda: bool(bed.notes("written")), "the worker is not held up", 90)
    bed.order("all", "exit 3")
    assert bed.codes(timeout=60) == [3, 3], bed.said()
    assert "not written (the disk does not answer)" in jobs[rank].err, bed.said()


def test_a_job_of_one_node_ends_although_its_log_disk_hangs(make_bed: Callable[[int], Bed]) -> None:
    """Its scheduler is part of the agent, and writes the event log."""
    bed = make_bed(1)
    hang = hung_disk(bed, "h1")
    (job,) = bed.job("--log-dir", DISK, "--grace", "3", hosts=("h1",), nodes="1")
    bed.running(1)
    hang()
    bed.order("all", "exit 3")
    assert job.wait(60) == 3, bed.said()
    assert "event log" in job.err and "not written (the disk does not answer)" in job.err, (
        bed.said()
    )


@pytest.mark.parametrize("where", [thorough("/dev/shm"), DISK])
def test_full_temporary_folders_at_the_start_are_no_riddle(
    make_bed: Callable[[int], Bed], where: str
) -> None:
    """/dev/shm, or $TMPDIR: pdrun does without, or says in one line which folder is full."""
    bed = make_bed(2)
    small_disk(bed, "h2", "16k", where)
    fill(bed, "h2", where)
    jobs = two(bed, "--start-timeout", "20", env={"TMPDIR": DISK} if where == DISK else {})
    until(
        lambda: len(bed.notes("start")) == 2 or jobs[1].process.poll() is not None,
        "it starts or ends",
        60,
    )
    if len(bed.notes("start")) == 2:
        bed.order("all", "exit 0")
        assert bed.codes() == [0, 0], bed.said()
    else:
        assert jobs[1].wait(10) in (74, 78) and where in jobs[1].err, bed.said()
    assert "Traceback" not in jobs[1].err, bed.said()


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        thorough("rm /mnt/job/program", 127, "/mnt/job/program"),
        ("printf '\\001\\002' >/mnt/job/program", 126, "/mnt/job/program"),
    ],
)
def test_a_program_that_goes_while_the_nodes_meet_names_its_host(
    bed: Bed, change: str, code: int, words: str
) -> None:
    """
    It was there when each node started; the last node makes the job whole, and on h2 it is gone by
    then.
    """
    for host in bed.cluster:
        small_disk(bed, host.name, "1m")
        host.run(
            "sh",
            "-c",
            "mkdir /mnt/job; printf '#!/bin/sh\\nexec sleep 60\\n' >/mnt/job/program; "
            "chmod +x /mnt/job/program",
        )
    options: dict[str, object] = {"program": ["--no-python", "/mnt/job/program"]}
    jobs = bed.job(hosts=("h1", "h2"), **options)
    jobs[0].expect("2 of 3 nodes")
    bed["h2"].run("sh", "-c", change)
    jobs += bed.job(hosts=("h3",), **options)
    assert bed.codes() == [code] * 3, bed.said()
    assert all("h2" in job.err and words in job.err for job in jobs), bed.said()
    bed.clean()


@pytest.mark.thorough
def test_a_working_folder_that_goes_while_the_nodes_meet_names_its_host(bed: Bed) -> None:
    for host in bed.cluster:
        small_disk(bed, host.name, "1m")
        host.run("mkdir", "/mnt/here")
    options: dict[str, object] = {"cwd": "/mnt/here", "program": ["--no-python", "sleep", "60"]}
    jobs = bed.job("--log-dir", str(bed.folder / "logs"), hosts=("h1", "h2"), **options)
    jobs[0].expect("2 of 3 nodes")
    bed["h2"].run("rmdir", "/mnt/here")
    jobs += bed.job("--log-dir", str(bed.folder / "logs"), hosts=("h3",), **options)
    codes = set(bed.codes())
    assert len(codes) == 1 and codes <= {78, 127}, bed.said()
    assert all("h2" in job.err and "/mnt/here" in job.err for job in jobs), bed.said()


def test_a_limit_on_processes_is_said_and_ends_soon(make_bed: Callable[[int], Bed]) -> None:
    """
    Wherever it bites (the keeper, a thread, the worker): the job ends everywhere and says what is
    short.
    """
    bed = make_bed(2)
    try:
        bed["h2"].group.limit("pids", 8)
    except Unavailable as reason:
        pytest.skip(str(reason))
    jobs = two(bed, "--start-timeout", "15", worker=["family"])
    codes = bed.codes(timeout=90)
    assert all(codes), bed.said()
    assert (
        "Resource temporarily unavailable" in jobs[1].err + jobs[1].out or "thread" in jobs[1].err
    ), bed.said()
    assert "a bug of pdrun" not in jobs[0].err + jobs[1].err, bed.said()
    bed.clean()
