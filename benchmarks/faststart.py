"""
Measure how long torch workers take to start with pdrun, pdrun --start exec, torchrun and mpirun,
and how much memory they use.

    python benchmarks/faststart.py [--workers 1,2,4,8,16] [--rounds 3] [--rows
    gloo,ddp,second,memory]
    python benchmarks/faststart.py --rows nccl --workers 2,4 --rounds 3

The second command is for GPUs, cold and warm. It takes 3 minutes on four.

Launchers take turns, round by round. Quote the ratio of medians. CPU is user and system time of all
processes that a launcher started, and what a warm process used for the job. The package is compiled
first, as pip does.

    gloo, ddp   import torch, form a group, all-reduce (three steps of AdamW), exit
    second      gloo with a warm process
    nccl        one worker per GPU, to the last rank's first all-reduce; not in the default
    memory      proportional memory of idle workers
    restart     from SIGKILL of one worker to the first line of all workers of the next generation
    tail        from the end of the last worker's process (its pidfd) to the end of the launcher
    floor       gloo with 8 workers, compared with one import of torch and 8 forks
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib
import os
import platform
import re
import resource
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
    "idle": "import os, time, torch\nopen(f'up{os.environ[\"RANK\"]}',"
    " 'w').close()\ntime.sleep(600)\n",
    "restart": """
import os, time, torch
restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("main", os.environ["RANK"], restarts, time.time(), os.getpid(), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1": raise SystemExit
time.sleep(600)
""",
    "tail": "import os, torch\nprint('pid', os.getpid(), flush=True)\n",
    "floor": """
import os, sys, torch, torch.distributed
pids = [os.fork() for _ in range(int(sys.argv[1]))]
if 0 in pids: os._exit(0)
for pid in pids: os.waitpid(pid, 0)
""",
    "mpi": """
import os, runpy, sys
for name, value in dict(RANK="RANK", WORLD_SIZE="SIZE", LOCAL_RANK="LOCAL_RANK").items():
    os.environ[name] = os.environ["OMPI_COMM_WORLD_" + value]
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", sys.argv[2]
runpy.run_path(sys.argv[1], run_name="__main__")
""",
}
WARM = "pdrun, warm"


def launchers(workers: int, row: str, cwd: str) -> dict[str, list[str]]:
    """
    Name -> command line up to the script. Every row but nccl is about CPUs, on a machine with GPUs,
    too.
    """
    pdrun = [
        sys.executable,
        "-m",
        "pdrun",
        "--devices",
        str(workers),
        "--threads",
        "1",
        "--no-files",
        "--prefix",
        "none",
        "--backend",
        "cuda" if row == "nccl" else "cpu",
    ]
    found = {
        "pdrun": [*pdrun, "--no-warm"],
        WARM: pdrun,
        "pdrun --start exec": [*pdrun, "--start", "exec"],
        "torchrun": [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(workers),
        ],
    }
    if row in ("gloo", "ddp", "second") and (mpirun := shutil.which("mpirun")):
        Path(cwd, "mpi.py").write_text(PROGRAMS["mpi"])
        asked = [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(workers)]
        found["mpirun"] = [*asked, sys.executable, "mpi.py"]
    if row == "second":
        del found["pdrun"], found["pdrun --start exec"]
    elif row != "nccl":
        del found[WARM]
    return found


def environment(cwd: str) -> dict[str, str]:
    """The launchers' environment: no warm process but our own, byte code enabled."""
    left = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "OMP_NUM_THREADS")
    return {
        **{name: value for name, value in os.environ.items() if name not in left},
        "OMP_NUM_THREADS": "1",
        "XDG_RUNTIME_DIR": str(Path(cwd, "run")),
    }


@contextlib.contextmanager
def warm_process(cwd: str) -> Iterator[psutil.Process]:
    """A warm process."""
    command = [sys.executable, "-m", "pdrun", "warm"]
    subprocess.run([*command, "start"], env=environment(cwd), check=True, capture_output=True)
    try:
        out = subprocess.run(
            [*command, "status"], env=environment(cwd), check=True, capture_output=True, text=True
        )
        yield psutil.Process(int(out.stdout.split()[1].rstrip(":")))
    finally:
        subprocess.run([*command, "stop"], env=environment(cwd), check=True, capture_output=True)


def cpu_seconds(process: psutil.Process | None) -> float:
    """
    CPU seconds of our children that have ended, and of the warm process with its reaped children.
    """
    mine = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = mine.ru_utime + mine.ru_stime
    if process is not None:
        deadline = time.monotonic() + 10
        while process.children() and time.monotonic() < deadline:
            time.sleep(0.005)  # the keeper of the last job is on its way out
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def time_command(
    command: list[str], cwd: str, process: psutil.Process | None = None
) -> tuple[float, float, str]:
    """Return (wall, CPU) seconds, and the output; the command must succeed."""
    before, start = cpu_seconds(process), time.time()
    done = subprocess.run(command, cwd=cwd, env=environment(cwd), capture_output=True, text=True)
    end = time.time()
    if done.returncode:
        raise SystemExit(f"{command} failed: {done.stderr}")
    reduced = [float(text) for text in re.findall(r"reduced ([\d.]+)", done.stdout)]
    return (max(reduced) if reduced else end) - start, cpu_seconds(process) - before, done.stdout


def free_port() -> str:
    """A port for mpirun's workers, which have no process that binds one for them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def measure_row(row: str, workers: int, rounds: int, cwd: str) -> None:
    """One row of the table: all launchers, in turn."""
    script = Path(cwd, f"{row}.py")
    script.write_text(PROGRAMS["gloo" if row == "second" else row])
    commands = launchers(workers, row, cwd)
    found: dict[str, list[tuple[float, float, str]]] = {name: [] for name in commands}
    with warm_process(cwd) if WARM in commands else contextlib.nullcontext() as process:
        for _ in range(rounds):
            for name, command in commands.items():
                words = [*command, str(script), *([free_port()] if name == "mpirun" else [])]
                found[name].append(time_command(words, cwd, process if name == WARM else None))
    base = [statistics.median(run[part] for run in found["torchrun"]) for part in (0, 1)]
    for name, runs in found.items():
        wall, cpu = (statistics.median(run[part] for run in runs) for part in (0, 1))
        print(
            f"| {row} | {workers} | {name} | {wall:.2f} | {wall / base[0]:.2f} | {cpu:.2f} |"
            f" {cpu / base[1]:.2f} "
            f"| {os.getloadavg()[0]:.1f} |",
            flush=True,
        )


def measure_memory(workers: int, cwd: str) -> None:
    """Proportional memory of idle workers, forked and executed, with all processes of the job."""
    script = Path(cwd, "idle.py")
    script.write_text(PROGRAMS["idle"])
    for name in ("pdrun", "pdrun --start exec"):
        for file in Path(cwd).glob("up*"):
            file.unlink()
        process = subprocess.Popen(
            [*launchers(workers, "memory", cwd)[name], str(script)],
            cwd=cwd,
            env=environment(cwd),
            stderr=subprocess.DEVNULL,
        )
        while len(list(Path(cwd).glob("up*"))) < workers:
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        pss = sum(item.memory_full_info().pss for item in family) / 1e6
        process.terminate()
        process.wait()
        print(
            f"| memory | {workers} | {name} | {pss:.0f} MB PSS of {len(family)} processes | | |"
            " | |",
            flush=True,
        )


def measure_restart(workers: int, rounds: int, cwd: str) -> None:
    """From SIGKILL of one worker to the first line of all workers of the next generation."""
    script = Path(cwd, "restart.py")
    script.write_text(PROGRAMS["restart"])
    for name in ("pdrun", "pdrun --start exec"):
        times = []
        for _ in range(rounds):
            command = [
                *launchers(workers, "restart", cwd)[name],
                "--max-restarts",
                "1",
                "--grace",
                "0",
                str(script),
            ]
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment(cwd),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert process.stdout is not None
            first = [process.stdout.readline() for _ in range(workers)]
            os.kill(int(first[0].split()[4]), signal.SIGKILL)
            killed = time.time()
            lines = process.stdout.read().splitlines()
            process.wait()
            times.append(
                max(float(line.split()[3]) for line in lines if line.split()[2] == "1") - killed
            )
        print_single("restart", workers, name, times)


def measure_tail(workers: int, rounds: int, cwd: str) -> None:
    """From the end of the last worker's process to the end of the launcher."""
    script = Path(cwd, "tail.py")
    script.write_text(PROGRAMS["tail"])
    for name, command in launchers(workers, "tail", cwd).items():
        times = []
        for _ in range(rounds):
            process = subprocess.Popen(
                [*command, str(script)],
                cwd=cwd,
                env=environment(cwd),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
            assert process.stdout is not None
            ended = last_end(process.stdout.fileno(), workers)
            process.wait()
            times.append(time.monotonic() - ended)
        print_single("tail", workers, name, times)


def last_end(output: int, workers: int) -> float:
    """
    Return when the last worker's process ended, monotonic seconds.

    Each prints ``pid N`` when it has started. Its pidfd becomes readable when it ends, for any
    parent. A worker that ends before its line is read counts with the time of that moment. This
    makes the tail shorter by less than the time of one line; the exit takes a hundred times as
    long.
    """
    poll, text, handles, last = select.poll(), b"", set[int](), 0.0
    poll.register(output, select.POLLIN)
    begun = 0
    while begun < workers or handles:
        for number, _ in poll.poll():
            if number in handles:
                last = time.monotonic()
                poll.unregister(number)
                handles.remove(number)
                os.close(number)
                continue
            data = os.read(output, 4096)
            if not data:
                poll.unregister(output)
                if begun < workers:
                    raise SystemExit(f"{begun} of {workers} workers began")
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                begun += 1
                try:
                    handle = os.pidfd_open(int(line.split()[-1]))
                except ProcessLookupError:
                    last = time.monotonic()
                    continue
                handles.add(handle)
                poll.register(handle, select.POLLIN)
    return last


def measure_floor(workers: int, rounds: int, cwd: str) -> None:
    """What a launcher adds to the one import and the forks that every launcher needs."""
    for row in ("floor", "gloo"):
        Path(cwd, f"{row}.py").write_text(PROGRAMS[row])
    bare: list[float] = []
    whole: list[float] = []
    for _ in range(rounds):
        bare.append(time_command([sys.executable, "floor.py", str(workers)], cwd)[0])
        whole.append(time_command([*launchers(workers, "floor", cwd)["pdrun"], "gloo.py"], cwd)[0])
    print_single("floor", workers, "one import and the forks", bare)
    print_single("floor", workers, "pdrun, gloo", whole)
    ratio = statistics.median(whole) / statistics.median(bare)
    print(f"| floor | {workers} | pdrun over it | {ratio:.2f} times | | | | |", flush=True)


def print_single(row: str, workers: int, name: str, times: list[float]) -> None:
    """A line of the table with one figure."""
    load, middle = os.getloadavg()[0], statistics.median(times)
    print(f"| {row} | {workers} | {name} | {middle:.3f} | | | | {load:.1f} |", flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="gloo,ddp,second,memory,restart,tail,floor")
    asked = parser.parse_args()
    for name in ("pdrun", "pdrun.launcher", "pdrun.rendezvous", "pdrun.backends"):
        compileall.compile_dir(next(iter(importlib.import_module(name).__path__)), quiet=2)
    print(
        f"{date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch"
        f" {version('torch')}, "
        f"{asked.rounds} rounds in turn\n"
    )
    print(
        "| what | workers | launcher | wall s | of torchrun | CPU s | of torchrun | load |\n"
        + "|---" * 8
        + "|"
    )
    rows = asked.rows.split(",")
    with tempfile.TemporaryDirectory() as cwd:
        for row in ("gloo", "ddp", "nccl"):
            for workers in map(int, asked.workers.split(",") if row in rows else ()):
                measure_row(row, workers, asked.rounds, cwd)
        if "second" in rows:
            measure_row("second", 4, asked.rounds, cwd)
        if "memory" in rows:
            measure_memory(8, cwd)
        if "restart" in rows:
            measure_restart(4, asked.rounds, cwd)
        if "tail" in rows:
            measure_tail(4, asked.rounds, cwd)
        if "floor" in rows:
            measure_floor(8, asked.rounds, cwd)


if __name__ == "__main__":
    main()
