"""The terminal's writer: order, slow readers, readers that go away, real terminals."""

from __future__ import annotations

import os
import pty
import threading
import time
import tty
from pathlib import Path

import pytest

from pdrun.async_writer import HIGH_WATER_BYTES, MessageWriter
from pdrun.launcher.output.console import STDERR, STDOUT, Console
from pdrun.rendezvous.transport.zmq_util import wait_readable
from tests.launcher.output.helpers import make_output, pump, start_worker


def until(condition, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def read_all(fd: int, wait: float = 0.2) -> bytes:
    """Return what comes until nothing came for ``wait`` seconds."""
    data = b""
    while wait_readable(fd, wait=wait):
        try:
            data += os.read(fd, 1 << 16)
        except OSError:
            break
    return data


@pytest.fixture
def terminal():
    """A pseudo terminal in raw mode: (our end, the program's end)."""
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_order_over_both_streams_of_one_terminal(terminal: tuple[int, int]) -> None:
    console = Console(terminal[1], os.dup(terminal[1]), environ={})
    for number in range(50):
        console.write(STDOUT, b"out %d\n" % number)
        console.write(STDERR, b"err %d\n" % number)
    console.print_line("pdrun: done")
    assert console.close() == ()
    expected = b"".join(b"out %d\nerr %d\n" % (number, number) for number in range(50))
    assert read_all(terminal[0]) == expected + b"pdrun: done\n"


def test_our_own_line_never_stands_behind_half_a_line(terminal: tuple[int, int]) -> None:
    console = Console(terminal[1], terminal[1], environ={})
    console.write(STDOUT, b"10%")
    console.print_line("pdrun: rank 0 said \x1b[2J")
    console.close()
    assert read_all(terminal[0]) == b"10%\npdrun: rank 0 said ^[[2J\n"


def test_escapes_of_a_worker_are_neutralised_on_a_terminal(
    tmp_path: Path, terminal: tuple[int, int]
) -> None:
    output = make_output(tmp_path, terminal[1], terminal[1], world_size=2)
    code = r"import os; os.write(1, b'\x1b[31mred\x1b[0m \x1b[2J\x1b]0;t\x07 \x9b5n\n\x1b[Aup\n')"
    pump(output, [start_worker(output, 1, code)])
    output.close()
    shown = read_all(terminal[0])
    head = b"\x1b[33mnode0:1|\x1b[0m " if output.console.has_colour(STDOUT) else b"node0:1| "
    assert shown == head + b"\x1b[31mred\x1b[0m ^[[2J^[]0;t^G \\x9b5n\x1b[0m\n" + head + b"^[[Aup\n"


def test_no_color_and_dumb_terminals_are_respected(terminal: tuple[int, int]) -> None:
    end = terminal[1]
    assert Console(end, end, environ={"TERM": "xterm"}).has_colour(STDOUT)
    assert not Console(end, end, environ={"NO_COLOR": "1"}).has_colour(STDOUT)
    assert not Console(end, end, environ={"TERM": "dumb"}).has_colour(STDOUT)
    assert Console(end, end, environ={"NO_COLOR": ""}).has_colour(STDOUT)
    # a terminal that Open MPI makes for its task: mpirun may write to a file
    assert not Console(end, end, environ={"OMPI_COMM_WORLD_RANK": "0"}).has_colour(STDOUT)


def test_what_another_process_knows_of_its_terminal_is_believed() -> None:
    read, write = os.pipe()
    front = Console(write, write, tty=(True, False), colour=True)
    console = Console.from_json(front.to_json())
    os.close(read)
    os.close(write)
    assert (
        console.is_terminal(STDOUT),
        console.is_terminal(STDERR),
        console.has_colour(STDOUT),
        console.has_colour(STDERR),
    ) == (
        True,
        False,
        True,
        False,
    )


def test_above_the_limit_it_is_held_and_tells_when_there_is_room() -> None:
    read, write = os.pipe()
    console = Console(write, write)
    room = threading.Event()
    console.call_when_ready(room.set)
    for _ in range(HIGH_WATER_BYTES // 1000 + 200):
        console.write(STDOUT, b"x" * 999 + b"\n")
    assert console.is_behind(STDOUT)
    assert not room.is_set()
    got = 0
    while not room.is_set():
        got += len(os.read(read, 1 << 20))
    assert not console.is_behind(STDOUT)
    assert got > HIGH_WATER_BYTES // 4
    os.close(read)
    assert console.close() == ()
    os.close(write)


def test_a_reader_that_hangs_is_given_up_and_the_loss_is_said() -> None:
    read, write = os.pipe()
    console = Console(write, write)
    console.write(STDOUT, b"x" * 300_000)
    start = time.monotonic()
    (lost,) = console.close(timeout=0.3)
    assert time.monotonic() - start < 2
    assert "the reader read nothing for 0.3 s" in lost
    os.close(read)
    until(lambda: console._stdout.off_reason)
    os.close(write)


def test_a_reader_that_is_only_slow_gets_everything_at_the_end() -> None:
    read, write = os.pipe()
    console = Console(write, write)
    console.write(STDOUT, b"x" * 400_000)
    got: list[int] = []

    def slow() -> None:
        while sum(got) < 400_000:
            got.append(len(os.read(read, 8192)))
            time.sleep(0.02)

    thread = threading.Thread(target=slow)
    thread.start()
    assert console.close(timeout=0.5) == ()
    thread.join(20)
    assert sum(got) == 400_000
    os.close(read)
    os.close(write)


def test_closed_streams_are_left_alone() -> None:
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    console = Console(write, write)
    read, again = os.pipe()
    try:
        console.write(STDOUT, b"must not reach whatever uses this number now\n")
        assert console.close() == ()
        assert read_all(read, 0.05) == b""
    finally:
        os.close(read)
        os.close(again)


def test_a_full_disk_below_a_redirected_stdout_is_said_and_stderr_goes_on(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    err = os.open(tmp_path / "err", os.O_CREAT | os.O_WRONLY)
    console = Console(full, err)
    console.write(STDOUT, b"lost\n")
    until(lambda: console._stdout.off_reason)
    console.print_line("pdrun: still here")
    (lost,) = console.close()
    assert lost == "stdout: No space left on device; output after that was not shown"
    assert (tmp_path / "err").read_text() == f"pdrun: still here\npdrun: {lost}\n"
    os.close(full)
    os.close(err)


def test_a_terminal_that_somebody_made_non_blocking(terminal: tuple[int, int]) -> None:
    os.set_blocking(terminal[1], False)
    console = Console(terminal[1], terminal[1])
    console.write(STDOUT, b"x" * 200_000 + b"\n")
    got = b""
    while len(got) < 200_001:
        got += read_all(terminal[0], 1.0)
    assert console.close() == ()


def test_a_speaker_waits_for_nobody_and_says_what_it_left_out() -> None:
    read, write = os.pipe()
    speaker = MessageWriter(write)
    line = "x" * 100_000
    for number in range(2 * HIGH_WATER_BYTES // len(line)):
        speaker.write_message(f"{number} {line}")
    began = time.monotonic()
    speaker.flush(0.2)  # nobody reads
    assert time.monotonic() - began < 5.0
    threading.Thread(
        target=lambda: (
            speaker.flush(20.0),
            speaker.write_message("again"),
            speaker.flush(),
            os.close(write),
        ),
        daemon=True,
    ).start()
    with open(read, "rb") as file:
        *lines, gap, last = file.read().splitlines()
    assert [int(text.split()[1]) for text in lines] == list(range(len(lines))), (
        "a line is missing before the gap"
    )
    assert gap == b"pdrun: %d lines skipped here: the reader was too slow" % (
        2 * HIGH_WATER_BYTES // len(line) - len(lines)
    )
    assert last == b"pdrun: again"


def test_a_speaker_outlives_its_reader() -> None:
    read, write = os.pipe()
    os.close(read)
    speaker = MessageWriter(write)
    for _ in range(3):
        speaker.write_message("is anybody there?")
        speaker.flush(5.0)
    os.close(write)
