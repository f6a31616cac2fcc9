"""
The private folder of an agent: how it is called, and what it says about the agent's workers.

The agent makes it (`pdrun.launcher.agent.channel`). ``pdrun attach`` and ``pdrun trace`` look for
it on their host.
"""

from __future__ import annotations

import json
from pathlib import Path

GENERATION_FILE = "generation.json"
"""In the folder: to which run, generation and ranks its workers belong."""
FOLDER_PREFIX = "pdrun-agent-"
"""
The identifier of the running kernel follows: in a folder that hosts share, only that kernel knows
whether a socket is in use.
"""


def folder_prefix() -> str:
    """Return how this kernel's folders begin; without its identifier if that cannot be read."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return FOLDER_PREFIX
    return f"{FOLDER_PREFIX}{boot_id[:8]}-"


def write_generation(folder: Path, run: str, generation: int, first_rank: int) -> None:
    """Write which ranks run here; a failure is ignored, because the job does not need it."""
    data = {"run": run, "generation": generation, "first_rank": first_rank}
    place = folder / GENERATION_FILE
    try:
        draft = place.with_suffix(".part")
        draft.write_text(json.dumps(data))
        draft.replace(place)
    except OSError:
        pass


def read_first_rank(folder: Path, run: str) -> int | None:
    """Return the first rank of an agent's workers; None: it belongs to another run."""
    try:
        data = json.loads((folder / GENERATION_FILE).read_text())
        return int(data["first_rank"]) if data["run"] == run else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
