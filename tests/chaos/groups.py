"""
Control groups of one host of the bed: everything in it frozen at once, or held to a limit.

Works with the old hierarchies (/sys/fs/cgroup/freezer ...) and the unified one. A group is found
again by its name, so that any process may thaw and remove what another one made.
"""

from __future__ import annotations

import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
LIMITS = {
    "memory": ("memory.limit_in_bytes", "memory.max"),
    "pids": ("pids.max", "pids.max"),
    "cpu": ("cpu.cfs_quota_us", "cpu.max"),
}
"""Controller -> file of its limit in the old and in the unified hierarchy."""


class Unavailable(Exception):
    """This machine's control groups cannot do it; the text says why."""


class Group:
    """The groups called ``name``, one a hierarchy that was needed."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def folders(self) -> list[Path]:
        """Folders of this group that exist."""
        return [base / self.name for base in _hierarchies() if (base / self.name).is_dir()]

    def joins(self) -> list[str]:
        """Files to which a process writes its id to come under everything that was asked for."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def make_freezable(self) -> None:
        """
        Make the group that `freeze` works on; what joins later can be frozen. Does nothing where it
        cannot.
        """
        for base in (ROOT / "freezer", ROOT / "unified", ROOT):
            if (base / "cgroup.procs").exists():
                try:
                    (base / self.name).mkdir(exist_ok=True)
                    return
                except OSError:
                    continue

    @property
    def freezable(self) -> bool:
        """Whether `freeze` has a group to work on."""
        return any(
            (folder / name).exists()
            for folder in self.folders
            for name in ("freezer.state", "cgroup.freeze")
        )

    def freeze(self, on: bool = True) -> None:
        """
        Stop every process of the group wherever it is (old hierarchy: not even SIGKILL is obeyed),
        or let go.
        """
        for folder in self.folders:
            if (folder / "freezer.state").exists():
                (folder / "freezer.state").write_text("FROZEN" if on else "THAWED")
            elif (folder / "cgroup.freeze").exists():
                (folder / "cgroup.freeze").write_text("1" if on else "0")

    def limit(self, controller: str, value: int) -> None:
        """
        Hold what joins from now on to ``value`` bytes of memory, processes (`pids`), or
        microseconds of CPU in 0.1 s.

        Raises:
            Unavailable: the controller cannot be had.
        """
        old, unified = LIMITS[controller]
        try:
            if (ROOT / controller / "cgroup.procs").exists():
                folder, name = ROOT / controller / self.name, old
            else:
                (ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
                folder, name = ROOT / self.name, unified
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(str(value))
        except OSError as error:
            raise Unavailable(f"no control group for {controller}: {error}") from None

    def remove(self, timeout: float = 5.0) -> None:
        """
        Remove the groups, whose processes have been killed; one whose last process lingers is tried
        again.
        """
        deadline = time.monotonic() + timeout
        for folder in self.folders:
            while True:
                try:
                    folder.rmdir()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.02)


def _hierarchies() -> list[Path]:
    return [ROOT, *(path for path in ROOT.iterdir() if path.is_dir())] if ROOT.is_dir() else []
