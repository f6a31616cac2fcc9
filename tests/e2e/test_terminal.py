"""A worker that reads the terminal: breakpoint(), input(), a switched-off echo."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from tests.e2e.conftest import Shell
from tests.lib.terminal_screen import TerminalScreen

BREAKPOINT = """
import os
x = 41 + int(os.environ["RANK"])
if os.environ["RANK"] == os.environ.get("STOP_RANK", "0"):
    breakpoint()
print("x is", x)
"""
ASK = "print('hello', input('name? '))"
SILENT = """
import sys, termios, time
state = termios.tcgetattr(0)
state[3] &= ~termios.ECHO
termios.tcsetattr(0, termios.TCSANOW, state)
print("no echo", flush=True)
time.sleep(60)
"""


class Terminal:
    """``pdrun ARGS`` on a terminal of its own."""

    def __init__(
        self,
        shell: Shell,
        *args: str,
        env: dict[str, str] | None = None,
        start: str = "os.execv(command[0], command)",
    ) -> None:
        """``start``: how the leader of the terminal's session starts ``command``."""
        self.fd, own = pty.openpty()
        leader = (
            "import fcntl, os, subprocess, sys, termios\n"
            "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
            "command = [sys.executable, '-m', 'pdrun', *sys.argv[1:]]\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", leader + start, *args],
            cwd=shell.folder,
            env={**shell.env, "NO_COLOR": "1", **(env or {})},
            stdin=own,
            stdout=own,
            stderr=own,
            start_new_session=True,
        )
        self._own = own
        self.text = ""
        self._seen = 0

    def expect(self, part: str, timeout: float = 30.0) -> None:
        """Wait until new output contains ``part``."""
        deadline = time.monotonic() + timeout
        while part not in self.text[self._seen :]:
            if time.monotonic() > deadline or not self._read(deadline):
                pytest.fail(f"{part!r} not seen in\n{self.text}")
        self._seen = self.text.index(part, self._seen) + len(part)

    def type(self, line: str) -> None:
        """Type a line."""
        os.write(self.fd, f"{line}\n".encode())

    def end(self, timeout: float = 30.0) -> int:
        """Wait for the end; return the exit code."""
        os.close(self._own)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._read(deadline):
            pass
        return self.process.wait(timeout)

    def has_echo(self) -> bool:
        """Return whether the terminal shows what is typed."""
        return bool(termios.tcgetattr(self._own)[3] & termios.ECHO)

    def _read(self, deadline: float) -> bool:
        poll = select.poll()  # select.select refuses descriptors from 1024 on
        poll.register(self.fd, select.POLLIN)
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        try:
            data = os.read(self.fd, 65536) if ready else b""
        except OSError:  # the last process with this terminal has ended
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


@pytest.mark.parametrize(
    ("options", "rank"),
    [
        ([], 0),
        (["--devices", "2", "--show-ranks", "1"], 1),
        (["--devices", "3", "--stdin", "2"], 2),
    ],
    ids=["one worker", "one rank is shown", "--stdin"],
)
def test_breakpoint(shell: Shell, options: list[str], rank: int) -> None:
    (shell.folder / "stop.py").write_text(BREAKPOINT)
    job = Terminal(shell, *options, "stop.py", env={"STOP_RANK": str(rank)})
    job.expect("(Pdb) ")
    job.type("x")
    job.expect(str(41 + rank))
    job.expect("(Pdb) ")
    job.type("c")
    job.expect(f"x is {41 + rank}")
    assert job.end() == 0, job.text


def test_prompt_of_a_forked_worker(shell: Shell) -> None:
    (shell.folder / "ask.py").write_text(f"import torch\n{ASK}\n")
    job = Terminal(shell, "ask.py")
    job.expect("name? ")
    job.type("Ada")
    job.expect("hello Ada")
    assert job.end() == 0, job.text


def test_several_ranks_get_a_hint(shell: Shell) -> None:
    (shell.folder / "stop.py").write_text(BREAKPOINT)
    job = Terminal(shell, "--devices", "2", "stop.py")
    assert job.end() == 1
    assert "--stdin 0 gives it that of pdrun" in job.text


def test_no_hint_for_a_rank_that_has_the_input(shell: Shell) -> None:
    (shell.folder / "ask.py").write_text(ASK)
    code, _, err = shell.run("ask.py")
    assert code == 1
    assert "EOFError" in err
    assert "--stdin" not in err


def test_the_echo_returns_after_a_killed_worker(shell: Shell) -> None:
    (shell.folder / "silent.py").write_text(SILENT)
    job = Terminal(shell, "silent.py")
    job.expect("no echo")
    assert not job.has_echo()
    job.process.send_signal(signal.SIGTERM)
    job.process.wait(30)
    assert job.has_echo()
    job.end()


def test_a_job_in_the_background_gets_no_terminal(shell: Shell) -> None:
    """The worker would read what is typed for the shell."""
    (shell.folder / "ask.py").write_text(ASK)
    background = "sys.exit(subprocess.run(command, process_group=0).returncode)"
    job = Terminal(shell, "--stdin", "0", "ask.py", start=background)
    assert job.end() == 1
    assert "EOFError" in job.text
    assert "this job is in the background" in job.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "2", "--stdin", "2"], "there is no rank 2; the ranks are 0-1"),
        (["--nodes", "2", "--local", "--stdin", "0"], "no worker can read standard input"),
        (["--hosts", "a,b", "--stdin", "0"], "no worker can read standard input"),
    ],
)
def test_ranks_that_cannot_read_are_refused(shell: Shell, options: list[str], message: str) -> None:
    (shell.folder / "ask.py").write_text(ASK)
    code, _, err = shell.run(*options, "ask.py")
    assert code == 2
    assert message in err
    assert "--stdin" in err


STEPS = """
import os, sys, time
import pdrun
for step in range(8):
    pdrun.progress(step, total=8, loss=2.5)
    print("at", step, flush=True)
    time.sleep(1.0)
"""


@pytest.mark.parametrize("local", [False, True], ids=["one node", "--local"])
def test_the_live_line_is_below_the_output_and_gone_at_the_end(shell: Shell, local: bool) -> None:
    (shell.folder / "steps.py").write_text(STEPS)
    options = ["--nodes", "2", "--local"] if local else []
    job = Terminal(shell, *options, "--devices", "2", "steps.py", env={"CI": ""})
    job.expect(" of 8  loss 2.5")
    assert job.end() == 0, job.text
    screen = TerminalScreen(80, 200)
    screen.feed(job.text)
    assert not screen.unknown
    lines = screen.lines()
    assert not any("loss" in line for line in lines), lines
    assert sum("at 7" in line for line in lines) == (4 if local else 2)
    logs = [path.read_bytes() for path in (shell.folder / "pdrun-logs").glob("*/0/*")]
    assert logs and not any(b"\x1b" in data for data in logs)


@pytest.mark.parametrize(
    ("options", "env"), [(["--screen", "none"], {"CI": ""}), ([], {"CI": "true"})]
)
def test_no_live_line(shell: Shell, options: list[str], env: dict[str, str]) -> None:
    (shell.folder / "steps.py").write_text(STEPS.replace("range(8)", "range(3)"))
    job = Terminal(shell, *options, "--devices", "1", "steps.py", env=env)
    job.expect("at 2")
    assert job.end() == 0, job.text
    assert "\x1b" not in job.text
