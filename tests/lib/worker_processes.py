"""Real worker processes, started by hand with the environment that a launcher would set."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lib import script_forks
from tests.lib.ports import free_port as free_port

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


def run_program(folder: Path, program: Path, *words: str, timeout: float = 170.0) -> str:
    """Run ``python PROGRAM WORDS`` in a folder, as `fork` does; return its output."""
    process = script_forks.start_forked(program, clean(), words, folder)
    code, out, err = finish(process, timeout)
    assert code == 0, out + err
    return out


def reports(text: str) -> list[dict[str, Any]]:
    """Return what the workers reported, by rank."""
    found = [
        json.loads(line.partition("REPORT ")[2]) for line in text.splitlines() if "REPORT " in line
    ]
    return sorted(found, key=lambda told: int(told["rank"]))


Worker = subprocess.Popen[str] | script_forks.ForkedScript
Ended = tuple[int | None, str, str]
"""Exit code, output and errors."""
MOMENT_SECONDS = 1.0
"""For the output of a process that has ended while another one was waited for."""


def finish(process: Worker, timeout: float = 60.0) -> Ended:
    """
    Wait for a process; return its exit code and output. One that does not end is killed and fails
    the test.
    """
    return finish_all([process], timeout)[0]


def finish_all(processes: Sequence[Worker], timeout: float = 60.0) -> list[Ended]:
    """
    Wait for processes that belong together; return exit code and output of each.

    If one does not end in time, all that still run are killed, and the test fails with what every
    one of them said: the cause is rarely in the output of the one that waits.
    """
    deadline = time.monotonic() + timeout
    ended: dict[int, Ended] = {}
    for place, process in enumerate(processes):
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, err = process.communicate(timeout=max(MOMENT_SECONDS, deadline - time.monotonic()))
            ended[place] = process.returncode, out, err
    late = [place for place in range(len(processes)) if place not in ended]
    for place in late:
        processes[place].kill()
    for place in late:
        out, err = processes[place].communicate()
        ended[place] = None, out, err
    found = [ended[place] for place in range(len(processes))]
    if late:
        told = [
            f"process {place}: {'killed' if code is None else f'exit code {code}'}\n{out}\n{err}"
            for place, (code, out, err) in enumerate(found)
        ]
        pytest.fail(f"did not end in {timeout} s: {late}\n" + "\n".join(told))
    return found
