"""
An agent as the process that started it sees it: what it prints, how far it is, how it ended.

    Front --- Started <|-- LocalAgent    a child process; signals by kill, output by two pipes, the lifeline is a socket
                      <|-- RemoteAgent   the same over one ssh connection, in frames (`pdrun.launcher.controller.ssh_agent`)
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
from pdrun.launcher.agent.lifeline import FOR_ALL, RUNNING, UP
from pdrun.launcher.common.signals import signal_name
from pdrun.launcher.output.console import ERR, OUT

STOPPING = process_setup.STOP_SIGNALS
Held = Callable[[int], bool]
"""Whether the reader of OUT or ERR is so far behind that no more of it is wanted."""
_HELD_LINE = 1 << 20


@dataclass(frozen=True)
class End:
    """How an agent ended."""

    code: int | None
    """As Popen says it: negative for a signal. None: nobody knows, the way to it was cut."""
    at: float
    """Monotonic seconds."""
    fate: str = ""
    """``the agent of node0 was killed by SIGKILL``; empty where it left by itself."""


@dataclass(frozen=True)
class AgentStart:
    """An agent to start on this machine."""

    node: str
    line: str
    """What it reads on stdin, with the line end. Holds the secret: never log it."""
    pass_fds: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"AgentStart(node={self.node!r}, pass_fds={self.pass_fds})"


def agent_command() -> list[str]:
    """
    Return the command of an agent; ``-P`` keeps the current folder, which may hold a json.py, from
    its imports.
    """
    return [sys.executable, "-P", "-m", "pdrun.launcher.launch.agent_main"]


class Started(Protocol):
    """One agent that was started here."""

    node: str
    end: End | None
    up: bool
    """Whether it takes signals."""
    running: bool
    """Whether it has begun to start workers."""

    def start(self) -> None:
        """Start it."""
        ...

    def order(self) -> None:
        """Tell it what to do."""
        ...

    def descriptors(self, held: Held) -> Iterable[tuple[int, int]]:
        """
        Yield (descriptor, poll mask) of what to wait for now; a stream that is held is left alone.
        """
        ...

    def take(self, fd: int) -> Iterable[tuple[int, bytes]]:
        """
        Deal with a descriptor that is ready; yield what it printed as (OUT or ERR, whole lines).
        """
        ...

    def drained(self) -> bool:
        """Whether nothing more can come from it."""
        ...

    def look(self) -> None:
        """Set ``end`` once it has ended."""
        ...

    def signal(self, number: int) -> None:
        """
        Give it a signal in the name of the whole job: a SIGTERM does not mean that its node alone
        is to go.
        """
        ...

    def kill(self) -> None:
        """End it at once; its workers end because it has ended."""
        ...

    def cut(self) -> None:
        """Close its lifeline: it ends everything and leaves."""
        ...


class LocalAgent:
    """
    An agent that is a child of this process, in a session of its own: a Ctrl-C reaches it once,
    through us.
    """

    def __init__(self, start: AgentStart, command: Sequence[str]) -> None:
        self.node = start.node
        self.end: End | None = None
        self.up = self.running = False
        self._start = start
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None
        self._hears = True
        self._streams: dict[int, int] = {}
        self._halves: dict[int, bytes] = {}

    def start(self) -> None:
        """Start the process; it waits for its order."""
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
        # descriptors of our own: closed by `take` at the end of the stream
        self._streams = {
            os.dup(self._process.stdout.fileno()): OUT,
            os.dup(self._process.stderr.fileno()): ERR,
        }
        self._process.stdout.close()
        self._process.stderr.close()

    def order(self) -> None:
        """Give it its line; one that is gone already is found by `look`."""
        assert self._lifeline is not None
        try:
            self._lifeline.sendall(self._start.line.encode())
        except OSError:
            pass

    def descriptors(self, held: Held) -> Iterator[tuple[int, int]]:
        """See `Started`."""
        if self._hears and self._lifeline is not None and self._lifeline.fileno() >= 0:
            yield self._lifeline.fileno(), select.POLLIN
        for fd, stream in self._streams.items():
            if not held(stream):
                yield fd, select.POLLIN

    def take(self, fd: int) -> Iterator[tuple[int, bytes]]:
        """See `Started`."""
        if fd not in self._streams:
            return self._hear()
        data = os.read(fd, 1 << 18)
        whole = self._halves.get(fd, b"") + data
        # agents write whole lines; what is left over was cut by the pipe (or is a prompt of a job
        # with one worker)
        cut = len(whole) if not data or len(whole) > _HELD_LINE else whole.rfind(b"\n") + 1
        yield self._streams[fd], whole[:cut]
        self._halves[fd] = whole[cut:]
        if not data:
            os.close(fd)
            del self._streams[fd]
        return None

    def _hear(self) -> None:
        assert self._lifeline is not None
        try:
            said = self._lifeline.recv(4096)
        except OSError:  # it ended without having read its order
            said = b""
        self._hears = bool(said)
        self.up = self.up or UP in said
        self.running = self.running or RUNNING in said

    def drained(self) -> bool:
        """See `Started`."""
        return not self._streams

    def look(self) -> None:
        """See `Started`."""
        if (
            self.end is None
            and self._process is not None
            and (code := self._process.poll()) is not None
        ):
            fate = (
                f"the agent of {self.node} was killed by {signal_name(-code)}" if code < 0 else ""
            )
            self.end = End(code, time.monotonic(), fate)

    def signal(self, number: int) -> None:
        """See `Started`."""
        if self._process is None:
            return
        if number in STOPPING and self.up and self._lifeline is not None:
            try:
                self._lifeline.send(FOR_ALL, socket.MSG_DONTWAIT)
            except OSError:
                pass  # it is ending, or has been told often enough
        self._process.send_signal(number)

    def kill(self) -> None:
        """See `Started`."""
        if self._process is not None:
            self._process.kill()

    def cut(self) -> None:
        """See `Started`."""
        if self._lifeline is not None:
            self._lifeline.close()
