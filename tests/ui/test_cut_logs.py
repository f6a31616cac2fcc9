"""All screens on a log that ends at any byte: a writer may be killed in the middle of a line."""

from __future__ import annotations

from pathlib import Path

from pdrun.ui.event_reader import EventLogReader
from pdrun.ui.live_line import LiveLine, text_width
from pdrun.ui.report.history import HistoryReader
from pdrun.ui.report.numbers import read_rows
from pdrun.ui.report.page import render_page
from pdrun.ui.report.plot import collect_curves, render_plot
from pdrun.ui.status import format_plain
from pdrun.ui.top.model import TopModel
from tests.ui.report.test_history import LOG, line

NAME = "<script>\u202e\x1b[2Jé名"
HOSTILE = (
    line("created", 1.0, job=NAME, run=NAME, nodes=2),
    line("joined", 2.0, node=NAME, workers=1),
    line("assigned", 3.0, generation=0, restarts=0, nodes=[[NAME, 0, 1]]),
    line("started", 3.5, generation=0),
    line("plan", 3.6, generation=0, facts=[[NAME, NAME, NAME], ["cells 0", NAME, ""]]),
    line("progress", 4.0, step=1, most=1, total=9, values={NAME: [1.0, 1.0, 1.0, 0, 0]}),
    line("warning", 5.0, text=f"rank 0 on {NAME} needs 1 s per step, the others 0.1 s"),
    line("exited", 6.0, generation=0, rank=0, node=NAME, code=1, how="failed", cause=NAME),
    line("verdict", 7.0, code=1, reason=NAME, rank=0, node=NAME, traceback=NAME),
)


def check_screens(path: Path, text: str) -> None:
    status = EventLogReader(path).read_status()
    live, model = LiveLine(), TopModel()
    for width in (20, 80, 300):
        shown = live.format(status, 1e9, width)
        assert shown.isprintable() and text_width(shown) <= width
    model.update(status)
    rows = list(read_rows(text.splitlines(keepends=True)))
    model.seed(rows)
    cells = [cell for node in model.nodes() for cell in model.format_node(node)]
    cells += [cell for one in model.ranks() for cell in model.format_rank(one)]
    cells += [cell for row in model.curve_rows(20) for cell in row]
    cells += [*model.messages(), *model.head(1e9, 80), *format_plain([status], 1e9)]
    assert all(cell.isprintable() for cell in cells)
    picture = render_plot({status.run: collect_curves([*rows, *rows])})
    page = render_page(HistoryReader().read(text.splitlines()))
    for found in (picture, page):
        assert "\u202e" not in found and "\x1b" not in found and "<script" not in found


def test_logs_cut_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for lines, step in ((LOG, 29), (HOSTILE, 7)):
        data = ("\n".join(lines) + "\n").encode()
        for end in [*range(0, len(data), step), len(data)]:
            path.write_bytes(data[:end])
            check_screens(path, data[:end].decode("utf-8", "replace"))
