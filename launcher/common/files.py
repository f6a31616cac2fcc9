"""
Questions about paths that never raise: what may not be looked at counts as not there.

pathlib's own ``is_file``, ``is_dir`` and ``exists`` raise PermissionError: one closed folder on
PATH would end a job.
"""

from __future__ import annotations

import stat
from pathlib import Path


def _read_mode(path: str | Path, *, follow: bool = True) -> int:
    try:
        return Path(path).stat(follow_symlinks=follow).st_mode
    except (OSError, ValueError):
        return 0


def why_inaccessible(path: str | Path) -> str:
    """
    Return why the way to a path is closed, so that nobody can tell whether there is anything;
    empty: it is not.
    """
    try:
        Path(path).lstat()
    except PermissionError as error:
        return error.strerror or str(error)
    except (OSError, ValueError):
        pass
    return ""


def is_file(path: str | Path) -> bool:
    """Return whether there is a regular file."""
    return stat.S_ISREG(_read_mode(path))


def is_folder(path: str | Path) -> bool:
    """Return whether there is a directory."""
    return stat.S_ISDIR(_read_mode(path))


def is_link(path: str | Path) -> bool:
    """Return whether there is a symbolic link, to something or to nothing."""
    return stat.S_ISLNK(_read_mode(path, follow=False))


def path_exists(path: str | Path) -> bool:
    """Return whether there is anything; a link to nothing is something."""
    return _read_mode(path, follow=False) != 0
