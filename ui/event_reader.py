"""Reads the event log of a job, once or as it grows: only what is new is read and replayed."""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdrun.disk import find_data
from pdrun.ui.job_status import JobStatus
from pdrun.ui.replay import StatusReplay

MAX_READ_BYTES = 1 << 19
"""Bytes that are read at a time."""
MAX_LINE_BYTES = 1 << 26
"""A longer line is damaged; its bytes are dropped."""


@contextmanager
def _pause_collector() -> Iterator[None]:
    """Pause Python's cycle collector: a replay makes many objects, and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()  # else it would look at each of them afterwards
            gc.enable()


class EventLogReader:
    """The status of a job from its event log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        """Device and inode of the file that was read."""
        self._offset = 0
        self._partial_line = b""
        self._replay = StatusReplay()

    def read_status(self) -> JobStatus:
        """
        Read what is new in the log; return the status.

        A file that was replaced or cut is read again from its start.

        Raises:
            OSError: the log cannot be read, or is not a regular file.
        """
        fd = _open_file(self._path)
        try:
            found = os.fstat(fd)
            if self._file != (found.st_dev, found.st_ino) or found.st_size < self._offset:
                self._file = (found.st_dev, found.st_ino)
                self._offset = 0
                self._partial_line = b""
                self._replay = StatusReplay()
            with _pause_collector():
                self._read_until(fd, found.st_size)
                if self._partial_line.rstrip().endswith(b"}"):  # its writer may have been killed
                    self._replay.feed_lines([self._partial_line])
                    self._partial_line = b""
                return self._replay.make_status()
        finally:
            os.close(fd)

    def _read_until(self, fd: int, end: int) -> None:
        while self._offset < end:
            start = find_data(fd, self._offset, end)
            if start > self._offset:
                self._offset = start
                self._partial_line += b"\0"  # the line with the hole is damaged
                continue
            size = min(MAX_READ_BYTES, end - self._offset)
            head = b"\n" + self._partial_line
            data = b""
            if len(head) <= min(size, self._offset):  # a line is faster to read again than to copy
                data = os.pread(fd, len(head) + size, self._offset - len(head))
            if not data.startswith(head):
                data = head + os.pread(fd, size, self._offset)
            if len(data) == len(head):
                return
            self._offset += len(data) - len(head)
            last = data.rfind(b"\n", len(head))
            if last >= 0:
                self._replay.feed_block(data, last)
            self._partial_line = data[max(0, last) + 1 :]
            if len(self._partial_line) > MAX_LINE_BYTES:
                self._partial_line = b""


def read_log_lines(path: Path) -> Iterator[str]:
    """
    Yield the lines of an event log, without those that are too long to be events.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    fd = _open_file(path)
    try:
        offset = 0
        partial_line = b""
        while data := os.pread(fd, MAX_READ_BYTES, offset):
            start = find_data(fd, offset, os.fstat(fd).st_size)
            if start > offset:
                offset = start
                partial_line += b"\0"
                continue
            offset += len(data)
            *lines, partial_line = (partial_line + data).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)
            if len(partial_line) > MAX_LINE_BYTES:
                partial_line = b""
        if partial_line:
            yield partial_line.decode("utf-8", "replace")
    finally:
        os.close(fd)


def _open_file(path: Path) -> int:
    # A pipe that has no writer would block, and a device may never end.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "is not a regular file", str(path))
    return fd
