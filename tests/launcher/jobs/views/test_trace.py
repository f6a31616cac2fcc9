"""``pdrun trace``: requests, answers, and one file of all ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdrun.errors import DeadlineExceeded, UsageError
from pdrun.launcher.jobs.views import attach, trace
from pdrun.launcher.jobs.views.local_workers import LocalWorker

BASE = 1_790_000_000_000_000_000


def chrome(rank: int, base: int = BASE) -> dict[str, Any]:
    """A trace as torch writes it."""
    return {
        "baseTimeNanoseconds": base,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}},
            {"ph": "M", "name": "process_sort_index", "pid": 77, "args": {"sort_index": 77}},
            {"ph": "X", "name": f"op{rank}", "pid": 77, "tid": 77, "ts": 1000.0 + rank, "dur": 2.0},
            {"ph": "s", "name": "ac2g", "pid": 77, "tid": 77, "ts": 1001.0, "id": 5},
            {"ph": "X", "name": "span", "pid": "Spans", "tid": "x", "ts": 999.0, "dur": 9.0},
        ],
    }


def merged(tmp_path: Path, *traces: Any) -> dict[str, Any]:
    files = {}
    for rank, data in enumerate(traces):
        files[rank] = tmp_path / f"{rank}.json"
        files[rank].write_text(data if isinstance(data, str) else json.dumps(data))
    with (tmp_path / "all.json").open("w") as file:
        trace.merge_traces(files, file)
    found: dict[str, Any] = json.loads((tmp_path / "all.json").read_text())
    return found


def test_ranks_are_rows_on_one_clock(tmp_path: Path) -> None:
    # rank 1's profiler counts from a base that is 4 ms later
    found = merged(tmp_path, chrome(0), chrome(1, BASE + 4_000_000))
    events = found["traceEvents"]
    ops = {event["name"]: event for event in events if event["name"].startswith("op")}
    assert ops["op0"]["ts"] == 1000.0 and ops["op1"]["ts"] == 5001.0
    assert found["baseTimeNanoseconds"] == BASE
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert sorted(names.values()) == ["rank 0", "rank 0 Spans", "rank 1", "rank 1 Spans"]
    assert names[ops["op1"]["pid"]] == "rank 1"
    assert {event["id"] for event in events if "id" in event} == {"0.5", "1.5"}


def test_damaged_traces_do_not_spoil_the_others(tmp_path: Path) -> None:
    for bad in ("", "[]", '{"traceEvents": 7}', '{"traceEvents": [7, {"ph": "X"}]}', "[" * 9999):
        found = merged(tmp_path, chrome(0), bad)
        assert any(event.get("name") == "op0" for event in found["traceEvents"])


Answer = Callable[[Path, str], None]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Two workers, of which each answers as it is told."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "agent"
    folder.mkdir()
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def start(*answers: Answer) -> Path:
        import os

        workers = [LocalWorker(rank, os.getpid(), folder) for rank in range(len(answers))]
        monkeypatch.setattr(trace, "find_workers", lambda run: workers)
        monkeypatch.setattr(trace, "choose_running", lambda name: SimpleNamespace(run="train-1"))

        def work() -> None:
            while not stop.is_set():
                request = folder / "trace.json"
                if request.exists():
                    data = json.loads(request.read_text())
                    assert data["steps"] == 2
                    for rank, answer in enumerate(answers):
                        answer(folder / f"trace-{data['id']}-{rank}", str(rank))
                    return
                time.sleep(0.01)

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        return folder

    yield start  # type: ignore[misc]
    stop.set()
    for thread in threads:
        thread.join(10)


def good(stem: Path, rank: str) -> None:
    stem.with_suffix(".json").write_text(json.dumps(chrome(int(rank))))


def bad(stem: Path, rank: str) -> None:
    stem.with_suffix(".error").write_text("the script does not use torch")


def silent(stem: Path, rank: str) -> None:
    pass


def test_a_trace_of_all_ranks(job: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = job(good, good)
    assert trace.write_trace(None, 2, "", 20.0) == 0
    assert "trace of 2 of 2 ranks written to train-1-trace.json" in capsys.readouterr().err
    assert "op1" in Path("train-1-trace.json").read_text()
    assert list(folder.iterdir()) == [], "nothing is left in the agent's folder"


def test_ranks_without_an_answer_are_named(
    job: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job(good, bad)
    assert trace.write_trace(None, 2, "t.json", 20.0) == 0
    assert "no trace of ranks 1: rank 1: the script does not use torch" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_no_answer_at_all(job: Callable[..., Path]) -> None:
    folder = job(silent, silent)
    with pytest.raises(DeadlineExceeded, match=r"a trace needs pdrun\.progress"):
        trace.write_trace(None, 2, "t.json", 0.3)
    assert list(folder.iterdir()) == [] and not Path("t.json").exists()


def test_what_cannot_be_written(job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    job(good)
    with pytest.raises(UsageError, match="cannot be written"):
        trace.write_trace(None, 2, "no/such/t.json", 20.0)
    monkeypatch.setattr(trace, "find_workers", lambda run: [])
    with pytest.raises(UsageError, match="no worker of train-1 runs on this host"):
        trace.write_trace(None, 2, "", 1.0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, (None, "all")),
        ("train", ("train", "all")),
        ("train:3", ("train", "3")),
        (":0,2-4", (None, "0,2-4")),
    ],
)
def test_targets(text: str | None, found: tuple[str | None, str]) -> None:
    assert attach.split_target(text) == found


def test_a_target_that_is_none() -> None:
    with pytest.raises(UsageError, match="JOB:RANKS"):
        attach.split_target("train:x")
