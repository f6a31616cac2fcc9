"""
The workers' log files: raw bytes, one pair of files per rank, written by a thread.

    LOGDIR/RUN/GENERATION/rank_0.out, rank_0.err, ...        folders 0700, files 0600

No link below LOGDIR is followed, and no folder of another user is used (`pdrun.disk.open_below`).

A full or broken disk costs only the bytes that it did not accept; they are counted and reported at
the end. A slow disk holds the workers back (`is_behind`). A hung disk (a dead NFS server) does so
once, for HUNG_SECONDS. Afterwards data that does not fit into the queue is dropped until the disk
answers. Limit: all files share one thread, so a hung disk delays them all.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdrun.disk import open_below

MAX_BACKLOG_BYTES = 64 << 20
HUNG_SECONDS = 2.0
"""A disk without progress for this long counts as hung."""
_OPEN_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_MAX_BATCH_BYTES = 1 << 20
_NO_ANSWER = "the disk does not answer"


@dataclass
class LogFile:
    """One log file. Its descriptor belongs to the writer thread."""

    path: Path
    root: Path
    """The log folder, which contains it."""
    label: str
    """For messages: ``rank 3's output``."""
    lost_bytes: int = 0
    """Bytes that were not written."""
    reason: str = ""
    """The reason of the last loss."""
    fd: int = -1
    is_closed: bool = False


class LogWriter:
    """All log files of this agent, and the thread that writes them (started on first use)."""

    def __init__(
        self,
        *,
        max_backlog: int = MAX_BACKLOG_BYTES,
        hung_seconds: float = HUNG_SECONDS,
        write: Callable[[int, memoryview], int] = os.write,
    ) -> None:
        """
        Args:
            max_backlog: bytes that may wait for the disk.
            hung_seconds: time without progress after which a disk counts as hung.
            write: replaces the disk in tests.
        """
        self.on_ready: Callable[[], None] = lambda: None
        """Called from the thread when `is_behind` has become false again."""
        self._files: list[LogFile] = []
        self._queue: deque[tuple[LogFile, bytes | None]] = deque()  # None: the file ends
        self._backlog_bytes = 0
        self._current_file: LogFile | None = None
        self._max_backlog = max_backlog
        self._hung_seconds = hung_seconds
        self._write = write
        self._progress_at = time.monotonic()
        self._is_waited_for = False
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def open_file(self, root: Path, path: Path, name: str) -> LogFile:
        """
        Add a file below the log folder ``root``.

        The thread creates it and its folder, even if nothing is ever written.
        """
        file = LogFile(path, root, name)
        self._files.append(file)
        self._enqueue_bytes(file, b"")
        return file

    def write(self, file: LogFile, data: bytes) -> None:
        """Queue bytes; never blocks. If the queue is full and the disk hangs, they are dropped."""
        if self._backlog_bytes >= self._max_backlog and not self.is_behind():
            self._count_lost(file, len(data), _NO_ANSWER)
        else:
            self._enqueue_bytes(file, data)

    def is_behind(self) -> bool:
        """Return whether workers should wait: the disk is slow, but does not hang."""
        with self._condition:
            self._is_waited_for = (
                self._backlog_bytes >= self._max_backlog
                and time.monotonic() - self._progress_at < self._hung_seconds
            )
            return self._is_waited_for

    def end_file(self, file: LogFile) -> None:
        """Close a file after its queued bytes."""
        self._enqueue_bytes(file, None)

    def close(self, timeout: float) -> tuple[str, ...]:
        """
        Write everything that is queued.

        Args:
            timeout: seconds without progress after which the disk is given up.

        Returns:
            One line for each loss.
        """
        with self._condition:
            self._is_closing = True
            self._progress_at = time.monotonic()
            self._condition.notify_all()
            while self._queue or self._current_file:
                wait = self._progress_at + timeout - time.monotonic()
                if wait <= 0:
                    self._drop_queue()
                    break
                self._condition.wait(wait)
        return tuple(_describe_loss(file) for file in self._files if file.lost_bytes or file.reason)

    def _drop_queue(self) -> None:
        """Count the queue as lost. The thread stays in its write and ends with the process."""
        waiting = 0
        for file, data in self._queue:
            if data:
                waiting += len(data)
                file.lost_bytes += len(data)
                file.reason = _NO_ANSWER
        self._queue.clear()
        if self._current_file and self._backlog_bytes > waiting:
            self._current_file.lost_bytes += self._backlog_bytes - waiting
            self._current_file.reason = _NO_ANSWER

    def _enqueue_bytes(self, file: LogFile, data: bytes | None) -> None:
        with self._condition:
            if not self._queue and not self._current_file:
                self._progress_at = time.monotonic()
            self._queue.append((file, data))
            self._backlog_bytes += len(data or b"")
            self._condition.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run_writer, name="pdrun-logs", daemon=True
                )
                self._thread.start()

    def _count_lost(self, file: LogFile, count: int, reason: str) -> None:
        with self._condition:
            file.lost_bytes += count
            file.reason = reason

    def _run_writer(self) -> None:
        while item := self._take_batch():
            file, data, ends = item
            self._write_batch(file, memoryview(data))
            if ends:
                self._close_file(file)
            self._finish_batch(len(data))

    def _take_batch(self) -> tuple[LogFile, bytes, bool] | None:
        """Return the next file, the bytes queued for it in a row, and whether it ends there."""
        with self._condition:
            while not self._queue:
                if self._is_closing:
                    return None
                self._condition.wait()
            file = self._current_file = self._queue[0][0]
            parts = []
            size = 0
            ends = False
            while (
                self._queue and self._queue[0][0] is file and size < _MAX_BATCH_BYTES and not ends
            ):
                data = self._queue.popleft()[1]
                ends = data is None
                parts.append(data or b"")
                size += len(parts[-1])
            return file, b"".join(parts), ends

    def _write_batch(self, file: LogFile, view: memoryview) -> None:
        try:
            if file.fd < 0 and not file.is_closed:
                file.fd = open_below(file.root, file.path, _OPEN_FLAGS)
            while view:
                view = view[self._write(file.fd, view) :]
                self._progress_at = time.monotonic()
        except OSError as error:
            self._count_lost(file, len(view), error.strerror or str(error))
        else:
            if not file.lost_bytes:
                file.reason = ""

    def _close_file(self, file: LogFile) -> None:
        """Close a file; some file systems (NFS, quotas) report a full disk only here."""
        try:
            if file.fd >= 0:
                os.close(file.fd)
        except OSError as error:
            self._count_lost(file, 0, error.strerror or str(error))
        file.fd = -1
        file.is_closed = True

    def _finish_batch(self, count: int) -> None:
        with self._condition:
            self._current_file = None
            self._backlog_bytes -= count
            self._progress_at = time.monotonic()
            freed = self._is_waited_for and self._backlog_bytes < self._max_backlog // 2
            self._is_waited_for = self._is_waited_for and not freed
            self._condition.notify_all()
        if freed:
            self.on_ready()


def format_size(count: int) -> str:
    """Return a number of bytes for people: ``512 bytes``, ``1.2 MB``."""
    if count < 1000:
        return f"{count} bytes"
    value = float(count)
    units = ["kB", "MB", "GB"]
    while value >= 999.95 and units:
        value = value / 1000
        unit = units.pop(0)
    return f"{value:.1f} {unit}"


def _describe_loss(file: LogFile) -> str:
    loss = "may be incomplete"
    if file.lost_bytes:
        loss = f"{format_size(file.lost_bytes)} of {file.label} not written"
    return f"log {file.path}: {loss} ({file.reason}); the job went on"
