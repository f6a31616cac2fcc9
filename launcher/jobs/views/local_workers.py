"""
The workers of a job that run on this host, found through their agents' private folders.

    FOLDER/generation.json     written by the agent: run, generation, first rank
    FOLDER/PID.stacks          made by each worker that is forked or uses `pdrun.elastic`
    /proc/PID/environ          the marker of the supervisor, which has the local rank

Limits: an agent with another TMPDIR than this process is not found; neither are programs without
pdrun that were not forked.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pdrun.launcher.common import procfs
from pdrun.launcher.common.agent_folder import folder_prefix, read_first_rank
from pdrun.launcher.stdlib_only.watchdog import MARKER_VARIABLE
from pdrun.quick_dataclass import dataclass

STACKS_SUFFIX = ".stacks"


@dataclass(frozen=True)
class LocalWorker:
    """A worker on this host."""

    rank: int
    pid: int
    folder: Path
    """The private folder of its agent."""


def find_workers(run: str) -> list[LocalWorker]:
    """
    Return the workers of a run, by rank.

    Only this user's count: the folder of another user's agent cannot be read.
    """
    found: dict[int, LocalWorker] = {}
    for folder in _list_folders():
        first_rank = read_first_rank(folder, run)
        if first_rank is None:
            continue
        for path in folder.glob(f"*{STACKS_SUFFIX}"):
            pid = path.name.removesuffix(STACKS_SUFFIX)
            local_rank = _read_local_rank(int(pid)) if pid.isdecimal() else None
            if local_rank is not None:
                rank = first_rank + local_rank
                found[rank] = LocalWorker(rank, int(pid), folder)
    return [found[rank] for rank in sorted(found)]


def _list_folders() -> Iterator[Path]:
    """Yield the folders of this user's agents on this kernel."""
    bases = {tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR") or "/tmp", "/tmp"}
    for base in bases:
        try:
            for folder in Path(base).glob(f"{folder_prefix()}*"):
                if folder.lstat().st_uid == os.geteuid():
                    yield folder
        except OSError:
            continue  # an agent has ended meanwhile


def _read_local_rank(pid: int) -> int | None:
    """Return the local rank of a living worker; None: it has ended, or is no worker."""
    state = procfs.read_state(pid)
    if state is None or state.letter == "Z":
        return None
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    name = f"{MARKER_VARIABLE}=".encode()
    marker = next((entry for entry in entries if entry.startswith(name)), b"")
    slot = marker.rpartition(b".")[2]
    return int(slot) if slot.isdigit() else None
