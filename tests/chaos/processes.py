"""
Processes of the machine, by what /proc says of them: told by files, killed for certain, followed
into namespaces.

A file that tells a process holds its pid and its start: a later process with the same pid is never
taken for it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

BOOT_TIMEOUT = 20.0


class BedError(Exception):
    """The bed cannot do what was asked; the text says what and why."""


def pid_of(process: subprocess.Popen[bytes], timeout: float = 30.0) -> int:
    """Return the machine-wide pid of the command that `Host.start` started."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for child in children(process.pid):
            if (words := command_line(child)) and not words.startswith(
                ("nsenter", "sh -c cd")
            ):  # now the command
                return child
        if process.poll() is not None:
            break
        time.sleep(0.005)
    raise BedError("the command has not started, or has ended")


def run_here(
    *command: str | Path,
    timeout: float = 20.0,
    check: bool = True,
    env: Mapping[str, str] | None = None,
) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        timeout=timeout,
        env=env,
        stdin=subprocess.DEVNULL,
    )
    if check and done.returncode:
        raise BedError(
            f"{' '.join(map(str, command[-6:]))}: {done.stderr.decode(errors='replace').strip()}"
        )
    return done.stdout.decode(errors="replace")


def await_told(path: Path, what: str, log: Path | None = None) -> None:
    deadline = time.monotonic() + BOOT_TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            raise BedError(f"{what} did not come up: {log.read_text() if log else ''}")
        time.sleep(0.002)
    pid = int(path.read_text())
    path.write_text(json.dumps([pid, started(pid)]))


def told_pid(path: Path) -> int:
    """Return the pid that a file tells, 0 where that very process is no more."""
    try:
        pid, since = json.loads(path.read_text())
    except (OSError, ValueError, TypeError):
        return 0
    return pid if started(pid) == since else 0


def kill_told(path: Path, timeout: float = 10.0) -> None:
    """
    Kill the process that a file tells and wait until it is gone, and with it its namespace's other
    processes.
    """
    deadline = time.monotonic() + timeout
    while pid := told_pid(path):
        send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise BedError(f"process {pid} does not end")
        time.sleep(0.005)


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def started(pid: int) -> int | None:
    """
    Start of a process in ticks since boot, which tells it from a later one with its pid; None: it
    has ended.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def command_line(pid: int) -> str:
    """Words of a process; empty for one that has ended."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .rstrip(b"\0")
            .replace(b"\0", b" ")
            .decode(errors="replace")
        )
    except OSError:
        return ""
