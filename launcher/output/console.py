"""
The terminal: workers' lines and pdrun's own, in order. Threads write (`pdrun.async_writer`), so no
caller waits for a slow reader.

stdout and stderr share one queue if they lead to the same file, and have one each otherwise: an
unread `pdrun ... | less` must not keep the verdict from the screen. If a reader closes its end, its
stream is switched off and the job continues. A slow reader loses nothing: `is_behind` is then true,
and the workers' pipes are not read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from pdrun.async_writer import BackgroundWriter
from pdrun.launcher.output.formatting import escape_controls

STDOUT = 1
STDERR = 2
OPENMPI_TASK = "OMPI_COMM_WORLD_RANK"
MERGER_WAIT_SECONDS = 30.0
"""An agent waits this long at its end for the process that merges its output."""


class Console:
    """stdout and stderr of this process."""

    def __init__(
        self,
        out: int = STDOUT,
        err: int = STDERR,
        *,
        tty: tuple[bool, bool] | None = None,
        colour: bool | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """
        Write to the descriptors ``out`` and ``err``.

        Args:
            out: descriptor of stdout.
            err: descriptor of stderr.
            tty: whether (stdout, stderr) are terminals; None: ask the system.
            colour: whether prefixes are coloured; None: on a terminal, unless NO_COLOR or TERM=dumb
                forbids it, or the terminal is one that Open MPI made for its task: mpirun's own
                output may be a file.
            environ: contains NO_COLOR, TERM and the variables of Open MPI.
        """
        if tty is None:
            tty = (_is_terminal(out), _is_terminal(err))
        if colour is None:
            colour = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
            colour = colour and OPENMPI_TASK not in environ
        self._terminals = tty
        self._wants_colour = colour
        self._min_close_seconds = 0.0
        self._has_closed = False
        self._stdout = BackgroundWriter(out, "stdout")
        self._stderr = self._stdout
        if not _is_same_file(out, err):
            self._stderr = BackgroundWriter(err, "stderr")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Console:
        """Return the console of an agent whose output another process merges: `data` is its."""
        out, err = data["tty"]
        console = cls(tty=(bool(out), bool(err)), colour=bool(data["colour"]))
        console._min_close_seconds = MERGER_WAIT_SECONDS
        return console

    def to_json(self) -> dict[str, Any]:
        """Return what an agent needs to format its output for this console."""
        return {"tty": list(self._terminals), "colour": self._wants_colour}

    def is_terminal(self, stream: int) -> bool:
        """Return whether STDOUT or STDERR is a terminal."""
        return self._terminals[stream - 1]

    def has_colour(self, stream: int) -> bool:
        """Return whether STDOUT or STDERR may be coloured."""
        return self._wants_colour and self.is_terminal(stream)

    def write(self, stream: int, data: bytes) -> None:
        """Queue bytes for STDOUT or STDERR, unchanged; never blocks."""
        self._writer_of(stream).put(data)

    def print_line(self, text: str) -> None:
        """Queue a line of pdrun for stderr; it never continues a line of a worker."""
        data = text.encode("utf-8", "backslashreplace")
        if self.is_terminal(STDERR):
            data = escape_controls(data)
        if self._stderr.mid_line:
            data = b"\n" + data
        self._stderr.put(data + b"\n")

    def show_footer(self, text: str) -> None:
        """Show a line below the output on stderr's terminal; empty: remove it."""
        self._stderr.show_footer(escape_controls(text.encode("utf-8", "backslashreplace")))

    @property
    def has_closed(self) -> bool:
        """Return whether `close` was called."""
        return self._has_closed

    def is_behind(self, stream: int) -> bool:
        """Return whether the reader of STDOUT or STDERR is so slow that workers should wait."""
        return self._writer_of(stream).is_full()

    def is_closed(self, stream: int) -> bool:
        """Return whether the reader of STDOUT or STDERR has closed it."""
        return self._writer_of(stream).is_reader_gone()

    def call_when_ready(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, from another thread, when a stream is no longer behind."""
        self._stdout.on_writable = self._stderr.on_writable = call

    def close(self, timeout: float = 2.0) -> tuple[str, ...]:
        """
        Write everything that is queued.

        Args:
            timeout: seconds without progress after which a reader is given up.

        Returns:
            One line for each loss; losses of stdout are also printed on stderr. A second call
            returns nothing.
        """
        if self._has_closed:
            return ()
        self._has_closed = True
        timeout = max(timeout, self._min_close_seconds)
        losses = [self._stdout.close(timeout)]
        if self._stderr is not self._stdout:
            if losses[0]:
                self.print_line(f"pdrun: {losses[0]}")
            losses.append(self._stderr.close(timeout))
        return tuple(loss for loss in losses if loss)

    def _writer_of(self, stream: int) -> BackgroundWriter:
        return self._stdout if stream == STDOUT else self._stderr


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


def _is_same_file(one: int, other: int) -> bool:
    """Return whether two descriptors lead to the same file, pipe or terminal; False if closed."""
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
