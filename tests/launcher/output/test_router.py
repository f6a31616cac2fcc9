"""
Workers' pipes -> terminal and files, with real processes: nothing mixed, nothing lost, nobody kept
waiting.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.common.rank_lists import RankSet
from pdrun.launcher.output.log_files import LogWriter
from tests.launcher.output.helpers import log, make_output, pump, pump_once, start_worker

FLOOD = """
import os, random, sys
rank, count = int(sys.argv[1]), int(sys.argv[2])
random.seed(rank)
lines = [b"rank %d line %d %s\\n" % (rank, i, b"x" * random.randrange(60)) for i in range(count)]
bars = [b"\\r%d%%" % i for i in range(0, 100, 10)] + [b"\\rrank %d bar done\\n" % rank]
data = b"".join(lines[:count // 2] + bars + lines[count // 2:])
at = 0
while at < len(data):
    step = random.choice((1, 7, 60, 500, 5000))
    os.write(1, data[at:at + step])
    at += step
"""


@pytest.fixture
def screen(tmp_path: Path):
    """A file that stands for the terminal: (path, descriptor)."""
    path = tmp_path / "screen"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    yield path, fd
    os.close(fd)


def test_a_hundred_thousand_lines_none_mixed_none_lost(
    tmp_path: Path, screen: tuple[Path, int]
) -> None:
    path, fd = screen
    output = make_output(tmp_path, fd, fd)
    start = time.monotonic()
    workers = [start_worker(output, rank, FLOOD, "25000") for rank in range(4)]
    pump(output, workers)
    assert output.close() == ()
    assert time.monotonic() - start < 30
    shown = path.read_text().splitlines()
    bars = [line for line in shown if "%" in line]
    matches = {
        line: re.fullmatch(r"node0:(\d)\| rank (\d) line (\d+) x*", line)
        for line in shown
        if line not in bars
    }
    lines = [match for match in matches.values() if match]
    assert Counter((match[1], match[2]) for match in lines) == {
        (str(r), str(r)): 25000 for r in range(4)
    }
    for rank in "0123":
        assert [int(match[3]) for match in lines if match[1] == rank] == list(range(25000))
    others = sorted(line for line, match in matches.items() if not match)
    assert others == [f"node0:{rank}| rank {rank} bar done" for rank in range(4)]
    assert len(shown) == 4 * 25001 + len(bars)
    assert all(re.fullmatch(r"node0:\d\| \d+%", line) for line in bars)
    assert all(log(tmp_path, rank).count(b"\n") == 25001 for rank in range(4))


def test_the_log_has_the_very_bytes(tmp_path: Path, screen: tuple[Path, int]) -> None:
    data = bytes(range(256)) * 3 + b"\r\n\r50%\rno line end"
    output = make_output(tmp_path, screen[1], screen[1])
    pump(
        output,
        [
            start_worker(
                output, 0, "import os, sys; os.write(1, bytes.fromhex(sys.argv[2]))", data.hex()
            )
        ],
    )
    output.close()
    assert log(tmp_path, 0) == data


def test_a_line_of_five_megabytes(tmp_path: Path, screen: tuple[Path, int]) -> None:
    code = (
        "import os, sys; os.write(1, sys.argv[1].encode() * 5_000_000 + b'\\n'); "
        "print('short', sys.argv[1])"
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    output = make_output(tmp_path, screen[1], screen[1])
    pump(output, [start_worker(output, rank, code) for rank in range(2)])
    assert output.close() == ()
    shown = screen[0].read_bytes().splitlines()
    for rank in (b"0", b"1"):
        pieces = [
            line
            for line in shown
            if line.startswith((b"node0:" + rank + b"| ", b"node0:" + rank + b"+ "))
        ]
        assert pieces.pop() == b"node0:" + rank + b"| short " + rank
        texts = [piece.partition(b" ")[2] for piece in pieces]
        assert b"".join(texts) == rank * 5_000_000
        assert [piece[7:8] for piece in pieces] == [b"|"] + [b"+"] * (len(pieces) - 1)
        assert max(map(len, texts)) <= 1 << 16
        assert log(tmp_path, int(rank)) == rank * 5_000_000 + b"\nshort " + rank + b"\n"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_a_slow_reader_loses_nothing_and_holds_the_workers(tmp_path: Path) -> None:
    read, write = os.pipe()
    got: list[bytes] = []
    held: list[bool] = []
    output = make_output(tmp_path, write, write)

    def reader() -> None:
        while data := os.read(read, 1 << 20):
            got.append(data)
            held.append(output.console.is_behind(1))
            if len(got) < 30:
                time.sleep(0.02)

    thread = threading.Thread(target=reader)
    thread.start()
    code = (
        "import os, sys\n"
        "for i in range(400): os.write(1, (b'%d ' % i).ljust(59_999, b'x') + b'\\n')"
    )
    workers = [start_worker(output, rank, code) for rank in range(2)]
    pump(output, workers)
    assert output.close() == ()
    os.close(write)
    thread.join(20)
    os.close(read)
    assert Counter(line[:8] for line in b"".join(got).splitlines()) == {
        b"node0:0|": 400,
        b"node0:1|": 400,
    }
    assert any(held), "48 MB must have met a full queue"


def test_a_reader_that_goes_away_does_not_end_the_job(tmp_path: Path) -> None:
    read, write = os.pipe()
    output = make_output(tmp_path, write, 2)
    worker = start_worker(
        output, 0, "import os\nfor i in range(2000): os.write(1, b'y' * 999 + b'\\n')"
    )
    pump_once(output)
    assert os.read(read, 10)[:7] == b"node0:0"
    os.close(read)
    pump(output, [worker])
    assert worker.returncode == 0
    assert output.close() == ()
    os.close(write)
    assert len(log(tmp_path, 0)) == 2_000_000


def test_a_hung_disk_never_keeps_a_worker_waiting_for_good(
    tmp_path: Path, screen: tuple[Path, int]
) -> None:
    hang = threading.Event()

    def never(fd: int, data: memoryview) -> int:
        hang.wait(60)
        return len(data)

    files = LogWriter(max_backlog=1 << 20, hung_seconds=0.3, write=never)
    output = make_output(tmp_path, screen[1], screen[1], writer=files)
    worker = start_worker(
        output, 0, "import os\nfor i in range(8000): os.write(1, b'z' * 999 + b'\\n')"
    )
    start = time.monotonic()
    pump(output, [worker], timeout=30)
    assert worker.returncode == 0
    assert time.monotonic() - start < 10
    lost = output.close(timeout=0.3)
    hang.set()
    assert len(lost) == 1
    assert "8.0 MB of rank 0's output not written (the disk does not answer)" in lost[0]
    assert screen[0].read_bytes().count(b"zzz\n") == 8000


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small tmpfs")
def test_a_full_log_disk_costs_bytes_and_says_so(tmp_path: Path, screen: tuple[Path, int]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("mount is not allowed here")
    try:
        output = make_output(tmp_path, screen[1], screen[1], log_dir=str(disk / "logs"))
        pump(
            output,
            [
                start_worker(
                    output, 3, "import os\nfor i in range(3000): os.write(1, b'w' * 999 + b'\\n')"
                )
            ],
        )
        lost = output.close()
        size = (disk / "logs" / "run1" / "0" / "rank_3.out").stat().st_size
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert len(lost) == 1
    assert re.search(
        r"(1\.9|2\.\d) MB of rank 3's output not written \(No space left on device\)", lost[0]
    )
    assert 500_000 < size < 1_100_000
    assert screen[0].read_bytes().count(b"www\n") == 3000
    assert lost[0].encode() in screen[0].read_bytes()


def test_a_log_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/logs: cannot be used for logs: .*use --log-dir"):
        make_output(tmp_path, 1, 2, log_dir=str(tmp_path / "file" / "logs"))


def test_hidden_ranks_are_logged_and_revealed_when_they_fail(
    tmp_path: Path, screen: tuple[Path, int]
) -> None:
    output = make_output(tmp_path, screen[1], screen[1], show_ranks="0,2-3")
    pump(
        output,
        [start_worker(output, rank, "import sys; print('I am', sys.argv[1])") for rank in range(4)],
    )
    output.show_hidden_tail(1)
    output.show_hidden_tail(1)
    output.show_hidden_tail(0)
    output.close()
    shown = screen[0].read_text()
    assert sorted(re.findall(r"node0:(\d)\| I am", shown)) == ["0", "1", "2", "3"]
    assert re.search(
        r"rank 1 failed; its last line \(hidden by --show-ranks; its log is .*rank_1\.out\):\n",
        shown,
    )
    assert log(tmp_path, 1) == b"I am 1\n"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("print('why')", "rank_0.out"),
        ("import sys; sys.exit('why')", "rank_0.err"),
        ("", "rank_0.err"),
        ("import sys; print('why'); print('or', file=sys.stderr)", "rank_0.{out,err}"),
        ("print('step'); raise ValueError('why')", "rank_0.err"),
    ],
)
def test_the_log_that_is_named_holds_the_evidence(
    tmp_path: Path, screen: tuple[Path, int], code: str, name: str
) -> None:
    output = make_output(tmp_path, screen[1], screen[1])
    pump(output, [start_worker(output, 0, code)])
    assert output.log_path(0).rpartition("/")[2] == name
    output.close()


@pytest.mark.parametrize(
    ("settings", "world", "expected"),
    [
        ({}, 2, "node0:0| hi\n"),
        ({}, 1, "hi\n"),
        ({"prefix": "rank"}, 1, "0| hi\n"),
        ({"prefix": "rank"}, 2, "0| hi\n"),
        ({"prefix": "none"}, 2, "hi\n"),
    ],
)
def test_prefixes(
    tmp_path: Path, screen: tuple[Path, int], settings: dict[str, str], world: int, expected: str
) -> None:
    output = make_output(tmp_path, screen[1], screen[1], world_size=world, **settings)
    pump(output, [start_worker(output, 0, "print('hi')")])
    output.close()
    assert screen[0].read_text() == expected


def test_the_prefix_stays_when_a_job_shrinks_to_one_worker(
    tmp_path: Path, screen: tuple[Path, int]
) -> None:
    output = make_output(tmp_path, screen[1], screen[1], world_size=2)
    output.begin_generation("run1", 1)
    pump(output, [start_worker(output, 0, "print('hi')")])
    output.close()
    assert screen[0].read_text() == "node0:0| hi\n"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ({"show_stderr": "none"}, "node0:0| out\n"),
        ({"show_ranks": "none", "show_stderr": "0"}, "node0:0| err\n"),
        ({"show_stderr": "1"}, "node0:0| out\n"),
    ],
)
def test_each_stream_can_be_shown_alone(
    tmp_path: Path, screen: tuple[Path, int], shown: dict[str, str], expected: str
) -> None:
    output = make_output(tmp_path, screen[1], screen[1], **shown)
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
    pump(output, [start_worker(output, 0, code)])
    output.close()
    assert screen[0].read_text() == expected
    files = {path.suffix: path.read_text() for path in (tmp_path / "logs").rglob("rank_0.*")}
    assert files == {".out": "out\n", ".err": "err\n"}


def test_drain_takes_the_rest_and_is_bounded_by_its_timeout(
    tmp_path: Path, screen: tuple[Path, int]
) -> None:
    output = make_output(tmp_path, screen[1], screen[1])
    code = (
        "import os, sys, time\nif os.fork() == 0: time.sleep(60)\n"
        "os.write(2, b'last word'); os._exit(3)"
    )
    out, err = output.open_pipes(0, 0, 0)
    worker = subprocess.Popen(
        [sys.executable, "-c", code], stdout=out, stderr=err, start_new_session=True
    )
    os.close(out)
    os.close(err)
    try:
        assert worker.wait(20) == 3
        start = time.monotonic()
        output.drain_worker(0, 0.3)
        assert 0.2 < time.monotonic() - start < 2
        assert output.last_lines(0) == ("last word",)
        assert [fd for fd in output.watched_fds() if fd in output._stream_of_fd] == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, 9)
    output.close()
    assert screen[0].read_text() == "node0:0| last word\n"


def test_tail_and_traceback_are_what_a_summary_needs(
    tmp_path: Path, screen: tuple[Path, int]
) -> None:
    output = make_output(tmp_path, screen[1], screen[1])
    code = (
        "for i in range(100): print('out', i)\n"
        "raise ValueError('boom \\x1b]0;title\\x07' + 'x' * 900)"
    )
    pump(output, [start_worker(output, 0, code)])
    tail = output.last_lines(0)
    assert len(tail) == 20
    assert tail[0].startswith("out ") and tail[-1].startswith("ValueError: boom ^[]0;title^G")
    assert max(map(len, tail)) == 500
    at, text = output.last_traceback(0) or (0.0, "")
    assert text.startswith("Traceback") and time.monotonic() - 30 < at <= time.monotonic()
    assert output.log_path(0).endswith("logs/run1/0/rank_0.err")
    output.close()


def test_the_tail_of_one_endless_line_and_of_a_bar(
    tmp_path: Path, screen: tuple[Path, int]
) -> None:
    output = make_output(tmp_path, screen[1], screen[1])
    code = "import os; os.write(1, b'x' * 100_000); os.write(2, b'loading\\n1%\\r2%\\r')"
    pump(output, [start_worker(output, 0, code)])
    output.close()
    assert output.last_lines(0) == ("x" * 500, "loading", "2%")


def test_too_few_descriptors_are_one_clear_error(tmp_path: Path, screen: tuple[Path, int]) -> None:
    output = make_output(tmp_path, screen[1], screen[1])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 3, hard))
    try:
        with pytest.raises(
            ConfigError,
            match=r"no pipe for rank 0: Too many open files; raise the limit .*ulimit -n",
        ):
            output.open_pipes(0, 0, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    pump(output, [])
    output.close()


def test_drain_reads_all_that_has_come_though_its_time_has_passed(
    tmp_path: Path, screen: tuple[Path, int]
) -> None:
    output = make_output(tmp_path, screen[1], screen[1])
    out, err = output.open_pipes(0, 0, 0)
    size = fcntl.fcntl(out, fcntl.F_GETPIPE_SZ)
    text = b"x" * 4095 + b"\n"
    for _ in range(size // len(text)):
        os.write(out, text)
    output.drain_worker(0, 0.0)  # as after a pause of this process; a child keeps the pipes open
    os.close(out)
    os.close(err)
    output.close()
    assert (tmp_path / "logs" / "run1" / "0" / "rank_0.out").stat().st_size == size


def test_a_new_generation_has_new_files(tmp_path: Path, screen: tuple[Path, int]) -> None:
    output = make_output(tmp_path, screen[1], screen[1])
    for generation in (0, 1):
        output.begin_generation("run1", 2)
        for end in output.open_pipes(0, 0, generation):
            os.write(end, b"g%d\n" % generation)
            os.close(end)
        output.drain_worker(0, 5.0)
    output.close()
    folder = tmp_path / "logs" / "run1"
    assert [(folder / str(number) / "rank_0.out").read_text() for number in (0, 1)] == [
        "g0\n",
        "g1\n",
    ]
    assert (folder.stat().st_mode & 0o777, (folder / "1").stat().st_mode & 0o777) == (0o700, 0o700)
    assert (folder / "1" / "rank_0.out").stat().st_mode & 0o777 == 0o600


def test_no_files_when_none_are_wanted(tmp_path: Path, screen: tuple[Path, int]) -> None:
    output = make_output(tmp_path, screen[1], screen[1], files=False)
    pump(output, [start_worker(output, 0, "print('hi')")])
    assert output.log_path(0) == ""
    output.close()
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "٣", "1-2-3", "all,1"])
def test_sets_of_ranks_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--show-ranks"):
        RankSet(text)


def test_sets_of_ranks() -> None:
    assert [rank for rank in range(12) if rank in RankSet("0,7-9")] == [0, 7, 8, 9]
    assert 10**6 in RankSet("all") and 0 not in RankSet("none")
    assert RankSet("0,7-9, 4").unmatched_parts(range(2)) == "7-9,4"
    assert [RankSet(text).unmatched_parts(range(2)) for text in ("all", "none", "1-5")] == [""] * 3


def test_the_agent_s_side_loads_nothing_heavy() -> None:
    code = (
        "import sys, pdrun.launcher.output.router, pdrun.launcher.jobs.registry, pdrun.launcher.controller.controller\n"
        "heavy = ('zmq', 'rich', 'yaml', 'psutil', 'asyncio', 'torch', 'logging', 'tempfile')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
