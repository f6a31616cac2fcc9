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

from pdrun.private_folder import make_private_folder

MAX_QUEUE_CHARS = 4 << 20
"""Characters that may wait for a disk which does not answer."""
DISK_WAIT_SECONDS = 0.1
"""
Seconds that a line waits for the disk: whoever reads the file then sees what has happened already.
"""
CLOSE_SECONDS = 2.0
"""Seconds for what waits at the end."""
DISK_TIMEOUT_TEXT = "the disk does not answer"


class BackgroundFileWriter:
    """See the module. The thread, and with it the file, begins with the first line."""

    def __init__(
        self,
        path: Path,
        make_gap_line: Callable[[int], str],
        *,
        max_chars: int = MAX_QUEUE_CHARS,
        write: Callable[[int, memoryview], int] = os.write,
    ) -> None:
        """
        Args:
            missing: makes the line that stands in the file where so many are missing.
            most: characters that may wait for the disk.
            write: stands in for the disk in tests.
        """
        self._path = path
        self._make_gap_line = make_gap_line
        self.lost_lines = 0
        """Lines that were not written."""
        self._max_chars = max_chars
        self._write_bytes = write
        self._queue: deque[str] = deque()
        self._queued_chars = 0
        """Characters in the queue, and"""
        self._writing_lines = 0
        """lines that the thread has in hand."""
        self._gap_lines = 0
        """Lines that found no room behind those in the queue."""
        self.reason = ""
        """Why, as of the last trouble."""
        self._is_disk_late = self._is_closing = self._has_ended = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._fd = -1
        self._is_mid_line = False
        """Whether the file ends within a line. Descriptor and this: the thread's alone."""

    def put(self, *lines: str) -> None:
        """
        Write lines of ASCII; waits a moment for the disk, and not again before it has caught up.
        """
        with self._changed:
            if self._is_closing:
                return self._count_lost(len(lines), "it was closed already")
            for line in lines:
                if self._queued_chars >= self._max_chars and not self._wait_for_disk():
                    self._gap_lines += 1
                    self._count_lost(1, DISK_TIMEOUT_TEXT)
                else:
                    self._mark_gap()
                    self._enqueue_line(line)
            self._wait_for_disk()
            return None

    def close(self, timeout: float = CLOSE_SECONDS) -> int:
        """
        Write out what waits, for at most ``timeout`` seconds, and close; return how many lines were
        lost.
        """
        with self._changed:
            if not self._is_closing:
                self._mark_gap()
                self._is_closing = True
                self._changed.notify_all()
                if self._thread is not None and not self._changed.wait_for(
                    lambda: self._has_ended, timeout
                ):
                    self._count_lost(
                        len(self._queue) + self._writing_lines, DISK_TIMEOUT_TEXT
                    )  # the thread dies with the process
                    self._queue.clear()
            return self.lost_lines

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits for the disk."""
        with self._changed:
            return self._is_all_written()

    # Called with the lock held
    # ----------------------------------------------------------------------------------------

    def _wait_for_disk(self) -> bool:
        """
        Wait a moment for the disk, unless it is late already; return whether everything is written.
        """
        if self._queue and self._start_thread() and not self._is_disk_late:
            self._is_disk_late = not self._changed.wait_for(self._is_all_written, DISK_WAIT_SECONDS)
        return self._is_all_written()

    def _is_all_written(self) -> bool:
        return not self._queue and not self._writing_lines

    def _enqueue_line(self, line: str) -> None:
        self._queue.append(line)
        self._queued_chars += len(line)
        self._changed.notify_all()

    def _mark_gap(self) -> None:
        """Say in the log itself that lines are missing there."""
        if self._gap_lines and self._thread is not None:
            self._enqueue_line(self._make_gap_line(self._gap_lines))
        self._gap_lines = 0

    def _start_thread(self) -> bool:
        """Start the thread where there is none; return whether there is one."""
        if self._thread is None:
            thread = threading.Thread(target=self._write_loop, name="pdrun-events", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # a limit on processes
                self._count_lost(len(self._queue), str(error))
                self._queue.clear()
                self._queued_chars = 0
                return False
            self._thread = thread
        return True

    def _count_lost(self, count: int, reason: str) -> None:
        self.lost_lines += count
        self.reason = reason

    # The thread
    # -------------------------------------------------------------------------------------------------------

    def _write_loop(self) -> None:
        while lines := self._take_lines():
            faults = [fault for line in lines if (fault := self._write_line(line))]
            with self._changed:
                if faults:
                    self._count_lost(len(faults), faults[-1])
                self._writing_lines = 0
                self._is_disk_late = self._is_disk_late and bool(self._queue)
                self._changed.notify_all()
        self._close_file()

    def _take_lines(self) -> list[str]:
        """Return all lines that wait, once there are some; none when the log is to be closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            lines = list(self._queue)
            self._queue.clear()
            self._queued_chars, self._writing_lines = 0, len(lines)
            return lines

    def _write_line(self, line: str) -> str:
        """Write a line; return why it is not there, or the empty string."""
        try:
            if self._fd < 0:
                make_private_folder(self._path.parent)
                self._fd = os.open(
                    self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
                )
                self._is_mid_line = _ends_mid_line(self._path)  # of a process that was killed
            data = memoryview((b"\n" if self._is_mid_line else b"") + line.encode("ascii") + b"\n")
            while data:
                data = data[self._write_bytes(self._fd, data) :]
                self._is_mid_line = bool(data)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _close_file(self) -> None:
        """Close; some file systems tell of a full disk only here."""
        reason = ""
        try:
            if self._fd >= 0:
                os.close(self._fd)
        except OSError as error:
            reason = error.strerror or str(error)
        with self._changed:
            if reason:
                self._count_lost(1, reason)
            self._has_ended = True
            self._changed.notify_all()


def _ends_mid_line(path: Path) -> bool:
    with path.open("rb") as file:
        end = file.seek(0, 2)
        return bool(end) and file.seek(end - 1) >= 0 and file.read(1) != b"\n"
