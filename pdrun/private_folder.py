"""Folders that only their user can enter."""

from __future__ import annotations

from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """
    Make a folder and the folders above it that are missing, all 0700; one that is there stays as it
    is.

    `Path.mkdir` gives the mode to the last one only.
    """
    if not folder.is_dir():
        if folder.parent != folder:
            make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
