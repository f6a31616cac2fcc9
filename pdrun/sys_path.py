"""
Where a process of pdrun's own looks for modules. Nothing is imported here that a user's file could
shadow.
"""

from __future__ import annotations

import os
import sys


def put_standard_library_first(path: list[str]) -> None:
    """
    Put the standard library before everything else in ``path``, in place.

    A ``json.py`` in the working directory or on PYTHONPATH is the user's own affair in the script,
    and must not become a part of the launcher. Nothing is removed: sites install packages through
    PYTHONPATH.
    """
    home = os.__file__.rpartition("/")[0]  # plain text: pathlib itself could be shadowed
    archive = f"{home.rpartition('/')[0]}/python{sys.version_info[0]}{sys.version_info[1]}.zip"
    standard = (home, f"{home}/lib-dynload", archive)
    path.sort(key=lambda folder: folder not in standard)
