"""Real tools that answer, fail, hang, or are not there."""

from __future__ import annotations

import time
from pathlib import Path

from pdrun.backends.base import ToolAnswer
from pdrun.backends.tools import MAX_OUTPUT_BYTES, make_tool_runner


def script(folder: Path, text: str) -> dict[str, str]:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_answer_and_failure(tmp_path: Path) -> None:
    assert make_tool_runner(script(tmp_path, "echo GPU 0 $1"))(("nvidia-smi", "-L")) == ToolAnswer(
        "ok", "GPU 0 -L\n"
    )
    answer = make_tool_runner(
        script(tmp_path, "echo one; echo NVML: driver mismatch >&2; exit 18")
    )(("nvidia-smi",))
    assert answer == ToolAnswer("failed", "exit code 18: NVML: driver mismatch")


def test_missing_and_not_a_program(tmp_path: Path) -> None:
    assert make_tool_runner({"PATH": str(tmp_path)})(("nvidia-smi",)) == ToolAnswer("missing")
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert make_tool_runner({"PATH": str(tmp_path)})(("nvidia-smi",)).state == "failed"


def test_a_tool_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    environ = script(tmp_path, f"sleep 60 & echo $! > {mark}; wait")
    begin = time.monotonic()
    assert make_tool_runner(environ, seconds=0.5)(("nvidia-smi",)) == ToolAnswer("hung")
    assert time.monotonic() - begin < 3
    deadline = time.monotonic() + 5
    while _alive(int(mark.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_tool_that_floods_is_ended(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    begin = time.monotonic()
    answer = make_tool_runner(script(tmp_path, f"echo $$ > {mark}; exec yes"), seconds=30.0)(
        ("nvidia-smi",)
    )
    assert answer == ToolAnswer("failed", f"it printed more than {MAX_OUTPUT_BYTES} bytes")
    assert time.monotonic() - begin < 20, "it did not have to be waited for"
    assert not _alive(int(mark.read_text()))
    exact = script(tmp_path, f"head -c {MAX_OUTPUT_BYTES} /dev/zero | tr '\\0' x")
    assert make_tool_runner(exact, seconds=30.0)(("nvidia-smi",)) == ToolAnswer(
        "ok", "x" * MAX_OUTPUT_BYTES
    )


def _alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
