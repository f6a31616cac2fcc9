"""
The terminal: workers' lines and pdrun's own, in order. Threads write (`pdrun.async_writer`): nobody
waits for a slow reader.

stdout and stderr share one queue where they lead to the same place, and have one each elsewhere (`pdrun ... | less`
that is not read must not keep the verdict from the screen). A reader that goes away switches its stream off and the job
goes on. A reader that is slow loses nothing: above HIGH bytes `held` is true, and the workers' pipes are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from pdrun.async_writer import BackgroundWriter
from pdrun.launcher.output.formatting import escape_controls

STDOUT = 1
STDERR = 2
MERGER_WAIT_SECONDS = 30.0
"""
Seconds for which an agent waits, at its end, for the process that merges its output and may be held
up itself.
"""


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
            tty: whether (stdout, stderr) end at a terminal, when another process knows better;
                None: looked up.
            colour: whether prefixes are coloured; None: on a terminal, unless NO_COLOR or TERM=dumb
                says no.
            environ: where NO_COLOR and TERM are looked up.
        """
        self._terminals = tty if tty is not None else (_is_terminal(out), _is_terminal(err))
        wanted = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._wants_colour = colour if colour is not None else wanted
        self._min_close_seconds = 0.0
        self._has_closed = False
        self._stdout = BackgroundWriter(out, "stdout")
        self._stderr = self._stdout if _is_same_file(out, err) else BackgroundWriter(err, "stderr")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Console:
        """
        Return the console of an agent whose output another pdrun process merges (`to_json` of that
        process).
        """
        out, err = data["tty"]
        console = cls(tty=(bool(out), bool(err)), colour=bool(data["colour"]))
        console._min_close_seconds = MERGER_WAIT_SECONDS
        return console

    def to_json(self) -> dict[str, Any]:
        """Return what an agent must know to write as if this console were its own."""
        return {"tty": list(self._terminals), "colour": self._wants_colour}

    def is_terminal(self, stream: int) -> bool:
        """Whether OUT or ERR ends at a terminal."""
        return self._terminals[stream - 1]

    def has_colour(self, stream: int) -> bool:
        """Whether OUT or ERR may be coloured."""
        return self._wants_colour and self.is_terminal(stream)

    def write(self, stream: int, data: bytes) -> None:
        """Queue bytes for OUT or ERR, as they are; never blocks."""
        (self._stdout if stream == STDOUT else self._stderr).put(data)

    def print_line(self, text: str) -> None:
        """Queue a text of pdrun's own for stderr; it starts on a line of its own and ends it."""
        data = text.encode("utf-8", "backslashreplace")
        data = (escape_controls(data) if self.is_terminal(STDERR) else data) + b"\n"
        self._stderr.put(b"\n" + data if self._stderr.mid_line else data)

    def is_behind(self, stream: int) -> bool:
        """Whether the reader of OUT or ERR is so far behind that workers should wait."""
        return (self._stdout if stream == STDOUT else self._stderr).is_full()

    def is_closed(self, stream: int) -> bool:
        """
        Whether the reader of OUT or ERR has gone away: nobody will see what is written from now on.
        """
        return (self._stdout if stream == STDOUT else self._stderr).is_reader_gone()

    def call_when_ready(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, from another thread, when a stream is no longer held."""
        self._stdout.on_writable = self._stderr.on_writable = call

    def close(self, timeout: float = 2.0) -> tuple[str, ...]:
        """
        Write out everything, giving up on a reader that takes nothing for ``timeout`` seconds.

        Returns:
            What was lost, one line each; what stdout lost is said on stderr, too. Nothing the second time.
        """
        if self._has_closed:
            return ()
        self._has_closed = True
        timeout = max(timeout, self._min_close_seconds)
        lost = [problem] if (problem := self._stdout.close(timeout)) else []
        if self._stderr is not self._stdout:
            for line in lost:
                self.print_line(f"pdrun: {line}")
            lost += [problem] if (problem := self._stderr.close(timeout)) else []
        return tuple(lost)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


def _is_same_file(one: int, other: int) -> bool:
    """
    Whether two descriptors lead to the same file, pipe or terminal; False where one is closed.
    """
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
