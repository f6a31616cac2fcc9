"""The page: equal logs give equal bytes, hostile text stays text, nothing is loaded."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.ui.report.history import HistoryReader, ValuePoint, read_history
from pdrun.ui.report.page import LogTail, render_page
from pdrun.ui.report.svg import (
    MAX_ROWS,
    TimeAxis,
    choose_distance,
    choose_rows,
    format_seconds,
    render_timeline,
    render_values,
    split_at_falls,
)
from pdrun.ui.report.text import BLANK, blank_secrets
from tests.ui.report.test_history import LOG, line, read


class Tags(HTMLParser):
    """Collects tags and attributes; an unclosed element is an error."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def check_harmless(page: str) -> None:
    for tag, attributes in parse(page).found:
        assert tag not in ("script", "iframe", "object", "link", "img", "base", "form"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), name
            assert name not in ("href", "src", "action"), value
    assert "default-src 'none'" in page


def test_the_page_of_a_failed_job() -> None:
    tail = LogTail(3, "0/rank_3.err", "Traceback ...\nValueError: x")
    page = render_page(read(*LOG), [tail])
    check_harmless(page)
    text = re.sub(r"<[^>]+>", " ", page.partition("<body>")[2])
    for part in (
        "failed with exit code 1",
        "node a was lost",
        "rank 3",
        "ValueError",
        "Last lines of rank 3",
        "1 to 5",
        "4 workers on 2 nodes",
        "last b after 3 s",
        "1970-01-01 00:01:40 UTC",
    ):
        assert part in text, part


def test_equal_logs_give_equal_bytes(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(LOG) + "\n")
    assert render_page(read_history(path)) == render_page(read_history(path))


HOSTILE = "<script>alert(1)</script>\"' onload=x \x1b[31m \u202eabc \x00 &amp; ]]>"


def test_hostile_names_stay_text() -> None:
    lines = [
        text.replace('"a"', json.dumps(HOSTILE)).replace('"train"', json.dumps(HOSTILE))
        for text in LOG
    ]
    page = render_page(read(*lines, line("hang", 121.0, rank=1, node=HOSTILE, text=HOSTILE)))
    check_harmless(page)
    assert "\x1b" not in page and "\u202e" not in page and "\x00" not in page
    assert page.count("&lt;script&gt;") > 3


@given(st.text(max_size=60))
def test_any_text_stays_text(text: str) -> None:
    lines = [one.replace('"b"', json.dumps(text)) for one in LOG]
    check_harmless(render_page(read(*lines), [LogTail(0, text, text)]))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("WANDB_API_KEY=abc123 lr=3", f"WANDB_API_KEY={BLANK} lr=3"),
        ("'password': 'hunter2', x", f"'password': '{BLANK}', x"),
        ("db_password: hunter2", f"db_password: {BLANK}"),
        ("pdrun1-ABC-DEF-b4d5e77e", BLANK),
        ("tokens per second: 12", "tokens per second: 12"),
        ("monkey=3 keyboard=us", "monkey=3 keyboard=us"),
    ],
)
def test_secrets_are_blanked(text: str, shown: str) -> None:
    assert blank_secrets(text) == shown


def test_the_timeline_is_a_picture() -> None:
    ET.fromstring(render_timeline(read(*LOG)))


def test_nodes_with_trouble_are_in_the_timeline_of_a_large_job() -> None:
    count = 1_000
    lines = [LOG[0]]
    lines += [line("joined", 100.0, node=f"n{index}", workers=1) for index in range(count)]
    nodes = [[f"n{index}", index, 1] for index in range(count)]
    lines.append(line("assigned", 101.0, generation=0, nodes=nodes))
    lines.append(line("exited", 102.0, generation=0, rank=900, node="n900", code=1, how="failed"))
    history = HistoryReader().read(lines)
    rows = choose_rows(history)
    assert len(rows) == MAX_ROWS
    assert "n900" in rows and "n0" in rows
    assert f"{MAX_ROWS} of {count} nodes" in render_page(history)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.02, "20 ms"),
        (0.84, "0.8 s"),
        (59.6, "1 min"),
        (65, "1 min 5 s"),
        (7_380, "2 h 3 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("lines", [[], [LOG[0]], list(LOG[:4])])
def test_a_job_that_has_hardly_begun_has_a_page(lines: list[str]) -> None:
    page = render_page(read(*lines))
    check_harmless(page)
    assert "no verdict in the log" in page


@given(st.floats(0.01, 1e9))
def test_grid_lines_are_at_round_times_inside_of_the_picture(span: float) -> None:
    distance = choose_distance(span)
    assert 0 < span / distance <= 8
    assert span / distance >= 2 or span > 1e6
    labels = [part for part in TimeAxis(0.0, span).render(10) if part.startswith("<text")]
    assert len(labels) == int(span / distance + 1e-6) + 1
    assert ">0 s<" in labels[0]


def test_times_are_round() -> None:
    labels = " ".join(TimeAxis(1000.0, 1136.0).render(10))
    assert re.findall(r">([^<>]+)</text>", labels) == [
        *("0 s", "20 s", "40 s", "1 min", "1 min 20 s", "1 min 40 s", "2 min"),
    ]


def test_a_constant_is_in_the_middle() -> None:
    points = [ValuePoint(float(when), 7.0, -1) for when in range(3)]
    found = re.search(r'points="([^"]*)"', render_values(points, 0.0, 2.0))
    assert found and {place.split(",")[1] for place in found[1].split()} == {"110"}


def test_a_restart_breaks_the_curve() -> None:
    values = [(1.0, 3), (2.0, 4), (3.0, 0), (4.0, 5)]
    assert split_at_falls(values) == [[(1.0, 3), (2.0, 4)], [(3.0, 0), (4.0, 5)]]


def test_the_page_names_versions_that_differ_use_and_settings() -> None:
    page = render_page(
        read(
            line(
                "created",
                1.0,
                job="j",
                run="r",
                settings=[
                    ["resources.nodes", "2", "--nodes"],
                    ["output.log_dir", "token=abc", "<b>"],
                ],
            ),
            line(
                "joined", 2.0, node="a", workers=1, versions={"torch": "2.13.0", "python": "3.11"}
            ),
            line("joined", 3.0, node="<b>", workers=1, versions={"torch": "2.12.1"}),
            line(
                "usage",
                9.0,
                values={
                    "memory_bytes": [2.0 * 2**30, 1.0, 3.0 * 2**30, 5, -1],
                    "cpu_percent": [88.0, 1.0, 99.0, 0, -1],
                },
            ),
            line("verdict", 10.0, code=1, reason="rank 0 failed"),
        )
    )
    check_harmless(page)
    assert "torch differs between nodes: 2.12.1 on &lt;b&gt;; 2.13.0 on a" in page
    assert page.index("torch differs") < page.index("Nodes over time")
    assert "<tr><th>python</th><td>3.11</td></tr>" in page
    assert "<td>2 GiB</td><td>3 GiB</td><td>rank 5, after 8 s</td>" in page
    assert "<td>resources.nodes</td><td>2</td><td>--nodes</td>" in page
    assert "token=abc" not in page
