"""
Linux processes: their state in /proc, their descendants, and SIGKILL to exactly one of them.

Loaded in three ways, see `supervisor`. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 5.0
"""A process that SIGKILL does not end within this time is given up."""
RETRY_SECONDS = 0.02
"""Time between two attempts to kill what is left."""


def prctl(option: int, value: int) -> None:
    """Call prctl(2) with one argument."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def read_file(path: str) -> bytes:
    """Return the content of a file."""
    with open(path, "rb", buffering=0) as file:
        return file.readall()


class ProcessInfo:
    """
    A process as /proc/PID/stat shows it.

    ``start`` is its start time in clock ticks since boot. Pid and start time together identify a
    process; a pid alone may be reused. ``is_exiting``: it has no memory any more, so its
    environment cannot be read. Its children move to a reaper next, or have moved.
    """

    __slots__ = ("is_exiting", "pid", "ppid", "session", "start", "state")

    def __init__(self, pid: int, stat: bytes) -> None:
        fields = stat[stat.rindex(b")") + 2 :].split()
        self.pid = pid
        self.state = fields[0].decode()
        self.start = fields[19]
        self.is_exiting = fields[20] == b"0"
        self.ppid = int(fields[1])
        self.session = int(fields[3])

    def __str__(self) -> str:
        try:
            command = read_file(f"/proc/{self.pid}/cmdline").rstrip(b"\0").replace(b"\0", b" ")
        except OSError:
            return f"{self.pid} (ended)"
        return f"{self.pid} {command[:200].decode(errors='replace') or '(no command)'}"


def find_process(pid: int) -> ProcessInfo | None:
    """Return the process with this pid, or None."""
    try:
        return ProcessInfo(pid, read_file(f"/proc/{pid}/stat"))
    except OSError:
        return None


def list_numbers(folder: str) -> list[int]:
    """Return the entries of a folder that are decimal numbers; empty if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [int(entry.name) for entry in entries if entry.name.isdecimal()]
    except OSError:
        return []


def _child_pids(pid: int) -> list[int]:
    """
    Return the pids of the children of all threads of a process.

    Kernels without /proc/PID/task/TID/children: return all pids. The caller compares parent pids.
    """
    pids: list[int] = []
    for thread in list_numbers(f"/proc/{pid}/task"):
        try:
            pids += map(int, read_file(f"/proc/{pid}/task/{thread}/children").split())
        except FileNotFoundError:
            if thread == pid and find_process(pid) is not None:
                return list_numbers("/proc")
        except OSError:
            continue
    return pids


def list_children(parent: ProcessInfo) -> list[ProcessInfo]:
    """Return the children of a process; empty if its pid now belongs to another process."""
    children = [
        child
        for child in map(find_process, _child_pids(parent.pid))
        if child and child.ppid == parent.pid
    ]
    now = find_process(parent.pid)
    if now is None or now.start != parent.start:
        return []
    return children


def descendants(roots: list[ProcessInfo]) -> Iterator[ProcessInfo]:
    """Yield the roots and all their descendants, parents first."""
    queue = deque(roots)
    while queue:
        member = queue.popleft()
        yield member
        queue.extend(list_children(member))


def kill_process(target: ProcessInfo) -> None:
    """
    Send SIGKILL to this process, never to another process that has taken over its pid.

    A pidfd pins the process while its start time is compared. Without a pidfd (no free descriptor,
    or an old kernel) the comparison alone decides.
    """
    try:
        handle = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return
    except OSError:
        handle = -1
    try:
        now = find_process(target.pid)  # also None if there is no free descriptor to read it
        if now is not None and now.start == target.start and handle >= 0:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        elif handle < 0 and (now is None or now.start == target.start):
            os.kill(target.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        if handle >= 0:
            os.close(handle)
