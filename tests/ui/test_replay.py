"""The replay of an event log: fast, and the same as line by line."""

from __future__ import annotations

import json
import os
import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.eventlog import LogEvent
from pdrun.ui import deferred_lines, event_reader, replay
from pdrun.ui.deferred_lines import MAX_WARNINGS, LogBlock
from pdrun.ui.event_fields import MAX_RANKS
from pdrun.ui.event_reader import EventLogReader
from pdrun.ui.job_status import JobStatus
from pdrun.ui.replay import StatusReplay, replay_events, replay_lines
from pdrun.ui.status import format_plain

NODES = st.sampled_from(["n0", "n1", "n2", 'n", "', "", 'a"b'])
SMALL = st.integers(0, 3)


def line(kind: str, **data: object) -> bytes:
    return LogEvent(kind, 1.0, data).to_line().encode()


EVENTS = st.one_of(
    st.builds(
        line, st.sampled_from(["joined"]), node=NODES, workers=SMALL, host=st.just("h"), pid=SMALL
    ),
    st.builds(line, st.sampled_from(["suspect", "recovered"]), node=NODES, silent=SMALL),
    st.builds(line, st.sampled_from(["recovered", "lost", "left", "standby"]), node=NODES),
    st.builds(
        line,
        st.just("exited"),
        generation=SMALL,
        rank=SMALL,
        node=NODES,
        code=SMALL,
        how=st.sampled_from(["exit", "stopped"]),
        cause=st.sampled_from(["c", 'a "b"', "\\", "\u00e9\U0001f600\n"]),
    ),
    st.builds(line, st.just("progress"), generation=SMALL, step=SMALL, saved=SMALL),
    st.builds(
        line,
        st.just("assigned"),
        generation=SMALL,
        restarts=SMALL,
        nodes=st.lists(st.tuples(NODES, SMALL, SMALL), max_size=3),
    ),
    st.builds(
        line,
        st.just("plan"),
        generation=SMALL,
        facts=st.lists(st.lists(st.sampled_from("ab"), min_size=2, max_size=3), max_size=3),
    ),
    st.builds(
        line,
        st.just("usage"),
        values=st.dictionaries(
            st.sampled_from(["cpu_percent", "memory_bytes"]),
            st.tuples(SMALL | st.none(), SMALL, SMALL, SMALL, SMALL) | SMALL,
            max_size=2,
        ),
    ),
    st.builds(line, st.sampled_from(["started", "resumed"]), generation=SMALL),
    st.builds(line, st.sampled_from(["stopping", "restarting", "gathering"]), reason=NODES),
    st.builds(line, st.just("warning"), text=NODES),
    st.builds(line, st.just("hang"), generation=SMALL, rank=SMALL, node=NODES, reason=NODES),
    st.builds(line, st.just("created"), job=NODES, run=NODES, nodes=SMALL),
    st.builds(line, st.just("verdict"), code=SMALL, reason=NODES),
    # damaged, or of another writer
    st.sampled_from(
        [
            b"",
            b"{",
            b'{"kind": "progress", "time": 1.0, "step": [',
            b'{"kind": "progress", "time": 1.0, "step": "x"}',
            b'{"kind": "suspect", "time": 1.0, "node": "n0"',
            b'{"kind": "recovered", "time": NaN, "node": "n0"}',
            b'{"kind": "lost", "time": 1.0, "node": "n0"} {}',
            b'{"time": 1.0, "kind": "lost", "node": "n1"}',
            b'{"kind": "exited", "time": 1.0, "generation": 0, "rank": 1, "node": "n0"}',
            b'{"kind": "exited", "time": 1.0, "rank": 2, "code": 3}',
            b'{"kind": "exited", "time": 1.0, "generation": 0, "rank": 1, "node": "n0"'
            b', "code": 1, "how": "exit", "cause": "\\x"}',
            b'{"kind": "exited", "time": 1.0, "generation": 0, "rank": 1, "node": "n0"'
            b', "code": 1, "how": "exit", "cause": "\x01"}',
            b'{"kind": "exited", "time": 1.0, "generation": 0, "rank": 01, "node": "n0"'
            b', "code": 1, "how": "exit", "cause": ""}',
            b'{"kind": "exited", "time": 1.0, "generation": 0, "rank": 2, "node": "n1"'
            b', "code": 4, "how": "exit", "cause": "", "more": 1}',
            b'{"kind": "suspect", "time": 1.0, "node": "n0", "silent": ',
            b'{"kind": "susp{"kind": "recovered", "time": 1.0, "node": "n0"}',
            b'{"kind": "joined", "time": 1.0, "node": "n2", "workers": {}}',
            b'{"kind": "assigned", "time": 1.0, "generation": 1, "nodes": [["n0", 0]]}',
            b'{"kind": "refused", "time": 1.0, "node": "n0"}',
            b'{"kind": "warning", "time": 1.0, "text": "\xff"}',
            b"[" * 3000,
        ]
    ),
)


@given(st.lists(EVENTS, max_size=40))
def test_deferring_changes_no_status(lines: list[bytes]) -> None:
    one_by_one = StatusReplay()
    for each in lines:
        one_by_one.feed_lines([each])
        one_by_one.make_status()
    together = StatusReplay()
    together.feed_lines(lines)
    assert together.make_status() == one_by_one.make_status()
    assert [*together.make_status().nodes] == [*one_by_one.make_status().nodes]
    in_blocks = StatusReplay()
    for first in range(0, len(lines), 3):
        in_blocks.feed_lines(lines[first : first + 3])
    assert in_blocks.make_status() == one_by_one.make_status()
    assert [*in_blocks.make_status().ranks] == [*one_by_one.make_status().ranks]


def test_blocks_before_the_last_states_of_all_nodes_are_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[LogBlock] = []
    find_lines = LogBlock.find_lines

    def note_block(block: LogBlock, pattern: re.Pattern[bytes]) -> list[tuple[bytes, bytes]]:
        if pattern is deferred_lines.NODE_LINES:
            searched.append(block)
        return find_lines(block, pattern)

    monkeypatch.setattr(LogBlock, "find_lines", note_block)
    follower = StatusReplay()
    follower.feed_lines([line("joined", node=f"n{i}", workers=1) for i in range(3)])
    for _ in range(100):
        follower.feed_lines([line("suspect", node=f"n{i}") for i in range(3)])
    assert {node.state for node in follower.make_status().nodes.values()} == {"suspect"}
    assert len(searched) == 1
    follower.feed_lines([line("recovered", node="n1")])  # nodes that are known by then
    for _ in range(100):
        follower.feed_lines([line("suspect", node="n0"), line("recovered", node="n2")])
    nodes = follower.make_status().nodes
    assert [nodes[f"n{i}"].state for i in range(3)] == ["suspect", "joined", "joined"]


def test_damaged_lines_do_not_make_all_others_be_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line("joined", node=f"n{i}", workers=1) for i in range(3)]
    lines += [line("suspect", node=f"n{i % 3}") for i in range(300)]
    lines += [
        line("exited", generation=0, rank=i, node="n0", code=3, how="exit", cause="")
        for i in range(300)
    ]
    for cut in (line("recovered", node="n1"), line("left", node="n2"), lines[-1]):
        lines.append(cut[:-1])  # its writer was killed
        lines.append(cut[:-14] + line("warning", text="the scheduler was restarted"))
    lines.append(b'{"kind": "joined", "time": 1.0, "no')
    parsed: list[bytes] = []
    read_lines = replay._read_lines
    monkeypatch.setattr(
        replay, "_read_lines", lambda lines: parsed.extend(lines) or read_lines(lines)
    )
    status = replay_lines(text.decode() for text in lines)
    assert {node.state for node in status.nodes.values()} == {"suspect"}
    assert len(status.ranks) == 300 and status.ranks[299].code == 3
    assert len(parsed) < 40, len(parsed)


def generations(nodes: int, count: int, placed: int) -> list[bytes]:
    """A log of generations in which every node is silent now and then, and every rank exits."""
    lines = [line("created", job="j", run="r", nodes=nodes)]
    lines += [line("joined", node=f"n{i}", workers=1, host="h", pid=i) for i in range(nodes)]
    for generation in range(count):
        at = [[f"n{i}", i, 1] for i in range(placed)]
        lines += [line("assigned", generation=generation, restarts=generation, nodes=at)]
        lines += [line("started", generation=generation)]
        for i in range(nodes):
            lines += [line("suspect", node=f"n{i}"), line("recovered", node=f"n{i}")]
            lines.append(line("progress", generation=generation, step=i, saved=i))
        lines += [
            line("exited", generation=generation, rank=i, node=f"n{i}", code=1, how="exit")
            for i in range(placed)
        ]
        lines.append(line("suspect", node=f"n{nodes - 1}"))
        lines.append(line("restarting", generation=generation, reason="x"))
    return lines


@pytest.mark.parametrize("placed", [20, 19])
def test_lines_of_earlier_generations_are_not_parsed(
    monkeypatch: pytest.MonkeyPatch, placed: int
) -> None:
    lines = generations(20, 6, placed)
    one_by_one = StatusReplay()
    for each in lines:
        one_by_one.feed_lines([each])
        one_by_one.make_status()
    parsed: list[int] = []
    read_lines = replay._read_lines
    monkeypatch.setattr(
        replay, "_read_lines", lambda lines: parsed.append(len(lines)) or read_lines(lines)
    )
    together = StatusReplay()
    together.feed_lines(lines)
    assert together.make_status() == one_by_one.make_status()
    assert together.make_status().nodes["n19"].state == "suspect"
    # The nodes' last states and the exits of the last generation, and few lines of each one before.
    assert sum(parsed) < 20 + placed + 6 * 4, parsed


def test_many_deferred_lines_are_applied_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_DEFERRED_BYTES", 300)
    texts = [LogEvent("progress", 1.0, {"step": step}).to_line() for step in range(20)]
    assert replay_lines(texts).step == 19


def test_a_status_keeps_the_newest_warnings() -> None:
    texts = [str(number) for number in range(MAX_WARNINGS + 10)]
    events = [LogEvent("warning", 1.0, {"text": text}) for text in texts]
    for status in (
        replay_lines(event.to_line() for event in events),
        replay_events(events),
    ):
        assert status.warnings == tuple(texts[10:])
        lines = [text for text in format_plain([status], 2.0) if text.startswith("warning")]
        assert lines[0] == "warning   950 older ones are in the event log" and len(lines) == 51


def test_an_event_with_absurd_numbers_costs_nothing() -> None:
    huge = LogEvent("assigned", 1.0, {"generation": 0, "nodes": [["n", 0, 10**15]]})
    many = LogEvent("assigned", 1.0, {"generation": 0, "nodes": [["n", 0, MAX_RANKS]] * 2})
    assert replay_events([huge, many]) == JobStatus()


def write_large_log(path: Path, nodes: int, events: int) -> None:
    """Write a log with restarts, silent nodes, failed ranks and progress."""
    draw = random.Random(7)
    lines = [line("created", job="big", run="big-1", nodes=nodes)]
    lines += [line("joined", node=f"n{i}", workers=8, host="h", pid=i) for i in range(nodes)]
    placed = [[f"n{i}", 8 * i, 8] for i in range(nodes)]
    lines += [line("assigned", generation=0, restarts=0, nodes=placed), line("started")]
    while len(lines) < events:
        node = draw.randrange(nodes)
        kind = draw.choice(
            ["progress", "progress", "suspect", "recovered", "exited", "warning", "resumed"]
        )
        match kind:
            case "exited":
                rank = 8 * node + draw.randrange(8)
                data = {"rank": rank, "node": f"n{node}", "code": 1, "how": "exit", "cause": "c"}
                lines.append(line(kind, generation=0, **data))
            case "progress":
                lines.append(line(kind, generation=0, step=len(lines), saved=7))
            case "warning":
                lines.append(line(kind, text=f"rank {node} is slow"))
            case "resumed" if draw.random() > 0.01:
                continue
            case _:
                lines.append(line(kind, node=f"n{node}"))
    path.write_bytes(b"\n".join(lines) + b"\n")


def test_the_time_is_linear_in_the_size_of_the_log(tmp_path: Path) -> None:
    seconds = []
    for factor in (1, 10):
        path = tmp_path / f"{factor}.jsonl"
        write_large_log(path, 500 * factor, 2000 * factor)
        best = 1e9
        for _ in range(3):
            began = time.process_time()
            status = EventLogReader(path).read_status()
            assert format_plain([status], 2.0)
            best = min(best, time.process_time() - began)
        seconds.append(best)
        assert len(status.nodes) == 500 * factor and len(status.ranks) == 4000 * factor
    assert seconds[1] < 40 * seconds[0], seconds


def test_following_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(line("created", job="j", run="r") + b"\n" + line("progress", step=1)[:-9])
    reader = EventLogReader(path)
    assert (reader.read_status().run, reader.read_status().step) == ("r", -1)
    monkeypatch.setattr(event_reader, "MAX_READ_BYTES", 7)
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read.append(args[2]) or pread(*args))
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(line("progress", step=1)[-9:])
    assert reader.read_status().step == 1, "a last line without its end counts when it is complete"
    assert read[0] == size
    with path.open("ab") as file:
        file.write(b"\n" + line("progress", step=2) + b"\n")
    assert reader.read_status().step == 2
    assert reader.read_status() is reader.read_status()
    path.write_bytes(line("progress", step=3) + b"\n")
    assert (reader.read_status().step, reader.read_status().run) == (3, ""), "it was cut"
    other = tmp_path / "other"
    other.write_bytes(line("progress", step=4) * 50 + b"\n" + line("progress", step=5) + b"\n" * 99)
    other.replace(path)
    assert reader.read_status().step == 5, "it was replaced"


def test_a_line_without_an_end_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_reader, "MAX_LINE_BYTES", 100)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 1000)
    reader = EventLogReader(path)
    assert reader.read_status() == JobStatus()
    with path.open("ab") as file:
        file.write(b"\n" + line("progress", step=1) + b"\n")
    assert reader.read_status().step == 1


def test_holes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(line("progress", step=1) + b"\n" + line("progress", step=2)[:-5])
    os.truncate(path, 1 << 36)
    reader = EventLogReader(path)
    began = time.process_time()
    assert reader.read_status().step == 1
    with path.open("ab") as file:
        file.write(b"\n" + line("progress", step=3) + b"\n")
    assert reader.read_status().step == 3
    assert EventLogReader(path).read_status().step == 3
    assert time.process_time() - began < 5, "64 GB take more than a minute"


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_only_a_file_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "events.jsonl"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="is not a regular file"):
        EventLogReader(path).read_status()


def test_status_as_json_has_the_fields_of_nodes_and_ranks() -> None:
    from pdrun.launcher.jobs.status import encode_status

    status = replay_events([LogEvent("assigned", 1.0, {"generation": 0, "nodes": [["n", 0, 1]]})])
    data = json.loads(encode_status(status))
    assert data["nodes"] == [{"name": "n", "state": "joined", "index": 0, "workers": 1}]
    assert data["ranks"] == [
        {"rank": 0, "node": "n", "state": "running", "code": None, "cause": ""}
    ]
