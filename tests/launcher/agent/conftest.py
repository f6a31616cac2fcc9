"""Jobs of one node as processes: started with a hand-made plan, ended with the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lib.supervisor_driver import REPOSITORY, python, wait_until


class Job:
    """One running agent with its output in files."""

    def __init__(
        self, folder: Path, number: int, prefix: tuple[str, ...], options: dict[str, Any]
    ) -> None:
        self._paths = folder / f"{number}.out", folder / f"{number}.err"
        environ = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            self.process = subprocess.Popen(
                [
                    *prefix,
                    sys.executable,
                    "-m",
                    "tests.lib.agent_job",
                    json.dumps({"cwd": str(folder), **options}),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environ,
                process_group=0,
            )

    @property
    def out(self) -> str:
        return self._paths[0].read_text()

    @property
    def err(self) -> str:
        return self._paths[1].read_text()

    def wait(self, seconds: float = 60.0) -> int:
        """The exit code; a job that does not end fails the test."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s\n{self.out[-2000:]}\n{self.err[-3000:]}")

    def expect(self, text: str, count: int = 1, seconds: float = 60.0) -> None:
        """Wait until a text was printed that often."""
        wait_until(
            lambda: (self.out + self.err).count(text) >= count, seconds, f"{count} x {text!r}"
        )

    def signal(self, number: int) -> float:
        """Signal the agent alone; return the time."""
        self.process.send_signal(number)
        return time.monotonic()


class Jobs:
    """Starts jobs in the test's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []

    def start(self, *argv: str, prefix: tuple[str, ...] = (), **options: Any) -> Job:
        """Start a job of this command; ``options`` are those of `fakes.make_plan`."""
        self.started.append(Job(self.folder, len(self.started), prefix, {"argv": argv, **options}))
        return self.started[-1]

    def run(self, *argv: str, **options: Any) -> tuple[int, Job]:
        """Run a job to its end."""
        job = self.start(*argv, **options)
        return job.wait(), job

    def pids(self, name: str = "pids") -> list[int]:
        """Pids that workers appended to a file, one a line."""
        path = self.folder / name
        return [int(word) for word in path.read_text().split()] if path.exists() else []

    def python(self, code: str, *args: Any) -> tuple[str, ...]:
        """
        A light Python worker, with ``rank`` and ``note()`` (which appends its pid to the file) at
        hand.
        """
        return python(PRELUDE + code, *args)


PRELUDE = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def note(pid=None):
    with open("pids", "a") as file: file.write(f"{pid or os.getpid()}\\n")
def say(*words): print(*words, flush=True)
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Jobs that are ended with the test."""
    made = Jobs(tmp_path)
    yield made
    for job in made.started:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGKILL)
            job.process.wait(20)
