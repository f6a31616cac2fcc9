"""Run a vendor's tool, bounded in time and output: a hanging driver must not hang the launcher."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from pdrun.backends.base import ToolAnswer

TOOL_SECONDS = 3.0
"""Time limit of a tool. nvidia-smi -L takes 0.03 s, but minutes if a driver hangs."""
MAX_OUTPUT_BYTES = 1 << 20
"""Limit of its output."""


def make_tool_runner(
    environ: Mapping[str, str], seconds: float = TOOL_SECONDS
) -> Callable[[Sequence[str]], ToolAnswer]:
    """Return a function that runs a tool on the PATH of ``environ`` for at most ``seconds``."""

    def run(command: Sequence[str]) -> ToolAnswer:
        program = shutil.which(command[0], path=environ.get("PATH", os.defpath))
        if program is None:
            return ToolAnswer("missing")
        return _run_tool([program, *command[1:]], environ, seconds)

    return run


def _run_tool(command: Sequence[str], environ: Mapping[str, str], seconds: float) -> ToolAnswer:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
    except OSError as error:
        return ToolAnswer("failed", str(error))
    try:
        data = _read_output(process, time.monotonic() + seconds)
    except TimeoutError:
        _kill_tool(process)
        return ToolAnswer("hung")
    if len(data) > MAX_OUTPUT_BYTES:
        _kill_tool(process)
        return ToolAnswer("failed", f"it printed more than {MAX_OUTPUT_BYTES} bytes")
    text = data.decode("utf-8", "replace")
    if process.returncode:
        last = (text.strip().splitlines() or ["no output"])[-1]
        return ToolAnswer("failed", f"exit code {process.returncode}: {last[:200]}")
    return ToolAnswer("ok", text)


def _read_output(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """
    Return the output of a tool when it has ended, or a little more than MAX_OUTPUT_BYTES of it.

    Raises:
        TimeoutError: it, or a process that it has started, still has its output open.
    """
    assert process.stdout is not None
    data = bytearray()
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while len(data) <= MAX_OUTPUT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError
        part = os.read(process.stdout.fileno(), 1 << 16)
        if not part:
            process.stdout.close()
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TimeoutError from None
            break
        data += part
    return bytes(data)


def _kill_tool(process: subprocess.Popen[bytes]) -> None:
    """Kill a tool and its children; do not wait for one that is stuck in the kernel."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(0.2)
    except (OSError, subprocess.TimeoutExpired):
        pass
    if process.stdout is not None:
        process.stdout.close()
