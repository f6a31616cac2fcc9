"""
`pdrun status --follow`: the status again and again until the job has ended.

On a terminal one screen that is redrawn; elsewhere a line for each thing that changed, which suits
a log file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pdrun import async_writer
from pdrun.eventlog import JobStatus
from pdrun.ui.status import escape_text, failed_lines, list_facts, render_status

REFRESH_SECONDS = 0.5
"""Seconds between two looks at the log."""
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
        read: returns the statuses; called every PERIOD seconds.
        out: text stream; stdout by default.
        clock: wall clock, for ages.
        sleep: waits, in seconds.

    Raises:
        BrokenPipeError: whoever read ``out`` has gone away.
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
    Whether nobody reads what is shown any more; what does not change would tell only at the job's
    end.
    """
    try:
        return async_writer.is_reader_gone(out.fileno())
    except (OSError, ValueError, AttributeError):  # no file
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
    while True:
        found = read()
        for one in found:
            before = shown.get(one.run, [])
            after = _status_lines(one)
            for line in after:
                if line not in before:
                    print(f"{escape_text(one.job)}: {line}", file=out, flush=True)
            shown[one.run] = after
        if _have_ended(found):
            return
        sleep(REFRESH_SECONDS)


def _have_ended(found: Sequence[JobStatus]) -> bool:
    return all(one.state in ENDED_STATES for one in found)


def _status_lines(one: JobStatus) -> list[str]:
    """What is worth a line when it changes: not the time, which always does."""
    lines = [
        f"{name} {value}"
        for name, value in list_facts(one, 0.0)
        if name not in ("job", "run", "time")
    ]
    return (
        lines
        + [f"failed {line}" for line in failed_lines(one)]
        + [f"warning {escape_text(text)}" for text in one.warnings]
    )
