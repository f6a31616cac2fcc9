"""
Measure how long a job is without its scheduler when that is killed, and whether a worker notices.

    python benchmarks/recovery.py [--kills 20]

Two nodes of two workers each on loopback. Each worker writes the time every 10 ms. The scheduler's
process gets SIGKILL many times in one job.

    back    until the next process answers a viewer; the viewer asks all the time, so this includes
            CURVE handshakes and the journal
    node    until the first node's agent has reported that it is back
    floor   the start of a Python process with the scheduler's imports, measured in turn
    gap     the longest pause between two lines of any worker, with the kills, and before them for
            the same time without kills
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from pdrun.endpoint import Endpoint
from pdrun.errors import PdrunError
from pdrun.rendezvous.clients.viewer import query_status
from pdrun.rendezvous.protocol.security import Secret, format_token

WORKER = """
import os, time
with open("stamps" + os.environ["RANK"], "w") as file:
    while not os.path.exists("enough"):
        file.write(f"{time.monotonic()}\\n"); file.flush()
        time.sleep(0.01)
"""
RUNNER = """
import sys
from pdrun.rendezvous.scheduler import child
child.RESTART_WINDOW_SECONDS = 0.0  # so many kills in a minute are wanted here
from pdrun.__main__ import main
sys.exit(main())
"""
FLOOR = (
    "import pdrun.rendezvous.scheduler.child_main, pdrun.rendezvous.transport.zmq_server,"
    " pdrun.rendezvous.journal.replay"
)


class Cluster:
    """The two nodes, and their scheduler's process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = Secret.random()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.endpoint = Endpoint("127.0.0.1", probe.getsockname()[1])
        (folder / "work.py").write_text(WORKER)
        (folder / "runner.py").write_text(RUNNER)
        (folder / "token").write_text(format_token(self.secret) + "\n")
        (folder / "token").chmod(0o600)
        self.said = [folder / f"stderr{rank}" for rank in (0, 1)]
        self.nodes = [self._start(rank) for rank in (0, 1)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        words = [
            "--nodes",
            "2",
            "--devices",
            "2",
            "--scheduler",
            str(self.endpoint),
            "--node-rank",
            str(rank),
            "--node-name",
            f"host{rank}",
            "--token-file",
            "token",
            "--show-ranks",
            "none",
            "work.py",
        ]
        with self.said[rank].open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "runner.py", *words],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )

    def kill(self) -> float:
        """Kill the scheduler's process; return when."""
        children = psutil.Process(self.nodes[0].pid).children()
        (found,) = (
            each for each in children if "pdrun.rendezvous.scheduler.child_main" in each.cmdline()
        )
        found.send_signal(signal.SIGKILL)
        return time.monotonic()

    def answers(self) -> None:
        """Ask as a viewer until somebody answers."""
        while True:
            try:
                query_status(self.endpoint, self.secret, timeout=10.0)
                return
            except PdrunError:
                time.sleep(0.001)

    def node_is_back(self, count: int) -> None:
        """Wait until the first node's agent has said so ``count`` times."""
        while self.said[0].read_text().count("is back") < count:
            time.sleep(0.001)

    def gap(self, begin: float, end: float) -> float:
        """The longest pause of any worker within a time."""
        longest = 0.0
        for rank in range(4):
            lines = (self.folder / f"stamps{rank}").read_text().splitlines()[:-1]
            found = [stamp for stamp in map(float, lines) if begin <= stamp <= end]
            longest = max(longest, *(after - before for before, after in itertools.pairwise(found)))
        return longest

    def finish(self) -> None:
        """Let the workers end; the job must have succeeded."""
        (self.folder / "enough").touch()
        codes = [node.wait(60) for node in self.nodes]
        if codes != [0, 0]:
            sys.exit(
                f"the job failed with {codes}:\n"
                + "\n".join(path.read_text() for path in self.said)
            )


def floor() -> float:
    """Seconds of the start of a process with a scheduler's imports."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-P", "-c", FLOOR], check=True)
    return time.monotonic() - begin


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    kills = parser.parse_args().kills
    back, node, floors = list[float](), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        while not all((cluster.folder / f"stamps{rank}").exists() for rank in range(4)):
            time.sleep(0.05)
        quiet = time.monotonic()
        time.sleep(10.0)
        begin = time.monotonic()
        for count in range(1, kills + 1):
            floors.append(floor())
            killed = cluster.kill()
            cluster.answers()
            back.append(time.monotonic() - killed)
            cluster.node_is_back(count)
            node.append(time.monotonic() - killed)
            print(
                f"kill {count}: back {back[-1]:.3f} s, node {node[-1]:.3f} s, floor"
                f" {floors[-1]:.3f} s",
                file=sys.stderr,
            )
        end = time.monotonic()
        gaps = cluster.gap(quiet, begin), cluster.gap(begin, end)
        cluster.finish()
    print(
        f"{os.cpu_count()} CPUs, {platform.system()} {platform.release()}, Python"
        f" {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print("\n| what | median s | min s | max s |\n|---|---|---|---|")
    for name, found in (("back", back), ("node", node), ("floor", floors)):
        print(f"| {name} | {statistics.median(found):.3f} | {min(found):.3f} | {max(found):.3f} |")
    print(
        f"\nlongest pause of a worker: {gaps[0] * 1000:.0f} ms in 10 s without a kill, "
        f"{gaps[1] * 1000:.0f} ms in {end - begin:.0f} s with {kills} kills"
    )


if __name__ == "__main__":
    main()
