from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pdrun.launcher.cli import main as cli


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script, and an environment without any launcher's words."""
    (tmp_path / "train.py").write_text("print('started')\n")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def pdrun(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Run the command line in this process; anything that would start a job fails the test."""
    from pdrun.launcher.launch import execute, join

    def started(*args: object) -> int:
        raise AssertionError(f"a job was started: {args}")

    monkeypatch.setattr(execute, "execute", started)
    monkeypatch.setattr(join, "execute_join", started)

    def call(*argv: str) -> Outcome:
        code = cli.main(argv)
        caught = capsys.readouterr()
        return Outcome(code, caught.out, caught.err)

    return call
