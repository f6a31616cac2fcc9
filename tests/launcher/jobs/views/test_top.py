"""``pdrun top``: which job it shows, and what it does where there is no screen for it."""

from __future__ import annotations

import importlib.util
import io
import shutil
import sys
from pathlib import Path

import pytest

from pdrun.errors import UsageError
from pdrun.launcher.jobs.registry import make_job_record, register_job
from pdrun.launcher.jobs.report import read_rank_log
from pdrun.launcher.jobs.views import top
from tests.ui.report.test_plot import line


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(top, "_has_terminal", lambda: True)
    run = tmp_path / "logs/train-1"
    for generation in (0, 1):
        (run / str(generation)).mkdir(parents=True)
        (run / str(generation) / "rank_3.out").write_text(f"generation {generation}\n")
    (run / "0/rank_4.err").write_text("gone\n")
    (run / "events.jsonl").write_text(line(1, loss=2.0) + line(2, loss=1.0) + '{"kind": "prog')
    return run


def test_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(UsageError, match="use pdrun status --follow"):
        top.show_top(None)


def test_without_textual(
    terminal: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    followed: list[tuple[str | None, bool]] = []

    def show_status(name: str | None, *, follow: bool, scheduler: object) -> int:
        followed.append((name, follow))
        return 0

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(top, "show_status", show_status)
    assert top.show_top("train") == 0
    assert followed == [("train", True)]
    assert "pip install 'pdrun[screen]'" in capsys.readouterr().err
    assert top.show_top("./logs/train-1") == 0
    assert followed[1:] == [("./logs/train-1", True)]


def test_the_last_lines_of_a_rank(terminal: Path) -> None:
    assert read_rank_log(terminal, "rank_{rank}", 3) == ["-- rank_3.out", "generation 1"]
    assert read_rank_log(terminal, "rank_{rank}", 4) == ["-- rank_4.err", "gone"]
    assert read_rank_log(terminal, "rank_{rank}", 5) == []
    assert read_rank_log(terminal / "none", "rank_{rank}", 3) == []


@pytest.mark.parametrize("name", ["train", "./logs/train-1", "copy/events.jsonl", None])
def test_what_is_shown(name: str | None, terminal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("textual")
    from pdrun.ui.top import app

    record = make_job_record(
        "train-1", "train", events=str(terminal / "events.jsonl"), log_dir="logs", made=1.0
    )
    assert register_job(record)
    if name == "copy/events.jsonl":  # the logs of another machine
        shutil.copytree(terminal, "copy")
    seen: list[app.TopApp] = []

    def run(self: app.TopApp) -> str | None:
        seen.append(self)
        return None

    monkeypatch.setattr(app.TopApp, "run", run)
    assert top.show_top(name) == 0
    (screen,) = seen
    status = screen._read_status()
    assert status.step == 2
    assert [row.step for row in screen._read_past()] == [1, 2]  # type: ignore[misc]
    assert screen._read_log(3) == ["-- rank_3.out", "generation 1"]
    assert screen._can_stop == (name != "copy/events.jsonl")
