"""
Where pdrun keeps what it knows of this user between jobs. Paths only: nothing is made or looked at
here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """
    Return ``$XDG_STATE_HOME/pdrun`` (default ~/.local/state). Raises OSError: neither home nor
    variable is set.
    """
    base = environ.get("XDG_STATE_HOME") or ""
    if not base.startswith("/"):
        home = environ.get("HOME") or ""
        if not home.startswith("/"):
            raise FileNotFoundError(2, "HOME is not set")
        base = f"{home}/.local/state"
    return Path(base) / "pdrun"


def warm_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """
    Return the folder of this user's warm processes on this node (`warm`).

    Raises:
        OSError: there is neither a home nor a variable that names a place.
    """
    runtime = environ.get("XDG_RUNTIME_DIR") or ""
    if runtime.startswith("/"):
        return Path(runtime, "pdrun")
    return state_folder(environ) / f"warm-{os.uname().nodename}"
