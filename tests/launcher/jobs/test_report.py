"""``pdrun report``: from a job, a folder or a file to a page with the failed worker's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdrun.errors import UsageError
from pdrun.launcher.jobs.registry import make_job_record, register_job
from pdrun.launcher.jobs.report import find_log, write_report
from tests.ui.report.test_history import LOG


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "logs" / "train-1"
    (run / "0").mkdir(parents=True)
    (run / "events.jsonl").write_text("\n".join(LOG) + "\n")
    (run / "0" / "rank_3.out").write_text("step 5\n")
    (run / "0" / "rank_3.err").write_text("Traceback\nValueError: WANDB_API_KEY=abc\n")
    (run / "0" / "rank_0.err").write_text("another rank\n")
    return run


def test_a_folder_becomes_a_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert write_report("./train-1", "") == 0
    page = (folder.parent / "train-1.html").read_text()
    assert "ValueError: WANDB_API_KEY=[blanked]" in page
    assert "0/rank_3.err" in page
    assert "another rank" not in page


def test_a_registered_job_is_found_by_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder.parent / "state"))
    record = make_job_record(
        "train-1",
        "train",
        events=str(folder / "events.jsonl"),
        log_dir=str(folder.parent),
        made=1.0,
    )
    assert register_job(record)
    for name in ("train", "train-1", None):
        assert write_report(name, "-") == 0
        assert "Last lines of rank 3" in capsys.readouterr().out


def test_what_cannot_be_read_or_written_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing/events.jsonl: cannot be read: No such file"):
        write_report("./missing/events.jsonl", "-")
    (tmp_path / "fifo").mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        write_report(f"{tmp_path}/fifo", "-")
    with pytest.raises(UsageError, match=r"no/such/report\.html: cannot be written"):
        write_report(str(folder), "no/such/report.html")


def test_the_newest_job_needs_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="no jobs are known here"):
        find_log(None)
