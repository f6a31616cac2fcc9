"""Files below a folder that others may write to: no link is followed, nothing of theirs is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pdrun import disk
from pdrun.disk import foreign_owner, open_below, open_folder
from pdrun.errors import ConfigError, RendezvousError
from pdrun.eventlog import EventLog, LogEvent
from pdrun.launcher.output.log_files import LogWriter
from pdrun.launcher.output.log_names import prepare_log_folder
from pdrun.rendezvous.journal.file import reopen_journal

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
OTHER = 12345
MakeForeign = Callable[[Path], None]


@pytest.fixture
def make_foreign(monkeypatch: pytest.MonkeyPatch) -> MakeForeign:
    """A function that gives a path to another user, for pdrun at least."""

    def change(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, OTHER, -1, follow_symlinks=False)
            return
        real = disk.foreign_owner
        inode = path.lstat().st_ino

        def owner(status: os.stat_result) -> str:
            is_other = status.st_ino == inode
            return f"belongs to another user (uid {OTHER})" if is_other else real(status)

        monkeypatch.setattr(disk, "foreign_owner", owner)

    return change


def test_folders_and_files_are_made_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run" / "0" / "rank_0.out"
    before = os.umask(0)
    try:
        os.close(open_below(tmp_path / "logs", path, APPEND))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    for folder in (path.parent, path.parent.parent, tmp_path / "logs"):
        assert folder.stat().st_mode & 0o777 == 0o700
    os.close(open_below(tmp_path / "logs", path, APPEND))


@pytest.mark.parametrize("place", ["run", "run/0", "run/0/rank_0.out"])
@pytest.mark.parametrize("leads_to", ["folder", "file", "missing"])
def test_no_link_below_the_root_is_followed(tmp_path: Path, place: str, leads_to: str) -> None:
    root = tmp_path / "logs"
    link = root / place
    link.parent.mkdir(parents=True)
    precious = tmp_path / "precious"
    if leads_to == "folder":
        precious.mkdir()
    elif leads_to == "file":
        precious.write_text("keep")
    link.symlink_to(precious)
    with pytest.raises(PermissionError, match="is a symbolic link"):
        open_below(root, root / "run" / "0" / "rank_0.out", APPEND)
    assert leads_to == "missing" or not precious.is_dir() or not list(precious.iterdir())
    assert leads_to != "file" or precious.read_text() == "keep"


def test_the_way_to_the_root_may_have_links(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "scratch")
    os.close(open_below(tmp_path / "logs", tmp_path / "logs" / "x" / "y", APPEND))
    assert (tmp_path / "scratch" / "x" / "y").is_file()


@pytest.mark.parametrize("target", ["precious", "{}/precious"])
def test_a_link_of_another_user_is_no_root(
    tmp_path: Path, make_foreign: MakeForeign, target: str
) -> None:
    """It was planted: the folder that it leads to is this user's own."""
    (tmp_path / "precious").mkdir()
    link = tmp_path / "logs"
    link.symlink_to(target.format(tmp_path))
    os.close(open_folder(link))
    make_foreign(link)
    with pytest.raises(PermissionError, match="is a link that belongs to another user"):
        open_folder(link)
    with pytest.raises(ConfigError, match="is a link that belongs to another user"):
        prepare_log_folder(link)
    assert not list((tmp_path / "precious").iterdir())


@pytest.mark.parametrize("place", ["", "run", "run/0", "run/0/rank_0.out"])
def test_nothing_of_another_user_is_used(
    tmp_path: Path, place: str, make_foreign: MakeForeign
) -> None:
    path = tmp_path / "run" / "0" / "rank_0.out"
    os.close(open_below(tmp_path, path, APPEND))
    make_foreign(tmp_path / place)
    with pytest.raises(PermissionError, match=rf"belongs to another user \(uid {OTHER}\)"):
        open_below(tmp_path, path, APPEND)


def test_files_of_root_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = Path("/").stat()
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert status.st_uid == 0 and foreign_owner(status) == ""


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    for flags in (APPEND, os.O_RDWR, os.O_RDONLY):
        with pytest.raises(OSError, match=r"regular file|No such device"):
            open_below(tmp_path, tmp_path / "x", flags)


# What uses it
# --------------------------------------------------------------------------------------------------


def test_the_log_folder_of_another_user_is_refused(
    tmp_path: Path, make_foreign: MakeForeign
) -> None:
    root = tmp_path / "logs"
    prepare_log_folder(root)
    assert (root / ".gitignore").read_text() == "*\n"
    make_foreign(root)
    with pytest.raises(ConfigError, match="belongs to another user") as caught:
        prepare_log_folder(root)
    assert "--log-dir" in caught.value.hint


def test_a_planted_gitignore_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "logs" / "run").mkdir(parents=True)
    (tmp_path / "logs" / "run" / "events.jsonl").touch()
    (tmp_path / "precious").write_text("keep")
    prepare_log_folder(tmp_path / "logs")
    (tmp_path / "logs" / ".gitignore").unlink()
    (tmp_path / "logs" / ".gitignore").symlink_to(tmp_path / "precious")
    prepare_log_folder(tmp_path / "logs")
    assert (tmp_path / "precious").read_text() == "keep"
    os.close(open_folder(tmp_path / "logs"))


def test_events_are_private_and_follow_no_link(tmp_path: Path) -> None:
    event = LogEvent("warning", 1.0, {"text": "x"})
    log = EventLog(tmp_path / "logs" / "run" / "events.jsonl")
    log.append(event)
    assert log.close() == ""
    assert log.path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "precious").mkdir()
    (tmp_path / "logs" / "other").symlink_to(tmp_path / "precious")
    log = EventLog(tmp_path / "logs" / "other" / "events.jsonl")
    log.append(event)
    assert "other is a symbolic link" in log.close()
    assert not list((tmp_path / "precious").iterdir())


def test_output_of_workers_follows_no_link(tmp_path: Path) -> None:
    root = tmp_path / "logs"
    (tmp_path / "precious").mkdir()
    (root / "run").mkdir(parents=True)
    (root / "run" / "1").symlink_to(tmp_path / "precious")
    writer = LogWriter()
    file = writer.open_file(root, root / "run" / "1" / "rank_0.out", "rank 0's output")
    writer.write(file, b"data")
    (line,) = writer.close(10.0)
    assert "4 bytes of rank 0's output not written" in line and "1 is a symbolic link" in line
    assert not list((tmp_path / "precious").iterdir())


def test_a_planted_journal_is_refused(tmp_path: Path, make_foreign: MakeForeign) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "scheduler.journal").write_bytes(b"x")
    make_foreign(folder / "scheduler.journal")
    with pytest.raises(RendezvousError, match="belongs to another user"):
        reopen_journal(folder / "scheduler.journal")
    (folder / "scheduler.journal").unlink()
    os.mkfifo(folder / "scheduler.journal")
    with pytest.raises(RendezvousError, match="is not a regular file"):
        reopen_journal(folder / "scheduler.journal")


def test_the_plan_refuses_the_log_folder_of_another_user(
    tmp_path: Path, make_foreign: MakeForeign
) -> None:
    from pdrun.launcher.config.spec import JobSpec, Output, Program
    from pdrun.launcher.plan import facts

    (tmp_path / "logs").mkdir()
    spec = JobSpec(program=Program("script", "x.py"), output=Output(log_dir="logs"))
    assert facts.check_log_dir(spec, str(tmp_path)) == ""
    make_foreign(tmp_path / "logs")
    if os.geteuid() == 0:
        assert "belongs to another user" in facts.check_log_dir(spec, str(tmp_path))
