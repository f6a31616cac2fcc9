"""
Compare how pdrun and torchrun handle the same faults on three namespace hosts. Root only.

    python benchmarks/faults.py [--rows 1,3,19] [--launchers pdrun,torchrun] [--limit 75]

Each row of the fault matrix (docs/reliability.md) is played once per launcher, on separate hosts,
with the same worker (tests/chaos/worker.py, which does not import torch). The output is what
happened first: the job ended, it restarted, or nothing within the limit; and the processes that
were left over.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chaos import clocks, cluster
from tests.chaos.cluster import Cluster
from tests.chaos.jobs import PORT, WORKER, Bed, NodeJob

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
HOSTS = ("h1", "h2", "h3")


class FaultPlay:
    """One launcher on three hosts, and one fault."""

    def __init__(self, launcher: str, bed: Bed, limit: float) -> None:
        self.launcher, self.bed, self.limit = launcher, bed, limit

    def start(
        self, host: str, nodes: str = "3", worker: Sequence[str] = (), options: Sequence[str] = ()
    ) -> NodeJob:
        """Start this launcher on a host."""
        if self.launcher == "pdrun":
            return self.bed.start(host, *options, nodes=nodes, worker=worker)
        limits = (
            ("--shutdown-timeout", options[options.index("--grace") + 1])
            if "--grace" in options
            else ()
        )
        return self.bed.launch(
            host,
            TORCHRUN,
            "--nnodes",
            nodes,
            "--nproc-per-node",
            "1",
            "--rdzv-backend",
            "c10d",
            "--max-restarts",
            "3" if ":" in nodes else "0",
            "--rdzv-endpoint",
            f"h1:{PORT}",
            "--rdzv-id",
            "faults",
            *limits,
            WORKER,
            str(self.bed.folder),
            *worker,
        )

    def job(
        self, nodes: str = "3", worker: Sequence[str] = (), options: Sequence[str] = ()
    ) -> list[NodeJob]:
        """Start it on all hosts, and wait until the workers run."""
        jobs = [self.start(host, nodes, worker, options) for host in HOSTS]
        self.bed.running(3, timeout=120)
        return jobs

    def outcome(
        self, since: float, *, limit: float | None = None, jobs: Sequence[NodeJob] | None = None
    ) -> str:
        """
        Watch until the job has ended on the hosts that are up, has restarted, or the limit has
        passed.
        """
        bed, end = self.bed, since + (limit or self.limit)
        chosen = [job for job in (jobs or bed.jobs) if job.host.up]
        while time.monotonic() < end:
            anew = bed.notes("start", after=since)
            if anew and len(anew) >= anew[0].world:
                return f"began anew with {anew[0].world} workers after {anew[-1].at - since:.1f} s"
            if all(job.process.poll() is not None for job in chosen):
                codes = " ".join(str(job.process.returncode) for job in chosen)
                return (
                    f"ended everywhere after {time.monotonic() - since:.1f} s with"
                    f" {codes}{self.left_over()}"
                )
            time.sleep(0.02)
        gone = sum(job.process.poll() is not None for job in chosen)
        return (
            f"nothing more in {limit or self.limit:g} s: {gone} of {len(chosen)} launchers"
            f" ended{self.left_over()}"
        )

    def left_over(self) -> str:
        """Return the processes of jobs whose launcher has ended, a second later."""
        time.sleep(1.0)
        left = sum(
            "worker.py" in words or "sleep" in words
            for job in self.bed.jobs
            if job.host.up and job.process.poll() is not None
            for words in job.host.processes().values()
        )
        return f"; {left} processes left over" if left else ""


def order_worker(
    order: str, worker: Sequence[str] = (), options: Sequence[str] = ()
) -> Callable[[FaultPlay], str]:
    """Return the fault in which rank 1 does what is ordered."""

    def play(it: FaultPlay) -> str:
        it.job(worker=worker, options=options)
        return it.outcome(it.bed.order(1, order))

    return play


def kill_agent(it: FaultPlay) -> str:
    """SIGKILL to the launcher of h2."""
    jobs = it.job()
    return it.outcome(jobs[1].signal(signal.SIGKILL))


def stop_agent(it: FaultPlay) -> str:
    """SIGTERM to the launcher of h3; two nodes are enough."""
    jobs = it.job(nodes="2:3")
    return it.outcome(jobs[2].signal(signal.SIGTERM), jobs=jobs[:2])


def freeze_host(seconds: float) -> Callable[[FaultPlay], str]:
    """Return the fault in which h2 is frozen; two nodes are enough."""

    def play(it: FaultPlay) -> str:
        it.job(nodes="2:3")
        since = time.monotonic()
        it.bed["h2"].freeze()
        jobs = [job for job in it.bed.jobs if job.host.name != "h2"]
        first = it.outcome(since, limit=seconds, jobs=jobs)
        it.bed["h2"].thaw()
        thawed = time.monotonic()
        time.sleep(6)
        old = [life for life in it.bed.lives() if life.host == "h2" and life.generation == 0]
        still = "still runs" if old[0].last > thawed + 5.5 else "is gone"
        return f"{first}; 6 s after the thaw its old worker {still}"

    return play


def kill_scheduler(it: FaultPlay) -> str:
    """SIGKILL to the rendezvous process: pdrun's scheduler; with torchrun the first launcher."""
    jobs = it.job()
    pid = jobs[0].scheduler() if it.launcher == "pdrun" else jobs[0].pid
    os.kill(pid, signal.SIGKILL)
    return it.outcome(time.monotonic(), limit=20)


def take_host_down(how: str) -> Callable[[FaultPlay], str]:
    """Return the fault in which h2 crashes, or loses its power; two nodes are enough."""

    def play(it: FaultPlay) -> str:
        it.job(nodes="2:3")
        since = time.monotonic()
        getattr(it.bed["h2"], how)()
        return it.outcome(since)

    return play


def cut_one_way(it: FaultPlay) -> str:
    """Packets from h2 to h1 are lost; two nodes are enough."""
    it.job(nodes="2:3")
    since = time.monotonic()
    it.bed.cluster.one_way("h2", "h1")
    return it.outcome(since)


def join_foreign_job(it: FaultPlay) -> str:
    """
    A node of another program connects to the port while the first job waits for its third node.
    """
    bed = it.bed
    for host in ("h1", "h2"):
        it.start(host)
    time.sleep(8)  # until torchrun's first two have met, for certain
    other = bed.folder / "other.py"
    other.write_text("import time\nprint('the other program runs', flush=True)\ntime.sleep(60)\n")
    if it.launcher == "pdrun":
        stranger = bed.start("h3", program=[str(other)])
    else:
        stranger = bed.launch(
            "h3",
            TORCHRUN,
            "--nnodes",
            "3",
            "--nproc-per-node",
            "1",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"h1:{PORT}",
            "--rdzv-id",
            "faults",
            str(other),
        )
    end = time.monotonic() + 30
    while (
        time.monotonic() < end
        and stranger.process.poll() is None
        and "the other program" not in stranger.out
    ):
        time.sleep(0.05)
    if "the other program" in stranger.out:
        return "joined: two programs run as one job"
    return f"refused with code {stranger.process.poll()}; the first job goes on waiting"


def advance_wall_clock(it: FaultPlay) -> str:
    """h2's wall clock is an hour ahead; then 20 s of running."""
    it.bed["h2"].skew(3600)
    it.job()
    return it.outcome(time.monotonic(), limit=20)


ROWS: dict[str, tuple[str, Callable[[FaultPlay], str]]] = {
    "1": ("worker exits with 3", order_worker("exit 3")),
    "3": ("worker killed by SIGKILL", order_worker("signal 9")),
    "6": (
        "a peer fails, workers ignore SIGTERM, 5 s of grace",
        order_worker("exit 3", ["ignore"], ["--grace", "5"]),
    ),
    "7": (
        "worker hangs (pdrun: --hang-timeout 10s)",
        order_worker("hang", (), ["--hang-timeout", "10s"]),
    ),
    "9": ("worker fails and leaves children behind", order_worker("exit 3", ["family"])),
    "10": ("launcher of one node killed", kill_agent),
    "11": ("launcher of one node gets SIGTERM, 2 of 3 nodes are enough", stop_agent),
    "12": ("a host stands still for 5 s", freeze_host(5)),
    "13": ("a host stands still for 20 s, 2 of 3 nodes are enough", freeze_host(20)),
    "16": ("the process that all meet at is killed", kill_scheduler),
    "18": ("a host crashes (reset), 2 of 3 nodes are enough", take_host_down("crash")),
    "19": ("a host loses power (silence), 2 of 3 nodes are enough", take_host_down("power_off")),
    "22": ("one-way cut, 2 of 3 nodes are enough", cut_one_way),
    "33": ("a node of another program comes to the port", join_foreign_job),
    "35": ("a wall clock is an hour ahead", advance_wall_clock),
}
"""Row of the matrix -> the fault in words, and how it is played."""


def main() -> int:
    """Play the rows of the command line; print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--launchers", default="pdrun,torchrun")
    parser.add_argument("--limit", type=float, default=75.0)
    args = parser.parse_args()
    if reason := cluster.why_not() or clocks.why_not():
        print(f"faults: {reason}", file=sys.stderr)
        return 2
    names = args.launchers.split(",")
    print(
        f"{date.today()}, {os.cpu_count()} cores, torch {version('torch')}, limit {args.limit:g}"
        " s\n"
    )
    print(f"| row | fault | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}", flush=True)
    for row in args.rows.split(","):
        words, play = ROWS[row]
        cells = []
        for name in names:
            with tempfile.TemporaryDirectory(prefix="faults-") as folder:
                bed = Bed(Cluster.up(f"faults-{os.getpid()}", 3), Path(folder))
                try:
                    cells.append(play(FaultPlay(name, bed, args.limit)))
                except BaseException as error:
                    cells.append(
                        "not played:"
                        f" {str(error).splitlines()[0] if str(error) else type(error).__name__}"
                    )
                    if isinstance(error, KeyboardInterrupt):
                        raise
                finally:
                    bed.stop()
        print(f"| {row} | {words} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
