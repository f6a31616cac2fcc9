"""
The parameter servers of this node in one generation: started with the workers, ended after them.

Their stderr is read and printed by the agent. A server is never expected to end: whatever its exit
code is, its end is a failure of the job. One case is excepted: a killed server that may go back to
tables which it has written (modes async and bounded) is started again alone.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pdrun.launcher.supervisor.events import (
    LOST_AT_VARIABLE,
    NOTE_VARIABLE,
    Exited,
    SpawnFailed,
    SupervisorEvent,
    WorkerCommand,
    server_of_slot,
)
from pdrun.text import escape_text

MAX_READ_BYTES = 1 << 16
MAX_RETURNS = 5
"""Times that one server is started again alone in a generation."""


class ProcessStarter(Protocol):
    """What is needed of the supervisor."""

    def spawn(
        self,
        command: WorkerCommand,
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Ask for a process."""
        ...

    def send_signal(self, slot: int, number: int, *, group: bool) -> None:
        """Send a signal to the process of a slot."""
        ...


class ServerProcesses:
    """
    The servers of this node. Called from the agent's loop only.

    Args:
        print_line: prints a line of a server.
    """

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line
        self._stderr: dict[int, int] = {}
        """Slot -> descriptor of the file that gets the process's output."""
        self._read_bytes: dict[int, int] = {}
        self._commands: dict[int, WorkerCommand] = {}
        self._returns: dict[int, int] = {}

    def start_processes(self, starter: ProcessStarter, commands: Sequence[WorkerCommand]) -> None:
        """Start servers; those of an earlier generation are killed."""
        self.kill_processes(starter)
        for command in commands:
            with tempfile.TemporaryFile() as file:
                self._stderr[command.slot] = os.dup(file.fileno())
            self._read_bytes[command.slot] = 0
            self._commands[command.slot] = command
            self._returns[command.slot] = 0
            self._start_process(starter, command)

    def _start_process(self, starter: ProcessStarter, command: WorkerCommand) -> None:
        output = self._stderr[command.slot]
        with open(os.devnull, "r+b", buffering=0) as null:
            starter.spawn(command, null.fileno(), output, output)

    def start_again(self, starter: ProcessStarter, event: SupervisorEvent) -> bool:
        """Start a killed server again if it has written its tables; return whether it was."""
        command = self._commands.get(event.slot)
        if command is None or not isinstance(event, Exited) or not os.WIFSIGNALED(event.status):
            return False
        if not Path(command.env[NOTE_VARIABLE]).exists():
            return False
        self._returns[event.slot] += 1
        if self._returns[event.slot] > MAX_RETURNS:
            return False
        env = {**command.env, LOST_AT_VARIABLE: f"{time.time():.3f}"}
        self._start_process(starter, replace(command, env=env))
        return True

    def kill_processes(self, starter: ProcessStarter | None) -> None:
        """Kill the servers of the present generation."""
        self.read_lines()
        for slot in self._stderr:
            if starter is not None:
                starter.send_signal(slot, signal.SIGKILL, group=False)
        self.close()

    def close(self) -> None:
        """Read no more output."""
        for fd in self._stderr.values():
            os.close(fd)
        self._stderr.clear()
        self._commands.clear()

    def read_lines(self) -> None:
        """Print the complete lines that the servers have printed since the last call."""
        for slot, fd in self._stderr.items():
            data = os.pread(fd, MAX_READ_BYTES, self._read_bytes[slot])
            end = data.rfind(b"\n") + 1
            if len(data) == MAX_READ_BYTES and not end:
                end = len(data)
            self._read_bytes[slot] += end
            for line in data[:end].decode("utf-8", "replace").splitlines():
                self._print_line(f"server {server_of_slot(slot)}: {escape_text(line)}")

    def describe_exit(self, event: SupervisorEvent) -> str:
        """Return how a server ended; empty for any other event."""
        if not isinstance(event, (Exited, SpawnFailed)) or event.slot not in self._stderr:
            return ""
        name = f"parameter server {server_of_slot(event.slot)}"
        if isinstance(event, SpawnFailed):
            return f"{name} cannot be started: {event.message}"
        code = os.waitstatus_to_exitcode(event.status)
        if code < 0:
            return f"{name} was killed by {signal.Signals(-code).name}"
        return f"{name} ended with exit code {code}"
