"""
`pdrun status --follow`: show the status until the job has ended.

On a terminal one screen is redrawn. Elsewhere every change is printed as a line, for log files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pdrun import async_writer
from pdrun.text import escape_text
from pdrun.ui.job_status import JobStatus
from pdrun.ui.status import failed_lines, list_facts, render_status

REFRESH_SECONDS = 0.5
"""Time between two readings of the log."""
ENDED_STATES = ("done", "dead")

Read = Callable[[], Sequence[JobStatus]]


def follow_status(
    read: Read,
    *,
    out: Any = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """
    Show what ``read`` returns until every job in it has ended; return 0, or 130 after Ctrl-C.

    Args:
        read: returns the statuses; called every REFRESH_SECONDS.
        out: text stream; default: stdout.
        clock: wall clock, for run times.
        sleep: time.sleep, or a fake in tests.

    Raises:
        BrokenPipeError: the reader of ``out`` has closed it.
    """
    out = out or sys.stdout

    def wait(seconds: float) -> None:
        if _is_reader_gone(out):
            raise BrokenPipeError
        sleep(seconds)

    try:
        if out.isatty():
            _follow_on_terminal(read, out, clock, wait)
        else:
            _follow_as_lines(read, out, wait)
    except KeyboardInterrupt:
        return 130
    return 0


def _is_reader_gone(out: Any) -> bool:
    """
    Return whether the reader has closed the pipe.

    Without this, only the next change would show it, which may be the end of the job.
    """
    try:
        return async_writer.is_reader_gone(out.fileno())
    except (OSError, ValueError, AttributeError):  # not a file
        return False


def _follow_on_terminal(
    read: Read, out: Any, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    from rich.console import Console
    from rich.live import Live

    found = read()
    with Live(render_status(found, clock()), console=Console(file=out), auto_refresh=False) as live:
        while not _have_ended(found):
            sleep(REFRESH_SECONDS)
            found = read()
            live.update(render_status(found, clock()), refresh=True)


def _follow_as_lines(read: Read, out: Any, sleep: Callable[[float], None]) -> None:
    shown: dict[str, list[str]] = {}
    last: dict[str, JobStatus] = {}
    while True:
        found = read()
        for status in found:
            if status is last.get(status.run):
                continue
            last[status.run] = status
            before = frozenset(shown.get(status.run, ()))
            after = _status_lines(status)
            for line in after:
                if line not in before:
                    print(f"{escape_text(status.job)}: {line}", file=out, flush=True)
            shown[status.run] = after
        if _have_ended(found):
            return
        sleep(REFRESH_SECONDS)


def _have_ended(found: Sequence[JobStatus]) -> bool:
    return all(status.state in ENDED_STATES for status in found)


def _status_lines(status: JobStatus) -> list[str]:
    """Return the lines to print when they change: all but the time, which always changes."""
    lines = [
        f"{name} {value}"
        for name, value in list_facts(status, 0.0)
        if name not in ("job", "run", "time")
    ]
    return (
        lines
        + [f"failed {line}" for line in failed_lines(status)]
        + [f"warning {escape_text(text)}" for text in status.warnings]
    )
