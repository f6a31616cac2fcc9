"""The footer of a terminal: below the output, never in it, gone at the end."""

from __future__ import annotations

import os
import pty
import time
from collections.abc import Iterator

import pytest

from pdrun.async_writer import BackgroundWriter
from tests.lib.terminal_screen import TerminalScreen


class Pair:
    """A writer on a terminal, and the screen that it fills."""

    def __init__(self) -> None:
        self.master, self.own = pty.openpty()
        self.writer = BackgroundWriter(self.own, "stderr")
        self.screen = TerminalScreen(40, 6)
        self.bytes = b""

    def expect(self, *lines: str) -> None:
        """Wait until the screen shows exactly these lines."""
        deadline = time.monotonic() + 20
        while self.screen.lines() != list(lines):
            assert time.monotonic() < deadline, (self.screen.lines(), lines)
            os.set_blocking(self.master, False)
            try:
                data = os.read(self.master, 65536)
            except BlockingIOError:
                time.sleep(0.01)
                continue
            self.bytes += data
            self.screen.feed(data.decode())


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.writer.close(1.0)
    os.close(made.master)
    os.close(made.own)


def test_it_stays_below_the_output(pair: Pair) -> None:
    pair.writer.show_footer(b"step 1")
    pair.expect("step 1")
    pair.writer.put(b"one\n")
    pair.expect("one", "step 1")
    pair.writer.show_footer(b"step 2")
    pair.expect("one", "step 2")
    pair.writer.put(b"two\nthree\n")
    pair.expect("one", "two", "three", "step 2")
    # erased and drawn again with the output, in one write: it does not flicker
    assert pair.bytes.endswith(b"\r\x1b[Jtwo\r\nthree\r\nstep 2\r")
    assert pair.writer.close(5.0) == ""
    pair.expect("one", "two", "three")


def test_a_prompt_and_a_bar_have_the_line_for_themselves(pair: Pair) -> None:
    pair.writer.show_footer(b"step 1")
    pair.writer.put(b"(Pdb) ")
    pair.expect("(Pdb)")
    pair.writer.show_footer(b"step 2")
    pair.writer.put(b"n\n")
    pair.expect("(Pdb) n", "step 2")
    pair.writer.put(b"\r 10 %")
    pair.expect("(Pdb) n", " 10 %")
    pair.writer.show_footer(b"")
    pair.writer.put(b"\r 20 %\n")
    pair.expect("(Pdb) n", " 20 %")


def test_all_is_counted_as_written(pair: Pair) -> None:
    pair.writer.show_footer(b"step 1")
    for index in range(200):
        pair.writer.put(b"%d\n" % index)
    pair.expect("195", "196", "197", "198", "199", "step 1")
    pair.writer.drain(5.0)
    assert pair.writer._backlog_bytes == 0


def test_without_a_footer_bytes_are_as_ever(pair: Pair) -> None:
    pair.writer.put(b"one\n")
    pair.writer.show_footer(b"")
    pair.writer.put(b"two\n")
    pair.expect("one", "two")
    assert b"\x1b" not in pair.bytes
