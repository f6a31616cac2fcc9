"""
Several groups of servers, each a ``pdrun serve`` process: they start and end together.

A group restarts by itself. When one ends, whatever its exit code, the others are stopped, because
the service is not complete without it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from pdrun.launcher.common.exit import print_message
from pdrun.launcher.common.signals import STOP_SIGNALS, SignalReceiver
from pdrun.launcher.stdlib_only.process_tree import PR_SET_PDEATHSIG, prctl

READ_BYTES = 1 << 16


def run_groups(commands: Mapping[str, Sequence[str]], *, one_by_one: bool) -> int:
    """
    Run the commands until all have ended; return the exit code of the first that failed.

    Args:
        commands: name of a group -> its command.
        one_by_one: they only print something: each is started when the one before has ended.
    """
    if one_by_one:
        codes = (subprocess.run(command, check=False).returncode for command in commands.values())
        return next((code for code in codes if code), 0)
    with SignalReceiver() as signals:
        runner = GroupRunner(commands)
        try:
            return runner.run(signals)
        finally:
            runner.close()


class GroupRunner:
    """Starts the groups, passes on signals to them, and prints their lines with their names."""

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        parent = os.getpid()
        self._poll = select.poll()
        self._groups: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
        """Descriptor of the process -> name, process."""
        self._outputs: dict[int, GroupOutput] = {}
        for name, command in commands.items():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # a Ctrl-C of the terminal reaches this process, which passes it on once
                process_group=0,
                preexec_fn=lambda: _end_with_parent(parent),
            )
            self._groups[os.pidfd_open(process.pid)] = (name, process)
            for pipe, target in ((process.stdout, 1), (process.stderr, 2)):
                assert pipe is not None
                self._outputs[pipe.fileno()] = GroupOutput(name, pipe, target)
        for descriptor in (*self._groups, *self._outputs):
            self._poll.register(descriptor, select.POLLIN)
        self._code = 0
        self._is_stopping = False

    def run(self, signals: SignalReceiver) -> int:
        """Wait until all have ended; return the exit code of the first that failed."""
        self._poll.register(signals.fileno(), select.POLLIN)
        while self._groups:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            for descriptor in ready:
                if descriptor in self._outputs:
                    self._read_output(descriptor)
            for descriptor in ready:
                if descriptor in self._groups:
                    self._on_end(descriptor)
            for number in signals.read_signals():
                self._is_stopping = self._is_stopping or number in STOP_SIGNALS
                self._send(number)
        return self._code

    def close(self) -> None:
        """Kill what still runs: nothing, unless this process fails."""
        for descriptor, (_, process) in self._groups.items():
            process.kill()
            process.wait()
            os.close(descriptor)
        for output in self._outputs.values():
            output.pipe.close()

    def _read_output(self, descriptor: int) -> None:
        output = self._outputs[descriptor]
        if not output.copy_lines():
            self._poll.unregister(descriptor)
            self._outputs.pop(descriptor).pipe.close()

    def _on_end(self, descriptor: int) -> None:
        name, process = self._groups.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        code = process.wait()
        for number, output in list(self._outputs.items()):
            if output.name == name:  # a job that has ended left no process that writes
                while number in self._outputs:
                    self._read_output(number)
        code = 128 - code if code < 0 else code
        self._code = self._code or code
        if self._groups and not self._is_stopping:
            self._is_stopping = True
            print_message(f"group {name} has ended with exit code {code}: stopping the others")
            self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for _, process in self._groups.values():
            process.send_signal(number)


class GroupOutput:
    """One stream of a group, whose lines begin with the group's name."""

    def __init__(self, name: str, pipe: IO[bytes], target: int) -> None:
        self.name = name
        self.pipe = pipe
        self._target = target
        self._rest = b""

    def copy_lines(self) -> bool:
        """Print the lines that have come; return whether more may come."""
        data = os.read(self.pipe.fileno(), READ_BYTES)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if self._rest and (not data or len(self._rest) > READ_BYTES):
            lines.append(self._rest)
            self._rest = b""
        prefix = f"{self.name}| ".encode()
        text = memoryview(b"".join(prefix + line + b"\n" for line in lines))
        try:
            while text:
                text = text[os.write(self._target, text) :]
        except OSError:
            pass  # nobody reads any more: the servers go on
        return bool(data)


def _end_with_parent(parent: int) -> None:
    """Ask for SIGTERM when the parent dies, in a child that was just forked."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(127)
