"""
Runs an Output the way the agent does: one loop over its descriptors, workers as real processes.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pdrun.launcher.config import spec
from pdrun.launcher.output.console import Console
from pdrun.launcher.output.log_files import LogWriter
from pdrun.launcher.output.router import OutputRouter


def make_output(
    folder: Path,
    out: int,
    err: int,
    *,
    world_size: int = 4,
    writer: LogWriter | None = None,
    **settings: object,
) -> OutputRouter:
    """
    Return an Output of node ``node0`` that shows on two descriptors and logs below ``folder``.
    """
    wanted = spec.Output(**{"log_dir": str(folder / "logs"), **settings})  # type: ignore[arg-type]
    output = OutputRouter(
        wanted, node="node0", cwd=str(folder), console=Console(out, err), log_writer=writer
    )
    output.prepare_folder()
    output.begin_generation("run1", world_size)
    return output


def start_worker(output: OutputRouter, rank: int, code: str, *args: str) -> subprocess.Popen[bytes]:
    """Start ``python -c code rank args`` with its streams in the output's pipes."""
    out, err = output.open_pipes(rank, rank, 0)
    try:
        command = [sys.executable, "-S", "-c", code, str(rank), *args]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    finally:
        os.close(out)
        os.close(err)


def pump(
    output: OutputRouter, workers: Sequence[subprocess.Popen[bytes]], timeout: float = 60.0
) -> None:
    """Read until every pipe has ended; the workers are killed when that takes too long."""
    deadline = time.monotonic() + timeout
    try:
        while output._stream_of_fd:
            assert time.monotonic() < deadline, "the workers' output has not ended"
            poll = select.poll()
            for fd in output.watched_fds():
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(500):
                output.read_pipe(fd)
    finally:
        for worker in workers:
            if output._stream_of_fd:
                worker.kill()
            worker.wait(20)


def pump_once(output: OutputRouter) -> None:
    """Let the first bytes of any worker through."""
    poll = select.poll()
    for fd in output.watched_fds():
        poll.register(fd, select.POLLIN)
    ready = poll.poll(20_000)
    assert ready, "no worker printed anything"
    for fd, _ in ready:
        output.read_pipe(fd)


def log(folder: Path, rank: int, suffix: str = "out") -> bytes:
    """Return what a rank's log file holds."""
    return (folder / "logs" / "run1" / "0" / f"rank_{rank}.{suffix}").read_bytes()
