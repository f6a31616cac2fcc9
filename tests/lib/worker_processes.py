"""Real worker processes, started by hand with the environment that a launcher would set."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.lib import script_forks

torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

LAUNCHERS = ("PDRUN_", "MS_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_")
SINGLE = ("RANK", "WORLD_SIZE", "NODE_RANK", "PYTHONUNBUFFERED", "GLOO_SOCKET_IFNAME")
REPORT = """
def report(ctx, **more):
    import dataclasses, json
    told = {**dataclasses.asdict(ctx), "device": str(ctx.device), "main": ctx.is_main, **more}
    sys.stdout.flush()
    os.write(1, f"REPORT {json.dumps(told)}\\n".encode())  # in one piece: under torchrun the workers share a pipe
"""


def clean(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """
    Return this environment without any launcher's variables, with one thread a worker, and with
    ``more``.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHERS) and name not in SINGLE
    }
    return {**kept, "OMP_NUM_THREADS": "1", **(more or {})}


def free_port() -> int:
    """Return a port that was free a moment ago, for programs that take nothing else."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write(folder: Path, body: str) -> Path:
    """
    Write a script that may call ``report(ctx)``; return its path.

    The file appears whole: a process that was started a moment ago may be reading it.
    """
    script, unfinished = folder / "script.py", folder / "script.py.tmp"
    unfinished.write_text(f"import os, sys\nimport pdrun\n{REPORT}\n{body}\n")
    return unfinished.replace(script)


def start(
    folder: Path, body: str, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start Python on a script that may call ``report(ctx)``."""
    return subprocess.Popen(
        [sys.executable, str(write(folder, body))],
        env=clean(environ),
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def fork(
    folder: Path, body: str, environ: Mapping[str, str] | None = None
) -> script_forks.ForkedScript:
    """Do as `start` in a process that has imported torch, which costs a tenth."""
    return script_forks.start_forked(write(folder, body), clean(environ))


def reports(text: str) -> list[dict[str, Any]]:
    """Return what the workers reported, by rank."""
    found = [
        json.loads(line.partition("REPORT ")[2]) for line in text.splitlines() if "REPORT " in line
    ]
    return sorted(found, key=lambda told: int(told["rank"]))


def finish(
    process: subprocess.Popen[str] | script_forks.ForkedScript, timeout: float = 60.0
) -> tuple[int | None, str, str]:
    """
    Wait for a process; return its exit code and output. One that does not end is killed and fails
    the test.
    """
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"did not end in {timeout} s:\n{out}\n{err}")
    return process.returncode, out, err
