"""
Random faults from a seed on elastic jobs, and what must be true afterwards.

    scripts/soak [--minutes 10] [--seed S] [--hosts 4] [--keep]

Jobs of 2 to N nodes run one after the other on N hosts. Every few seconds something breaks:
workers, agents, the scheduler, hosts, links, clocks; broken hosts and agents are started again
after a while. Each job ends by order, by a stop, or by the loss of its first node, and then this
must hold:

* every node leaves with the same code, the one that belongs to the end, and soon;
* no process is left on any host;
* one generation at a time: no worker runs once a worker of a later generation has started;
* within a generation no rank is there twice, and all agree on size and restarts; the log tells the same story.

A seed fixes the order, the kinds and the times of the faults, not the machine's own timing: a
failing seed is a strong hint, not a recording. The folder of a failed run is kept and named.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import cluster as clusters
from tests.chaos.cluster import Cluster
from tests.chaos.jobs import Bed
from tests.chaos.soak_round import Round


@dataclass
class Soak:
    """One run of the soak: a cluster, a source of chance, and what has been found."""

    cluster: Cluster
    folder: Path
    chance: random.Random
    ends: float
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    generations: int = 0
    jobs: int = 0

    def run(self) -> None:
        """Run jobs until the time is over, or something is wrong."""
        while time.monotonic() < self.ends and not self.wrong:
            round_ = Round(self, Bed(self.cluster, self.folder / f"job{self.jobs}"))
            self.jobs += 1
            round_.run()
            self.generations += len(round_.bed.events("assigned"))

    def report(self) -> str:
        """Return the result in a few lines."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        return (
            f"{sum(self.counts.values())} faults ({kinds}), {self.jobs} jobs, {self.generations} generations, "
            f"{len(self.wrong)} violations" + "".join(f"\n  {text}" for text in self.wrong)
        )


def soak(minutes: float, seed: int, hosts: int, folder: Path) -> Soak:
    """Run one soak in ``folder``; return what it found."""
    cluster = Cluster.up(f"soak-{os.getpid()}", hosts)
    try:
        found = Soak(cluster, folder, random.Random(seed), time.monotonic() + 60 * minutes)
        found.run()
        return found
    finally:
        cluster.down()


def main() -> int:
    """Run what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument(
        "--keep", action="store_true", help="keep the folder of a run without violations, too"
    )
    args = parser.parse_args()
    if reason := clusters.why_not():
        print(f"soak: {reason}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(
        f"soak: seed {args.seed}, {args.minutes:g} minutes, {args.hosts} hosts; traces in {folder}",
        flush=True,
    )
    found = soak(args.minutes, args.seed, args.hosts, folder)
    print(f"soak: seed {args.seed}: {found.report()}", flush=True)
    if not found.wrong and not args.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
