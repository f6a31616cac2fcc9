"""
Small text files that users name: read with a limit, never waited for, every complaint with its
line.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.common.parsers import quote_text


def read_text(path: str, max_bytes: int, *, pipe_hint: str = "write it to a file") -> str:
    """
    Return the text of a regular file of at most ``limit`` bytes in UTF-8, its byte order mark
    removed.

    A pipe or a device is refused rather than waited for; ``instead`` is what to do with a pipe.

    Raises:
        UsageError: there is no such file, it is no regular file, or it cannot be read.
        ConfigError: it is too large or no UTF-8 text; names the file's name and line.
    """
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
    """Return the text of bytes that were read from ``name``; as `read_text`."""
    if len(data) > max_bytes:
        raise ConfigError(f"is larger than {max_bytes} bytes", where=name)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data:
        raise ConfigError("holds NUL bytes or is UTF-16", where=name, hint="save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError("is not UTF-8", where=f"{name}:{line}", hint="save it as UTF-8") from None
