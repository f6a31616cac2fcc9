"""
Bytes for a descriptor, written by a thread so that nobody waits for a slow reader, and pdrun's own
lines on stderr.

    say() --> queue --> writer thread --> os.write

A process that must go on (scheduler, relay, agent, member of a dynamic cluster) says its lines by
`say`: a reader that goes away switches them off, and of what a reader that takes nothing would have
to hold, what is above HIGH bytes is counted and left out. `flush` waits a moment at the end.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

HIGH_WATER_BYTES = 8 << 20
"""Bytes that may wait for a reader before workers are held back."""
LOW_WATER_BYTES = HIGH_WATER_BYTES // 2
FLUSH_SECONDS = 2.0
"""Seconds for which `flush` waits for a reader that takes nothing."""
_BATCH_BYTES = 1 << 20
_WRITE_BYTES = 1 << 16
_CLOSING_WRITE_BYTES = 1 << 12


def _do_nothing() -> None:
    """Nobody asked to be told."""


class BackgroundWriter:
    """
    A queue of bytes and the thread that writes them to one descriptor. Starts its thread on first
    use.
    """

    def __init__(self, fd: int, name: str, on_writable: Callable[[], None] = _do_nothing) -> None:
        self.name = name
        self.on_writable = on_writable
        """Called from the thread when `held` has become false again."""
        self.mid_line = False
        self.off_reason = "" if _is_open(fd) else "closed"
        """Why nothing is written any more, or empty."""
        self._fd = fd
        self._queue: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._is_full = False
        self._progress_at = time.monotonic()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def put(self, data: bytes) -> None:
        """
        Queue whole bytes; never blocks. Dropped when the stream is off.

        Raises:
            RuntimeError: a limit on processes allows no thread; nothing is queued.
        """
        if not data or self.off_reason:
            return
        with self._changed:
            if not self._backlog_bytes:
                self._progress_at = time.monotonic()
            self._queue.append(data)
            self._backlog_bytes += len(data)
            self._is_full = self._is_full or self._backlog_bytes > HIGH_WATER_BYTES
            self.mid_line = data[-1] != 0x0A
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(
                    target=self._write_loop, name=f"pdrun-{self.name}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    self._backlog_bytes -= len(self._queue.pop())
                    raise
                self._thread = thread

    def write_now(self, data: bytes) -> None:
        """Write from this thread, if the reader takes something within a second."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        try:
            if not self.off_reason and poll.poll(1000):
                os.write(self._fd, data)
        except OSError as error:
            self._stop_writing(error)

    def is_reader_gone(self) -> bool:
        """Whether the reader has gone away, be it that nothing was written since."""
        return self.off_reason == "closed" or is_reader_gone(self._fd)

    def is_full(self) -> bool:
        """Whether producers should wait: true above HIGH, until the queue has fallen below LOW."""
        return self._is_full

    def drain(self, timeout: float) -> None:
        """
        Wait until all that is queued is written; give up when nothing was taken for ``timeout``
        seconds.
        """
        with self._changed:
            self._progress_at = time.monotonic()
            while self._backlog_bytes and not self.off_reason:
                if (wait := self._progress_at + timeout - time.monotonic()) <= 0:
                    return
                self._changed.wait(min(wait, 0.5))

    def close(self, timeout: float) -> str:
        """
        Write out what is queued; give up when nothing was taken for ``timeout`` seconds.

        Returns:
            What was lost, as one line, or the empty string.
        """
        with self._changed:
            self._is_closing = True
            self._progress_at = time.monotonic()
            self._changed.notify_all()
            while self._backlog_bytes and not self.off_reason:
                wait = self._progress_at + timeout - time.monotonic()
                if wait <= 0:
                    return f"{self.name}: its reader took nothing for {timeout:g} s, {self._backlog_bytes} bytes not shown"
                self._changed.wait(min(wait, 0.5))
        if self._thread:
            self._thread.join(timeout)
        if self.off_reason in ("", "closed"):
            return ""
        return f"{self.name}: {self.off_reason}; output after that was not shown"

    def _write_loop(self) -> None:
        while data := self._take_batch():
            try:
                self._write_all(data)
            except OSError as error:
                self._stop_writing(error)
                return

    def _take_batch(self) -> bytes:
        with self._changed:
            while not self._queue:
                if self._is_closing:
                    return b""
                self._changed.wait()
            parts = []
            size = 0
            while self._queue and size < _BATCH_BYTES:
                parts.append(self._queue.popleft())
                size += len(parts[-1])
            return b"".join(parts)

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                # a pipe's write returns when all is in: small ones at the end tell a slow reader
                # from one that is gone
                done = os.write(
                    self._fd, view[: _CLOSING_WRITE_BYTES if self._is_closing else _WRITE_BYTES]
                )
            except BlockingIOError:  # somebody else made the shared terminal non-blocking
                self._wait_writable()
                continue
            view = view[done:]
            self._count_written(done)

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        poll.poll(1000)

    def _count_written(self, count: int) -> None:
        with self._changed:
            self._backlog_bytes -= count
            self._progress_at = time.monotonic()
            freed = self._is_full and self._backlog_bytes < LOW_WATER_BYTES
            self._is_full = self._is_full and not freed
            self._changed.notify_all()
        if freed:
            self.on_writable()

    def _stop_writing(self, error: OSError) -> None:
        with self._changed:
            # a closed pipe is how `| head` says that it has enough: nothing to report
            self.off_reason = (
                "closed" if error.errno == errno.EPIPE else (error.strerror or str(error))
            )
            self._queue.clear()
            self._backlog_bytes = 0
            freed = self._is_full
            self._is_full = False
            self._changed.notify_all()
        if freed:
            self.on_writable()


class MessageWriter:
    """Lines of pdrun's own for the people at a descriptor; may be used by several threads."""

    def __init__(self, fd: int) -> None:
        self._writer = BackgroundWriter(fd, "stderr")
        self._skipped_lines = 0

    def write_message(self, text: str) -> None:
        """Say a line; never blocks, never raises."""
        if self._writer.is_full():
            self._skipped_lines += 1
            return
        if self._skipped_lines:
            self._write_line(f"{self._skipped_lines} line(s) are missing here: nobody read them")
            self._skipped_lines = 0
        self._write_line(text)

    def flush(self, timeout: float = FLUSH_SECONDS) -> None:
        """
        Wait until all is written, until nothing was taken for ``timeout`` seconds, or the reader
        has gone.
        """
        self._writer.drain(timeout)

    def _write_line(self, text: str) -> None:
        data = f"pdrun: {text}\n".encode("utf-8", "backslashreplace")
        try:
            self._writer.put(data)
        except RuntimeError:  # there can be no thread: the line is mostly about just that
            self._writer.write_now(data)


_message_writers: dict[int, MessageWriter] = {}


def write_message(text: str) -> None:
    """
    Say a line of pdrun's own on stderr; never blocks, never raises.

    Where ``sys.stderr`` is no descriptor (a notebook's) the line goes there.
    """
    speaker = _current_writer()
    if speaker is not None:
        speaker.write_message(text)
        return
    try:
        print(f"pdrun: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass  # there is no stderr (any more)


def flush_messages(timeout: float = FLUSH_SECONDS) -> None:
    """
    Wait a moment until what was said is written: before a process ends, or writes to stderr by
    itself.
    """
    for speaker in list(_message_writers.values()):
        speaker.flush(timeout)


def _current_writer() -> MessageWriter | None:
    """The one for the present ``sys.stderr``."""
    try:
        fd = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return None
    if fd not in _message_writers:
        if not _message_writers:
            atexit.register(flush_messages)
            os.register_at_fork(after_in_child=_message_writers.clear)  # no thread is forked
        _message_writers[fd] = MessageWriter(fd)
    return _message_writers[fd]


def is_reader_gone(fd: int) -> bool:
    """
    Whether nobody reads at the other end of a pipe any more, or a terminal has hung up; False for
    all else.
    """
    poll = select.poll()
    poll.register(fd, 0)  # asks for nothing: only what is wrong is told
    return bool(poll.poll(0))


def _is_open(fd: int) -> bool:
    """
    Whether a descriptor is open; one that is closed now must not be written to once the number is
    used again.
    """
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
