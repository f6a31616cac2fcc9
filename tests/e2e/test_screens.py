"""Full screens on real terminals of several sizes, as a person has them: the bytes become rows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Shell
from tests.lib.terminal_screen import TerminalScreen
from tests.ui.test_cut_logs import HOSTILE

SIZES = [(80, 24), (300, 100)]


class Screen:
    """A command on a terminal of its own, and what its rows show."""

    def __init__(self, shell: Shell, size: tuple[int, int], *words: str, **env: str) -> None:
        self.rows = TerminalScreen(*size)
        self.master, own = pty.openpty()
        fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdrun", *words],
            cwd=shell.folder,
            env={**shell.env, "TERM": "xterm-256color", **env},
            stdin=own,
            stdout=own,
            stderr=own,
            start_new_session=True,
        )
        os.close(own)

    def expect(self, text: str, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while text not in "\n".join(self.rows.lines()):
            left = deadline - time.monotonic()
            assert left > 0 and self._read(left), (text, self.rows.text())

    def end(self, keys: str = "") -> int:
        os.write(self.master, keys.encode())
        while self._read(30.0):
            pass
        return self.process.wait(30)

    def _read(self, timeout: float) -> bool:
        poll = select.poll()
        poll.register(self.master, select.POLLIN)
        if not poll.poll(timeout * 1000):
            return False
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # the command has ended
            return False
        self.rows.feed(data.decode("utf-8", "replace"))
        return bool(data)


@contextlib.contextmanager
def screen(shell: Shell, size: tuple[int, int], *words: str, **env: str) -> Iterator[Screen]:
    made = Screen(shell, size, *words, **env)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
        made.process.wait(30)
        os.close(made.master)


@pytest.fixture
def logs(shell: Shell) -> Path:
    """The log of a job whose names are hostile, cut in its last line."""
    folder = shell.folder / "logs" / "run-1"
    folder.mkdir(parents=True)
    text = "\n".join(HOSTILE)
    (folder / "events.jsonl").write_text(text[:-20])
    return folder


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}], ids=["colour", "NO_COLOR"])
def test_top(shell: Shell, logs: Path, size: tuple[int, int], env: dict[str, str]) -> None:
    textual = pytest.importorskip("textual")
    path = str(Path(textual.__file__).parents[1])
    with screen(shell, size, "top", "./logs/run-1", PYTHONPATH=path, **env) as shown:
        shown.expect("Nodes  Ranks  Messages")
        shown.expect("<script>")
        shown.expect("quit")
        assert not any("\u202e" in row for row in shown.rows.lines())
        assert shown.end("q") == 0


@pytest.mark.parametrize("size", [(40, 10), *SIZES])
def test_status_of_an_ended_job(shell: Shell, size: tuple[int, int]) -> None:
    (shell.folder / "quick.py").write_text("print('done')\n")
    done = subprocess.run(
        [sys.executable, "-m", "pdrun", "--devices", "2", "--start", "exec", "quick.py"],
        cwd=shell.folder,
        env=shell.env,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    with screen(shell, size, "status", "--follow", "quick") as shown:
        assert shown.end() == 0
        text = shown.rows.text()
        assert "done, exit code 0" in text and "2 done" in text
        assert not shown.rows.unknown
