"""
The workers' log files: raw bytes, one pair of files a rank, written by a thread that nobody waits
for.

    LOGDIR/RUN/GENERATION/rank_0.out, rank_0.err, ...        folders 0700, files 0600

A disk that is full or broken costs the bytes that it did not take: they are counted and said at the
end. A disk that is slow holds the workers back (`held`); one that hangs (a dead NFS server) does so
for STUCK seconds once, after which what does not fit in the queue is dropped until it answers
again. Limit: all files share one thread, so that a hung disk hangs them all.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdrun.private_folder import make_private

HIGH = 64 << 20
"""Bytes that may wait for the disk."""
STUCK = 2.0
"""Seconds without progress after which a disk counts as hung."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY
_BATCH = 1 << 20
_NO_ANSWER = "the disk does not answer"


@dataclass
class LogFile:
    """One file. Its descriptor belongs to the writer thread."""

    path: Path
    name: str
    """Whose it is, for people: ``rank 3's output``."""
    lost: int = 0
    """Bytes that were not written."""
    reason: str = ""
    """Why, as of the last trouble."""
    fd: int = -1
    closed: bool = False


class LogFiles:
    """Every log file of this agent, and the thread that writes them (started on first use)."""

    def __init__(
        self,
        *,
        high: int = HIGH,
        stuck: float = STUCK,
        write: Callable[[int, memoryview], int] = os.write,
    ) -> None:
        """Write with at most ``high`` bytes waiting; ``write`` stands in for the disk in tests."""
        self.on_room: Callable[[], None] = lambda: None
        """Called from the thread when `held` has become false again."""
        self._files: list[LogFile] = []
        self._queue: deque[tuple[LogFile, bytes | None]] = deque()  # None: the file ends
        self._backlog = 0
        self._current: LogFile | None = None
        self._high = high
        self._stuck = stuck
        self._write = write
        self._moved = time.monotonic()
        self._waiting = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def open(self, path: Path, name: str) -> LogFile:
        """
        Announce a file; the thread makes it and its folders, even when nothing is ever written.
        """
        file = LogFile(path, name)
        self._files.append(file)
        self._put(file, b"")
        return file

    def write(self, file: LogFile, data: bytes) -> None:
        """
        Queue bytes; never blocks. Dropped and counted when the queue is full and the disk hangs.
        """
        if self._backlog >= self._high and not self.held():
            self._lose(file, len(data), _NO_ANSWER)
        else:
            self._put(file, data)

    def held(self) -> bool:
        """Whether workers should wait for a disk that is slow, though not hung."""
        with self._changed:
            self._waiting = (
                self._backlog >= self._high and time.monotonic() - self._moved < self._stuck
            )
            return self._waiting

    def done(self, file: LogFile) -> None:
        """No more will be written to a file."""
        self._put(file, None)

    def close(self, timeout: float) -> tuple[str, ...]:
        """
        Write out what is queued, giving up when the disk took nothing for ``timeout`` seconds; say
        what was lost.
        """
        with self._changed:
            self._closing = True
            self._moved = time.monotonic()
            self._changed.notify_all()
            while self._queue or self._current:
                wait = self._moved + timeout - time.monotonic()
                if wait <= 0:
                    self._give_up()
                    break
                self._changed.wait(wait)
        return tuple(_loss(file) for file in self._files if file.lost or file.reason)

    def _give_up(self) -> None:
        """Count what waits as lost. The thread stays in its write and dies with the process."""
        waiting = 0
        for file, data in self._queue:
            if data:
                waiting += len(data)
                file.lost = file.lost + len(data)
                file.reason = _NO_ANSWER
        self._queue.clear()
        if self._current and self._backlog > waiting:
            self._current.lost += self._backlog - waiting
            self._current.reason = _NO_ANSWER

    def _put(self, file: LogFile, data: bytes | None) -> None:
        with self._changed:
            if not self._queue and not self._current:
                self._moved = time.monotonic()
            self._queue.append((file, data))
            self._backlog += len(data or b"")
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pdrun-logs", daemon=True)
                self._thread.start()

    def _lose(self, file: LogFile, count: int, reason: str) -> None:
        with self._changed:
            file.lost += count
            file.reason = reason

    def _run(self) -> None:
        while item := self._take():
            file, data, ends = item
            self._save(file, memoryview(data))
            if ends:
                self._end(file)
            self._settle(len(data))

    def _take(self) -> tuple[LogFile, bytes, bool] | None:
        """
        Return the next file with everything that is queued for it in a row, and whether it ends
        there.
        """
        with self._changed:
            while not self._queue:
                if self._closing:
                    return None
                self._changed.wait()
            file = self._current = self._queue[0][0]
            parts = []
            size = 0
            ends = False
            while self._queue and self._queue[0][0] is file and size < _BATCH and not ends:
                data = self._queue.popleft()[1]
                ends = data is None
                parts.append(data or b"")
                size += len(parts[-1])
            return file, b"".join(parts), ends

    def _save(self, file: LogFile, view: memoryview) -> None:
        try:
            if file.fd < 0 and not file.closed:
                make_private(file.path.parent)
                file.fd = os.open(file.path, _FLAGS, 0o600)
            while view:
                view = view[self._write(file.fd, view) :]
                self._moved = time.monotonic()
        except OSError as error:
            self._lose(file, len(view), error.strerror or str(error))
        else:
            file.reason = file.reason if file.lost else ""

    def _end(self, file: LogFile) -> None:
        """Close; some file systems (NFS, quotas) tell of a full disk only here."""
        try:
            if file.fd >= 0:
                os.close(file.fd)
        except OSError as error:
            self._lose(file, 0, error.strerror or str(error))
        file.fd = -1
        file.closed = True

    def _settle(self, count: int) -> None:
        with self._changed:
            self._current = None
            self._backlog -= count
            self._moved = time.monotonic()
            freed = self._waiting and self._backlog < self._high // 2
            self._waiting = self._waiting and not freed
            self._changed.notify_all()
        if freed:
            self.on_room()


def size_text(count: int) -> str:
    """Return a number of bytes for people: ``512 bytes``, ``1.2 MB``."""
    if count < 1000:
        return f"{count} bytes"
    value = float(count)
    units = ["kB", "MB", "GB"]
    while value >= 999.95 and units:
        value = value / 1000
        unit = units.pop(0)
    return f"{value:.1f} {unit}"


def _loss(file: LogFile) -> str:
    if not file.lost:
        return f"log {file.path}: may be incomplete ({file.reason}); the job went on"
    return f"log {file.path}: {size_text(file.lost)} of {file.name} not written ({file.reason}); the job went on"
