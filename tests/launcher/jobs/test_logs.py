"""`pdrun logs` of registered jobs: once, and as the files grow."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pdrun.errors import UsageError
from pdrun.launcher.jobs import log_reader, registry
from pdrun.launcher.jobs.log_reader import LogReader
from pdrun.launcher.jobs.logs import print_logs
from pdrun.launcher.jobs.lookup import find_job
from pdrun.launcher.jobs.status import (
    StatusReader,
)
from pdrun.launcher.output.console import Console
from pdrun.launcher.output.formatting import PrefixFormatter
from tests.launcher.jobs.helpers import TERM_ONCE, ended, register, show, write


def test_logs_of_the_last_generation_with_prefixes_in_rank_order(home: Path) -> None:
    register(home, ended())
    write(home, 0, "rank_0.out", b"old\n")
    for rank in (10, 1, 0):
        write(home, 1, f"rank_{rank}.out", b"out %d\nhalf" % rank)
        write(home, 1, f"rank_{rank}.err", b"err %d\n" % rank)
    code, out, err = show(home, "demo")
    assert code == 0
    assert out == "n0:0| out 0\nn0:1| out 1\n10| out 10\nn0:0| half\nn0:1| half\n10| half\n"
    said = "pdrun: generation 1, the last of 2; --generation all shows all\n"
    assert err == said + "n0:0| err 0\nn0:1| err 1\n10| err 10\n"
    assert show(home, ranks="1", stderr=False)[1:] == ("n0:1| out 1\nn0:1| half\n", said)
    with pytest.raises(
        UsageError, match=r"--ranks: run demo-1 has no rank 7,20-30; there are 0-1,10"
    ):
        show(home, ranks="0,7,20-30")


def test_logs_of_other_generations(home: Path) -> None:
    register(home, ended())
    for generation in (0, 1, 10):
        write(home, generation, "rank_0.out", b"1\n2\ng%d\n" % generation)
    assert show(home, generation=1, lines=1) == (0, "n0:0| g1\n", "")
    assert show(home, generation="all", lines=1) == (0, "n0:0| g0\nn0:0| g1\nn0:0| g10\n", "")
    assert show(home, lines=1)[1] == "n0:0| g10\n"
    with pytest.raises(
        UsageError, match=r"--generation: run demo-1 has no generation 2; known: 0, 1, 10"
    ):
        show(home, generation=2)


@pytest.mark.parametrize(
    ("lines", "expected"), [(1, "3\n"), (2, "2\n3\n"), (9, "1\n2\n3\n"), (0, "")]
)
def test_the_last_lines_only(home: Path, lines: int, expected: str) -> None:
    register(home, ended())
    write(home, 0, "rank_0.out", b"1\n2\n3\n")
    assert show(home, "demo", lines=lines)[1].replace("n0:0| ", "") == expected


def test_the_last_lines_of_a_big_file(home: Path) -> None:
    path = home / "big"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(200_000)) + b"half")
    with path.open("rb") as file:
        file.seek(log_reader.find_last_lines(file.fileno(), 100_001))
        assert file.read().split(b"\n")[0] == b"100000"


def write_holes(path: Path, parts: list[tuple[int, bytes]], size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for offset, data in parts:
            os.pwrite(file.fileno(), data, offset)
        file.truncate(size)


HOLES = [
    ([(1 << 40, b"after\n")], (1 << 40) + 6, "after\n"),
    ([(0, b"one\ntwo\n"), (1 << 30, b"three\nfo"), ((1 << 40) + 7, b"five\n")], 1 << 41, ""),
    ([(0, b"cut off")], 1 << 42, "cut off\n"),
    ([], 1 << 42, ""),
]
"""Parts of a file, its size, and what is shown of it; empty: every line."""


@pytest.mark.parametrize(("parts", "size", "expected"), HOLES)
def test_holes_of_a_log_are_neither_read_nor_shown(
    home: Path, parts: list[tuple[int, bytes]], size: int, expected: str
) -> None:
    """As a crash of the machine leaves them, or a file that was cut while its writer went on."""
    register(home, ended())
    write_holes(home / "logs/demo-1/0/rank_0.out", parts, size)
    expected = expected or ("one\ntwo\nthree\nfo\nfive\n" if parts else "")
    code, out, err = show(home, "demo")
    assert (code, out.replace("n0:0| ", "")) == (0, expected)
    assert err.count("0/rank_0.out: holes are not shown: ") == 1
    every = expected.splitlines(keepends=True)
    for lines in range(6):
        shown = show(home, "demo", lines=lines)[1].replace("n0:0| ", "")
        assert shown == "".join(every[-lines:] if lines else []), lines


def test_zero_bytes_that_a_worker_wrote_are_shown(home: Path) -> None:
    register(home, ended())
    write(home, 0, "rank_0.out", b"\0\0 data \0\n\0")
    assert show(home, "demo")[1:] == ("n0:0| \0\0 data \0\nn0:0| \0\n", "")


def test_a_log_that_is_cut_while_it_is_followed_is_shown_from_its_start(home: Path) -> None:
    path = home / "rank_0.out"
    path.write_bytes(b"a longer first line\n")
    with path.open("rb") as file:
        source = log_reader.LogSource(path, file, 1, PrefixFormatter("0", tty=False))
        assert b"".join(source.read_new()) == b"a longer first line\n"
        path.write_bytes(b"new\n")
        assert b"".join(source.read_new()) == b"new\n"
        assert not source.hole_bytes


def test_other_file_names(home: Path) -> None:
    job = register(home, ended())
    registry.register_job(replace(job, log_name="{node}-w{rank}"))
    write(home, 0, "n0-w1.out", b"one\n")
    write(home, 0, "unrelated.out", b"no\n")
    assert show(home, "demo", ranks="1")[1] == "n0:1| one\n"


def test_follow_goes_on_through_a_restart_until_the_end(home: Path, process) -> None:
    child = process(TERM_ONCE)
    register(home, child.pid)
    write(home, 0, "rank_0.out", b"first\n")
    shown = home / "shown"
    fd = os.open(shown, os.O_CREAT | os.O_WRONLY)
    result: list[int] = []
    thread = threading.Thread(
        target=lambda: result.append(print_logs(follow=True, console=Console(fd, fd)))
    )
    thread.start()

    def seen(text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in shown.read_text():
            assert time.monotonic() < deadline, shown.read_text()
            time.sleep(0.01)

    seen("n0:0| first\n")
    write(home, 0, "rank_0.out", b"second\nha")
    write(home, 0, "rank_1.out", b"late file\n")
    seen("n0:1| late file\n")
    write(home, 0, "rank_0.out", b"lf\n")
    seen("n0:0| half\n")
    write(home, 1, "rank_0.out", b"restarted\n")
    seen("restarted\n")
    write(home, 1, "rank_0.out", b"last word")
    child.terminate()
    thread.join(20)
    os.close(fd)
    assert result == [0]
    assert shown.read_text().endswith("n0:0| last word\n")
    assert shown.read_text().count("second") == 1


def test_following_ends_with_its_reader_and_not_with_the_job(home: Path) -> None:
    register(home, os.getpid())
    write(home, 0, "rank_0.out", b"first\n")
    read, out = os.pipe()
    result: list[int] = []
    thread = threading.Thread(
        target=lambda: result.append(print_logs(follow=True, console=Console(out, out)))
    )
    thread.start()
    assert os.read(read, 100) == b"n0:0| first\n"
    os.close(read)  # | head -1; and the workers print nothing more
    thread.join(20)
    os.close(out)
    assert result == [141]


def test_logs_that_go_while_they_are_followed_are_no_fault(home: Path) -> None:
    register(home, os.getpid())
    write(home, 0, "rank_0.out", b"first\n")
    job = find_job("demo", registry.list_jobs())
    with (home / "shown").open("wb") as file:
        reader = LogReader(
            job,
            StatusReader(job).read_status,
            Console(file.fileno(), file.fileno()),
            ranks="all",
            lines=None,
            stdout=True,
            stderr=True,
        )
        assert reader.show_new()
        shutil.rmtree(home / "logs")
        with pytest.raises(
            UsageError, match=r"logs/demo-1: the logs of demo cannot be read: No such file"
        ):
            reader.show_new()


def test_a_log_that_may_not_be_read_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(home, ended())
    write(home, 0, "rank_0.out", b"first\n")

    opened = Path.open

    def refuse(path: Path, *how: str, **more: str):
        if path.suffix == ".out":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        UsageError, match=r"0/rank_0\.out: the logs of demo cannot be read: Permission denied"
    ):
        show(home, "demo-1")


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "dangling"])
def test_what_is_no_file_is_named_and_not_read(home: Path, kind: str) -> None:
    register(home, ended())
    write(home, 0, "rank_0.out", b"first\n")
    path = home / "logs" / "demo-1" / "0" / "rank_1.out"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    code, out, err = show(home, "demo-1")
    assert code == 0
    assert "first" in out
    assert err.count("0/rank_1.out: not a regular file, so it is not shown") == 1


def test_logs_that_are_not_here(home: Path) -> None:
    with pytest.raises(UsageError, match="no job of yours is known here"):
        print_logs()
    job = register(home, ended())
    registry.register_job(replace(job, run="demo-2", events="", log_dir=str(home / "elsewhere")))
    with pytest.raises(UsageError, match=r"elsewhere/demo-2: the logs of demo are not here"):
        print_logs("demo-2")
