"""What a report reads from an event log, damaged ones too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.ui.report import history as history_module
from pdrun.ui.report.history import (
    MAX_FAILURES,
    MAX_POINTS,
    HistoryReader,
    Interval,
    JobHistory,
    match_plain_progress,
)


def line(kind: str, when: float, **data: Any) -> str:
    return json.dumps({"kind": kind, "time": when, **data})


def read(*lines: str) -> JobHistory:
    return HistoryReader().read(lines)


LOG = (
    line("created", 100.0, job="train", run="train-1", nodes=2),
    line("joined", 100.5, node="a", workers=2),
    line("joined", 103.0, node="b", workers=2),
    line("assigned", 103.1, generation=0, restarts=0, nodes=[["a", 0, 2], ["b", 2, 2]]),
    line("started", 103.5, generation=0),
    line("plan", 104.0, generation=0, facts=[["mesh", "mesh(dp=4)", "argument mesh="]]),
    line("progress", 110.0, generation=0, step=1, rank=3, most=2, saved=-1),
    line("suspect", 111.0, node="b", silent=3.0),
    line("recovered", 113.0, node="b"),
    line("progress", 115.0, generation=0, step=5, rank=3, most=5, saved=4),
    line("exited", 116.0, generation=0, rank=3, node="b", code=1, how="failed", cause="ValueError"),
    line("exited", 116.1, generation=0, rank=0, node="a", code=143, how="stopped", cause=""),
    line("restarting", 116.2, reason="rank 3 on b failed", generation=0),
    line("assigned", 117.0, generation=1, restarts=1, nodes=[["a", 0, 2], ["b", 2, 2]]),
    line("started", 117.5, generation=1),
    line("plan", 117.6, generation=1, facts=[["mesh", "mesh(pp=2, dp=2)", "file plan.json"]]),
    line(
        "plan",
        117.7,
        generation=1,
        facts=[
            ["cells 0", "0F0@0+100 0F1@100+100 0B0@600+200 0B1@800+200", ""],
            ["cells 1", "1F0@100+100 1B0@200+200 1F1@400+100 1B1@500+200", ""],
        ],
    ),
    line("lost", 118.0, node="a", reason="silent"),
    line("verdict", 120.0, code=1, reason="node a was lost"),
)


def test_a_log_becomes_a_history() -> None:
    history = read(*LOG)
    assert (history.job, history.run, history.code) == ("train", "train-1", 1)
    assert (history.begin, history.end) == (100.0, 120.0)
    assert history.joined == {"a": 100.5, "b": 103.0}
    first, second = history.generations
    assert (first.started_at, first.ended_at, first.end) == (103.5, 116.2, "rank 3 on b failed")
    assert (first.steps, second.ended_at) == ((1, 5), 120.0)
    assert [(f.rank, f.code, f.cause) for f in history.failures] == [(3, 1, "ValueError")]
    assert history.intervals == [
        Interval("b", 111.0, 113.0, "silent"),
        Interval("a", 118.0, None, "lost"),
    ]
    assert [(p.step, p.most) for p in history.points] == [(1, 2), (5, 5)]
    assert (history.slowest, history.saved) == ({3: 1}, 4)


@given(st.integers(0, 2_000), st.integers(0, len(LOG)))
def test_a_log_cut_anywhere_is_read(cut: int, drop: int) -> None:
    lines = [text for index, text in enumerate(LOG) if index != drop]
    text = "\n".join(lines)[: max(0, len("\n".join(lines)) - cut)]
    history = read(*text.splitlines())
    assert history.unreadable_lines <= 1
    assert history.end >= history.begin


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(st.lists(st.tuples(st.integers(0, len(LOG) - 1), st.text(max_size=6), JSON), max_size=4))
def test_wrong_values_leave_one_event_out(changes: list[tuple[int, str, Any]]) -> None:
    lines = list(LOG)
    for index, key, value in changes:
        data = json.loads(lines[index])
        names = [name for name in data if name not in ("kind", "time")]
        data[names[len(key) % len(names)] if names else key] = value
        lines[index] = json.dumps(data)
    history = read(*lines)
    assert history.unreadable_lines <= len(changes)


def test_a_long_log_is_thinned() -> None:
    lines = [LOG[0], LOG[3]]
    lines += [
        line("progress", 200.0 + index, step=index, rank=0, most=index, saved=-1)
        for index in range(20_000)
    ]
    lines += [
        line("exited", 30_000.0, generation=0, rank=rank, node="a", code=1, how="failed")
        for rank in range(500)
    ]
    history = read(*lines)
    assert MAX_POINTS / 2 <= len(history.points) < 2 * MAX_POINTS
    assert history.points[0].step == 0
    assert history.points[-1].step > 19_000
    assert (len(history.failures), history.failure_count) == (MAX_FAILURES, 500)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"kind": "verdict", "time": 1}'])
def test_lines_that_are_no_events(text: str) -> None:
    history = read(*LOG[:-1], text)
    assert history.code is None
    assert history.unreadable_lines == (1 if text else 0)


def test_numbers_of_the_script_become_curves() -> None:
    values = [{"loss": [3.0, 2.0, 4.0, 1, -1]}, {"loss": [None, None, None, -1, 2], "lr": [1]}]
    lines = [
        line("progress", 110.0 + index, step=index, rank=0, most=index, saved=-1, values=one)
        for index, one in enumerate(values)
    ]
    history = read(LOG[0], lines[0], lines[1].replace(', "lr": [1]', ""))
    assert [(p.mean, p.bad_rank) for p in history.values["loss"]] == [(3.0, -1), (None, 2)]
    assert history.bad_values == [(111.0, "loss", 2, 1)]
    assert read(LOG[0], *lines).unreadable_lines == 1


def test_versions_of_nodes_are_those_of_the_first_and_what_differs() -> None:
    history = read(
        line("joined", 1.0, node="a", workers=1, versions={"torch": "2.13.0", "python": "3.11"}),
        line("joined", 2.0, node="b", workers=1),
        line("joined", 3.0, node="c", workers=1, versions={"torch": "2.12.1"}),
        line("joined", 9.0, node="c", workers=1, versions={"torch": "2.12.1"}),
    )
    assert history.versions == {
        "torch": {"2.13.0": ["a", "b"], "2.12.1": ["c"]},
        "python": {"3.11": ["a", "b", "c"]},
    }
    assert read(line("joined", 1.0, node="a", workers=1)).versions == {}, "an older log"


def test_a_peak_of_memory_outlives_the_thinning() -> None:
    lines = [
        line("usage", 1.0 + i, values={"memory_bytes": [1.0, 1.0, 9.0 if i == 7 else 2.0, 3, -1]})
        for i in range(5 * MAX_POINTS)
    ]
    points = read(*lines).usage["memory_bytes"]
    assert len(points) <= 2 * MAX_POINTS
    assert max(point.most for point in points) == 9.0


def test_settings_have_their_sources() -> None:
    settings = [["resources.nodes", "2", "--nodes"]]
    history = read(line("created", 1.0, job="j", run="r", nodes=2, settings=settings))
    assert history.settings == [("resources.nodes", "2", "--nodes")]
    assert read(line("created", 1.0, job="j", run="r", settings=3)).settings == []


def test_the_plan_is_that_of_the_last_generation() -> None:
    plan = read(*LOG).plan
    assert plan["mesh"] == ("mesh(pp=2, dp=2)", "file plan.json")
    assert list(plan) == ["mesh", "cells 0", "cells 1"]
    for facts in (5, [["a", "b"]], None):
        damaged = read(*LOG, line("plan", 119.0, generation=1, facts=facts))
        assert damaged.plan == plan and damaged.unreadable_lines == 1


TEXTS = st.sampled_from(["1", "0", "12", "-1", "01", "1.5", "1e3", "null", "NaN", '"x"', ""])


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS, TEXTS, TEXTS), min_size=1, max_size=6), st.data())
def test_progress_that_is_not_parsed_has_the_same_effects(
    rows: list[tuple[str, ...]], data: st.DataObject
) -> None:
    lines = [LOG[0], LOG[3]]
    for step, saved, rank, total, mean in rows:
        value = f'"loss": [{mean}, 1.0, 2.5, 0, {data.draw(st.sampled_from(["-1", "3"]))}]'
        lines.append(
            f'{{"kind": "progress", "time": 110.5, "generation": 0, "step": {step}, "most": 9,'
            f' "saved": {saved}, "rank": {rank}, "total": {total}, "values": {{{value}}}}}'
        )
    parsed, skipped = HistoryReader(), HistoryReader()
    for reader in (parsed, skipped):
        reader._stride = 1_000  # no line becomes a point
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history_module, "match_plain_progress", lambda line: None)
        expected = parsed.read(lines)
    assert skipped.read(lines) == expected
    assert match_plain_progress(line("progress", 1.5, generation=0, step=1, most=2, saved=-1))
