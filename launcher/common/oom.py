"""
How many processes the kernel has killed for lack of memory in this process's cgroup: the proof
behind "out of memory".

Reads memory.events (cgroup v2) or memory.oom_control (v1). Limits: 0 where neither can be read; a
kill by the machine's own limit, outside any cgroup limit, is counted by v1 and v2 only on kernels
that say so.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def count_oom_kills(self_cgroup: Path = Path("/proc/self/cgroup"), root: Path = _ROOT) -> int:
    """Return the count so far; only differences mean something."""
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if "memory" in names:
            folder = root / "memory"
            count = _read_oom_count(
                folder / path.lstrip("/") / "memory.oom_control", folder / "memory.oom_control"
            )
        elif controllers == "":
            count = _read_oom_count(root / path.lstrip("/") / "memory.events", root / "memory.events")
        else:
            continue
        if count is not None:
            return count
    return 0


def _read_oom_count(*files: Path) -> int | None:
    """
    The count in the first file that can be read: inside a container the path of the host may not
    exist.
    """
    for file in files:
        try:
            words = file.read_text().split()
        except OSError:
            continue
        if "oom_kill" in words:
            return int(words[words.index("oom_kill") + 1])
    return None
