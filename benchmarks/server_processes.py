"""Processes of the benchmarks of parameter servers: which they are, and their CPU time."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_seconds(*pids: int) -> float:
    """Return the CPU time of all threads of processes."""
    total = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                total += int(path.read_text().split()[0])
            except OSError:
                pass
    return total / 1e9


def find_servers() -> list[int]:
    """Return the servers of this worker's job: they have its parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()
            parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            continue
        if b"servers.main" in command and int(parent) == os.getppid():
            found.append(int(path.name))
    return found
