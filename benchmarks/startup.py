"""
Measure how long a launcher takes to start two processes that do nothing, and how much memory it
uses while they run.

    python benchmarks/startup.py [--rounds 15] [--markdown]

Launchers take turns, round by round, so that noise hits all of them. Quote the ratio of medians.
Memory: resident (RSS) and proportional (PSS) bytes of all processes of the launcher without the
workers.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent


def launchers() -> dict[str, list[str]]:
    """Name -> command line up to the program that each of the two workers runs."""
    found = {"pdrun": [str(BIN / "pdrun"), "--nodes", "1", "--devices", "2", "--no-python"]}
    if (BIN / "torchrun").exists():
        found["torchrun"] = [
            str(BIN / "torchrun"),
            "--standalone",
            "--nproc-per-node",
            "2",
            "--no-python",
        ]
    if mpirun := shutil.which("mpirun"):
        found["mpirun"] = [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    return found


def wall_seconds(command: list[str], cwd: str) -> float:
    """Seconds from start to exit; the command must succeed."""
    start = time.perf_counter()
    subprocess.run(
        command, cwd=cwd, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - start


def memory_megabytes(command: list[str], cwd: str, worker: str) -> tuple[float, float]:
    """
    (RSS, PSS) in MB summed over the launcher's processes, at their peak while the workers sleep.
    """
    process = subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    peak = (0.0, 0.0)
    while process.poll() is None:
        rss = pss = 0.0
        try:
            root = psutil.Process(process.pid)
            for item in [root, *root.children(recursive=True)]:
                if item.name() != worker:
                    full = item.memory_full_info()
                    rss, pss = rss + full.rss / 1e6, pss + full.pss / 1e6
        except psutil.Error:
            continue
        peak = max(peak, (rss, pss))
        time.sleep(0.02)
    return peak


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    found = launchers()
    times: dict[str, list[float]] = {name: [] for name in found}
    sizes: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as cwd:
        for index in range(rounds):
            for name, command in found.items():
                times[name].append(wall_seconds([*command, "/bin/true"], cwd))
                print(
                    f"round {index + 1} of {rounds}: {name} {times[name][-1]:.3f} s",
                    file=sys.stderr,
                )
        for name, command in found.items():
            sizes[name] = memory_megabytes(
                [*command, shutil.which("sleep") or "/bin/sleep", "2"], cwd, "sleep"
            )
    base = statistics.median(times["pdrun"])
    print(
        f"{date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch"
        f" {version('torch')}, ",
        end="",
    )
    print(f"{rounds} rounds in turn\n")
    print(
        "| launcher | wall median (min-max) s | times pdrun | RSS MB | PSS MB"
        " |\n|---|---|---|---|---|"
    )
    for name, values in times.items():
        middle = statistics.median(values)
        spread = f"{middle:.3f} ({min(values):.3f}-{max(values):.3f})"
        print(
            f"| {name} | {spread} | {middle / base:.1f} | {sizes[name][0]:.0f} |"
            f" {sizes[name][1]:.0f} |"
        )


if __name__ == "__main__":
    main()
