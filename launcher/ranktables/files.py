"""
Rank tables as files.

Kubernetes' controllers truncate a file and write it, or swap the links of a mounted ConfigMap.
Therefore a file that changed while it was read is read again, and so is one that is cut off and
still grows. A table that is "initializing" is waited for. Files are written atomically.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdrun.errors import ConfigError, DeadlineExceeded
from pdrun.launcher.common.files import read_text
from pdrun.launcher.ranktables import jsontext
from pdrun.launcher.ranktables.check import check_table
from pdrun.launcher.ranktables.model import Fault, RankTable
from pdrun.launcher.ranktables.read import read_table
from pdrun.text import quote_command

MAX_TABLE_BYTES = 64 << 20
"""65,536 ranks of dialect 1.2 take about 12 MB."""
SETTLED_SECONDS = 2.0
"""
An invalid file that has not changed for this time is not being written. The time is measured here:
the clock of a file server may differ.
"""
POLL_SECONDS = 1.0
MESSAGE_SECONDS = 10.0
"""Between two messages about what is waited for."""
MAX_READS = 10


@dataclass(frozen=True)
class LoadedTable:
    """A file, its table and its faults."""

    name: str
    text: str
    table: RankTable | None
    faults: tuple[Fault, ...]

    def format_fault(self, fault: Fault) -> str:
        """
        Return a fault as a line:
        ``hccl.json:14: server_list[0].device[3].device_ip: WHAT; HINT``.
        """
        return str(self.make_error(fault))

    def make_error(self, fault: Fault) -> ConfigError:
        """
        Return a fault as an error with its line.

        The line of a missing entry is that of the object that lacks it.
        """
        path = fault.path
        offset = 0
        while path and not offset:
            offset = jsontext.find_offset(self.text, path)
            path = path[:-1]
        where = self.name
        what = fault.what
        if fault.path:
            where += f":{jsontext.line_of_offset(self.text, offset)}"
            what = f"{jsontext.format_path(fault.path)}: {what}"
        return ConfigError(what, where=where, hint=fault.hint)

    @property
    def errors(self) -> tuple[Fault, ...]:
        """Faults with which the table cannot be used."""
        return tuple(fault for fault in self.faults if not fault.is_warning)

    @property
    def warnings(self) -> tuple[Fault, ...]:
        """Faults with which the table can be used."""
        return tuple(fault for fault in self.faults if fault.is_warning)


def load_table(path: str, *, lenient: bool = False) -> LoadedTable:
    """
    Read and check a file once.

    Args:
        path: the file.
        lenient: numbers in the place of text, and text in the place of numbers, are warnings.

    Raises:
        UsageError: the file does not exist, or is not a regular one.
        ConfigError: it is not JSON.
    """
    name = Path(path).name
    text = _read_unchanged(path)
    table, faults = read_table(jsontext.parse_json(text, name), lenient=lenient)
    if table is not None and all(fault.is_warning for fault in faults):
        faults = [*faults, *check_table(table)]
    return LoadedTable(name, text, table, (*faults, *_check_permissions(path)))


def wait_for_table(
    path: str,
    wait: float = 0.0,
    print_line: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RankTable:
    """
    Return a table that a job can use.

    A table that is "initializing", or cut off while it still changes, is waited for.

    Args:
        path: the file.
        wait: longest time to wait, in seconds.
        print_line: called with what is waited for, and with every warning.
        clock: monotonic seconds.
        sleep: waits for a number of seconds.

    Raises:
        ConfigError: the table cannot be used; its first fault, with file and line.
        DeadlineExceeded: it was not complete at the end of the wait.
    """
    loaded = _load_complete(path, wait, print_line, clock, sleep)
    for fault in loaded.warnings:
        print_line(f"warning: {loaded.format_fault(fault)}")
    errors = loaded.errors
    if errors or loaded.table is None:
        error = loaded.make_error(errors[0])
        if len(errors) > 1:
            more = f"{len(errors) - 1} more: pdrun rank-table check"
            error.hint = f"{error.hint}; {more}" if error.hint else more
        raise error
    return loaded.table


def _load_complete(
    path: str,
    wait: float,
    print_line: Callable[[str], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> LoadedTable:
    """Load a file again and again until its table is complete."""
    deadline = clock() + wait
    next_message = float("-inf")
    identity = _file_identity(path)
    unchanged_since = clock()
    while True:
        try:
            loaded = load_table(path)
            if loaded.table is None or loaded.table.status != "initializing":
                return loaded
            what = f"{loaded.name} is initializing"
        except ConfigError:
            current = _file_identity(path)
            if current != identity:
                identity = current
                unchanged_since = clock()
            if clock() >= min(deadline, unchanged_since + SETTLED_SECONDS):
                raise
            what = f"{Path(path).name} is being written"
        if clock() >= deadline:
            raise DeadlineExceeded(
                f"the rank table is not complete after {wait:g} s",
                where=path,
                hint="see why not all pods of its job run, or increase --start-timeout",
            )
        if clock() >= next_message:
            print_line(f"waiting for the rank table: {what}")
            next_message = clock() + MESSAGE_SECONDS
        sleep(min(POLL_SECONDS, max(0.0, deadline - clock())))


def _read_unchanged(path: str) -> str:
    """Read a file until it was the same before and after."""
    for _ in range(MAX_READS):
        before = _file_identity(path)
        text = read_text(path, MAX_TABLE_BYTES)
        if before == _file_identity(path):
            return text
    raise ConfigError("changes faster than it can be read", where=path)


def _file_identity(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _check_permissions(path: str) -> list[Fault]:
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return []
    if not mode & stat.S_IWOTH:
        return []
    what = "every user of this machine can write this file"
    return [Fault((), what, quote_command("chmod", "o-w", path), is_warning=True)]


def write_file(path: str, text: str) -> None:
    """
    Write a file atomically.

    Raises:
        ConfigError: it cannot be written.
    """
    target = Path(path)
    if not target.name:  # ".", "/"
        raise ConfigError("is a folder", where=path, hint="name a file")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot be written: {error.strerror}", where=path) from None
