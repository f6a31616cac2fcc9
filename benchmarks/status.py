"""
How long `pdrun status` takes for a large job: 12,500 nodes, 100,000 workers, a million events.

    python benchmarks/status.py [--nodes N] [--events N] [--rounds N] [--mixes NAME ...]

The log has restarts of the job, silent nodes, failed workers, progress and warnings. Measured are
the whole command (start of Python, log, screen), a replay in this process, and what a follower does
when ten events are added.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pdrun.launcher.jobs import registry
from pdrun.ui.event_reader import EventLogReader
from pdrun.ui.status import format_plain

WORKERS = 8
MIXES = {
    "progress": (("progress", 1.0),),
    "silent nodes": (("suspect", 0.5), ("recovered", 0.5)),
    "mixed": (
        *(("progress", 0.5), ("suspect", 0.12), ("recovered", 0.12), ("exited", 0.2)),
        *(("warning", 0.05), ("left", 0.005), ("joined", 0.005)),
    ),
}
"""Kind of event -> its share of the log. A worker exits at most once per generation."""
MIXES["failed workers"] = (("exited", 0.5), ("warning", 0.5))


def write_log(
    path: Path, nodes: int, events: int, mix: tuple[tuple[str, float], ...], generations: int
) -> None:
    """Write an event log with so many generations of the same length."""
    draw = random.Random(1)
    kinds = [kind for kind, _ in mix]
    shares = [share for _, share in mix]
    clock = 1.7e9
    count = 0

    with path.open("w") as file:

        def add(kind: str, **data: object) -> None:
            nonlocal count, clock
            clock += 0.001
            count += 1
            file.write(json.dumps({"kind": kind, "time": round(clock, 6), **data}) + "\n")

        add("created", job="big", run="big-1", nodes=nodes, host="n0")
        for node in range(nodes):
            add("joined", node=f"n{node}", workers=WORKERS, host=f"n{node}", pid=4000 + node)
        generation = 0
        while count < events:
            if count >= events // generations * generation and generation < generations:
                ranks = draw.sample(range(nodes * WORKERS), nodes * WORKERS)
                placed = [[f"n{node}", node * WORKERS, WORKERS] for node in range(nodes)]
                add("assigned", generation=generation, restarts=generation, nodes=placed)
                add("started", generation=generation)
                generation += 1
            (kind,) = draw.choices(kinds, shares)
            node = draw.randrange(nodes)
            match kind:
                case "progress":
                    add(kind, generation=generation, step=count, saved=7, rank=node, most=count)
                case "exited":
                    if not ranks:
                        continue
                    rank = ranks.pop()
                    node = rank // WORKERS
                    add(
                        kind,
                        generation=generation,
                        rank=rank,
                        node=f"n{node}",
                        code=1,
                        how="exit",
                        cause='RuntimeError: expected "x"',
                    )
                case "warning":
                    add(kind, text=f"rank {node} is slower than the others")
                case "joined":
                    add(kind, node=f"n{node}", workers=WORKERS, host=f"n{node}", pid=1)
                case _:
                    add(kind, node=f"n{node}", silent=3.1)


def measure(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the least wall and CPU seconds of a call, children included."""
    walls, cpus = [], []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), sum(os.times()[:4])
        call()
        walls.append(time.perf_counter() - wall)
        cpus.append(sum(os.times()[:4]) - cpu)
    return min(walls), min(cpus)


def main() -> None:
    """Print one line per mix of events."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--nodes", type=int, default=12_500)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mixes", nargs="*", default=[*MIXES], choices=[*MIXES])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        for name, generations in itertools.product(options.mixes, (5, 1)):
            path = Path(folder, "events.jsonl")
            write_log(path, options.nodes, options.events, MIXES[name], generations)
            job = registry.make_job_record(
                "big-1", "big", events=str(path), log_dir=folder, made=time.time()
            )
            registry.register_job(job)
            command = [sys.executable, "-m", "pdrun", "status", "big"]
            whole = measure(
                lambda command=command: subprocess.run(command, check=True, capture_output=True),
                options.rounds,
            )
            replay = measure(
                lambda path=path: format_plain([EventLogReader(path).read_status()], 0.0),
                options.rounds,
            )
            reader = EventLogReader(path)
            reader.read_status()

            def follow(path: Path = path, reader: EventLogReader = reader) -> None:
                with path.open("a") as file:
                    file.write('{"kind": "suspect", "time": 1.8e9, "node": "n7"}\n' * 10)
                format_plain([reader.read_status()], 0.0)

            update = measure(follow, options.rounds)
            size = path.stat().st_size >> 20
            print(
                f"{name:<14} {generations} generation(s) {size:>4} MB   "
                f"command {whole[0]:.2f} s (CPU {whole[1]:.2f})   "
                f"replay and screen {replay[0]:.2f} s (CPU {replay[1]:.2f})   "
                f"follow {update[0]:.3f} s (CPU {update[1]:.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
