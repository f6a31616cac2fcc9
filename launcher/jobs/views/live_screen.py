"""
Shows the live line of a job below the output on the terminal that the job was started from.

A thread reads what is new in the event log twice a second. It starts late, so that it takes no time
from the start of the job, and it may hang with the disk without an effect on the job.

Limits: there is no line without log files, and none on nodes whose scheduler runs elsewhere.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdrun.launcher.config.spec import Output
from pdrun.launcher.jobs import registry
from pdrun.launcher.output.console import STDERR, STDOUT, Console

START_SECONDS = 1.0
REFRESH_SECONDS = 0.5
MIN_COLUMNS = 20


def show_live_line(
    console: Console,
    settings: Output,
    events: Path | None = None,
    *,
    expected_nodes: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> None:
    """
    Start the thread, if there is a terminal for the line and the user wants it.

    Args:
        console: the terminal.
        settings: the user's options.
        events: the event log; None: that of the job that the registry has for this process.
        expected_nodes: names of the nodes that the job waits for, if they are known.
        environ: contains CI and TERM.
    """
    if not settings.files or not is_line_wanted(console, settings.screen, environ):
        return
    screen = LiveScreen(console, events, expected_nodes)
    threading.Thread(target=screen.run, name="pdrun-live-line", daemon=True).start()


def is_line_wanted(console: Console, screen: str, environ: Mapping[str, str]) -> bool:
    """Return whether the line is shown: ``auto`` needs a terminal that nothing else writes to."""
    if screen == "none" or not console.is_terminal(STDERR) or environ.get("TERM") == "dumb":
        return False
    # `pdrun ... | less` draws on the terminal, too
    return screen == "line" or (console.is_terminal(STDOUT) and not environ.get("CI"))


class LiveScreen:
    """The line of one job."""

    def __init__(
        self, console: Console, events: Path | None, expected_nodes: Sequence[str]
    ) -> None:
        self._console = console
        self._events = events
        self._expected_nodes = expected_nodes
        self._started_at = time.time()

    def run(self) -> None:
        """Show the line until the job has ended or the console is closed."""
        time.sleep(START_SECONDS)
        from pdrun.ui.event_reader import EventLogReader
        from pdrun.ui.live_line import LiveLine

        line = LiveLine(self._expected_nodes)
        reader = None
        while not self._console.has_closed:
            if self._events is None:
                self._events = self._find_event_log()
            if reader is None and self._events is not None:
                reader = EventLogReader(self._events)
            if reader is not None:
                try:
                    status = reader.read_status()
                except OSError:
                    pass  # not written yet
                else:
                    width = max(MIN_COLUMNS, _terminal_columns() - 1)
                    text = line.format(status, time.time(), width)
                    self._console.show_footer(text if is_in_foreground(STDERR) else "")
                    if status.state == "done":
                        return
            time.sleep(REFRESH_SECONDS)

    def _find_event_log(self) -> Path | None:
        """Return the event log of the job that this process controls, from the registry."""
        for job in registry.list_jobs():
            if job.pid == os.getpid() and job.events and job.made >= self._started_at - 1.0:
                return Path(job.events)
        return None


def is_in_foreground(fd: int) -> bool:
    """Return False for a job that a shell runs in the background: its user types there."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return True  # no terminal controls this process


def _terminal_columns() -> int:
    try:
        return os.get_terminal_size(STDERR).columns or 80
    except OSError:
        return 80
