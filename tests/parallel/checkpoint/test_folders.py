"""Which folders are checkpoints, in which order, and whose: without ranks."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

import pytest

from pdrun.errors import UsageError
from pdrun.parallel.checkpoint import save, storage
from pdrun.parallel.checkpoint.storage import list_checkpoints, prune_checkpoints, publish_folder

pytestmark = pytest.mark.torch


class FakeState:
    """The state of a run, as far as it is only told from others."""


def make_checkpoint(folder: Path, name: str, turn: int) -> Path:
    (folder / name).mkdir()
    (folder / name / "run.json").write_text(f'{{"turn": {turn}}}')
    return folder / name


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def test_a_folder_without_its_last_file_is_no_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "step-00000001", 1)
    (tmp_path / "step-00000002").mkdir()
    make_checkpoint(tmp_path, ".new-step-00000003", 3)
    make_checkpoint(tmp_path, "step-x", 4)
    assert names(tmp_path) == ["step-00000001"]


def test_what_was_being_replaced_counts_until_its_successor_is_there(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, ".old-step-00000001", 1)
    assert names(tmp_path) == [".old-step-00000001"]
    make_checkpoint(tmp_path, "step-00000001", 2)
    assert names(tmp_path) == ["step-00000001"]


def test_the_newest_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    """A run may have gone back to an earlier step."""
    make_checkpoint(tmp_path, "step-00000009", 1)
    make_checkpoint(tmp_path, "step-00000005", 2)
    assert names(tmp_path) == ["step-00000009", "step-00000005"]
    prune_checkpoints(tmp_path, None)
    assert len(names(tmp_path)) == 2
    prune_checkpoints(tmp_path, 1)
    assert names(tmp_path) == ["step-00000005"]
    assert not (tmp_path / "step-00000009").exists()


def test_a_complete_checkpoint_replaces_another_of_its_step(tmp_path: Path) -> None:
    final = make_checkpoint(tmp_path, "step-00000005", 1)
    publish_folder(make_checkpoint(tmp_path, ".new", 2), final)
    assert (final / "run.json").read_text() == '{"turn": 2}'
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_another_runs_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    first: Any = FakeState()
    second: Any = FakeState()
    final = tmp_path / "step-00000005"
    save._last_savers[str(final.resolve())] = first
    with pytest.raises(UsageError, match="belongs to another run"):
        save._claim_folder(second, final)
    save._claim_folder(first, final)


def test_a_save_that_fails_after_the_last_step_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)

    def fail() -> None:
        raise OSError("the disk is full")

    pending = save.PendingSave(fail, Path("step-1"))
    (report,) = at_exit
    report()
    assert capsys.readouterr().err == "pdrun: error: step-1 was not saved: the disk is full\n"
    with pytest.raises(OSError, match="the disk is full"):
        pending.wait()
    report()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "text",
    [
        '{"turn": Infinity}',
        '{"turn": NaN}',
        '{"turn": "9"}',
        '{"turn": [1]}',
        "[]",
        "{" * 100_000,
        "\x00",
        '{"turn": 1' + "0" * 5000 + "}",
    ],
    ids=lambda text: text[:12],
)
def test_a_strange_file_does_not_end_the_search(text: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "step-00000001", 1)
    odd = make_checkpoint(tmp_path, "step-00000002", 2)
    (odd / "run.json").write_text(text)
    assert names(tmp_path) == ["step-00000002", "step-00000001"]


def test_a_pipe_and_a_huge_file_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_JSON_BYTES", 1000)
    make_checkpoint(tmp_path, "step-00000001", 1)
    huge = make_checkpoint(tmp_path, "step-00000002", 2)
    (huge / "run.json").write_text('{"turn": 9, "more": "' + "x" * 1000 + '"}')
    assert names(tmp_path) == ["step-00000002", "step-00000001"]
    pipe = tmp_path / "step-00000003"
    pipe.mkdir()
    os.mkfifo(pipe / "run.json")
    assert names(tmp_path) == ["step-00000002", "step-00000001"]
    assert storage.read_turn(pipe) == 0  # it replaced a file after the search
    (tmp_path / "step-\u00b2").mkdir()  # a digit that is no number
    (tmp_path / "step-\u00b2" / "run.json").write_text("{}")
    assert names(tmp_path) == ["step-00000002", "step-00000001"]
