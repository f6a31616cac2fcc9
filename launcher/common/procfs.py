"""
What /proc tells of a process that seems to do nothing: its CPU time, what state it is in, what it
waits for.

Everything here is a reading at one moment of a process that may end meanwhile; then there is
nothing to tell. No process is stopped or slowed by it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")
_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "uninterruptible, in the kernel",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
}


@dataclass(frozen=True)
class ProcessState:
    """What a process's status says."""

    letter: str
    """
    R runs, S waits, D waits uninterruptibly, T is stopped by a signal, t by a debugger, Z has
    ended.
    """
    tracer_pid: int = 0
    """Pid of the debugger that holds it, or 0."""
    caught_signals: int = 0
    """Bit N-1 is set where signal N has a handler."""

    @property
    def description(self) -> str:
        """``D (uninterruptible, in the kernel)``."""
        return f"{self.letter} ({_STATES.get(self.letter, 'unknown')})"


def read_state(pid: int) -> ProcessState | None:
    """Return the state of a process; None: there is none."""
    letter = ""
    tracer = 0
    caught = 0
    for line in _read_text(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name == "State":
            letter = value.split()[0]
        elif name == "TracerPid":
            tracer = int(value)
        elif name == "SigCgt":
            caught = int(value, 16)
    return ProcessState(letter, tracer, caught) if letter else None


def read_cpu_seconds(pid: int) -> float | None:
    """
    Return the CPU time of a process and all its descendants, ended ones that were waited for
    included.
    """
    own = _read_cpu_ticks(pid)
    if not own:
        return None
    total = own
    todo = [pid]
    seen = {pid}
    while todo:
        for child in _child_pids(todo.pop()):
            if child not in seen:
                seen.add(child)
                todo.append(child)
                total += _read_cpu_ticks(child)
    return total * TICK_SECONDS


def read_wait_channel(pid: int) -> str:
    """
    Return the kernel's function in which a process waits, ``futex_wait_queue`` say; empty where
    that is not told.
    """
    name = _read_text(f"/proc/{pid}/wchan").strip()
    return "" if name in ("0", "") else name


def read_kernel_stack(pid: int) -> str:
    """
    Return the kernel's stack of a process, innermost first, one function a line; mostly only root
    may read it.
    """
    lines = _read_text(f"/proc/{pid}/stack").splitlines()
    return "\n".join(line.partition("] ")[2].partition("+")[0] for line in lines)


def has_open_file(pid: int, path: str) -> bool:
    """Whether a process has a file open."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return any(_read_link(entry.path) == path for entry in entries)
    except OSError:
        return False


def _read_link(link: str) -> str:
    try:
        return str(Path(link).readlink())
    except OSError:
        return ""


def _read_cpu_ticks(pid: int) -> int:
    """Clock ticks of a process and of its children that were waited for; 0: it is gone."""
    words = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, words[11:15])) + 1 if len(words) > 15 else 0


def _child_pids(pid: int) -> list[int]:
    found: list[int] = []
    try:
        with os.scandir(f"/proc/{pid}/task") as threads:
            for thread in threads:
                found += map(int, _read_text(f"{thread.path}/children").split())
    except OSError:
        pass  # it has ended
    return found


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
