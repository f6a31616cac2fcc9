"""The summary of a trace in a report: read strictly, since anybody may have written the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdrun.ui.report.communication import (
    SUMMARY_FILE,
    RankCommunication,
    TraceSummary,
    read_summary,
    render_communication,
)
from pdrun.ui.report.page import render_page
from tests.ui.report.test_history import LOG, read
from tests.ui.report.test_page import check_harmless

SUMMARY = TraceSummary(
    "/logs/<script>.json",
    (RankCommunication(0, 0.1, 0.03, 0.01), RankCommunication(1, 0.1, 0.05, 0.03)),
)


def test_a_summary_is_in_the_page(tmp_path: Path) -> None:
    (tmp_path / SUMMARY_FILE).write_text(SUMMARY.to_json())
    found = read_summary(tmp_path)
    assert found == SUMMARY
    text = "exposed communication: 20 of 100 ms a step (20%), most on rank 1 (30%)"
    assert SUMMARY.describe() == text
    page = render_page(read(*LOG), (), found)
    check_harmless(page)
    assert text in page and "&lt;script&gt;.json" in page
    assert page.index("rank 1</td><td>100 ms</td><td>50 ms") < page.index("rank 0</td><td>100 ms")
    assert "Communication" not in render_page(read(*LOG))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"trace": "x"}',
        '{"trace": "x", "ranks": []}',
        '{"trace": "x", "ranks": [[0, 1, 2]]}',
        '{"trace": "x", "ranks": [[0, 1, 2, "a"]]}',
        '{"trace": "x", "ranks": [[0, NaN, 2, 3]]}',
        '{"trace": "x", "ranks": [[0, 1, -2, 3]]}',
        "[" * 100_000,
    ],
)
def test_damaged_summaries(tmp_path: Path, text: str) -> None:
    (tmp_path / SUMMARY_FILE).write_text(text)
    assert read_summary(tmp_path) is None
    assert read_summary(tmp_path / "missing") is None
    assert list(render_communication(None)) == []
