"""
The terminal: workers' lines and pdrun's own, in order, written by a thread so that nobody waits for a slow reader.

    put() --> queue (bounded by `held`) --> writer thread --> os.write

stdout and stderr share one queue where they lead to the same place, and have one each elsewhere (`pdrun ... | less`
that is not read must not keep the verdict from the screen). A reader that goes away switches its stream off and the job
goes on. A reader that is slow loses nothing: above HIGH bytes `held` is true, and the workers' pipes are left alone.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from pdrun.launcher.shaping import clean

OUT, ERR = 1, 2
HIGH = 8 << 20
"""Bytes that may wait for a reader before workers are held back."""
LOW = HIGH // 2
MERGER_WAIT = 30.0
"""Seconds for which an agent waits, at its end, for the process that merges its output and may be held up itself."""
_BATCH = 1 << 20
_LARGE, _SMALL = 1 << 16, 1 << 12


def _nothing() -> None:
    """Nobody asked to be told."""


class Lane:
    """A queue of bytes and the thread that writes them to one descriptor. Starts its thread on first use."""

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
        """Queue whole bytes; never blocks. Dropped when the stream is off."""
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
                self._thread = threading.Thread(target=self._run, name=f"pdrun-{self.name}", daemon=True)
                self._thread.start()

    def held(self) -> bool:
        """Whether producers should wait: true above HIGH, until the queue has fallen below LOW."""
        return self._held

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
        return "" if self.off in ("", "closed") else f"{self.name}: {self.off}; output after that was not shown"

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
            parts, size = [], 0
            while self._queue and size < _BATCH:
                parts.append(self._queue.popleft())
                size += len(parts[-1])
            return b"".join(parts)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                # a pipe's write returns when all is in: small ones at the end tell a slow reader from one that is gone
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
            self._backlog, freed, self._held = 0, self._held, False
            self._changed.notify_all()
        if freed:
            self.on_room()


class Console:
    """stdout and stderr of this process."""

    def __init__(
        self, out: int = OUT, err: int = ERR, *,
        tty: tuple[bool, bool] | None = None, colour: bool | None = None, environ: Mapping[str, str] = os.environ,
    ) -> None:  # fmt: skip
        """
        Write to the descriptors ``out`` and ``err``.

        Args:
            out: descriptor of stdout.
            err: descriptor of stderr.
            tty: whether (stdout, stderr) end at a terminal, when another process knows better; None: looked up.
            colour: whether prefixes are coloured; None: on a terminal, unless NO_COLOR or TERM=dumb says no.
            environ: where NO_COLOR and TERM are looked up.
        """
        self._tty = tty if tty is not None else (_isatty(out), _isatty(err))
        wanted = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._colour = colour if colour is not None else wanted
        self._least_wait = 0.0
        self._out = Lane(out, "stdout")
        self._err = self._out if _same_place(out, err) else Lane(err, "stderr")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Console:
        """Return the console of an agent whose output another pdrun process merges (`to_json` of that process)."""
        out, err = data["tty"]
        console = cls(tty=(bool(out), bool(err)), colour=bool(data["colour"]))
        console._least_wait = MERGER_WAIT
        return console

    def to_json(self) -> dict[str, Any]:
        """Return what an agent must know to write as if this console were its own."""
        return {"tty": list(self._tty), "colour": self._colour}

    def tty(self, stream: int) -> bool:
        """Whether OUT or ERR ends at a terminal."""
        return self._tty[stream - 1]

    def colour(self, stream: int) -> bool:
        """Whether OUT or ERR may be coloured."""
        return self._colour and self.tty(stream)

    def write(self, stream: int, data: bytes) -> None:
        """Queue bytes for OUT or ERR, as they are; never blocks."""
        (self._out if stream == OUT else self._err).put(data)

    def say(self, text: str) -> None:
        """Queue a text of pdrun's own for stderr; it starts on a line of its own and ends it."""
        data = text.encode("utf-8", "backslashreplace")
        data = (clean(data) if self.tty(ERR) else data) + b"\n"
        self._err.put(b"\n" + data if self._err.mid_line else data)

    def held(self, stream: int) -> bool:
        """Whether the reader of OUT or ERR is so far behind that workers should wait."""
        return (self._out if stream == OUT else self._err).held()

    def on_room(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, from another thread, when a stream is no longer held."""
        self._out.on_room = self._err.on_room = call

    def close(self, timeout: float = 2.0) -> tuple[str, ...]:
        """
        Write out everything, giving up on a reader that takes nothing for ``timeout`` seconds.

        Returns:
            What was lost, one line each; what stdout lost is said on stderr, too.
        """
        timeout = max(timeout, self._least_wait)
        lost = [problem] if (problem := self._out.close(timeout)) else []
        if self._err is not self._out:
            for line in lost:
                self.say(f"pdrun: {line}")
            lost += [problem] if (problem := self._err.close(timeout)) else []
        return tuple(lost)


def _is_open(fd: int) -> bool:
    """Whether a descriptor is open; one that is closed now must not be written to once the number is used again."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _isatty(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


def _same_place(one: int, other: int) -> bool:
    """Whether two descriptors lead to the same file, pipe or terminal; False where one is closed."""
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
