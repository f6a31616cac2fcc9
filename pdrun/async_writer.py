"""
Bytes that a thread writes to a descriptor, so that a slow reader blocks no other thread.

    write_message() --> queue --> writer thread --> os.write

Processes that must not block (scheduler, relay, agent, member of a dynamic cluster) print their
messages with `write_message`. If the reader has closed the descriptor, messages are dropped. If it
does not read, up to HIGH_WATER_BYTES are queued, and messages above that are counted and dropped.
`flush_messages` waits at the end.
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

from pdrun.text import plural

HIGH_WATER_BYTES = 8 << 20
"""Bytes that are queued before producers should wait."""
LOW_WATER_BYTES = HIGH_WATER_BYTES // 2
"""Producers may continue below this."""
FLUSH_SECONDS = 2.0
"""Time that `flush_messages` waits for a reader that does not read."""
_BATCH_BYTES = 1 << 20
_WRITE_BYTES = 1 << 16
_CLOSING_WRITE_BYTES = 1 << 12
_ERASE = b"\r\x1b[J"
"""Removes the footer, also if it has more lines since the terminal was made narrower."""


def _do_nothing() -> None:
    """The default of `on_writable`."""


class BackgroundWriter:
    """A queue of bytes, and the thread that writes them to a descriptor; started on first use."""

    def __init__(self, fd: int, name: str, on_writable: Callable[[], None] = _do_nothing) -> None:
        self.name = name
        self.on_writable = on_writable
        """Called in the writer thread when `is_full` has become false."""
        self.mid_line = False
        self.off_reason = ""
        """Why nothing is written any more, or empty."""
        if not _is_open(fd):
            self.off_reason = "closed"
        self._fd = fd
        self._queue: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._is_full = False
        self._progress_at = time.monotonic()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._footer = b""
        self._shown_footer = b""
        self._is_line_open = False
        """Whether the last byte written was within a line."""

    def put(self, data: bytes) -> None:
        """
        Queue bytes; never blocks. They are dropped if the stream is off.

        Raises:
            RuntimeError: no thread could be started (a limit on processes); nothing is queued.
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
            try:
                self._start_thread()
            except RuntimeError:
                self._backlog_bytes -= len(self._queue.pop())
                raise

    def show_footer(self, footer: bytes) -> None:
        """
        Show a line below the output, on a terminal; empty: remove it.

        It is written with the output, not between, so that it does not flicker. While the output
        is within a line (a prompt, a progress bar) it is not shown.

        Raises:
            RuntimeError: no thread could be started.
        """
        with self._changed:
            if footer != self._footer and not self.off_reason and not self._is_closing:
                self._footer = footer
                self._changed.notify_all()
                self._start_thread()

    def _start_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(
                target=self._write_loop, name=f"pdrun-{self.name}", daemon=True
            )
            thread.start()
            self._thread = thread

    def write_now(self, data: bytes) -> None:
        """Write in the calling thread, if the descriptor is writable within a second."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        try:
            if not self.off_reason and poll.poll(1000):
                os.write(self._fd, data)
        except OSError as error:
            self._stop_writing(error)

    def is_reader_gone(self) -> bool:
        """Return whether the reader has closed its end, also if nothing was written since."""
        return self.off_reason == "closed" or is_reader_gone(self._fd)

    def is_full(self) -> bool:
        """Return whether producers should wait: above HIGH_WATER, until it is below LOW_WATER."""
        return self._is_full

    def drain(self, timeout: float) -> None:
        """Wait until the queue is written; give up if nothing was read for ``timeout`` seconds."""
        with self._changed:
            self._progress_at = time.monotonic()
            while self._backlog_bytes and not self.off_reason:
                if (wait := self._progress_at + timeout - time.monotonic()) <= 0:
                    return
                self._changed.wait(min(wait, 0.5))

    def close(self, timeout: float) -> str:
        """
        Write the queue; give up if nothing was read for ``timeout`` seconds.

        Returns:
            what was lost, as one line, or the empty string.
        """
        with self._changed:
            self._is_closing = True
            self._footer = b""
            self._progress_at = time.monotonic()
            self._changed.notify_all()
            while self._backlog_bytes and not self.off_reason:
                wait = self._progress_at + timeout - time.monotonic()
                if wait <= 0:
                    why = f"the reader read nothing for {timeout:g} s"
                    return f"{self.name}: {why}; {self._backlog_bytes} bytes were not shown"
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
            while not self._queue and self._shown_footer == self._due_footer():
                if self._is_closing:
                    return b""
                self._changed.wait()
            parts = []
            size = 0
            while self._queue and size < _BATCH_BYTES:
                parts.append(self._queue.popleft())
                size += len(parts[-1])
            return self._add_footer(b"".join(parts))

    def _due_footer(self) -> bytes:
        return b"" if self._is_line_open else self._footer

    def _add_footer(self, data: bytes) -> bytes:
        """Return the bytes between removing the footer and showing it again."""
        if data:
            self._is_line_open = data[-1] != 0x0A
        before = _ERASE if self._shown_footer else b""
        self._shown_footer = self._due_footer()
        # the cursor is left in front of it: what other processes write replaces it
        after = self._shown_footer + b"\r" if self._shown_footer else b""
        self._backlog_bytes += len(before) + len(after)
        return before + data + after

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                # A write to a pipe returns when all is written. Small writes at the end show
                # whether a slow reader makes progress.
                size = _CLOSING_WRITE_BYTES if self._is_closing else _WRITE_BYTES
                done = os.write(self._fd, view[:size])
            except BlockingIOError:  # another process made the shared terminal non-blocking
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
            self.off_reason = error.strerror or str(error)
            if error.errno == errno.EPIPE:
                self.off_reason = "closed"  # `| head` has read enough: nothing to report
            self._queue.clear()
            self._backlog_bytes = 0
            freed = self._is_full
            self._is_full = False
            self._changed.notify_all()
        if freed:
            self.on_writable()


class MessageWriter:
    """Writes pdrun's messages to a descriptor; may be used by several threads."""

    def __init__(self, fd: int) -> None:
        self._writer = BackgroundWriter(fd, "stderr")
        self._skipped_lines = 0

    def write_message(self, text: str) -> None:
        """Write a line; never blocks, never raises."""
        if self._writer.is_full():
            self._skipped_lines += 1
            return
        if self._skipped_lines:
            self._write_line(
                f"{plural(self._skipped_lines, 'line')} skipped here: the reader was too slow"
            )
            self._skipped_lines = 0
        self._write_line(text)

    def flush(self, timeout: float = FLUSH_SECONDS) -> None:
        """Wait until all is written; give up if nothing was read for ``timeout`` seconds."""
        self._writer.drain(timeout)

    def _write_line(self, text: str) -> None:
        data = f"pdrun: {text}\n".encode("utf-8", "backslashreplace")
        try:
            self._writer.put(data)
        except RuntimeError:  # no thread could be started; most likely the message is about that
            self._writer.write_now(data)


_message_writers: dict[int, MessageWriter] = {}


def write_message(text: str) -> None:
    """
    Write a line to stderr, with the prefix ``pdrun:``; never blocks, never raises.

    If ``sys.stderr`` has no descriptor (in a notebook), the line is printed to it.
    """
    speaker = _current_writer()
    if speaker is not None:
        speaker.write_message(text)
        return
    try:
        print(f"pdrun: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass  # no stderr


def flush_messages(timeout: float = FLUSH_SECONDS) -> None:
    """Wait until messages are written: before a process ends, or writes to stderr directly."""
    for speaker in list(_message_writers.values()):
        speaker.flush(timeout)


def _current_writer() -> MessageWriter | None:
    """Return the writer of the current ``sys.stderr``, or None if that has no descriptor."""
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
    """Return whether the reader of a pipe has closed it, or a terminal has hung up."""
    poll = select.poll()
    poll.register(fd, 0)  # no event is requested, so only errors are reported
    return bool(poll.poll(0))


def _is_open(fd: int) -> bool:
    """
    Return whether a descriptor is open.

    A closed one must not be written to later, when another file has its number.
    """
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
