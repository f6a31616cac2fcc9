"""A worker's trace of some steps: started by a file, written when they are over."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from pdrun.parallel.startup import step_trace

pytestmark = pytest.mark.torch


def request(folder: Path, **data: object) -> str:
    path = folder / "trace.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_three_steps(tmp_path: Path) -> None:
    path = request(tmp_path, id="aa", steps=3)
    found = step_trace.start_trace(path, "5")
    assert found is not None
    for left in (2, 1, 0):
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        assert found.count_step() is (left > 0)
        assert (tmp_path / "trace-aa-5.json").exists() is (left == 0)
    events = json.loads((tmp_path / "trace-aa-5.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("aten::mm") == 3 and "step 3 of the trace" in names
    assert step_trace.start_trace(path, "5") is None, "a request is answered once"


@pytest.mark.parametrize(
    "data", [{}, {"id": "../x", "steps": 1}, {"id": "bb", "steps": 0}, {"id": "cc", "steps": 10**9}]
)
def test_requests_that_are_none(tmp_path: Path, data: dict[str, object]) -> None:
    assert step_trace.start_trace(request(tmp_path, **data), "0") is None
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = request(tmp_path, id="dd", steps=1)
    monkeypatch.delitem(sys.modules, "torch")
    assert step_trace.start_trace(path, "0") is None
    assert "does not use torch" in (tmp_path / "trace-dd-0.error").read_text()


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    found = step_trace.start_trace(request(tmp_path, id="ee", steps=1), "0")
    assert found is not None
    (tmp_path / "trace-ee-0.json").mkdir()
    assert found.count_step() is False
    assert (tmp_path / "trace-ee-0.error").exists()
