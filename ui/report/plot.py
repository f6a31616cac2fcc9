"""
Curves of one job or several over their steps, as an SVG file.

A panel for each number, a line for each job. Values that are not finite leave a gap, and a red
mark. A restart begins a new part of the line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pdrun.ui.report.numbers import StepRow
from pdrun.ui.report.text import clean_line

WIDTH = 900
PANEL_HEIGHT = 240
LEFT = 80
MARGIN = 30
MAX_PANELS = 16
MAX_JOBS = 12
MAX_BUCKETS = 1_000
"""Of each bucket of steps the smallest and the largest value are drawn."""
TICKS = 5
COLOURS = (
    *("#2563eb", "#d97706", "#15803d", "#b91c1c", "#7c3aed", "#0891b2"),
    *("#be185d", "#4d7c0f", "#1e3a8a", "#92400e", "#166534", "#6b21a8"),
)
STYLE = (
    "svg{background:#fff;font:12px system-ui,sans-serif}text{fill:#374151}"
    ".title{font-weight:600;font-size:14px}.grid{stroke:#e5e7eb}"
    "polyline{fill:none;stroke-width:1.5}.bad{stroke:#b91c1c;stroke-width:1.5}"
)

Point = tuple[int, float]


@dataclass
class Curve:
    """One number of one job."""

    parts: list[list[Point]] = field(default_factory=list)
    """Lines of (step, value)."""
    bad_steps: list[int] = field(default_factory=list)
    """Steps with a value that is not finite."""

    def add(self, step: int, value: float | None, *, is_new_part: bool) -> None:
        """Add a value; None is a gap."""
        if value is None or not math.isfinite(value):
            self.parts.append([])
            return
        if is_new_part or not self.parts:
            self.parts.append([])
        self.parts[-1].append((step, value))


def collect_curves(rows: Iterable[StepRow]) -> dict[str, Curve]:
    """Return the curves of a job by name."""
    curves: dict[str, Curve] = {}
    last_step, last_generation = -1, -1
    for row in rows:
        is_new_part = row.step < last_step or row.generation != last_generation
        last_step, last_generation = row.step, row.generation
        for name, number in row.values.items():
            curve = curves.setdefault(name, Curve())
            curve.add(row.step, number.mean, is_new_part=is_new_part)
            if number.bad_rank >= 0:
                curve.bad_steps.append(row.step)
    return curves


def render_plot(jobs: Mapping[str, Mapping[str, Curve]], names: Sequence[str] = ()) -> str:
    """
    Return the picture; empty: there is nothing to draw.

    Args:
        jobs: run -> its curves by name.
        names: the numbers to draw; empty: all.
    """
    shown = dict(list(jobs.items())[:MAX_JOBS])
    known = dict.fromkeys(name for curves in shown.values() for name in curves)
    chosen = [name for name in (names or sorted(known)) if name in known][:MAX_PANELS]
    panels = [panel for name in chosen if (panel := _render_panel(name, shown))]
    if not panels:
        return ""
    legend = list(_render_legend(list(shown)))
    top = 20 * len(shown) + 10
    height = top + len(panels) * (PANEL_HEIGHT + 2 * MARGIN)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">',
        f"<style>{STYLE}</style>",
        *legend,
    ]
    for index, panel in enumerate(panels):
        offset = top + index * (PANEL_HEIGHT + 2 * MARGIN) + MARGIN
        lines += [f'<g transform="translate(0 {offset})">', *panel, "</g>"]
    return "\n".join([*lines, "</svg>", ""])


def _render_legend(names: Sequence[str]) -> Iterator[str]:
    for index, name in enumerate(names):
        y = 20 + 20 * index
        colour = COLOURS[index]
        yield f'<line x1="{LEFT}" x2="{LEFT + 24}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}"/>'
        yield f'<text x="{LEFT + 32}" y="{y}">{clean_line(name[:100])}</text>'


def _render_panel(name: str, jobs: Mapping[str, Mapping[str, Curve]]) -> list[str]:
    """Return the panel of one number; empty if no job has two finite values of it."""
    curves = [curves.get(name, Curve()) for curves in jobs.values()]
    points = [point for curve in curves for part in curve.parts for point in part]
    if len(points) < 2:
        return []
    bad = [step for curve in curves for step in curve.bad_steps]
    steps = _Scale.over([step for step, _ in points] + bad, LEFT, WIDTH - 20)
    values = _Scale.over([value for _, value in points], PANEL_HEIGHT, 0)
    lines = [f'<text class="title" x="{LEFT}" y="-10">{clean_line(name)}</text>']
    for tick in range(TICKS):
        value, step = values.at(tick / (TICKS - 1)), steps.at(tick / (TICKS - 1))
        x, y = steps.place(step), values.place(value)
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 20}" y1="{y}" y2="{y}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{value:.4g}</text>')
        lines.append(
            f'<text x="{x}" y="{PANEL_HEIGHT + 16}" text-anchor="middle">{step:,.0f}</text>'
        )
    for index, curve in enumerate(curves):
        lines += _render_curve(curve, steps, values, COLOURS[index])
    for step in sorted(set(bad))[:MAX_BUCKETS]:
        x = steps.place(step)
        lines.append(f'<line class="bad" x1="{x}" x2="{x}" y1="0" y2="{PANEL_HEIGHT}"/>')
    return lines


def _render_curve(curve: Curve, steps: _Scale, values: _Scale, colour: str) -> Iterator[str]:
    for part in curve.parts:
        places = [f"{steps.place(step)},{values.place(value)}" for step, value in thin_points(part)]
        if len(places) == 1:
            x, _, y = places[0].partition(",")
            yield f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}"/>'
        elif places:
            yield f'<polyline stroke="{colour}" points="{" ".join(places)}"/>'


def thin_points(points: Sequence[Point], buckets: int = MAX_BUCKETS) -> list[Point]:
    """Return points of which each bucket keeps the smallest and the largest value, in order."""
    if len(points) <= 2 * buckets:
        return list(points)
    found = []
    for index in range(buckets):
        begin, end = len(points) * index // buckets, len(points) * (index + 1) // buckets
        part = range(begin, end)
        low = min(part, key=lambda place: points[place][1])
        high = max(part, key=lambda place: points[place][1])
        found += [points[place] for place in sorted({low, high})]
    return found


@dataclass(frozen=True)
class _Scale:
    """Values to pixels, rounded to a tenth, so that equal logs give equal bytes."""

    low: float
    high: float
    first: float
    last: float

    @classmethod
    def over(cls, values: Sequence[float], first: float, last: float) -> _Scale:
        low, high = min(values), max(values)
        if high <= low:
            margin = abs(low) * 0.05 or 0.5
            low, high = low - margin, high + margin
        return cls(low, high, first, last)

    def at(self, share: float) -> float:
        return self.low * (1 - share) + self.high * share

    def place(self, value: float) -> float:
        # halved, so that the difference of two large numbers is finite
        share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return round(self.first + share * (self.last - self.first), 1)
