"""
Pictures of a report, as SVG: the timeline of the nodes, and the curve of the steps.

Coordinates are rounded to a tenth of a pixel, so that equal logs give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdrun.text import natural_key
from pdrun.ui.report.history import Interval, JobHistory, ProgressPoint, ValuePoint
from pdrun.ui.report.text import clean_line

WIDTH = 960
LEFT = 120
"""Pixels of the names left of a picture."""
ROW = 18
CURVE_HEIGHT = 220
MAX_ROWS = 64
"""Nodes in the timeline; beyond them only those out of the ordinary."""
_MAX_TICKS = 8
_ROUND_SECONDS = (
    *(factor * 10.0**power for power in (-3, -2, -1, 0) for factor in (1, 2, 5)),
    *(10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_200.0, 1_800.0, 3_600.0, 7_200.0),
    *(4 * 3_600.0, 8 * 3_600.0),
)
"""Distances of grid lines; of long jobs a day, or days."""


@dataclass(frozen=True)
class TimeAxis:
    """Wall clock to pixels."""

    begin: float
    end: float

    def place(self, when: float) -> float:
        """Return the x coordinate of a time."""
        span = max(self.end - self.begin, 1e-3)
        inside = min(max(when, self.begin), self.end)
        return LEFT + (inside - self.begin) / span * (WIDTH - LEFT - 10)

    def render(self, height: float) -> Iterable[str]:
        """Yield grid lines at round times since the begin."""
        span = max(self.end - self.begin, 1e-3)
        distance = choose_distance(span)
        for index in range(int(span / distance + 1e-6) + 1):
            place = self.place(self.begin + index * distance)
            x = format_number(place)
            yield f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{format_number(height)}"/>'
            anchor = "end" if place > WIDTH - 50 else "start" if index == 0 else "middle"
            label = format_seconds(index * distance)
            y = format_number(height + 14)
            yield f'<text x="{x}" y="{y}" text-anchor="{anchor}">{label}</text>'


def choose_distance(span: float) -> float:
    """Return the seconds between grid lines: the least round number with few lines."""
    for seconds in _ROUND_SECONDS:
        if span / seconds <= _MAX_TICKS:
            return seconds
    days = math.ceil(span / _MAX_TICKS / 86_400)
    return days * 86_400.0


def format_seconds(seconds: float) -> str:
    """Return a duration for people: ``0.8 s``, ``1 min 5 s``, ``2 h 3 min``."""
    if 0 < seconds < 0.0995:
        return f"{round(seconds * 1000)} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60} s".replace(" 0 s", "")
    return f"{whole // 3_600} h {whole % 3_600 // 60} min".replace(" 0 min", "")


def render_timeline(history: JobHistory) -> str:
    """
    Return the timeline: a row per node, a bar per generation, marks for silence, loss and failure.

    Of more than `MAX_ROWS` nodes, those that failed or fell silent are shown first.
    """
    axis = TimeAxis(history.begin, history.end)
    names = choose_rows(history)
    rows = {name: index for index, name in enumerate(names)}
    height = len(names) * ROW
    parts = list(axis.render(height))
    for name, index in rows.items():
        label = f'<text class="name" x="{LEFT - 6}" y="{format_number(index * ROW + ROW / 2)}">'
        parts.append(f"{label}{clean_line(name[:60])}</text>")
    for generation in history.generations:
        begin = generation.started_at or generation.assigned_at
        end = history.end if generation.ended_at is None else generation.ended_at
        for name, first, workers in generation.nodes:
            if name in rows:
                title = f"generation {generation.number}, ranks {first} to {first + workers - 1}"
                style = f"generation g{generation.number % 2}"
                parts.append(_bar(axis, rows[name], begin, end, style, title))
    for one in history.intervals:
        if one.node in rows:
            end = history.end if one.end is None else one.end
            parts.append(_bar(axis, rows[one.node], one.start, end, one.what, _describe(one, end)))
    for failure in history.failures:
        if failure.node in rows:
            x, y = axis.place(failure.time), rows[failure.node] * ROW + ROW / 2
            title = f"rank {failure.rank} failed: exit code {failure.code}"
            parts.append(
                f'<circle class="failure" cx="{format_number(x)}" cy="{format_number(y)}" r="4">'
                f"<title>{clean_line(title)}</title></circle>"
            )
    return make_picture(parts, height + 20)


def choose_rows(history: JobHistory) -> list[str]:
    """Return the nodes of the timeline, in the natural order of their names."""
    names = list(history.joined)
    for generation in history.generations:
        names += [name for name, _, _ in generation.nodes]
    names = sorted(dict.fromkeys(names), key=natural_key)
    if len(names) <= MAX_ROWS:
        return names
    special = {failure.node for failure in history.failures}
    special |= {one.node for one in history.intervals}
    chosen = [name for name in names if name in special][:MAX_ROWS]
    usual = [name for name in names if name not in special]
    kept = {*chosen, *usual[: MAX_ROWS - len(chosen)]}
    return [name for name in names if name in kept]


def render_curve(points: Sequence[ProgressPoint], begin: float, end: float) -> str:
    """Return the curve of the slowest worker's step over time; empty with fewer than two points."""
    if len(points) < 2:
        return ""
    axis = TimeAxis(begin, end)
    low, high = min(p.step for p in points), max(p.most for p in points)
    span = max(high - low, 1)

    def y_of(step: int) -> float:
        return CURVE_HEIGHT - 5 - (step - low) / span * (CURVE_HEIGHT - 10)

    parts = list(axis.render(CURVE_HEIGHT))
    for step in sorted({low, low + span // 2, high}):
        y = format_number(y_of(step))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="name" x="{LEFT - 6}" y="{y}">{step:,}</text>')
    for style, values in (
        ("most", [(p.time, p.most) for p in points]),
        ("step", [(p.time, p.step) for p in points]),
    ):
        for part in split_at_falls(values):
            line = " ".join(
                f"{format_number(axis.place(when))},{format_number(y_of(n))}" for when, n in part
            )
            parts.append(f'<polyline class="{style}" points="{line}"/>')
    return make_picture(parts, CURVE_HEIGHT + 20)


def render_values(points: Sequence[ValuePoint], begin: float, end: float) -> str:
    """Return the curve of a number of the script; empty with fewer than two finite values."""
    known = [(point.time, point.mean) for point in points if point.mean is not None]
    if len(known) < 2:
        return ""
    axis = TimeAxis(begin, end)
    low, high = min(value for _, value in known), max(value for _, value in known)
    span = high - low

    def y_of(value: float) -> float:
        share = (value - low) / span if span else 0.5
        return CURVE_HEIGHT - 5 - share * (CURVE_HEIGHT - 10)

    parts = list(axis.render(CURVE_HEIGHT))
    for value in sorted({low, (low + high) / 2, high}):
        y = format_number(y_of(value))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="name" x="{LEFT - 6}" y="{y}">{value:.4g}</text>')
    line = " ".join(
        f"{format_number(axis.place(when))},{format_number(y_of(value))}" for when, value in known
    )
    parts.append(f'<polyline class="step" points="{line}"/>')
    return make_picture(parts, CURVE_HEIGHT + 20)


def split_at_falls(values: Sequence[tuple[float, int]]) -> list[list[tuple[float, int]]]:
    """Return a curve in parts: after a restart the steps begin again further down."""
    parts: list[list[tuple[float, int]]] = []
    for when, number in values:
        if not parts or number < parts[-1][-1][1]:
            parts.append([])
        parts[-1].append((when, number))
    return parts


def _describe(one: Interval, end: float) -> str:
    text = f"{one.what} for {format_seconds(end - one.start)}"
    return text if one.what == "silent" else one.what


def _bar(axis: TimeAxis, row: int, begin: float, end: float, style: str, title: str) -> str:
    x = axis.place(begin)
    width = max(axis.place(end) - x, 1.0)
    return (
        f'<rect class="{style}" x="{format_number(x)}" y="{row * ROW + 3}" '
        f'width="{format_number(width)}" height="{ROW - 6}">'
        f"<title>{clean_line(title)}</title></rect>"
    )


def make_picture(parts: Iterable[str], height: float) -> str:
    """Return a picture of the page's width; its style is that of the page."""
    body = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {format_number(height)}" width="{WIDTH}"'
    return f'<div class="chart"><svg {size} role="img">\n{body}\n</svg></div>'


def format_number(value: float) -> str:
    """Return a coordinate: a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")
