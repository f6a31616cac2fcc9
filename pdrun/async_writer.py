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

HIGH = 8 << 20
"""Bytes that may wait for a reader before workers are held back."""
LOW = HIGH // 2
FLUSHING = 2.0
"""Seconds for which `flush` waits for a reader that takes nothing."""
_BATCH = 1 << 20
_LARGE = 1 << 16
_SMALL = 1 << 12


def _nothing() -> None:
    """Nobody asked to be told."""


class Lane:
    """
    A queue of bytes and the thread that writes them to one descriptor. Starts its thread on first
    use.
    """

    def __init__(self, fd: int, name: str, on_room: Callable[[], None] = _nothing) -> None:
        self.name = name
        self.on_room = on_room
        """Called from the thread when `held` has become false again."""
        self.mid_line = False
        self.off = "" if _is_open(fd) else "closed"
        """Why nothing is written any more, or empty."""
        self._fd = fd
        self._queue: deque[bytes] = deque()
        self._backlog = 0
        self._held = False
        self._moved = time.monotonic()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def put(self, data: bytes) -> None:
        """
        Queue whole bytes; never blocks. Dropped when the stream is off.

        Raises:
            RuntimeError: a limit on processes allows no thread; nothing is queued.
        """
        if not data or self.off:
            return
        with self._changed:
            if not self._backlog:
                self._moved = time.monotonic()
            self._queue.append(data)
            self._backlog += len(data)
            self._held = self._held or self._backlog > HIGH
            self.mid_line = data[-1] != 0x0A
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=f"pdrun-{self.name}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    self._backlog -= len(self._queue.pop())
                    raise
                self._thread = thread

    def write_now(self, data: bytes) -> None:
        """Write from this thread, if the reader takes something within a second."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        try:
            if not self.off and poll.poll(1000):
                os.write(self._fd, data)
        except OSError as error:
            self._switch_off(error)

    def gone(self) -> bool:
        """Whether the reader has gone away, be it that nothing was written since."""
        return self.off == "closed" or reader_gone(self._fd)

    def held(self) -> bool:
        """Whether producers should wait: true above HIGH, until the queue has fallen below LOW."""
        return self._held

    def drain(self, timeout: float) -> None:
        """
        Wait until all that is queued is written; give up when nothing was taken for ``timeout``
        seconds.
        """
        with self._changed:
            self._moved = time.monotonic()
            while self._backlog and not self.off:
                if (wait := self._moved + timeout - time.monotonic()) <= 0:
                    return
                self._changed.wait(min(wait, 0.5))

    def close(self, timeout: float) -> str:
        """
        Write out what is queued; give up when nothing was taken for ``timeout`` seconds.

        Returns:
            What was lost, as one line, or the empty string.
        """
        with self._changed:
            self._closing = True
            self._moved = time.monotonic()
            self._changed.notify_all()
            while self._backlog and not self.off:
                wait = self._moved + timeout - time.monotonic()
                if wait <= 0:
                    return f"{self.name}: its reader took nothing for {timeout:g} s, {self._backlog} bytes not shown"
                self._changed.wait(min(wait, 0.5))
        if self._thread:
            self._thread.join(timeout)
        if self.off in ("", "closed"):
            return ""
        return f"{self.name}: {self.off}; output after that was not shown"

    def _run(self) -> None:
        while data := self._take():
            try:
                self._write(data)
            except OSError as error:
                self._switch_off(error)
                return

    def _take(self) -> bytes:
        with self._changed:
            while not self._queue:
                if self._closing:
                    return b""
                self._changed.wait()
            parts = []
            size = 0
            while self._queue and size < _BATCH:
                parts.append(self._queue.popleft())
                size += len(parts[-1])
            return b"".join(parts)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                # a pipe's write returns when all is in: small ones at the end tell a slow reader
                # from one that is gone
                done = os.write(self._fd, view[: _SMALL if self._closing else _LARGE])
            except BlockingIOError:  # somebody else made the shared terminal non-blocking
                self._wait_writable()
                continue
            view = view[done:]
            self._written(done)

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        poll.poll(1000)

    def _written(self, count: int) -> None:
        with self._changed:
            self._backlog -= count
            self._moved = time.monotonic()
            freed = self._held and self._backlog < LOW
            self._held = self._held and not freed
            self._changed.notify_all()
        if freed:
            self.on_room()

    def _switch_off(self, error: OSError) -> None:
        with self._changed:
            # a closed pipe is how `| head` says that it has enough: nothing to report
            self.off = "closed" if error.errno == errno.EPIPE else (error.strerror or str(error))
            self._queue.clear()
            self._backlog = 0
            freed = self._held
            self._held = False
            self._changed.notify_all()
        if freed:
            self.on_room()


class Speaker:
    """Lines of pdrun's own for the people at a descriptor; may be used by several threads."""

    def __init__(self, fd: int) -> None:
        self._lane = Lane(fd, "stderr")
        self._left_out = 0

    def say(self, text: str) -> None:
        """Say a line; never blocks, never raises."""
        if self._lane.held():
            self._left_out += 1
            return
        if self._left_out:
            self._put(f"{self._left_out} line(s) are missing here: nobody read them")
            self._left_out = 0
        self._put(text)

    def flush(self, timeout: float = FLUSHING) -> None:
        """
        Wait until all is written, until nothing was taken for ``timeout`` seconds, or the reader
        has gone.
        """
        self._lane.drain(timeout)

    def _put(self, text: str) -> None:
        data = f"pdrun: {text}\n".encode("utf-8", "backslashreplace")
        try:
            self._lane.put(data)
        except RuntimeError:  # there can be no thread: the line is mostly about just that
            self._lane.write_now(data)


_speakers: dict[int, Speaker] = {}


def say(text: str) -> None:
    """
    Say a line of pdrun's own on stderr; never blocks, never raises.

    Where ``sys.stderr`` is no descriptor (a notebook's) the line goes there.
    """
    speaker = _speaker()
    if speaker is not None:
        speaker.say(text)
        return
    try:
        print(f"pdrun: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass  # there is no stderr (any more)


def flush(timeout: float = FLUSHING) -> None:
    """
    Wait a moment until what was said is written: before a process ends, or writes to stderr by
    itself.
    """
    for speaker in list(_speakers.values()):
        speaker.flush(timeout)


def _speaker() -> Speaker | None:
    """The one for the present ``sys.stderr``."""
    try:
        fd = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return None
    if fd not in _speakers:
        if not _speakers:
            atexit.register(flush)
            os.register_at_fork(after_in_child=_speakers.clear)  # no thread is forked
        _speakers[fd] = Speaker(fd)
    return _speakers[fd]


def reader_gone(fd: int) -> bool:
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
