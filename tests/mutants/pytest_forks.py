"""
Runs pytest in forks of one process that has imported what is large and never edited.

``python pytest_forks.py`` is that process. It reads a line of JSON for each run: the arguments of
pytest, and the file for its output. It answers with the pid of the fork and, at its end, its exit
code. `PytestForks` is the other side.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

MODULES = (
    *("pytest", "_pytest.pytester", "xdist.plugin", "pytest_timeout", "hypothesis", "numpy"),
    *("psutil", "zmq", "torch", "torch.distributed", "torch._dynamo"),
)
"""None of pdrun's own, and none that starts a thread. Those that are missing are left out."""


class PytestForks:
    """The process that forks, for one folder and environment."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._output = folder / "pytest-output"
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            cwd=folder,
            env={**env, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answers = b""

    def run(
        self, arguments: Sequence[str], seconds: float, env: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """
        Run pytest; return its exit code, -1 if it did not end in time, and its output.

        Args:
            env: variables to set for this run.
        """
        assert self._process.stdin is not None
        order = {"arguments": list(arguments), "output": str(self._output), "env": dict(env or {})}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        pid = self._read_number()
        assert pid is not None
        code = self._read_number(seconds)
        if code is None:
            os.killpg(pid, signal.SIGKILL)
            self._read_number()
        return -1 if code is None else code, self._output.read_text(errors="replace")

    def _read_number(self, seconds: float | None = None) -> int | None:
        """Return the next number that the process says; None: it did not come in time."""
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        while b"\n" not in self._answers:
            if not poll.poll(None if seconds is None else seconds * 1000):
                return None
            more = os.read(stream, 4096)
            if not more:
                raise RuntimeError("the process that runs the tests has ended")
            self._answers += more
        number, _, self._answers = self._answers.partition(b"\n")
        return int(number)

    @property
    def pid(self) -> int:
        """Of the process that forks."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> None:
    """Import, then fork for each order until the end of stdin."""
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run_order(order)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run_order(order: Mapping[str, object]) -> None:
    """Be a fork: run pytest as ``python -m pytest`` does, and end."""
    import pytest

    code = 3
    try:
        os.setsid()
        output = os.open(str(order["output"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, number in ((null, 0), (output, 1), (output, 2)):
            os.dup2(fd, number)
        os.closerange(3, 100)
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(order["env"])  # type: ignore[call-overload]
        sys.path[:0] = [os.getcwd()]
        sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
        code = int(pytest.main(list(order["arguments"])))  # type: ignore[call-overload]
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
