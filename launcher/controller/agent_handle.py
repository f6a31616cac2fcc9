"""
An agent as its controller sees it: its output, its progress, its exit.

    Controller --- AgentHandle <|-- LocalAgentHandle   a child process: signals, pipes, a lifeline
                               <|-- RemoteAgentHandle  the same in frames over ssh (`ssh_agent`)
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdrun import process_setup
from pdrun.launcher.agent.lifeline import Lifeline
from pdrun.launcher.common.signals import format_signal
from pdrun.launcher.output.console import STDERR, STDOUT

STOP_SIGNALS = process_setup.STOP_SIGNALS
IsBehind = Callable[[int], bool]
"""Whether the reader of STDOUT or STDERR is so far behind that the stream must not be read."""
MAX_PARTIAL_LINE_BYTES = 1 << 20
READ_BYTES = 1 << 18


@dataclass(frozen=True)
class AgentExit:
    """How an agent ended."""

    code: int | None
    """As Popen returns it: negative for a signal. None: unknown, the connection was lost."""
    time: float
    """Monotonic seconds."""
    reason: str = ""
    """``the agent of node0 was killed by SIGKILL``; empty if it exited."""


@dataclass(frozen=True)
class AgentStart:
    """An agent to start on this machine."""

    node: str
    payload: str
    """One line of JSON for its stdin, with the line end. Contains the secret: never log it."""
    pass_fds: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"AgentStart(node={self.node!r}, pass_fds={self.pass_fds})"


def agent_command() -> list[str]:
    """
    Return the command of an agent.

    ``-P`` keeps the current folder, which may contain a json.py, out of its imports.
    """
    return [sys.executable, "-P", "-m", "pdrun.launcher.launch.agent_main"]


class AgentHandle(Protocol):
    """One agent that a controller started."""

    node: str
    exit: AgentExit | None
    is_up: bool
    """Whether signals reach it."""
    is_running: bool
    """Whether it may have started workers."""

    def start(self) -> None:
        """Start the agent; it waits for its payload."""
        ...

    def send_payload(self) -> None:
        """Send the payload: what the agent is to do."""
        ...

    def poll_descriptors(self, is_behind: IsBehind) -> Iterable[tuple[int, int]]:
        """
        Yield (descriptor, poll mask) to wait for.

        A stream whose reader is behind is left out.
        """
        ...

    def read_output(self, fd: int) -> Iterable[tuple[int, bytes]]:
        """Process a ready descriptor; yield output as (STDOUT or STDERR, complete lines)."""
        ...

    def is_drained(self) -> bool:
        """Return whether there can be no more output."""
        ...

    def check_exit(self) -> None:
        """Set ``exit`` if the agent has ended."""
        ...

    def send_signal(self, number: int) -> None:
        """
        Send a signal on behalf of the whole job.

        A SIGTERM sent this way does not mean that only this node leaves.
        """
        ...

    def kill(self) -> None:
        """Kill the agent; its workers are killed because it has ended."""
        ...

    def close_lifeline(self) -> None:
        """Close the lifeline: the agent kills everything and exits."""
        ...


class LocalAgentHandle:
    """
    An agent that is a child of this process.

    It has its own session, so that a Ctrl-C reaches it once, through the controller.
    """

    def __init__(self, start: AgentStart, command: Sequence[str]) -> None:
        self.node = start.node
        self.exit: AgentExit | None = None
        self.is_up = False
        self.is_running = False
        self._start = start
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None
        self._is_lifeline_open = True
        self._streams: dict[int, int] = {}
        """Descriptor -> STDOUT or STDERR."""
        self._partial_lines: dict[int, bytes] = {}

    def start(self) -> None:
        """Start the process; it waits for its payload."""
        self._lifeline, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=self._start.pass_fds,
                start_new_session=True,
            )
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            theirs.close()
        assert self._process.stdout and self._process.stderr
        # duplicates: `read_output` closes them at the end of the stream
        self._streams = {
            os.dup(self._process.stdout.fileno()): STDOUT,
            os.dup(self._process.stderr.fileno()): STDERR,
        }
        self._process.stdout.close()
        self._process.stderr.close()

    def send_payload(self) -> None:
        """Send the payload. `check_exit` finds an agent that has ended already."""
        assert self._lifeline is not None
        try:
            self._lifeline.sendall(self._start.payload.encode())
        except OSError:
            pass

    def poll_descriptors(self, is_behind: IsBehind) -> Iterator[tuple[int, int]]:
        """See `AgentHandle`."""
        lifeline = self._lifeline
        if self._is_lifeline_open and lifeline is not None and lifeline.fileno() >= 0:
            yield lifeline.fileno(), select.POLLIN
        for fd, stream in self._streams.items():
            if not is_behind(stream):
                yield fd, select.POLLIN

    def read_output(self, fd: int) -> Iterator[tuple[int, bytes]]:
        """See `AgentHandle`."""
        if fd not in self._streams:
            return self._read_lifeline()
        data = os.read(fd, READ_BYTES)
        pending = self._partial_lines.get(fd, b"") + data
        # Agents write complete lines. A partial line was cut by the pipe, or is the prompt of a
        # job with one worker.
        if not data or len(pending) > MAX_PARTIAL_LINE_BYTES:
            end = len(pending)
        else:
            end = pending.rfind(b"\n") + 1
        yield self._streams[fd], pending[:end]
        self._partial_lines[fd] = pending[end:]
        if not data:
            os.close(fd)
            del self._streams[fd]
        return None

    def _read_lifeline(self) -> None:
        assert self._lifeline is not None
        try:
            data = self._lifeline.recv(4096)
        except OSError:  # the agent ended without reading its payload
            data = b""
        self._is_lifeline_open = bool(data)
        self.is_up = self.is_up or Lifeline.UP in data
        self.is_running = self.is_running or Lifeline.RUNNING in data

    def is_drained(self) -> bool:
        """See `AgentHandle`."""
        return not self._streams

    def check_exit(self) -> None:
        """See `AgentHandle`."""
        if self.exit is not None or self._process is None:
            return
        code = self._process.poll()
        if code is not None:
            self.exit = AgentExit(code, time.monotonic(), kill_reason(self.node, code))

    def send_signal(self, number: int) -> None:
        """See `AgentHandle`."""
        if self._process is None:
            return
        if number in STOP_SIGNALS and self.is_up and self._lifeline is not None:
            try:
                self._lifeline.send(Lifeline.FOR_ALL, socket.MSG_DONTWAIT)
            except OSError:
                pass  # it is ending, or its buffer is full of the same byte
        self._process.send_signal(number)

    def kill(self) -> None:
        """See `AgentHandle`."""
        if self._process is not None:
            self._process.kill()

    def close_lifeline(self) -> None:
        """See `AgentHandle`."""
        if self._lifeline is not None:
            self._lifeline.close()


def kill_reason(node: str, code: int) -> str:
    """Return the message for an agent that a signal killed; empty for an exit code."""
    if code >= 0:
        return ""
    return f"the agent of {node} was killed by {format_signal(-code)}"
