"""
Lines that are appended to a file by a thread: a disk that hangs holds up nobody.

On a disk that answers, a line is with the system when `put` returns. One that does not is waited
for once, a moment; then lines queue up to a limit, in order, and what finds no room is counted,
here and in the file itself.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from pdrun.private_folder import make_private

MOST_WAITING = 4 << 20
"""Characters that may wait for a disk which does not answer."""
MOMENT = 0.1
"""
Seconds that a line waits for the disk: whoever reads the file then sees what has happened already.
"""
CLOSING = 2.0
"""Seconds for what waits at the end."""
NO_ANSWER = "the disk does not answer"


class LineWriter:
    """See the module. The thread, and with it the file, begins with the first line."""

    def __init__(
        self,
        path: Path,
        missing: Callable[[int], str],
        *,
        most: int = MOST_WAITING,
        write: Callable[[int, memoryview], int] = os.write,
    ) -> None:
        """
        Args:
            missing: makes the line that stands in the file where so many are missing.
            most: characters that may wait for the disk.
            write: stands in for the disk in tests.
        """
        self._path = path
        self._missing = missing
        self.lost = 0
        """Lines that were not written."""
        self._most = most
        self._write = write
        self._queue: deque[str] = deque()
        self._size = 0
        """Characters in the queue, and"""
        self._writing = 0
        """lines that the thread has in hand."""
        self._gap = 0
        """Lines that found no room behind those in the queue."""
        self.reason = ""
        """Why, as of the last trouble."""
        self._late = self._closing = self._ended = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._fd = -1
        self._half = False
        """Whether the file ends within a line. Descriptor and this: the thread's alone."""

    def put(self, *lines: str) -> None:
        """
        Write lines of ASCII; waits a moment for the disk, and not again before it has caught up.
        """
        with self._changed:
            if self._closing:
                return self._lose(len(lines), "it was closed already")
            for line in lines:
                if self._size >= self._most and not self._waited():
                    self._gap += 1
                    self._lose(1, NO_ANSWER)
                else:
                    self._mark_gap()
                    self._put(line)
            self._waited()
            return None

    def close(self, timeout: float = CLOSING) -> int:
        """
        Write out what waits, for at most ``timeout`` seconds, and close; return how many lines were
        lost.
        """
        with self._changed:
            if not self._closing:
                self._mark_gap()
                self._closing = True
                self._changed.notify_all()
                if self._thread is not None and not self._changed.wait_for(
                    lambda: self._ended, timeout
                ):
                    self._lose(
                        len(self._queue) + self._writing, NO_ANSWER
                    )  # the thread dies with the process
                    self._queue.clear()
            return self.lost

    @property
    def idle(self) -> bool:
        """Whether nothing waits for the disk."""
        with self._changed:
            return self._idle()

    # Called with the lock held
    # ----------------------------------------------------------------------------------------

    def _waited(self) -> bool:
        """
        Wait a moment for the disk, unless it is late already; return whether everything is written.
        """
        if self._queue and self._begin() and not self._late:
            self._late = not self._changed.wait_for(self._idle, MOMENT)
        return self._idle()

    def _idle(self) -> bool:
        return not self._queue and not self._writing

    def _put(self, line: str) -> None:
        self._queue.append(line)
        self._size += len(line)
        self._changed.notify_all()

    def _mark_gap(self) -> None:
        """Say in the log itself that lines are missing there."""
        if self._gap and self._thread is not None:
            self._put(self._missing(self._gap))
        self._gap = 0

    def _begin(self) -> bool:
        """Start the thread where there is none; return whether there is one."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="pdrun-events", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # a limit on processes
                self._lose(len(self._queue), str(error))
                self._queue.clear()
                self._size = 0
                return False
            self._thread = thread
        return True

    def _lose(self, count: int, reason: str) -> None:
        self.lost += count
        self.reason = reason

    # The thread
    # -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while lines := self._take():
            faults = [fault for line in lines if (fault := self._save(line))]
            with self._changed:
                if faults:
                    self._lose(len(faults), faults[-1])
                self._writing = 0
                self._late = self._late and bool(self._queue)
                self._changed.notify_all()
        self._end()

    def _take(self) -> list[str]:
        """Return all lines that wait, once there are some; none when the log is to be closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            lines = list(self._queue)
            self._queue.clear()
            self._size, self._writing = 0, len(lines)
            return lines

    def _save(self, line: str) -> str:
        """Write a line; return why it is not there, or the empty string."""
        try:
            if self._fd < 0:
                make_private(self._path.parent)
                self._fd = os.open(
                    self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
                )
                self._half = _half_line(self._path)  # of a process that was killed
            data = memoryview((b"\n" if self._half else b"") + line.encode("ascii") + b"\n")
            while data:
                data = data[self._write(self._fd, data) :]
                self._half = bool(data)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _end(self) -> None:
        """Close; some file systems tell of a full disk only here."""
        reason = ""
        try:
            if self._fd >= 0:
                os.close(self._fd)
        except OSError as error:
            reason = error.strerror or str(error)
        with self._changed:
            if reason:
                self._lose(1, reason)
            self._ended = True
            self._changed.notify_all()


def _half_line(path: Path) -> bool:
    with path.open("rb") as file:
        end = file.seek(0, 2)
        return bool(end) and file.seek(end - 1) >= 0 and file.read(1) != b"\n"
