"""Descriptors for the output's loop: the pipe of a worker's stream, and a wake-up for threads."""

from __future__ import annotations

import fcntl
import os
import threading

PIPE_BYTES = 1 << 20
"""Size of a worker's pipe, if possible: the worker continues while the agent is busy."""


def open_worker_pipe() -> tuple[int, int]:
    """
    Return (read end, write end) of a pipe.

    Both are closed on exec. The read end does not block.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    try:
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except (OSError, AttributeError):
        # above the user's pipe quota, or not Linux: the default of 64 KiB will do
        pass
    return read, write


class Wakeup:
    """A pipe that lets other threads wake the loop that polls ``fd``; -1 while it is not open."""

    def __init__(self) -> None:
        self.fd = -1
        self._write = -1
        self._lock = threading.Lock()

    def open(self) -> None:
        """Make the pipe."""
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def set(self) -> None:
        """Make ``fd`` readable; from any thread, at any time."""
        with self._lock:
            try:
                if self._write >= 0:
                    os.write(self._write, b"\0")
            except BlockingIOError:  # full: it is readable already
                pass

    def clear(self) -> None:
        """Make ``fd`` unreadable again."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the pipe; `set` does nothing afterwards."""
        with self._lock:
            for fd in (self.fd, self._write):
                if fd >= 0:
                    os.close(fd)
            self.fd = -1
            self._write = -1
