"""
The traces of other nodes: a command there (over ssh, or another one) that this process talks to.

    pdrun trace --all                     ssh NODE python -m pdrun trace --part RUN
      <- ready COUNT                        workers of the run on that host
      -> time         <- SECONDS            its wall clock, several times: the offset to this one's
      -> trace TOKEN STEPS START TIMEOUT FIRST STOP    START on its clock; ranks FIRST to STOP - 1
      <- rank RANK BYTES, and the file      per trace
      <- error RANK TEXT                    per worker without one
      <- end

Every wait is bounded: a timer ends the command.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from pdrun.launcher.jobs.views.local_workers import LocalWorker
from pdrun.launcher.jobs.views.trace_request import (
    TraceAnswers,
    TraceRequest,
    await_traces,
    request_traces,
)

DEFAULT_CONNECT = "ssh -o BatchMode=yes -o ConnectTimeout=10 {node}"
START_SECONDS = 30.0
"""Longest time until the command of a node is ready."""
CLOCK_ROUNDS = 5
MAX_TRACE_BYTES = 1 << 30
MAX_ERROR_CHARACTERS = 200
_NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*")
_BLOCK = 1 << 20


class TracePart:
    """The command that traces the workers of one node."""

    def __init__(self, node: str, ranks: range, run: str, connect: str) -> None:
        """
        Start it.

        Args:
            node: name of the node.
            ranks: its ranks. Hosts that share a folder for temporary files see those of others.
            run: the run of the job.
            connect: command that runs its further words on ``{node}``.

        Raises:
            OSError: the command cannot be started.
            ValueError: the name cannot be a word of a command.
        """
        self.node = node
        self._ranks = ranks
        self.error = ""
        """Why there are no traces of it."""
        self.clock_offset = 0.0
        """Seconds that its wall clock is ahead of this host's."""
        # a file: a process that ssh leaves behind may keep a pipe open
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        try:
            self._process = subprocess.Popen(
                make_command(node, run, connect),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._messages,
            )
        except (OSError, ValueError):
            self._messages.close()
            raise

    def prepare(self) -> None:
        """Wait until it is ready, and compare the clocks; sets `error`."""
        self._call(START_SECONDS, self._compare_clocks)

    def collect(self, request: TraceRequest, folder: Path, answers: TraceAnswers) -> None:
        """
        Trace, and add the answers.

        Args:
            request: with the start on this host's clock.
            folder: where the files are written.
            answers: what they are added to; bases of times are on this host's clock afterwards.
        """
        if not self.error:
            limit = request.timeout + max(0.0, request.start_at - time.time()) + START_SECONDS
            self._call(limit, lambda: self._receive(request, folder, answers))

    def kill(self) -> None:
        """End the command; who waits for its answer gets an error."""
        self._process.kill()

    def close(self) -> None:
        """End the command and release what it has used."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._messages):
            try:
                if stream is not None:
                    stream.close()
            except OSError:
                pass  # what was not written yet

    def _call(self, seconds: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            work()
        except (OSError, ValueError, EOFError) as error:
            is_late = not timer.is_alive()
            self.error = f"no answer in {seconds:.0f} s" if is_late else self._explain(error)
        finally:
            timer.cancel()

    def _explain(self, error: Exception) -> str:
        """Return why the command failed: its last line of stderr."""
        self._process.kill()
        self._messages.seek(0)
        lines = self._messages.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
        return (lines[-1] if lines else str(error) or type(error).__name__)[:MAX_ERROR_CHARACTERS]

    def _compare_clocks(self) -> None:
        if not self._read_line().startswith("ready "):
            raise ValueError("another program answers")
        rounds = []
        for _ in range(CLOCK_ROUNDS):
            begin = time.time()
            self._write_line("time")
            there = float(self._read_line())
            end = time.time()
            rounds.append((end - begin, there - (begin + end) / 2))
        self.clock_offset = min(rounds)[1]  # of the quickest round trip

    def _receive(self, request: TraceRequest, folder: Path, answers: TraceAnswers) -> None:
        start = request.start_at + self.clock_offset if request.start_at else 0.0
        words = [request.token, request.steps, start, request.timeout]
        words += [self._ranks.start, self._ranks.stop]
        self._write_line(f"trace {' '.join(map(str, words))}")
        while (line := self._read_line()) != "end":
            kind, _, rest = line.partition(" ")
            rank, _, value = rest.partition(" ")
            if kind == "error":
                answers.errors[int(rank)] = value[:MAX_ERROR_CHARACTERS]
            elif kind == "rank" and 0 <= int(value) <= MAX_TRACE_BYTES:
                path = folder / f"{int(rank)}.json"
                with path.open("wb") as file:
                    self._copy_bytes(file, int(value))
                answers.files[int(rank)] = path
            else:
                raise ValueError(f"unexpected answer {line[:40]!r}")

    def _copy_bytes(self, file: BinaryIO, count: int) -> None:
        assert self._process.stdout is not None
        while count:
            data = self._process.stdout.read(min(count, _BLOCK))
            if not data:
                raise EOFError("the answer is cut")
            file.write(data)
            count -= len(data)

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline(1 << 12)
        if not line.endswith(b"\n"):
            raise EOFError("the command has ended")
        return line.decode("utf-8", "replace").strip()

    def _write_line(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()


def make_command(node: str, run: str, connect: str) -> list[str]:
    """
    Return the words of the command for a node; ssh gets one word, which a shell there splits.

    Raises:
        ValueError: the name, which comes from another machine, would be taken for an option.
    """
    if not _NODE_NAME.fullmatch(node):
        raise ValueError(f"{node!r} is no name of a host")
    words = [word.replace("{node}", node) for word in shlex.split(connect)]
    program = [sys.executable, "-m", "pdrun", "trace", "--part", run]
    is_ssh = bool(words) and Path(words[0]).name in ("ssh", "rsh")
    return [*words, shlex.join(program)] if is_ssh else [*words, *program]


def serve_part(workers: Sequence[LocalWorker], lines: BinaryIO, out: BinaryIO) -> int:
    """
    Trace the workers of this host for a `TracePart`.

    Args:
        workers: those of the run.
        lines: what it asks.
        out: where it reads the answers.
    """

    def say(line: str) -> None:
        out.write(line.encode() + b"\n")
        out.flush()

    say(f"ready {len(workers)}")
    while (line := lines.readline(1 << 12).decode("utf-8", "replace").strip()) == "time":
        say(repr(time.time()))
    words = line.split()
    if len(words) != 7 or words[0] != "trace" or not words[1].isalnum():
        return 1
    ranks = range(int(words[5]), int(words[6]))
    workers = [worker for worker in workers if worker.rank in ranks]
    request = TraceRequest(words[1], int(words[2]), float(words[4]), float(words[3]))
    wait = max(0.0, request.start_at - time.time())
    with request_traces(workers, request):
        answers = await_traces(
            workers,
            TraceRequest(request.token, request.steps, request.timeout + wait, request.start_at),
        )
        for rank, text in sorted(answers.errors.items()):
            say(f"error {rank} {' '.join(text.split())}")
        for rank, path in sorted(answers.files.items()):
            data = path.read_bytes()
            say(f"rank {rank} {len(data)}")
            out.write(data)
    say("end")
    return 0
