"""
/proc and the memory cgroup: state, CPU time and wait channel of a process, and OOM kills.

Each function reads one moment of a process that may end meanwhile; then it returns nothing. No
process is stopped or slowed down.
"""

from __future__ import annotations

import os
from pathlib import Path

from pdrun.quick_dataclass import dataclass

TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
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
    """State of a process, from /proc/PID/status."""

    letter: str
    """
    R: running, S: sleeping, D: uninterruptible sleep, T: stopped by a signal, t: stopped by a
    debugger, Z: zombie.
    """
    tracer_pid: int = 0
    """Pid of the debugger that traces it, or 0."""
    caught_signals: int = 0
    """Bit N-1 is set if signal N has a handler."""

    @property
    def description(self) -> str:
        """``D (uninterruptible, in the kernel)``."""
        return f"{self.letter} ({_STATES.get(self.letter, 'unknown')})"


def read_state(pid: int) -> ProcessState | None:
    """Return the state of a process, or None if there is no such process."""
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


class CpuMeter:
    """
    Reads the CPU time of a process and its descendants again and again.

    To find all descendants costs more than to read their times. So that is done less often.
    """

    def __init__(self, pid: int, scan_seconds: float = 0.0) -> None:
        """``scan_seconds``: for so long a new descendant may be missing."""
        self._pid = pid
        self._scan_seconds = scan_seconds
        self._descendants: list[int] = []
        self._scan_at = float("-inf")

    def read_seconds(self, now: float) -> float | None:
        """
        Return the CPU seconds so far, or None if the process has ended.

        Descendants that have ended count once their parent has reaped them.
        """
        own = _read_cpu_ticks(self._pid)
        if not own:
            return None
        if now >= self._scan_at:
            self._scan_at = now + self._scan_seconds
            self._descendants = find_descendants(self._pid)
        return (own + sum(map(_read_cpu_ticks, self._descendants))) * TICK_SECONDS


def find_descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    found: list[int] = []
    todo = [pid]
    seen = {pid}
    while todo:
        for child in _child_pids(todo.pop()):
            if child not in seen:
                seen.add(child)
                todo.append(child)
                found.append(child)
    return found


def read_voluntary_switches(pid: int) -> int | None:
    """
    Return how often the main thread of a process has waited in the kernel, or None if it has ended.

    A thread that spins never waits.
    """
    for line in _read_text(f"/proc/{pid}/task/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name == "voluntary_ctxt_switches":
            return int(value)
    return None


def read_wait_channel(pid: int) -> str:
    """
    Return the kernel function in which a process waits, such as ``futex_wait_queue``.

    Returns:
        the empty string if the process does not wait or the kernel does not show it.
    """
    name = _read_text(f"/proc/{pid}/wchan").strip()
    return "" if name in ("0", "") else name


def read_kernel_stack(pid: int) -> str:
    """
    Return the kernel stack of a process, one function per line, innermost first.

    Usually only root may read it; otherwise the result is empty.
    """
    lines = _read_text(f"/proc/{pid}/stack").splitlines()
    return "\n".join(line.partition("] ")[2].partition("+")[0] for line in lines)


def has_open_file(pid: int, path: str) -> bool:
    """Return whether a process has a file open."""
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
    """Return the CPU ticks of a process and of its reaped children, or 0 if it has ended."""
    words = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, words[11:15])) + 1 if len(words) > 15 else 0


def read_resident_pages(pid: int) -> int:
    """Return how many pages of memory a process has in use, or 0 if it has ended."""
    words = _read_text(f"/proc/{pid}/statm").split()
    return int(words[1]) if len(words) > 1 else 0


def read_host_ticks() -> tuple[int, int] | None:
    """Return the busy and all CPU ticks of this host since it started; None: unknown."""
    name, *words = _read_text("/proc/stat").partition("\n")[0].split() or [""]
    if name != "cpu" or len(words) < 8:
        return None
    ticks = list(map(int, words[:8]))  # guests are in user already
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def read_host_memory_share() -> float | None:
    """Return which part of this host's memory is in use, 0 to 1; None: unknown."""
    sizes = {}
    for line in _read_text("/proc/meminfo").splitlines()[:8]:
        name, _, value = line.partition(":")
        sizes[name] = int(value.split()[0])
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable")
    return None if not total or available is None else 1 - available / total


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


# Memory
# --------------------------------------------------------------------------------------------------


def count_oom_kills(
    self_cgroup: Path = Path("/proc/self/cgroup"), root: Path = _CGROUP_ROOT
) -> int:
    """
    Return how many processes the kernel has killed for lack of memory in this process's cgroup.

    Only differences are meaningful. Read from memory.events (cgroup v2) or memory.oom_control (v1).

    Limits: 0 if neither file can be read. A kill by the machine's own limit, outside any cgroup
    limit, is counted only by kernels that report it.
    """
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        inner = path.lstrip("/")
        # Inside a container the path of the host may not exist: the mount's own file is second.
        if "memory" in names:
            folder = root / "memory"
            count = _read_oom_count(
                folder / inner / "memory.oom_control", folder / "memory.oom_control"
            )
        elif controllers == "":
            count = _read_oom_count(root / inner / "memory.events", root / "memory.events")
        else:
            continue
        if count is not None:
            return count
    return 0


def _read_oom_count(*files: Path) -> int | None:
    """Return the count in the first file that can be read."""
    for file in files:
        try:
            words = file.read_text().split()
        except OSError:
            continue
        if "oom_kill" in words:
            return int(words[words.index("oom_kill") + 1])
    return None
