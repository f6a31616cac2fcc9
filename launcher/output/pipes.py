"""
Descriptors of the output's loop: the pipe of a worker's stream, and a bell that writer threads
ring.
"""

from __future__ import annotations

import fcntl
import os
import threading

PIPE_BYTES = 1 << 20
"""Wanted size of a worker's pipe: a worker goes on while the agent is busy elsewhere."""


def open_worker_pipe() -> tuple[int, int]:
    """
    Return (read end, write end) of a pipe; neither is inherited by accident, and reading does not
    block.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    try:
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except (
        OSError,
        AttributeError,
    ):  # above the user's pipe quota, or not Linux: the usual 64 KiB do
        pass
    return read, write


class Wakeup:
    """A pipe by which other threads wake the loop that polls ``fd``; -1 while it is not open."""

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
            except BlockingIOError:  # full: it is ringing
                pass

    def clear(self) -> None:
        """Make ``fd`` unreadable again."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the pipe; ringing is allowed afterwards and does nothing."""
        with self._lock:
            for fd in (self.fd, self._write):
                if fd >= 0:
                    os.close(fd)
            self.fd = -1
            self._write = -1
