"""
Communication in the steps of a trace: the summary that `pdrun trace` leaves in the folder of the
job's logs, for its report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pdrun.ui.report.text import clean_line, render_table

SUMMARY_FILE = "trace-summary.json"
MAX_BYTES = 1 << 22
MAX_ROWS = 8
"""Ranks in the table: those with most exposed communication."""


class RankCommunication(NamedTuple):
    """Means of the traced steps of a rank, in seconds."""

    rank: int
    step: float
    communication: float
    exposed: float
    """Communication without computation beside it."""

    @property
    def exposed_share(self) -> float:
        """Share of the step."""
        return self.exposed / self.step if self.step > 0 else 0.0


class TraceSummary(NamedTuple):
    """A trace, and what it says about communication."""

    path: str
    """Of the merged trace."""
    ranks: tuple[RankCommunication, ...]

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps({"trace": self.path, "ranks": [list(one) for one in self.ranks]}) + "\n"

    def describe(self) -> str:
        """Return one line: the mean of the ranks, and the one with most."""
        most = max(self.ranks, key=lambda one: one.exposed_share)
        count = len(self.ranks)
        step, exposed = (
            sum(values) / count * 1e3
            for values in ([one.step for one in self.ranks], [one.exposed for one in self.ranks])
        )
        share = exposed / step if step else 0.0
        return (
            f"exposed communication: {exposed:.3g} of {step:.3g} ms a step ({share:.0%}), "
            f"most on rank {most.rank} ({most.exposed_share:.0%})"
        )


def read_summary(folder: Path) -> TraceSummary | None:
    """Return the summary in the folder of a job's logs; None if it is missing or damaged."""
    path = folder / SUMMARY_FILE
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        data = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        rows = [
            RankCommunication(int(rank), *(float(value) for value in values))
            for rank, *values in data["ranks"]
        ]
        is_finite = all(math.isfinite(value) and value >= 0 for row in rows for value in row)
        return TraceSummary(str(data["trace"]), tuple(rows)) if rows and is_finite else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def render_communication(summary: TraceSummary | None) -> Iterator[str]:
    """Yield the section of a report."""
    if summary is None:
        return
    yield "<h2>Communication in a trace</h2>"
    yield f"<p>{clean_line(summary.describe())}</p>"
    chosen = sorted(summary.ranks, key=lambda one: (-one.exposed_share, one.rank))[:MAX_ROWS]
    rows = [_make_row(one) for one in chosen]
    yield render_table(("worker", "step", "communication", "exposed", "share"), rows)
    yield (
        '<p class="key">Exposed: nothing is computed meanwhile. Means of the traced steps. '
        f"{clean_line(summary.path)} opens at https://ui.perfetto.dev.</p>"
    )


def _make_row(one: RankCommunication) -> Sequence[str]:
    times = [f"{value * 1e3:.3g} ms" for value in (one.step, one.communication, one.exposed)]
    return (f"rank {one.rank}", *times, f"{one.exposed_share:.0%}")
