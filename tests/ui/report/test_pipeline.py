"""The picture of a pipeline: cells to scale, idle time, nothing for damaged cells."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.ui.report.page import render_page
from pdrun.ui.report.pipeline import MAX_CELLS, idle_share, parse_cells, render_pipeline
from pdrun.ui.report.svg import LEFT, WIDTH
from tests.ui.report.test_history import LOG, read
from tests.ui.report.test_page import check_harmless

CELLS = {
    "mesh": "mesh(pp=2)",
    "cells 0": "0F0@0+100 0F1@100+100 0B0@600+200 0B1@800+200",
    "cells 1": "1F0@100+100 1B0@200+200 1F1@400+100 1B1@500+200",
}


def test_cells_are_to_scale() -> None:
    rows = parse_cells(CELLS)
    assert idle_share(rows) == pytest.approx(1 - 1200 / 2000)
    found = ET.fromstring(render_pipeline(rows))
    drawn = [one for one in found.iter("rect") if one.get("class", "").startswith("cell")]
    assert len(drawn) == 8
    assert float(drawn[0].get("x", "")) == LEFT
    assert float(drawn[2].get("width", "")) == pytest.approx(2 * float(drawn[1].get("width", "")))
    ends = [float(one.get("x", "")) + float(one.get("width", "")) for one in drawn]
    assert max(ends) == pytest.approx(WIDTH - 10, abs=0.2)
    title = drawn[6].find("title")
    assert title is not None and title.text == "forward of stage 1, micro-batch 1"


def test_the_page_has_plan_and_pipeline() -> None:
    page = render_page(read(*LOG))
    check_harmless(page)
    for part in ("<h2>Pipeline</h2>", "40.0%", "mesh(pp=2, dp=2)", "file plan.json"):
        assert part in page, part
    assert "mesh(dp=4)" not in page, "of an earlier generation"
    assert "0F0@0+100" not in page


@pytest.mark.parametrize(
    "facts",
    [
        {"cells 0": "0F0@0"},
        {"cells 0": "0X0@0+1"},
        {"cells 0": "0F0@0+1 <script>"},
        {"cells 1": "0F0@0+1"},
        {"cells -1": "0F0@0+1"},
        {"cells ²": "0F0@0+1"},
        {"cells 0": "0F0@0+" + "9" * 99},
        {"cells 0": "0F0@0+1 " * (MAX_CELLS + 1)},
        {"cells 0": ""},
        {},
    ],
)
def test_damaged_cells_are_no_picture(facts: dict[str, str]) -> None:
    rows = parse_cells(facts)
    assert render_pipeline(rows) == "" and idle_share(rows) == 0.0


@given(st.dictionaries(st.sampled_from(["cells 0", "cells 1", "cells x"]), st.text(max_size=30)))
def test_any_cells_are_a_picture_or_none(facts: dict[str, str]) -> None:
    picture = render_pipeline(parse_cells(facts))
    assert not picture or ET.fromstring(picture) is not None
