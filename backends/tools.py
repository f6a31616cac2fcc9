"""Asking a vendor's tool: bounded in time and output, so that a hanging driver never hangs the launcher."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from pdrun.backends.base import Answer

LIMIT = 3.0
"""Seconds that a tool may take. nvidia-smi -L takes 0.03 s on a healthy machine, minutes on a sick one."""


def runner(environ: Mapping[str, str], limit: float = LIMIT) -> Callable[[Sequence[str]], Answer]:
    """Return a function that runs a tool found on the PATH of ``environ`` for at most ``limit`` seconds."""

    def run(command: Sequence[str]) -> Answer:
        program = shutil.which(command[0], path=environ.get("PATH", os.defpath))
        if program is None:
            return Answer("missing")
        return _ask([program, *command[1:]], environ, limit)

    return run


def _ask(command: Sequence[str], environ: Mapping[str, str], limit: float) -> Answer:
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(environ),
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Answer("failed", str(error))
    try:
        text = process.communicate(timeout=limit)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        _end(process)
        return Answer("hung")
    if process.returncode:
        last = (text.strip().splitlines() or ["no output"])[-1]
        return Answer("failed", f"exit code {process.returncode}: {last[:200]}")
    return Answer("ok", text)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a tool and all that it started; one that sits in the kernel is left behind, not waited for."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=0.2)
    except (OSError, subprocess.TimeoutExpired):
        if process.stdout is not None:
            process.stdout.close()
