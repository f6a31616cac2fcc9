"""Starting the program of this process again, in its place: a worker of a cluster with recovery."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path


class ProgramStart:
    """
    How this process was started, to start its program again under the same process id.

    SIGTERM ends the program by SystemExit from now on, unless there is a handler already: only what
    ends by itself can start again.
    """

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._folder = Path.cwd()
        self._inherited = _list_descriptors()
        _exit_on_sigterm()

    def start_again(self) -> None:
        """Replace this process; its children are killed, and what it has opened is closed."""
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for number in _list_descriptors() - self._inherited:
            with contextlib.suppress(OSError):  # closed meanwhile
                os.set_inheritable(number, False)
        os.chdir(self._folder)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], self._environ)


def _exit_on_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def _list_descriptors() -> set[int]:
    """Return the open descriptors above stderr; empty where the system has no list of them."""
    try:
        return {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - {0, 1, 2}
    except OSError:
        return set()
