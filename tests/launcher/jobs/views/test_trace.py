"""``pdrun trace``: requests, answers, and one file of all ranks."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdrun.errors import DeadlineExceeded, UsageError
from pdrun.launcher.jobs.views import attach, trace, trace_parts
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


# ---- other nodes ------------------------------------------------------------


def test_a_name_from_the_log_is_no_option_and_no_code_for_ssh() -> None:
    command = trace_parts.make_command("node1", "train-1", trace_parts.DEFAULT_CONNECT)
    assert command[:-1] == ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "node1"]
    assert command[-1].endswith("-m pdrun trace --part train-1"), "one word: a shell there splits"
    for name in ("-oProxyCommand=x", "a;b", "", "a b", "$(x)"):
        with pytest.raises(ValueError, match="no name of a host"):
            trace_parts.make_command(name, "train-1", "ssh {node}")
    words = trace_parts.make_command("pod-1", "train-1", "kubectl exec -i {node} --")
    assert words[:5] == ["kubectl", "exec", "-i", "pod-1", "--"] and words[-1] == "train-1"


PART = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.launcher.jobs.views.test_trace import answer_part
answer_part(Path({folder!r}), {ahead})
"""


def answer_part(folder: Path, ahead: float) -> None:
    """Stands for `pdrun trace --part` on a host whose clock is ahead, with workers 2 and 3."""
    import os
    import sys

    real = time.time
    time.time = lambda: real() + ahead
    workers = [LocalWorker(rank, os.getpid(), folder) for rank in (2, 3)]

    def work() -> None:
        request = folder / "trace.json"
        while not request.exists():
            time.sleep(0.01)
        data = json.loads(request.read_text())
        begin = round((data["at"]) * 1e9)  # on its own clock
        (folder / f"trace-{data['id']}-2.json").write_text(json.dumps(chrome(2, begin)))
        (folder / f"trace-{data['id']}-3.error").write_text("another profiler\nruns")

    threading.Thread(target=work, daemon=True).start()
    trace_parts.serve_part(workers, sys.stdin.buffer, sys.stdout.buffer)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A job with ranks 0 and 1 on node a (here) and 2 and 3 on node b; returns its connection."""
    events = tmp_path / "events.jsonl"
    nodes = [["a", 0, 2], ["b", 2, 2]]
    lines: list[dict[str, Any]] = [
        {"kind": "created", "time": 1.0, "job": "j", "run": "train-1", "nodes": 2},
        {"kind": "joined", "time": 1.0, "node": "a", "workers": 2},
        {"kind": "joined", "time": 1.0, "node": "b", "workers": 2},
        {"kind": "assigned", "time": 1.0, "generation": 0, "restarts": 0, "nodes": nodes},
        {"kind": "started", "time": 1.0, "generation": 0},
    ]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = SimpleNamespace(run="train-1", events=str(events))
    monkeypatch.setattr(trace, "choose_running", lambda name: record)
    monkeypatch.setattr(trace, "START_DELAY_SECONDS", 0.2)
    (tmp_path / "there").mkdir()

    def connect(code: str) -> str:
        script = tmp_path / "part.py"
        script.write_text(code)
        return f"{sys.executable} {script} {{node}}"

    return connect


def test_traces_of_another_node_are_on_this_clock(
    job: Callable[..., Path],
    elsewhere: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = trace.choose_running(None)
    job(
        *[
            lambda stem, rank: stem.with_suffix(".json").write_text(
                json.dumps(chrome(int(rank), round(time.time() * 1e9)))
            )
        ]
        * 2
    )
    monkeypatch.setattr(trace, "choose_running", lambda name: record)
    root = str(Path(__file__).resolve().parents[4])
    code = PART.format(root=root, folder=str(tmp_path / "there"), ahead=1000.0)
    assert trace.write_trace(None, 2, "t.json", 20.0, connect=elsewhere(code)) == 0
    err = capsys.readouterr().err
    assert "trace of 3 of 4 ranks" in err and "no trace of ranks 3: rank 3: another profiler" in err
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    at = {event["name"]: event["ts"] for event in events if event["name"].startswith("op")}
    # the other node is 1,000 s ahead: its ranks are within a second of the others all the same
    assert set(at) == {"op0", "op1", "op2"}
    assert abs(at["op2"] - at["op0"]) < 2e6


def test_a_node_that_cannot_be_reached_is_named(
    job: Callable[..., Path],
    elsewhere: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = trace.choose_running(None)
    job(good, good)
    monkeypatch.setattr(trace, "choose_running", lambda name: record)
    connect = elsewhere("import sys; sys.exit('Permission denied (publickey)')")
    assert trace.write_trace(None, 2, "t.json", 20.0, connect=connect) == 0
    err = capsys.readouterr().err
    assert "trace of 2 of 4 ranks" in err
    assert "no trace of b: Permission denied (publickey)" in err
    monkeypatch.setattr(trace, "find_workers", lambda run: [])
    with pytest.raises(DeadlineExceeded, match="a: Permission denied"):
        trace.write_trace(None, 2, "t.json", 5.0, connect=connect)


def test_a_node_that_does_not_answer_is_not_waited_for(
    job: Callable[..., Path],
    elsewhere: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = trace.choose_running(None)
    job(good, good)
    monkeypatch.setattr(trace, "choose_running", lambda name: record)
    monkeypatch.setattr(trace_parts, "START_SECONDS", 0.5)
    connect = elsewhere("import time; time.sleep(600)")
    assert trace.write_trace(None, 2, "t.json", 1.0, connect=connect) == 0
    assert "no trace of b: no answer in 0 s" in capsys.readouterr().err
