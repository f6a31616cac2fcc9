"""
Runs the command as a user would, in a folder and with a home of its own, and leaves nothing behind.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.lib.ports import free_port as free_port


@dataclass
class Job:
    """One pdrun process with its output in files."""

    process: subprocess.Popen[bytes]
    out_path: Path
    err_path: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def out(self) -> str:
        return self.out_path.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self.err_path.read_text(errors="replace")

    def wait(self, timeout: float = 60.0) -> int:
        """Return the exit code; a job that does not end is a failure that shows what it printed."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
            pytest.fail(
                f"still running after {timeout} s\n--- stdout\n{self.out[-3000:]}\n---"
                f" stderr\n{self.err[-3000:]}"
            )

    def expect(self, pattern: str, timeout: float = 30.0, count: int = 1) -> str:
        """
        Wait until ``pattern`` was printed ``count`` times (stdout or stderr); return the text so
        far.
        """
        deadline = time.monotonic() + timeout
        while True:
            text = self.out + self.err
            if len(re.findall(pattern, text, re.MULTILINE)) >= count:
                return text
            if time.monotonic() > deadline or (
                self.process.poll() is not None and time.monotonic() > deadline - timeout + 1
            ):
                pytest.fail(
                    f"{pattern!r} not seen\n--- stdout\n{self.out[-3000:]}\n---"
                    f" stderr\n{self.err[-3000:]}"
                )
            time.sleep(0.03)

    def signal(self, number: int) -> float:
        """Send a signal to the pdrun process alone; return the time."""
        self.process.send_signal(number)
        return time.monotonic()


@dataclass
class Shell:
    """Starts jobs in one folder with one home."""

    folder: Path
    jobs: list[Job] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    def start(
        self, *args: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()
    ) -> Job:
        """Start ``pdrun ARGS``; stdin is closed, the process leads its own group as in a shell."""
        return self.start_process([*prefix, sys.executable, "-m", "pdrun", *args], env)

    def start_process(self, command: list[str], env: dict[str, str] | None = None) -> Job:
        """Start any command as `start` does."""
        number = len(self.jobs)
        out, err = self.folder / f"job{number}.stdout", self.folder / f"job{number}.stderr"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                process_group=0,
            )
        self.jobs.append(Job(process, out, err))
        return self.jobs[-1]

    def run(
        self, *args: str, timeout: float = 60.0, env: dict[str, str] | None = None
    ) -> tuple[int, str, str]:
        """Run to the end; return (exit code, stdout, stderr)."""
        job = self.start(*args, env=env)
        return job.wait(timeout), job.out, job.err

    def script(self, text: str, name: str = "work.py") -> str:
        """Write a script into the folder; return its name."""
        (self.folder / name).write_text(text)
        return name

    def pids(self, name: str) -> list[int]:
        """Whole numbers, one a line, that scripts appended to file ``name``."""
        path = self.folder / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone_within(pids: list[int], seconds: float) -> float:
    """Wait until none of ``pids`` runs; return how long that took, or fail."""
    start = time.monotonic()
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() - start > seconds:
            pytest.fail(f"still running after {seconds} s: {left}")
        time.sleep(0.005)
    return time.monotonic() - start


def until(condition: Callable[[], bool], what: str, timeout: float = 30.0) -> None:
    """Wait for a condition, bounded."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not reached within {timeout} s: {what}")
        time.sleep(0.025)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """
    A shell whose HOME, cookie and logs live in the test's folder; whatever still runs at the end is
    killed.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PDRUN_", "MS_", "PET_"))
    }
    env.update(
        HOME=str(tmp_path),
        XDG_CONFIG_HOME=str(tmp_path / "config"),
        XDG_STATE_HOME=str(tmp_path / "state"),
    )
    shell = Shell(tmp_path, env=env)
    yield shell
    for job in shell.jobs:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGKILL)
            job.process.wait(20)
