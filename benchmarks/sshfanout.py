"""
Measure the time until agents on many hosts have joined and the workers start, with one command, and
with mpirun on the same hosts.

    python benchmarks/sshfanout.py [--hosts 32] [--rounds 5]

Needs root, sshd and, for the others, their MPI.

The hosts are namespaces of this machine (tests/lib/netns_hosts.py), each with an sshd. All logins
and interpreters share its CPUs, so the figures are mainly CPU time. Compare ratios. Launchers take
turns round by round; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.lib import netns_hosts as beds

PYTHON = sys.executable


def build_commands(names: list[str]) -> dict[str, list[str]]:
    """
    The compared commands: a job of one worker per host that does nothing, and one interpreter per
    host under mpirun.
    """
    listed, count = ",".join(names), str(len(names))
    openmpi = [
        "mpirun.openmpi",
        "--allow-run-as-root",
        "-np",
        count,
        "--host",
        listed,
        "--map-by",
        "ppr:1:node",
    ]
    mpich = ["mpirun.mpich", "-n", count, "-hosts", listed, "-ppn", "1"]
    found = {
        "pdrun --hosts": [
            PYTHON,
            "-m",
            "pdrun",
            "--hosts",
            listed,
            "--devices",
            "1",
            "--no-python",
            "/bin/true",
        ],
        "Open MPI 4.1, /bin/true": [*openmpi, "/bin/true"],
        "Open MPI 4.1, python -c pass": [*openmpi, PYTHON, "-c", "pass"],
        "MPICH 4.0, /bin/true": [*mpich, "/bin/true"],
        "pdrun --mpirun (Open MPI)": [
            PYTHON,
            "-m",
            "pdrun",
            "--mpirun",
            "mpirun.openmpi",
            "--hosts",
            listed,
            "--devices",
            "1",
            "--no-python",
            "/bin/true",
        ],
    }
    return {name: argv for name, argv in found.items() if "mpi" not in name.lower() or _has(argv)}


def _has(argv: list[str]) -> bool:
    return all(shutil.which(word) for word in argv if word.startswith("mpirun."))


def seconds_until_joined(folder: Path, began: float) -> float:
    """Seconds from the start of the command to the event that every node has joined."""
    for path in folder.glob("pdrun-logs/*/events.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "started":
                return float(event["time"]) - began
    return float("nan")


def run_once(bed: beds.Hosts, argv: list[str], folder: Path) -> tuple[float, float]:
    """Run a command on the first host; return (seconds until all joined, seconds in total)."""
    shutil.rmtree(folder / "pdrun-logs", ignore_errors=True)
    began, wall = time.perf_counter(), time.time()
    env = {**os.environ, "HOME": "/root", "XDG_STATE_HOME": str(folder / "state")}
    process = bed.start(
        "h1",
        argv,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, said = process.communicate(timeout=300)
    if process.returncode:
        raise SystemExit(f"{argv[:6]}: code {process.returncode}\n{said.decode()[-2000:]}")
    return seconds_until_joined(folder, wall), time.perf_counter() - began


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if why := beds.missing():
        raise SystemExit(why)
    with tempfile.TemporaryDirectory(prefix="fan-") as base:
        Path(base).chmod(0o711)
        work = Path(base, "work")
        work.mkdir()
        with beds.hosts(Path(base), asked.hosts) as bed:
            chosen = build_commands(bed.names)
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
            for _ in range(asked.rounds):
                for name, argv in chosen.items():
                    found[name].append(run_once(bed, argv, work))
    print(
        f"{asked.hosts} hosts, {os.cpu_count()} CPUs, {asked.rounds} rounds, load"
        f" {os.getloadavg()[0]:.1f}"
    )
    for name, rows in found.items():
        first, whole = (statistics.median(column) for column in zip(*rows, strict=True))
        start = f"all joined after {first:6.2f} s, " if first == first else ""
        print(f"{name:<32} {start}whole run {whole:6.2f} s")


if __name__ == "__main__":
    main()
