"""
The last line of the terminal while a job runs: what it does now, and how long it will take.

    step 1,200 of 10,000  loss 2.31  4.2 steps/s  rank 5 slow  35:02 left  0:05:10 elapsed

Pure: statuses and times in, a text out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from pdrun.text import escape_text, plural
from pdrun.ui.job_status import JobStatus
from pdrun.ui.status import describe_values, format_age, is_present

SLOW_SECONDS = 90.0
"""A slow rank is shown for this time: it is named again once a minute while it is slow."""
MAX_NAMES = 8
"""Nodes that are named while a job waits for nodes."""
MAX_VALUES = 3
MAX_REASON_CHARS = 120
RATE_WEIGHT = 0.4
"""Weight of the newest interval in the average rate of steps."""
_SLOW = re.compile(r"rank (\d+) on \S+ (?:is \d+ steps behind|needs \S+ s per step)")


class LiveLine:
    """Makes the line; keeps what a status has not: rates, and since when a rank is slow."""

    def __init__(self, expected_nodes: Sequence[str] = ()) -> None:
        """``expected_nodes``: names of the nodes that the job waits for, if they are known."""
        self._expected_nodes = expected_nodes
        self._last_step: tuple[int, int, float] | None = None
        """Generation, step and time of the last report."""
        self._rate = 0.0
        """Steps per second; 0: not known."""
        self._warnings: tuple[str, ...] = ()
        self._slow: dict[int, float] = {}
        """Rank -> until when it is shown."""

    def format(self, status: JobStatus, now: float, width: int) -> str:
        """
        Return the line, at most ``width`` columns; empty: the job has ended.

        Args:
            status: the newest status.
            now: wall clock.
            width: columns of the terminal.
        """
        self._note_step(status)
        self._note_warnings(status, now)
        if status.state in ("done", "dead", "unknown"):
            return ""
        if status.state == "running":
            parts = self._describe_steps(status, now)
        elif status.state == "gathering":
            parts = self._describe_waiting(status)
        else:
            reason = escape_text(status.reason)[:MAX_REASON_CHARS]
            parts = [(0, f"{status.state}: {reason}" if reason else status.state)]
        if status.started_at:
            parts.append((5, f"{format_age(status, now)} elapsed"))
        return _fit_parts(parts, width)

    def _note_step(self, status: JobStatus) -> None:
        """Update the rate of steps."""
        last = self._last_step
        if status.step < 0 or not status.step_at:
            return
        new = (status.generation, status.step, status.step_at)
        if last is None or last[0] != status.generation:
            self._last_step = new
            self._rate = 0.0
        elif status.step_at > last[2]:
            self._last_step = new
            rate = (status.step - last[1]) / (status.step_at - last[2])
            if self._rate:
                rate = RATE_WEIGHT * rate + (1 - RATE_WEIGHT) * self._rate
            self._rate = max(0.0, rate)

    def _note_warnings(self, status: JobStatus, now: float) -> None:
        if status.warnings is not self._warnings:
            known = set(self._warnings)
            self._warnings = status.warnings
            for text in status.warnings:
                found = _SLOW.match(text) if text not in known else None
                if found is not None:
                    self._slow[int(found[1])] = now + SLOW_SECONDS
        if self._slow:
            self._slow = {rank: until for rank, until in self._slow.items() if until > now}

    def _describe_steps(self, status: JobStatus, now: float) -> list[tuple[int, str]]:
        """Return (priority, text) of each part; a lower number is more important."""
        parts: list[tuple[int, str]] = []
        if status.step < 0:
            ranks = plural(len(status.ranks), "rank")
            parts.append((0, f"running: {ranks} on {_count_nodes(status)}"))
        else:
            total = f" of {status.total:,}" if status.total else ""
            parts.append((0, f"step {status.step:,}{total}"))
        for index, (name, text) in enumerate(describe_values(status)[:MAX_VALUES]):
            parts.append((2 + index, f"{escape_text(name)} {text}"))
        if self._rate:
            parts.append((4, _format_rate(self._rate)))
        if self._slow:
            more = f" and {len(self._slow) - 1} more" if len(self._slow) > 1 else ""
            parts.append((1, f"rank {min(self._slow)}{more} slow"))
        if status.restarts:
            parts.append((3, plural(status.restarts, "restart")))
        if self._rate and status.total > status.step:
            passed = max(0.0, now - status.step_at)
            left = max(0.0, (status.total - status.step) / self._rate - passed)
            parts.append((1, f"{_format_duration(left)} left"))
        return parts

    def _describe_waiting(self, status: JobStatus) -> list[tuple[int, str]]:
        here = [node.name for node in status.nodes.values() if is_present(node)]
        of = f" of {status.expected}" if status.expected else ""
        parts = [(0, f"waiting: {len(here)}{of} nodes have joined")]
        absent = [name for name in self._expected_nodes if name not in status.nodes]
        if here:
            parts.append((2, f"here: {_format_names(here)}"))
        if absent:
            parts.append((1, f"missing: {_format_names(absent)}"))
        return parts


def text_width(text: str) -> int:
    """Return the columns that a text without control characters takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(map(_character_width, text))


def _character_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _fit_parts(parts: list[tuple[int, str]], width: int) -> str:
    """Return the parts that fit, in their order: the least important ones are left out first."""
    kept = list(parts)
    while len(kept) > 1 and text_width("  ".join(text for _, text in kept)) > width:
        kept.remove(max(reversed(kept), key=lambda part: part[0]))
    line = "  ".join(text for _, text in kept)
    while line and text_width(line) > width:
        line = line[:-1]
    return line


def _format_names(names: Sequence[str]) -> str:
    shown = ", ".join(escape_text(name)[:32] for name in names[:MAX_NAMES])
    return f"{shown}, ..." if len(names) > MAX_NAMES else shown


def _format_rate(rate: float) -> str:
    if rate >= 0.1:
        return f"{rate:.3g} steps/s"
    return f"{1 / rate:.3g} s/step"


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    text = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} d {text}" if days else text


def _count_nodes(status: JobStatus) -> str:
    return plural(sum(map(is_present, status.nodes.values())), "node")
