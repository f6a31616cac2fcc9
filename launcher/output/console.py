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

from pdrun.async_writer import Lane
from pdrun.launcher.output.formatting import clean

OUT = 1
ERR = 2
MERGER_WAIT = 30.0
"""
Seconds for which an agent waits, at its end, for the process that merges its output and may be held
up itself.
"""


class Console:
    """stdout and stderr of this process."""

    def __init__(
        self,
        out: int = OUT,
        err: int = ERR,
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
        self._tty = tty if tty is not None else (_isatty(out), _isatty(err))
        wanted = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._colour = colour if colour is not None else wanted
        self._least_wait = 0.0
        self._closed = False
        self._out = Lane(out, "stdout")
        self._err = self._out if _same_place(out, err) else Lane(err, "stderr")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Console:
        """
        Return the console of an agent whose output another pdrun process merges (`to_json` of that
        process).
        """
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

    def gone(self, stream: int) -> bool:
        """
        Whether the reader of OUT or ERR has gone away: nobody will see what is written from now on.
        """
        return (self._out if stream == OUT else self._err).gone()

    def on_room(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, from another thread, when a stream is no longer held."""
        self._out.on_room = self._err.on_room = call

    def close(self, timeout: float = 2.0) -> tuple[str, ...]:
        """
        Write out everything, giving up on a reader that takes nothing for ``timeout`` seconds.

        Returns:
            What was lost, one line each; what stdout lost is said on stderr, too. Nothing the second time.
        """
        if self._closed:
            return ()
        self._closed = True
        timeout = max(timeout, self._least_wait)
        lost = [problem] if (problem := self._out.close(timeout)) else []
        if self._err is not self._out:
            for line in lost:
                self.say(f"pdrun: {line}")
            lost += [problem] if (problem := self._err.close(timeout)) else []
        return tuple(lost)


def _isatty(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


def _same_place(one: int, other: int) -> bool:
    """
    Whether two descriptors lead to the same file, pipe or terminal; False where one is closed.
    """
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
