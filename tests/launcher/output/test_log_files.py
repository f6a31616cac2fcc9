"""
Log files and their names: nothing outside the folder, and no disk in whose way a worker could come.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import ConfigError
from pdrun.launcher.output.log_files import LogWriter, format_size
from pdrun.launcher.output.log_names import (
    check_template,
    fill_template,
    prepare_log_folder,
    rank_pattern,
)


def test_what_is_written_is_there_when_closed(tmp_path: Path) -> None:
    files = LogWriter()
    one = files.open_file(tmp_path, tmp_path / "a" / "b" / "one.out", "rank 0's output")
    two = files.open_file(tmp_path, tmp_path / "a" / "b" / "two.out", "rank 1's output")
    for number in range(1000):
        files.write(one, b"%d\n" % number)
        files.write(two, b"x")
    files.end_file(one)
    assert files.close(2.0) == ()
    assert (tmp_path / "a/b/one.out").read_text() == "".join(
        f"{number}\n" for number in range(1000)
    )
    assert (tmp_path / "a/b/two.out").read_bytes() == b"x" * 1000
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_a_disk_that_is_full_for_a_while_loses_only_what_it_refused(tmp_path: Path) -> None:
    full = threading.Event()
    refused = []

    def write(fd: int, data: memoryview) -> int:
        if full.is_set():
            refused.append(len(data))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(fd, data)

    files = LogWriter(write=write)
    file = files.open_file(tmp_path, tmp_path / "x.out", "rank 7's output")
    for phase in (b"before ", b"during ", b"after"):
        full.set() if phase == b"during " else full.clear()
        files.write(file, phase)
        deadline = time.monotonic() + 10
        while files._backlog_bytes and time.monotonic() < deadline:
            time.sleep(0.001)
    (lost,) = files.close(2.0)
    assert (tmp_path / "x.out").read_bytes() == b"before after"
    assert lost == (
        f"log {tmp_path}/x.out: 7 bytes of rank 7's output not written"
        " (No space left on device); the job went on"
    )


def test_a_disk_that_fails_only_at_close_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LogWriter()
    file = files.open_file(tmp_path, tmp_path / "x.out", "rank 0's output")
    files.write(file, b"data")
    real = os.close

    def close(fd: int) -> None:
        real(fd)
        if fd == file.fd:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", close)
    files.end_file(file)
    assert files.close(2.0) == (
        f"log {tmp_path}/x.out: may be incomplete (Disk quota exceeded); the job went on",
    )


def test_a_disk_that_hangs_hangs_the_thread_and_nobody_else(tmp_path: Path) -> None:
    free = threading.Event()

    def hang(fd: int, data: memoryview) -> int:
        free.wait(60)
        return len(data)

    files = LogWriter(max_backlog=1000, hung_seconds=0.1, write=hang)
    file = files.open_file(tmp_path, tmp_path / "x.out", "rank 0's output")
    start = time.monotonic()
    for _ in range(100):
        files.write(file, b"x" * 100)
    assert time.monotonic() - start < 10, "a moment; the thread hangs for a minute"
    deadline = time.monotonic() + 10
    while files.is_behind():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    files.write(file, b"y" * 500)
    (lost,) = files.close(0.2)
    free.set()
    assert "10.5 kB of rank 0's output not written (the disk does not answer)" in lost


def test_a_symbolic_link_in_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "x.out").symlink_to(tmp_path / "precious")
    files = LogWriter()
    files.write(files.open_file(tmp_path, tmp_path / "x.out", "rank 0's output"), b"data")
    assert "4 bytes of rank 0's output not written" in files.close(2.0)[0]
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_slow_disk_holds_the_workers_and_tells_when_there_is_room(tmp_path: Path) -> None:
    go = threading.Semaphore(0)
    room = threading.Event()

    def write(fd: int, data: memoryview) -> int:
        go.acquire(timeout=20)
        return os.write(fd, data[:100])

    files = LogWriter(max_backlog=1000, hung_seconds=30.0, write=write)
    files.on_ready = room.set
    file = files.open_file(tmp_path, tmp_path / "x.out", "rank 0's output")
    for _ in range(20):
        files.write(file, b"x" * 100)
    assert files.is_behind()
    go.release(100)
    assert room.wait(10)
    assert not files.is_behind()
    assert files.close(5.0) == ()
    assert (tmp_path / "x.out").stat().st_size == 2000


@pytest.mark.parametrize(
    "template",
    [
        "../x",
        "/etc/{rank}",
        "a/../{rank}",
        "{rank",
        "rank}",
        "{Rank}",
        "{}",
        "",
        "x\n{rank}",
        "x\0",
        "a//b",
    ],
)
def test_templates_that_are_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="log name"):
        check_template(template)


def test_a_mistyped_field_is_told_with_the_right_one() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown field \{local_rnk\}; did you mean 'local_rank'\?"
    ):
        check_template("{local_rnk}")


@pytest.mark.parametrize(
    ("template", "stem"),
    [
        ("rank_{rank}", "rank_12"),
        ("worker", "worker_12"),
        ("{hostname}", "gpu-a.x_12"),
        ("{node}_{local_rank}", "n0_4"),
        ("{node}/{ip}-{rank}", "n0/10.0.0.1-12"),
    ],
)
def test_names(template: str, stem: str) -> None:
    made = fill_template(
        template, rank=12, local_rank=4, node="n0", ip="10.0.0.1", hostname="gpu-a.x"
    )
    assert made == stem
    match = rank_pattern(template).fullmatch(made)
    assert match is not None
    assert match.groupdict().get("rank", "12") == "12"


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_no_value_leaves_the_folder(node: str, ip: str, hostname: str) -> None:
    folder = Path("/logs/run/0")
    stem = fill_template(
        "{node}/{ip}_{hostname}_{rank}", rank=1, local_rank=1, node=node, ip=ip, hostname=hostname
    )
    assert os.path.normpath(folder / stem) == str(folder / stem)
    assert (folder / stem).is_relative_to(folder) and ".." not in Path(stem).parts


def test_a_root_that_is_made_here_is_private_and_stays_out_of_git(tmp_path: Path) -> None:
    prepare_log_folder(tmp_path / "deep" / "logs")
    assert (tmp_path / "deep" / "logs" / ".gitignore").read_text() == "*\n"
    assert (tmp_path / "deep" / "logs").stat().st_mode & 0o777 == 0o700
    (tmp_path / "started" / "run").mkdir(parents=True)
    (tmp_path / "started" / "run" / "events.jsonl").write_text(
        "{}\n"
    )  # the event log may have come first
    prepare_log_folder(tmp_path / "started")
    assert (tmp_path / "started" / ".gitignore").exists()
    (tmp_path / "mine").mkdir()
    prepare_log_folder(tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (1_234_567, "1.2 MB"),
        (10**12, "1000.0 GB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert format_size(count) == text
