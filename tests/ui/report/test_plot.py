"""Curves of a job as a picture, from logs of any kind."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from pdrun.ui.report.numbers import read_rows
from pdrun.ui.report.plot import MAX_BUCKETS, collect_curves, render_plot, thin_points

SVG = "{http://www.w3.org/2000/svg}"


def line(step: int, generation: int = 0, **values: float | None) -> str:
    numbers = {
        name: [value, value, value, 0, -1 if value is not None else 2]
        for name, value in values.items()
    }
    data = {"kind": "progress", "time": 100.0 + step, "generation": generation, "step": step}
    return json.dumps({**data, "most": step, "values": numbers}) + "\n"


def picture(*lines: str, names: tuple[str, ...] = ()) -> str:
    return render_plot({"run-1": collect_curves(read_rows(lines))}, names)


def test_a_line_for_each_number_and_job() -> None:
    one = collect_curves(read_rows([line(0, loss=2.0, lr=0.1), line(1, loss=1.0, lr=0.1)]))
    two = collect_curves(read_rows([line(0, loss=3.0), line(4, loss=1.5)]))
    found = ElementTree.fromstring(render_plot({"a": one, "b": two}))
    assert len(found.findall(f".//{SVG}polyline")) == 3
    texts = [element.text for element in found.iter(f"{SVG}text")]
    assert {"a", "b", "loss", "lr"} <= set(texts)
    only = render_plot({"a": one, "b": two}, ["lr"])
    assert "loss" not in only and "lr" in only
    assert only == render_plot({"a": one, "b": two}, ["lr"])


def test_restarts_and_gaps_break_the_line() -> None:
    steps = [line(step, loss=float(step)) for step in range(4)]
    again = [line(step, 1, loss=float(step)) for step in range(2, 5)]
    found = picture(*steps, line(4, loss=None), line(5, loss=5.0), line(6, loss=5.5), *again)
    assert found.count("<polyline") == 3
    assert found.count('class="bad"') == 1


def test_nothing_to_draw() -> None:
    assert picture() == ""
    assert picture(line(1, loss=2.0)) == ""
    assert picture(line(1, loss=None), line(2, loss=None)) == ""
    assert picture(line(1, loss=2.0), line(2, loss=2.0)) != ""


def test_extreme_values_stay_in_the_picture() -> None:
    found = picture(line(0, loss=-1.7e308), line(1, loss=1.7e308), line(2, loss=5e-324))
    drawn = ElementTree.fromstring(found).find(f".//{SVG}polyline")
    assert drawn is not None
    assert "nan" not in drawn.attrib["points"] and "inf" not in drawn.attrib["points"]


def test_long_curves_are_thinned_and_keep_their_peaks() -> None:
    points = [(step, 100.0 if step == 77_777 else step % 7 / 7) for step in range(200_000)]
    thin = thin_points(points)
    assert len(thin) <= 2 * MAX_BUCKETS and (77_777, 100.0) in thin
    assert thin == sorted(thin)


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "\u202eevil", '"><svg', "a\x1b[2J"])
def test_hostile_names_are_harmless(name: str) -> None:
    lines = [line(step, **{name: float(step)}) for step in range(3)]
    found = render_plot({name: collect_curves(read_rows(lines))})
    ElementTree.fromstring(found)
    assert "<script" not in found and "\u202e" not in found and "\x1b" not in found
    assert found.count("<svg") == 1


def test_a_damaged_log_gives_what_is_whole() -> None:
    good = [line(step, loss=1.0 + step) for step in range(3)]
    bad = [good[1][:40], '{"kind": "progress", "time": 1, "step": "x"}', "\x00", "[" * 5000]
    bad += ['{"kind": "progress", "time": 1, "step": 3, "values": {"loss": [1]}}', '"progress"']
    bad += ['{"kind": "progress", "time": 1, "step": 3, "values": 7}']
    rows = list(read_rows([*bad, *good, good[2][:-9]]))
    assert [row.step for row in rows] == [0, 1, 2]
