"""
Lines that a thread appends to a file, so that a hanging disk blocks no other thread.

If the disk answers, the system has a line when `put` returns. If it does not, `put` waits once for
DISK_WAIT_SECONDS. After that, lines are queued in order, up to a limit. Lines above the limit are
counted; the count is written to the file, too.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from pdrun.disk import open_below

MAX_QUEUE_CHARS = 4 << 20
"""Characters that are queued at most while the disk does not answer."""
DISK_WAIT_SECONDS = 0.1
"""Time that `put` waits for the disk, so that a reader of the file sees recent events."""
CLOSE_SECONDS = 2.0
"""Time that `close` waits for queued lines."""
DISK_TIMEOUT_TEXT = "the disk does not answer"


class BackgroundFileWriter:
    """
    Appends lines to a file. The first line starts the thread, which creates the file, mode 0600.

    The folder of the file and the file are those of this user or of root, and no links.
    """

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
            make_gap_line: returns the line that is written in place of this many missing lines.
            max_chars: characters that are queued at most.
            write: os.write, or a fake disk in tests.
        """
        self._path = path
        self._make_gap_line = make_gap_line
        self.lost_lines = 0
        """Number of lines that were not written."""
        self._max_chars = max_chars
        self._write_bytes = write
        self._queue: deque[str] = deque()
        self._queued_chars = 0
        """Characters in the queue."""
        self._writing_lines = 0
        """Lines that the thread is writing."""
        self._gap_lines = 0
        """Lines that were dropped behind those in the queue."""
        self.reason = ""
        """Why lines were lost, as of the last error."""
        self._is_disk_late = False
        self._is_closing = False
        self._has_ended = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._fd = -1
        self._is_mid_line = False
        """Whether the file ends within a line. Only the thread uses this and the descriptor."""

    def put(self, *lines: str) -> None:
        """
        Write ASCII lines.

        Waits DISK_WAIT_SECONDS for the disk. If the disk is late, later calls do not wait until it
        has caught up.
        """
        with self._changed:
            if self._is_closing:
                return self._count_lost(len(lines), "it was closed")
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
        Write the queued lines, for at most ``timeout`` seconds, and close the file.

        Returns:
            the number of lines that were lost.
        """
        with self._changed:
            if not self._is_closing:
                self._mark_gap()
                self._is_closing = True
                self._changed.notify_all()
                if self._thread is not None and not self._changed.wait_for(
                    lambda: self._has_ended, timeout
                ):
                    # The thread ends with the process.
                    self._count_lost(len(self._queue) + self._writing_lines, DISK_TIMEOUT_TEXT)
                    self._queue.clear()
            return self.lost_lines

    @property
    def is_idle(self) -> bool:
        """Whether all lines are written."""
        with self._changed:
            return self._is_all_written()

    # Called with the lock held
    # ----------------------------------------------------------------------------------------

    def _wait_for_disk(self) -> bool:
        """Wait for the disk, unless it is late; return whether all lines are written."""
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
        """Queue a line with the number of missing lines."""
        if self._gap_lines and self._thread is not None:
            self._enqueue_line(self._make_gap_line(self._gap_lines))
        self._gap_lines = 0

    def _start_thread(self) -> bool:
        """Start the thread unless it runs; return whether it runs."""
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
    # ----------------------------------------------------------------------------------------------

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
        """Wait for lines and return all of them; empty when the file is to be closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            lines = list(self._queue)
            self._queue.clear()
            self._queued_chars, self._writing_lines = 0, len(lines)
            return lines

    def _write_line(self, line: str) -> str:
        """Write a line; return why that failed, or the empty string."""
        try:
            if self._fd < 0:
                self._fd = open_below(
                    self._path.parent.parent, self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND
                )
                self._is_mid_line = _ends_mid_line(self._fd)  # its writer was killed
            text = line.encode("ascii") + b"\n"
            if self._is_mid_line:
                text = b"\n" + text
            data = memoryview(text)
            while data:
                data = data[self._write_bytes(self._fd, data) :]
                self._is_mid_line = bool(data)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _close_file(self) -> None:
        """Close the file. Some file systems report a full disk only now."""
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


def _ends_mid_line(fd: int) -> bool:
    end = os.fstat(fd).st_size
    return end > 0 and os.pread(fd, 1, end - 1) != b"\n"
