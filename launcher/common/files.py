"""
Paths and text files: questions that never raise, text files read with a limit, pdrun's own folders.

pathlib's ``is_file``, ``is_dir`` and ``exists`` raise PermissionError. One closed folder on PATH
would then end a job. The functions here treat an inaccessible path as missing.

`pdrun.launcher.launch.prestart` imports this module before the command line is read. Imports that
take time are therefore inside the functions that need them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path


def is_file(path: str | Path) -> bool:
    """Return whether the path is a regular file."""
    return stat.S_ISREG(_read_mode(path))


def is_folder(path: str | Path) -> bool:
    """Return whether the path is a directory."""
    return stat.S_ISDIR(_read_mode(path))


def is_link(path: str | Path) -> bool:
    """Return whether the path is a symbolic link, broken or not."""
    return stat.S_ISLNK(_read_mode(path, follow=False))


def path_exists(path: str | Path) -> bool:
    """Return whether the path exists; a broken link exists."""
    return _read_mode(path, follow=False) != 0


def why_inaccessible(path: str | Path) -> str:
    """Return why a path cannot be examined (permission denied), or the empty string."""
    try:
        Path(path).lstat()
    except PermissionError as error:
        return error.strerror or str(error)
    except (OSError, ValueError):
        pass
    return ""


def _read_mode(path: str | Path, *, follow: bool = True) -> int:
    try:
        return Path(path).stat(follow_symlinks=follow).st_mode
    except (OSError, ValueError):
        return 0


# Text files
# --------------------------------------------------------------------------------------------------


def read_text(path: str, max_bytes: int, *, pipe_hint: str = "write it to a file") -> str:
    """
    Return the text of a regular UTF-8 file of at most ``max_bytes`` bytes, without byte order mark.

    A pipe or a device is refused, because reading it could block. ``pipe_hint`` says what to do
    with a pipe.

    Raises:
        UsageError: the file does not exist, is not a regular file, or cannot be read.
        ConfigError: the file is too large or not UTF-8; names the file and the line.
    """
    from pdrun.errors import UsageError
    from pdrun.launcher.common.parsers import quote_text

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISFIFO(mode):
                raise UsageError("is a pipe, not a regular file", where=path, hint=pipe_hint)
            if not stat.S_ISREG(mode):
                raise UsageError("is not a regular file", where=path)
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise UsageError(f"no such file {quote_text(path)}") from None
    except IsADirectoryError:
        raise UsageError("is not a regular file", where=path) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot be read: {reason}", where=path) from None
    return decode_text(data, Path(path).name, max_bytes)


def decode_text(data: bytes, name: str, max_bytes: int) -> str:
    """Return the text of bytes that were read from ``name``; raises ConfigError as `read_text`."""
    from pdrun.errors import ConfigError

    if len(data) > max_bytes:
        raise ConfigError(f"is larger than {max_bytes} bytes", where=name)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data:
        raise ConfigError("contains NUL bytes or is UTF-16", where=name, hint="save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError("is not UTF-8", where=f"{name}:{line}", hint="save it as UTF-8") from None


# Folders of pdrun
# --------------------------------------------------------------------------------------------------


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """
    Return the folder of pdrun's state between jobs: ``$XDG_STATE_HOME/pdrun``.

    Default of XDG_STATE_HOME: ``~/.local/state``. The folder is neither created nor examined.

    Raises:
        OSError: neither HOME nor XDG_STATE_HOME is an absolute path.
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
    Return the folder of the sockets of this user's warm processes on this node.

    Raises:
        OSError: see `state_folder`.
    """
    runtime = environ.get("XDG_RUNTIME_DIR") or ""
    if runtime.startswith("/"):
        return Path(runtime, "pdrun")
    return state_folder(environ) / f"warm-{os.uname().nodename}"


def has_warm_socket(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a warm process of this user may listen: a cheap look that opens no socket."""
    try:
        return any(path.suffix == ".sock" for path in warm_folder(environ).iterdir())
    except OSError:
        return False
