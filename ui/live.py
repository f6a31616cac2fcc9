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

from pdrun import async_writer as lane
from pdrun.eventlog import JobStatus
from pdrun.ui.status import facts, failed_lines, render, safe

PERIOD = 0.5
"""Seconds between two looks at the log."""
ENDED = ("done", "dead")

Read = Callable[[], Sequence[JobStatus]]


def follow(
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
        if _unread(out):
            raise BrokenPipeError
        sleep(seconds)

    try:
        if out.isatty():
            _redraw(read, out, clock, wait)
        else:
            _append(read, out, wait)
    except KeyboardInterrupt:
        return 130
    return 0


def _unread(out: Any) -> bool:
    """
    Whether nobody reads what is shown any more; what does not change would tell only at the job's
    end.
    """
    try:
        return lane.reader_gone(out.fileno())
    except (OSError, ValueError, AttributeError):  # no file
        return False


def _redraw(
    read: Read, out: Any, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    from rich.console import Console
    from rich.live import Live

    found = read()
    with Live(render(found, clock()), console=Console(file=out), auto_refresh=False) as live:
        while not _ended(found):
            sleep(PERIOD)
            found = read()
            live.update(render(found, clock()), refresh=True)


def _append(read: Read, out: Any, sleep: Callable[[float], None]) -> None:
    shown: dict[str, list[str]] = {}
    while True:
        found = read()
        for one in found:
            before = shown.get(one.run, [])
            after = _lines(one)
            for line in after:
                if line not in before:
                    print(f"{safe(one.job)}: {line}", file=out, flush=True)
            shown[one.run] = after
        if _ended(found):
            return
        sleep(PERIOD)


def _ended(found: Sequence[JobStatus]) -> bool:
    return all(one.state in ENDED for one in found)


def _lines(one: JobStatus) -> list[str]:
    """What is worth a line when it changes: not the time, which always does."""
    lines = [
        f"{name} {value}" for name, value in facts(one, 0.0) if name not in ("job", "run", "time")
    ]
    return (
        lines
        + [f"failed {line}" for line in failed_lines(one)]
        + [f"warning {safe(text)}" for text in one.warnings]
    )
