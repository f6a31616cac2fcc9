"""
The event log of a job: one JSON object per line, appended, never rewritten.

A job's status is the replay of its log (`pdrun.ui.replay`). `pdrun status` and all screens read
only the log. Readers skip incomplete lines, which a crash may leave.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any

from pdrun.async_file import CLOSE_SECONDS, BackgroundFileWriter
from pdrun.quick_dataclass import dataclass
from pdrun.text import plural

EVENT_KINDS = (
    "created",
    "joined",
    "refused",
    "assigned",
    "started",
    "exited",
    "stopping",
    "restarting",
    "suspect",
    "recovered",
    "lost",
    "left",
    "standby",
    "gathering",
    "progress",
    "usage",
    "plan",
    "hang",
    "resumed",
    "warning",
    "verdict",
)


@dataclass(frozen=True)
class LogEvent:
    """An event of a job."""

    kind: str
    """One of EVENT_KINDS."""
    time: float
    """Wall clock of the writer, seconds since the epoch; for display only."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON values, named per kind; see docs/protocol.md."""

    def to_line(self) -> str:
        """Return the event as one line of JSON, without the line end."""
        return self._line

    @cached_property
    def _line(self) -> str:
        return json.dumps(
            {"kind": self.kind, "time": round(self.time, 6), **self.data}, ensure_ascii=True
        )


class EventLog:
    """
    Appends events to a file in a thread. A hanging, full or broken disk does not affect the job.

    If the disk answers, the system has a line when `append` returns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = BackgroundFileWriter(path, _gap_line)

    @property
    def lost_events(self) -> int:
        """Number of events that were not written."""
        return self._lines.lost_lines

    def append(self, event: LogEvent) -> None:
        """Write an event; see `BackgroundFileWriter.put` about waiting for the disk."""
        self.extend((event,))

    def extend(self, events: Sequence[LogEvent]) -> None:
        """Write several events with one wait for the disk."""
        self._lines.put(*(event.to_line() for event in events))

    def close(self, timeout: float = CLOSE_SECONDS) -> str:
        """
        Write queued events, for at most ``timeout`` seconds, and close; may be called twice.

        Returns:
            a message if events were lost, or the empty string.
        """
        if not self._lines.close(timeout):
            return ""
        lost = plural(self.lost_events, "line")
        return (
            f"event log {self.path}: {lost} not written ({self._lines.reason}); the job continued"
        )


def _gap_line(count: int) -> str:
    text = f"{plural(count, 'event')} missing here: the disk of the event log did not answer"
    return LogEvent("warning", time.time(), {"text": text}).to_line()


def read_events(path: Path) -> Iterator[LogEvent]:
    """Yield the events of a log; incomplete lines are skipped."""
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from parse_events(file)


def read_last_events(path: Path, size: int) -> Iterator[LogEvent]:
    """Yield the events in the last ``size`` bytes of a log."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - size))
        yield from parse_events(file.read().decode(errors="replace").split("\n"))


def parse_events(lines: Iterable[str]) -> Iterator[LogEvent]:
    """Yield the events in lines of a log; incomplete lines are skipped."""
    for line in lines:
        try:
            found = take_event(json.loads(line))
        except (ValueError, RecursionError):
            continue
        if found is not None:
            yield LogEvent(*found)


def take_event(data: Any) -> tuple[str, float, dict[str, Any]] | None:
    """Return kind, time and the other fields of the event in a value; None: it is not an event."""
    try:
        kind = str(data.pop("kind"))
        when = float(data.pop("time"))
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError):
        return None
    return (kind, when, data) if math.isfinite(when) else None
