"""The module search path of pdrun's processes. Imports only what a user's file cannot shadow."""

from __future__ import annotations

import os
import sys


def put_standard_library_first(path: list[str]) -> None:
    """
    Move the standard library to the front of ``path``, in place.

    A ``json.py`` in the working directory or on PYTHONPATH is for the user's script and must not be
    imported by the launcher. Nothing is removed, because sites install packages through PYTHONPATH.
    """
    home = os.__file__.rpartition("/")[0]  # plain text: pathlib itself could be shadowed
    archive = f"{home.rpartition('/')[0]}/python{sys.version_info[0]}{sys.version_info[1]}.zip"
    standard = (home, f"{home}/lib-dynload", archive)
    path.sort(key=lambda folder: folder not in standard)
