"""
Measure how many agents one scheduler can handle: real scheduler, relays and sockets, and agents
that consist of their messages only.

    python benchmarks/scale.py --agents 1000               # CURVE, as a job of that size uses it
    python benchmarks/scale.py --agents 12500 --insecure   # 100,000 workers, without CURVE
    python benchmarks/scale.py --agents 12500              # with CURVE and relays

It prints

* seconds from the first connection until every agent has its assignment, until every agent can
  start, and at the end from the first finished node until every agent has the verdict
* the CPU time of scheduler, relays and agents until then
* the CPU of scheduler and relays while all agents send heartbeats, in percent of one core
* their memory (PSS)

Journal and event log are written as in a job. The agents (`crowd.py`) share the machine: their CPU
is printed, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import zmq
from crowd import crowd

from pdrun import eventlog
from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.scheduler.child import SchedulerChild


class IncompleteJob(Exception):
    """The job did not reach the expected state."""


PATIENCE = 300.0
"""Seconds for each stage."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument(
        "--workers", type=int, default=8, help="workers a node, as the agents claim"
    )
    parser.add_argument("--insecure", action="store_true", help="without CURVE")
    parser.add_argument(
        "--relays",
        type=int,
        default=None,
        help="relays beside the scheduler (default: as a job does)",
    )
    parser.add_argument("--crowds", type=int, default=2, help="processes that play the agents")
    parser.add_argument(
        "--beat", type=float, default=20.0, help="seconds for which CPU is measured while all beat"
    )
    asked = parser.parse_args()
    secret = None if asked.insecure else Secret.random()
    config = SchedulerConfig(
        job="scale",
        run="scale",
        nodes=asked.agents,
        spec="{}",
        start_timeout=600.0,
        relays=asked.relays,
    )
    with tempfile.TemporaryDirectory() as folder:
        child = SchedulerChild(
            config,
            secret,
            endpoint=Endpoint("127.0.0.1", 0),
            insecure=asked.insecure,
            journal=Path(folder, "journal"),
            events_path=Path(folder, "events.jsonl"),
        )
        crowds = [_start(asked, child.endpoint, secret, turn) for turn in range(asked.crowds)]
        try:
            print(json.dumps(measure_crowds(asked, child, [pipe for _, pipe in crowds]), indent=1))
        except IncompleteJob as error:
            happened = Counter(
                event.kind for event in eventlog.read_events(Path(folder, "events.jsonl"))
            )
            raise SystemExit(f"{error}; the event log has {dict(happened)}") from None
        finally:
            for process, _ in crowds:
                process.kill()
            child.close(1.0)


def _start(
    asked: argparse.Namespace, endpoint: Endpoint, secret: Secret | None, turn: int
) -> tuple[multiprocessing.Process, Connection]:
    share = [
        asked.agents // asked.crowds + (each < asked.agents % asked.crowds)
        for each in range(asked.crowds)
    ]
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(
        target=crowd,
        daemon=True,
        args=(
            sum(share[:turn]),
            share[turn],
            asked.agents,
            endpoint,
            secret,
            theirs,
            asked.workers,
        ),
    )
    process.start()
    theirs.close()
    return process, ours


def measure_crowds(
    asked: argparse.Namespace, child: SchedulerChild, pipes: list[Connection]
) -> dict[str, object]:
    """Lead the crowds through a job and return the results."""
    answers(pipes, "ready")
    load = os.getloadavg()[0]
    processes = scheduler_processes(child.pid)
    at_rest, began = [cpu_seconds(one) for one in processes], time.monotonic()
    tell(pipes, "go")
    found: dict[str, object] = {
        "agents": asked.agents,
        "workers": asked.agents * asked.workers,
        "curve": not asked.insecure,
        "relays": len(processes) - 1,
    }
    agents_cpu = 0.0
    for stage in ("assigned", "started"):
        told = answers(pipes, stage)
        found[f"{stage}_s"] = round(max(at for at, _ in told) - began, 2)
        agents_cpu = sum(cpu for _, cpu in told)
    spent = [cpu_seconds(one) - before for one, before in zip(processes, at_rest, strict=True)]
    found["cpu_to_started_s"] = name_quantities(spent, agents_cpu)
    time.sleep(3)
    before, at_first = [cpu_seconds(one) for one in processes], time.monotonic()
    time.sleep(asked.beat)
    took = time.monotonic() - at_first
    shares = [
        100 * (cpu_seconds(one) - was) / took for one, was in zip(processes, before, strict=True)
    ]
    found["beating_cpu_percent"] = name_quantities(shares)
    found["pss_mb"] = name_quantities(
        [process.memory_full_info().pss / 1e6 for process in processes]
    )
    tell(pipes, "end")
    ends, began = answers(pipes, "asked"), time.monotonic()
    found["beats"] = sum(end["beats"] for end in ends)
    found["agents_without_echo"] = sum(end["silent"] for end in ends)
    found["verdict_s"] = round(max(answers(pipes, "told the verdict")) - began, 2)
    found["load_average"] = [round(load, 1), round(os.getloadavg()[0], 1)]
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    cpu = names[0].partition(":")[2].strip() if names else ""
    found["machine"] = (
        f"{os.cpu_count()} x {cpu}, Python {platform.python_version()}, libzmq {zmq.zmq_version()}"
    )
    found["date"] = time.strftime("%Y-%m-%d")
    return found


def scheduler_processes(root: int) -> list[psutil.Process]:
    """Return the scheduler's process and those of its relays."""
    process = psutil.Process(root)
    return [process, *process.children(recursive=True)]


def cpu_seconds(process: psutil.Process) -> float:
    """Return its seconds of CPU."""
    return float(sum(process.cpu_times()[:2]))


def name_quantities(values: list[float], agents: float | None = None) -> dict[str, float]:
    """Name a quantity of each process."""
    found = {"scheduler": values[0], "relays": sum(values[1:]), "both": sum(values)}
    if agents is not None:
        found["agents"] = agents
    return {name: round(value, 2) for name, value in found.items()}


def tell(pipes: list[Connection], what: str) -> None:
    for pipe in pipes:
        pipe.send(what)


def answers(pipes: list[Connection], what: str) -> list:
    found = []
    for pipe in pipes:
        if not pipe.poll(PATIENCE):
            raise IncompleteJob(f"not all agents were {what} in {PATIENCE:g} s")
        try:
            found.append(pipe.recv())
        except EOFError:
            raise IncompleteJob(f"not all agents were {what}: a crowd has ended") from None
    return found


if __name__ == "__main__":
    sys.exit(main())
