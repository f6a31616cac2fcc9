"""
How long torch workers take to start, beside torchrun and beside pdrun's own exec, and what they hold in memory.

    python benchmarks/faststart.py [--workers 1,2,4,8,16] [--rounds 3] [--rows gloo,ddp,nccl,memory,restart,tail]

Launchers take turns, round by round; the ratio of medians is the figure to quote. CPU is user and system time of
everything a launcher started. ``nccl`` runs one worker a GPU, to its first all-reduce; it is not in the default.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import signal
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
PROGRAMS = {
    "gloo": """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
""",
    "ddp": """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
""",
    "nccl": """
import os, time, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
x = torch.ones(1, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
print("reduced", time.time(), flush=True)
dist.destroy_process_group()
""",
    "idle": "import os, time, torch\nopen(f'up{os.environ[\"RANK\"]}', 'w').close()\ntime.sleep(600)\n",
    "restart": """
import os, time, torch
print("main", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], time.time(), os.getpid(), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1": raise SystemExit
time.sleep(600)
""",
    "tail": "import atexit, time, torch\natexit.register(lambda: print('left', time.time(), flush=True))\n",
}


def launchers(workers: int, row: str = "") -> dict[str, list[str]]:
    """Name -> command line up to the script; every row but nccl is about CPUs, on a machine with GPUs too."""
    pdrun = [str(BIN / "pdrun"), "--devices", str(workers), "--threads", "1", "--no-files", "--prefix", "none",
             "--backend", "cuda" if row == "nccl" else "cpu"]  # fmt: skip
    return {
        "pdrun": pdrun,
        "pdrun --start exec": [*pdrun, "--start", "exec"],
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(workers)],
    }


def timed(command: list[str], cwd: str) -> tuple[float, float, str]:
    """(wall, CPU) seconds, and what was printed; the command must succeed."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    done = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
    end, after = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    reduced = [float(text) for text in re.findall(r"reduced ([\d.]+)", done.stdout)]
    wall = (max(reduced) if reduced else end) - start
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def in_turn(row: str, workers: int, rounds: int, cwd: str) -> None:
    """One row of the table: all launchers, in turn."""
    script = Path(cwd, f"{row}.py")
    script.write_text(PROGRAMS[row])
    found: dict[str, list[tuple[float, float, str]]] = {name: [] for name in launchers(workers, row)}
    for _ in range(rounds):
        for name, command in launchers(workers, row).items():
            found[name].append(timed([*command, str(script)], cwd))
    base = [statistics.median(run[part] for run in found["torchrun"]) for part in (0, 1)]
    for name, runs in found.items():
        wall, cpu = (statistics.median(run[part] for run in runs) for part in (0, 1))
        print(f"| {row} | {workers} | {name} | {wall:.2f} | {wall / base[0]:.2f} | {cpu:.2f} | {cpu / base[1]:.2f} "
              f"| {os.getloadavg()[0]:.1f} |", flush=True)  # fmt: skip


def memory(workers: int, cwd: str) -> None:
    """Proportional memory of idle workers, forked and executed, everything of the job counted."""
    script = Path(cwd, "idle.py")
    script.write_text(PROGRAMS["idle"])
    for name in ("pdrun", "pdrun --start exec"):
        for file in Path(cwd).glob("up*"):
            file.unlink()
        process = subprocess.Popen([*launchers(workers)[name], str(script)], cwd=cwd, stderr=subprocess.DEVNULL)
        while len(list(Path(cwd).glob("up*"))) < workers:
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        pss = sum(item.memory_full_info().pss for item in family) / 1e6
        process.terminate()
        process.wait()
        print(f"| memory | {workers} | {name} | {pss:.0f} MB PSS of {len(family)} processes | | | | |", flush=True)


def restart(workers: int, rounds: int, cwd: str) -> None:
    """From the kill of one worker to all workers of the next generation in their first line."""
    script = Path(cwd, "restart.py")
    script.write_text(PROGRAMS["restart"])
    for name in ("pdrun", "pdrun --start exec"):
        times = []
        for _ in range(rounds):
            command = [*launchers(workers)[name], "--max-restarts", "1", "--grace", "0", str(script)]
            process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            assert process.stdout is not None
            first = [process.stdout.readline() for _ in range(workers)]
            os.kill(int(first[0].split()[4]), signal.SIGKILL)
            killed = time.time()
            lines = process.stdout.read().splitlines()
            process.wait()
            times.append(max(float(line.split()[3]) for line in lines if line.split()[2] == "1") - killed)
        single("restart", workers, name, times)


def tail(workers: int, rounds: int, cwd: str) -> None:
    """From the last worker's last exit handler to the end of the launcher."""
    script = Path(cwd, "tail.py")
    script.write_text(PROGRAMS["tail"])
    for name, command in launchers(workers).items():
        times = []
        for _ in range(rounds):
            _, _, out = timed([*command, str(script)], cwd)
            times.append(time.time() - max(float(text) for text in re.findall(r"left ([\d.]+)", out)))
        single("tail", workers, name, times)


def single(row: str, workers: int, name: str, times: list[float]) -> None:
    """A line of the table with one figure."""
    load, middle = os.getloadavg()[0], statistics.median(times)
    print(f"| {row} | {workers} | {name} | {middle:.3f} | | | | {load:.1f} |", flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="gloo,ddp,memory,restart,tail")
    asked = parser.parse_args()
    print(f"{date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}, "
          f"{asked.rounds} rounds in turn\n")  # fmt: skip
    print("| what | workers | launcher | wall s | of torchrun | CPU s | of torchrun | load |\n" + "|---" * 8 + "|")
    rows = asked.rows.split(",")
    with tempfile.TemporaryDirectory() as cwd:
        for row in ("gloo", "ddp", "nccl"):
            for workers in map(int, asked.workers.split(",") if row in rows else ()):
                in_turn(row, workers, asked.rounds, cwd)
        if "memory" in rows:
            memory(8, cwd)
        if "restart" in rows:
            restart(4, asked.rounds, cwd)
        if "tail" in rows:
            tail(4, asked.rounds, cwd)


if __name__ == "__main__":
    main()
