"""
The order of a pipeline, as a picture: a row per rank, forwards and backwards to scale, gaps idle.

The cells come from the job's ``plan`` event: ``0F1@250+125`` is the forward of stage 0 on
micro-batch 1, which begins at 250 thousandths of a step and takes 125.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pdrun.ui.report.svg import LEFT, WIDTH, format_number, make_picture
from pdrun.ui.report.text import clean_line

CELLS_PREFIX = "cells "
"""Begin of the name of a fact that has the cells of a rank."""
MAX_CELLS = 8_192
MAX_RANKS = 256
ROW_HEIGHT = 26
LABEL_PIXELS = 9.0
"""Width per digit of a cell's number: narrower cells have none."""
_CELL = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})@(\d{1,6})\+(\d{1,6})", re.ASCII)
_KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the input",
    "W": "backward for the weights",
}
_FILE_STYLE = (
    "svg{background:#fff;font:12px system-ui,sans-serif}text{fill:#374151}"
    ".name{text-anchor:end;dominant-baseline:middle}"
)
PIPELINE_STYLE = """\
svg .idle { fill: #d1d5db; fill-opacity: .45; } svg .F { fill: #60a5fa; } svg .B { fill: #34d399; }
svg .I { fill: #34d399; } svg .W { fill: #a3e635; } svg .cell { stroke: #fff; stroke-width: .6; }
svg text.micro { fill: #111827; text-anchor: middle; dominant-baseline: central; font-size: 10px; }
"""


class PipelineCell(NamedTuple):
    """One action of a rank."""

    stage: int
    kind: str
    micro: int
    begin: int
    length: int


def parse_cells(facts: Mapping[str, str]) -> list[list[PipelineCell]]:
    """Return the cells of each rank, in order; empty: no pipeline, or damaged."""
    rows: dict[int, list[PipelineCell]] = {}
    count = 0
    for name, text in facts.items():
        rank = name.removeprefix(CELLS_PREFIX)
        if not (name.startswith(CELLS_PREFIX) and rank.isascii() and rank.isdecimal()):
            continue
        matches = [_CELL.fullmatch(word) for word in text.split()]
        count += len(matches)
        if len(rank) > 6 or count > MAX_CELLS or not all(matches):
            return []
        rows[int(rank)] = [
            PipelineCell(int(m[1]), m[2], int(m[3]), int(m[4]), int(m[5])) for m in matches if m
        ]
    if sorted(rows) != list(range(len(rows))) or len(rows) > MAX_RANKS:
        return []
    return [rows[rank] for rank in sorted(rows)]


def idle_share(rows: Sequence[Sequence[PipelineCell]]) -> float:
    """Return the share of the ranks' time in which they wait: the bubble."""
    total = _step_length(rows) * len(rows)
    busy = sum(cell.length for row in rows for cell in row)
    return max(0.0, 1 - busy / total) if total else 0.0


def render_pipeline(rows: Sequence[Sequence[PipelineCell]]) -> str:
    """Return the picture; empty without cells."""
    total = _step_length(rows)
    if not total:
        return ""
    return make_picture(_render_rows(rows, total), len(rows) * ROW_HEIGHT + 4)


def render_pipeline_file(facts: Mapping[str, str]) -> str:
    """Return the picture as an SVG file; empty if there is no pipeline, or it is damaged."""
    rows = parse_cells(facts)
    total = _step_length(rows)
    if not total:
        return ""
    height = len(rows) * ROW_HEIGHT + 30
    text = f"one step: {idle_share(rows):.1%} of the ranks' time is idle"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}">',
        f"<style>{_FILE_STYLE}{PIPELINE_STYLE}</style>",
        *_render_rows(rows, total),
        f'<text x="{LEFT}" y="{height - 8}">{text}</text>',
    ]
    return "\n".join([*lines, "</svg>", ""])


def _step_length(rows: Sequence[Sequence[PipelineCell]]) -> int:
    return max((cell.begin + cell.length for row in rows for cell in row), default=0)


def _render_rows(rows: Sequence[Sequence[PipelineCell]], total: int) -> Iterator[str]:
    scale = (WIDTH - LEFT - 10) / total
    for rank, row in enumerate(rows):
        top = rank * ROW_HEIGHT + 3
        middle = format_number(top + (ROW_HEIGHT - 6) / 2)
        stages = sorted({cell.stage for cell in row})
        name = f"rank {rank}, stage {', '.join(map(str, stages[:4]))}"
        yield f'<text class="name" x="{LEFT - 8}" y="{middle}">{clean_line(name)}</text>'
        yield (
            f'<rect class="idle" x="{LEFT}" y="{top}" width="{WIDTH - LEFT - 10}" '
            f'height="{ROW_HEIGHT - 6}"/>'
        )
        for cell in row:
            x, width = LEFT + cell.begin * scale, cell.length * scale
            title = f"{_KINDS[cell.kind]} of stage {cell.stage}, micro-batch {cell.micro}"
            yield (
                f'<rect class="cell {cell.kind}" x="{format_number(x)}" y="{top}" '
                f'width="{format_number(width)}" height="{ROW_HEIGHT - 6}">'
                f"<title>{title}</title></rect>"
            )
            label = str(cell.micro)
            if width >= LABEL_PIXELS * len(label):
                yield (
                    f'<text class="micro" x="{format_number(x + width / 2)}" y="{middle}">'
                    f"{label}</text>"
                )
