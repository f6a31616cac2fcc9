"""
Rank tables as files: read whole even while somebody writes them, waited for while they are
"initializing", written at once.

Kubernetes' controllers write with truncation, and swap links of mounted ConfigMaps: a file that
changed while it was read, or that is cut off and still grows, is read again.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as FilePath

from pdrun.errors import ConfigError, DeadlineExceeded
from pdrun.launcher.common.textfile import read_text
from pdrun.launcher.ranktables import jsontext
from pdrun.launcher.ranktables.check import check
from pdrun.launcher.ranktables.model import Fault, RankTable
from pdrun.launcher.ranktables.read import read

LIMIT = 64 << 20
"""Bytes of a table, at most; 65,536 ranks of dialect 1.2 take about 12 MB."""
FRESH = 2.0
"""
Seconds without a change after which a file that cannot be read is not in the making; no clock of a
server counts.
"""
POLL = 1.0


@dataclass(frozen=True)
class Loaded:
    """A file and everything that is to be said about it."""

    name: str
    text: str
    table: RankTable | None
    faults: tuple[Fault, ...]

    def line(self, fault: Fault) -> str:
        """
        Return one fault as a line: ``hccl.json:14: server_list[0].device[3].device_ip: WHAT;
        HINT``.
        """
        error = self.error(fault)
        return str(error)

    def error(self, fault: Fault) -> ConfigError:
        """
        Return a fault as an error with its place; of what is missing, the place is the object that
        lacks it.
        """
        path = fault.path
        offset = 0
        while path and not offset:
            offset = jsontext.locate(self.text, path)
            path = path[:-1]
        where = f"{self.name}:{jsontext.line_of(self.text, offset)}" if fault.path else self.name
        what = f"{jsontext.path_text(fault.path)}: {fault.what}" if fault.path else fault.what
        return ConfigError(what, where=where, hint=fault.hint)

    @property
    def wrong(self) -> tuple[Fault, ...]:
        """What makes the table useless."""
        return tuple(fault for fault in self.faults if not fault.mild)

    @property
    def mild(self) -> tuple[Fault, ...]:
        """Warnings."""
        return tuple(fault for fault in self.faults if fault.mild)


def load(path: str, *, lenient: bool = False) -> Loaded:
    """
    Read a file once, and say what is in it.

    Raises:
        UsageError: there is no such file, or it is no regular one. ConfigError: it is no JSON.
    """
    name = FilePath(path).name
    text = _steady(path)
    table, faults = read(jsontext.parse(text, name), lenient=lenient)
    usable = table is not None and all(fault.mild for fault in faults)
    more = check(table) if table is not None and usable else []
    return Loaded(name, text, table, (*faults, *more, *_permissions(path)))


def usable(
    path: str,
    wait: float = 0.0,
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RankTable:
    """
    Return a table that a job can use; one that is "initializing", or cut off while it still
    changes, is waited for.

    Args:
        wait: seconds to wait, at most.
        say: is told what is waited for, and every warning.

    Raises:
        ConfigError: the table cannot be used; the first thing that is wrong, with file and line.
        DeadlineExceeded: it was still initializing at the end of the wait.
    """
    end = clock() + wait
    told = -1e9
    seen = _identity(path)
    since = clock()
    while True:
        try:
            loaded = load(path)
            if loaded.table is None or loaded.table.status != "initializing":
                break
            what = f"{loaded.name} is initializing"
        except ConfigError:
            if seen != (seen := _identity(path)):
                since = clock()
            if clock() >= min(end, since + FRESH):
                raise
            what = f"{FilePath(path).name} is being written"
        if clock() >= end:
            raise DeadlineExceeded(
                f"still after {wait:g} s: whoever writes this rank table has not completed it",
                where=path,
                hint="see why its job's pods are not all there, or give more --start-timeout",
            )
        if clock() - told >= 10:
            say(f"waiting for the rank table: {what}")
            told = clock()
        sleep(min(POLL, max(0.0, end - clock())))
    for fault in loaded.mild:
        say(f"warning: {loaded.line(fault)}")
    if loaded.wrong or loaded.table is None:
        error = loaded.error(loaded.wrong[0])
        if len(loaded.wrong) > 1:
            error.hint = (
                f"{error.hint}; " * bool(error.hint)
                + f"{len(loaded.wrong) - 1} more: pdrun rank-table check"
            )
        raise error
    return loaded.table


def _steady(path: str) -> str:
    """Read a file until it was the same one before and after."""
    for _ in range(10):
        before = _identity(path)
        text = read_text(path, LIMIT)
        if before == _identity(path):
            return text
    raise ConfigError("changes faster than it can be read", where=path)


def _identity(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = FilePath(path).stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _permissions(path: str) -> list[Fault]:
    try:
        mode = FilePath(path).stat().st_mode
    except OSError:
        return []
    if mode & stat.S_IWOTH:
        return [
            Fault(
                (), "every user of this machine may write this file", f"chmod o-w {path}", mild=True
            )
        ]
    return []


def write(path: str, text: str) -> None:
    """
    Put a text into a file, whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    target = FilePath(path)
    if not target.name:  # ".", "/"
        raise ConfigError("is a folder", where=path, hint="name a file")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot be written: {error.strerror}", where=path) from None
