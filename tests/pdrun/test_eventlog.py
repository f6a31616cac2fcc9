"""The event log and its replay."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from pdrun.async_file import BackgroundFileWriter
from pdrun.eventlog import EVENT_KINDS, EventLog, LogEvent, read_events
from pdrun.launcher.jobs.status import encode_status
from pdrun.ui.job_status import JobStatus
from pdrun.ui.replay import replay_events
from pdrun.ui.status import format_plain
from tests.e2e.conftest import until

STORY = [
    LogEvent("created", 100.0, {"job": "gpt", "run": "gpt-1", "nodes": 2}),
    LogEvent("joined", 101.0, {"node": "n1", "workers": 2}),
    LogEvent("joined", 102.0, {"node": "n2", "workers": 1}),
    LogEvent(
        "assigned", 102.1, {"generation": 0, "restarts": 0, "nodes": [["n1", 0, 2], ["n2", 2, 1]]}
    ),
    LogEvent("started", 102.2, {"generation": 0}),
    LogEvent("exited", 110.0, {"rank": 2, "node": "n2", "code": 3, "cause": "exit code 3"}),
    LogEvent("stopping", 110.1, {"reason": "rank 2 failed"}),
    LogEvent("exited", 110.2, {"rank": 0, "node": "n1", "code": 143, "cause": "stopped"}),
    LogEvent("verdict", 110.3, {"code": 3, "reason": "rank 2 on n2 ended with exit code 3"}),
]


def test_replay_tells_the_story() -> None:
    status = replay_events(STORY)
    assert (status.job, status.run, status.state, status.code) == ("gpt", "gpt-1", "done", 3)
    assert [node.name for node in sorted(status.nodes.values(), key=lambda node: node.index)] == [
        "n1",
        "n2",
    ]
    assert [(status.ranks[r].node, status.ranks[r].state) for r in (0, 1, 2)] == [
        ("n1", "failed"),
        ("n1", "running"),
        ("n2", "failed"),
    ]
    assert status.started_at == 100.0 and status.ended_at == 110.3


def test_a_new_generation_forgets_the_old_exits() -> None:
    again = [
        LogEvent("restarting", 111.0, {"reason": "rank 2 failed"}),
        LogEvent(
            "assigned",
            112.0,
            {"generation": 1, "restarts": 1, "nodes": [["n1", 0, 2], ["n2", 2, 1]]},
        ),
        LogEvent("started", 112.1, {"generation": 1}),
    ]
    status = replay_events(STORY[:-1] + again)
    assert (status.generation, status.restarts, status.state) == (1, 1, "running")
    assert {rank.state for rank in status.ranks.values()} == {"running"}


def test_the_file_holds_what_was_appended_and_cut_lines_are_passed_over(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "deep" / "events.jsonl")
    for event in STORY:
        log.append(event)
    log.close()
    log.close()
    assert list(read_events(log.path)) == STORY
    whole = log.path.read_bytes()
    for cut in range(0, len(whole), 7):
        log.path.write_bytes(whole[:cut])
        events = list(read_events(log.path))
        assert events == STORY[: len(events)]
    log.path.write_text('[1]\n"text"\n{}\n{"kind": "joined"}\n\x00\n' + STORY[0].to_line() + "\n")
    assert list(read_events(log.path)) == [STORY[0]]


def test_lines_that_are_no_event_of_their_kind_change_nothing(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    kinds = [
        f'{{"kind": "{kind}", "time": 1{fields}}}'
        for kind in EVENT_KINDS
        for fields in (
            "",
            ', "node": [], "nodes": 7, "rank": "x", "code": null, "generation": {}',
            ', "nodes": [["n", 0]]',
            ', "nodes": [[{}, {}, {}]]',
            ', "step": 1e999, "rank": 1e999',
        )
    ]
    times = [
        f'{{"kind": "created", "time": {time}}}'
        for time in ("1e999", "NaN", "-Infinity", "1" + "0" * 400, "[]")
    ]
    log.write_text("\n".join(["[" * 100_000, *times, *kinds]) + "\n")
    damaged = replay_events(read_events(log))
    with log.open("a") as file:
        file.writelines(f"{event.to_line()}\n" for event in STORY)
    status = replay_events(read_events(log))
    assert (status.job, status.code, status.ended_at) == ("gpt", 3, 110.3)
    assert [status.ranks[rank].state for rank in (0, 1, 2)] == ["failed", "running", "failed"]
    assert damaged.started_at == 1.0 and format_plain([damaged], 2.0) and encode_status(damaged)


def test_a_broken_disk_is_counted_and_never_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = EventLog(tmp_path / "file" / "events.jsonl")
    log.append(STORY[0])
    log.append(STORY[1])
    assert "2 lines not written (" in log.close()
    assert log.lost_events == 2


class HungDisk:
    """A disk that takes nothing before it is `free`."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def write(self, fd: int, data: memoryview) -> int:
        self.free.wait(60)
        return os.write(fd, data)


def test_a_disk_that_hangs_holds_up_nobody_and_what_is_missing_stands_in_its_place(
    tmp_path: Path,
) -> None:
    disk = HungDisk()
    writer = BackgroundFileWriter(
        tmp_path / "log", lambda count: f"missing {count}", max_chars=100, write=disk.write
    )
    began = time.monotonic()
    for number in range(200):
        writer.put(f"line {number:04}")
    assert time.monotonic() - began < 5.0, "200 times a moment would be 20 s"
    lost = writer.lost_lines
    assert lost > 150
    disk.free.set()
    until(lambda: writer.is_idle, "the disk has caught up", 10)
    writer.put("afterwards")
    assert writer.close(10.0) == lost
    kept = [f"line {number:04}" for number in range(200 - lost)]
    assert (tmp_path / "log").read_text().splitlines() == [*kept, f"missing {lost}", "afterwards"]


def test_the_end_of_a_log_on_a_disk_that_hangs_is_bounded_and_said(tmp_path: Path) -> None:
    disk, log = HungDisk(), EventLog(tmp_path / "events.jsonl")
    log._lines._write_bytes = disk.write
    for event in STORY[:3]:
        log.append(event)
    began = time.monotonic()
    assert "3 lines not written (the disk does not answer); the job continued" in log.close(0.2)
    assert time.monotonic() - began < 5.0
    disk.free.set()


def test_a_line_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    others = {
        thread.ident for thread in threading.enumerate()
    }  # other tests' may be on their way out
    log = EventLog(tmp_path / "events.jsonl")

    def none() -> bool:
        return all(
            thread.ident in others
            for thread in threading.enumerate()
            if thread.name == "pdrun-events"
        )

    log._lines._wait_for_disk()
    assert none(), "begun with the first event"
    for count, event in enumerate(STORY, 1):
        log.append(event)
        until(lambda: len(list(read_events(log.path))) == count, "it is there", 10)  # noqa: B023
    assert log.close() == ""


def test_what_happened_together_is_written_together_however_much_it_is(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log._lines._max_chars = 1000
    log.extend([LogEvent("warning", float(number), {"text": "x" * 90}) for number in range(100)])
    until(
        lambda: [event.time for event in read_events(log.path)] == [*range(100)],
        "ten times what may wait is there",
        10,
    )
    assert log.close() == ""


def test_a_write_that_failed_half_way_spoils_no_other_line(tmp_path: Path) -> None:
    calls: list[int] = []

    def write(fd: int, data: memoryview) -> int:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "full")
        return os.write(fd, data[:5])

    writer = BackgroundFileWriter(tmp_path / "log", str, write=write)
    writer.put("first of all")
    writer.put("second")
    assert (writer.close(10.0), writer.reason) == (1, "full")
    assert (tmp_path / "log").read_text().splitlines() == ["first", "second"]


@pytest.mark.parametrize("kind", ["unheard-of", ""])
def test_unknown_kinds_change_nothing(kind: str) -> None:
    assert replay_events([LogEvent(kind, 1.0, {"x": 1})]) == JobStatus()


def test_a_job_that_changes_its_size() -> None:
    def at(kind: str, **data: object) -> LogEvent:
        return LogEvent(kind, 1.0, data)

    first = [
        at("created", job="j", run="r", nodes=3),
        *(at("joined", node=name, workers=1) for name in "abc"),
        at("assigned", generation=0, restarts=0, nodes=[["a", 0, 1], ["b", 1, 1]]),
        at("standby", node="c"),
        at("started"),
        at("progress", step=7, saved=5, rank=1, most=9),
    ]
    status = replay_events(first)
    assert {name: node.state for name, node in status.nodes.items()} == {
        "a": "running",
        "b": "running",
        "c": "standby",
    }
    assert (status.step, status.saved) == (7, 5)
    then = [
        at("restarting", reason="b was lost"),
        at("lost", node="b"),
        at("assigned", generation=1, restarts=0, nodes=[["a", 0, 1], ["c", 1, 1]]),
        at("started"),
    ]
    status = replay_events([*first, *then])
    assert {name: node.state for name, node in status.nodes.items()} == {
        "a": "running",
        "b": "lost",
        "c": "running",
    }
    assert (status.step, status.saved, sorted(status.ranks)) == (-1, 5, [0, 1])
    assert replay_events([*first, at("gathering", reason="too few")]).state == "gathering"


def test_suspects_are_themselves_again_when_heard_or_when_a_scheduler_begins_anew() -> None:
    def at(kind: str, **data: object) -> LogEvent:
        return LogEvent(kind, 1.0, data)

    begun = [
        at("created", job="j", run="r", nodes=1),
        *(at("joined", node=name, workers=1) for name in "ab"),
        at("assigned", generation=0, restarts=0, nodes=[["a", 0, 1]]),
        at("started"),
        at("standby", node="b"),
        at("suspect", node="a"),
        at("suspect", node="b"),
    ]
    assert {node.state for node in replay_events(begun).nodes.values()} == {"suspect"}
    for after in (
        [at("recovered", node="a"), at("recovered", node="b")],
        [at("resumed", scheduler="x", away=2.0)],
    ):
        status = replay_events([*begun, *after])
        assert {name: node.state for name, node in status.nodes.items()} == {
            "a": "running",
            "b": "standby",
        }
    status = replay_events(
        [*begun, at("resumed"), at("restarting", reason="x"), at("gathering", reason="too few")]
    )
    assert (status.state, status.nodes["a"].state) == ("gathering", "joined")


def test_a_hang_is_a_warning() -> None:
    status = replay_events(
        [
            *STORY[:5],
            LogEvent(
                "hang", 1.0, {"rank": 2, "node": "n2", "reason": "no progress", "text": "..."}
            ),
        ]
    )
    assert (status.warnings, status.state) == (("rank 2 on n2 hangs: no progress",), "running")
