"""
The remote server of one connection: ``python -m pdrun.launcher.launch.remote_main``, started by a
controller over ssh.

    controller --- ssh --- this process --- agent (pdrun.launcher.launch.agent_main)
                   stdin: frames, its end is the lifeline     stdin: payload and lifeline
                   stdout: frames                             stdout, stderr: complete lines

Arguments, variables, folder and secret of the job arrive over stdin as data; no shell sees them.
The remote server sends its hello, binds the scheduler's socket if asked to, starts the agent, and
forwards output, signals and the exit. When stdin ends, or no frame arrives for SILENCE_SECONDS, it
closes the agent's lifeline, and the agent kills everything.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from pdrun import process_setup
from pdrun.launcher.agent.lifeline import Lifeline
from pdrun.launcher.controller import frames
from pdrun.launcher.controller.agent_handle import AgentStart, LocalAgentHandle, agent_command
from pdrun.launcher.controller.frames import (
    FrameReader,
    NonblockingWriter,
    encode_frame,
    encode_message,
)
from pdrun.launcher.output.console import STDOUT

AGENT_EXIT_SECONDS = 10.0
"""Time for an agent without its lifeline to end its workers, before it is killed."""
STRAY_SECONDS = 5.0
"""How long a stray child may keep the agent's pipes open after the agent's end."""
MAX_QUEUED_BYTES = 4 << 20
"""Bytes that may wait for the connection before the agent's output is no longer read."""
POLL_SECONDS = 0.5
STDIN_READ_BYTES = 1 << 18
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> int:
    """Serve the connection on stdin and stdout until the agent or the controller has ended."""
    process_setup.setup_process()
    try:
        return RemoteServer().run()
    except Exception as error:
        from pdrun.launcher.common.exit import report_fault

        return report_fault(error)


class RemoteServer:
    """The loop over the connection, the agent and signals."""

    def __init__(self) -> None:
        self._frames = FrameReader(is_greeted=True)
        self._writer = NonblockingWriter(1)
        self._last_frame_at = time.monotonic()
        self._held_streams: set[int] = set()
        self._listener: socket.socket | None = None
        self._agent: LocalAgentHandle | None = None
        self._sent_marks = b""
        self._lost_at: float | None = None
        """When the controller was lost."""
        self._handlers: dict[bytes, Callable[[bytes], None]] = {
            frames.CHECK: self._on_check,
            frames.LISTEN: self._on_listen,
            frames.ORDER: self._on_order,
            frames.SIGNAL: self._on_signal,
            frames.HOLD: self._on_hold,
            frames.ALIVE: lambda payload: None,
        }
        self._signal_fd, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (*FORWARDED_SIGNALS, signal.SIGCHLD):
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, _ignore_signal)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def run(self) -> int:
        """Serve; return 0."""
        while True:
            self._wait_for_events()
            agent = self._agent
            if agent is None:
                if self._lost_at is not None:
                    return 0
                continue
            agent.check_exit()
            self._send_marks(agent)
            if agent.exit is not None:
                is_late = time.monotonic() > agent.exit.time + STRAY_SECONDS
                if agent.is_drained() or is_late:
                    self._send_exit(agent.exit.code or 0)
                    return 0
            lost_at = self._lost_at
            if lost_at is not None and time.monotonic() > lost_at + AGENT_EXIT_SECONDS:
                agent.kill()

    def _send_exit(self, code: int) -> None:
        """Send the last frame and wait until it is written."""
        self._writer.put(encode_message(frames.EXIT, {"code": code}))
        deadline = time.monotonic() + frames.SILENCE_SECONDS
        while len(self._writer) and self._lost_at is None and time.monotonic() < deadline:
            self._wait_for_events()

    def _wait_for_events(self) -> None:
        poll = select.poll()
        for fd, mask in self._poll_descriptors():
            poll.register(fd, mask)
        for fd, _ in poll.poll(POLL_SECONDS * 1000):
            if fd == self._signal_fd:
                self._read_signals()
            elif fd == 0:
                self._read_stdin()
            elif fd == self._writer.fd:
                self._writer.flush()
            elif self._agent is not None:
                for stream, data in self._agent.read_output(fd):
                    self._forward_output(stream, data)
        is_connected = self._lost_at is None
        if is_connected and time.monotonic() > self._last_frame_at + frames.SILENCE_SECONDS:
            self._on_controller_lost()

    def _poll_descriptors(self) -> Iterator[tuple[int, int]]:
        yield self._signal_fd, select.POLLIN
        if self._lost_at is None:
            yield 0, select.POLLIN
        if len(self._writer):
            yield self._writer.fd, select.POLLOUT
        if self._agent is not None:
            yield from self._agent.poll_descriptors(self._is_behind)

    def _is_behind(self, stream: int) -> bool:
        if stream in self._held_streams:
            return True
        return self._lost_at is None and len(self._writer) > MAX_QUEUED_BYTES

    def _forward_output(self, stream: int, data: bytes) -> None:
        if data and self._lost_at is None:
            kind = frames.OUTPUT if stream == STDOUT else frames.ERRORS
            self._writer.put(encode_frame(kind, data))

    def _send_marks(self, agent: LocalAgentHandle) -> None:
        """Report once that the agent takes signals, and once that it starts workers."""
        for is_reached, mark in (
            (agent.is_up, Lifeline.UP),
            (agent.is_running, Lifeline.RUNNING),
        ):
            if is_reached and mark not in self._sent_marks:
                self._sent_marks += mark
                self._writer.put(encode_frame(frames.MARK, mark))

    def _read_stdin(self) -> None:
        try:
            data = os.read(0, STDIN_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_controller_lost()
        self._last_frame_at = time.monotonic()
        for kind, payload in self._frames.feed(data):
            self._handlers[kind](payload)

    def _on_controller_lost(self) -> None:
        self._lost_at = time.monotonic()
        if self._agent is not None:
            self._agent.close_lifeline()

    def _read_signals(self) -> None:
        """Forward signals to the agent; without an agent, exit."""
        for number in os.read(self._signal_fd, 64):
            if number in FORWARDED_SIGNALS and self._agent is not None:
                self._agent.send_signal(number)
            elif number in FORWARDED_SIGNALS:
                os._exit(128 + number)

    # Frames of the controller
    # ----------------------------------------------------------------------------------------------

    def _on_check(self, payload: bytes) -> None:
        import pdrun

        folder = str(json.loads(payload)["folder"])
        error = ""
        try:
            os.chdir(folder)
            os.environ["PWD"] = folder
        except OSError as problem:
            error = f"cannot change to the folder {folder} there: {problem.strerror}"
        hello = {
            "version": pdrun.__version__,
            "python": platform.python_version(),
            "host": socket.gethostname(),
            "connection": os.environ.get("SSH_CONNECTION", ""),
            "error": error,
        }
        self._writer.put(frames.GREETING + encode_message(frames.HELLO, hello))

    def _on_listen(self, payload: bytes) -> None:
        request = json.loads(payload)
        try:
            self._listener = _bind_scheduler(
                request["addresses"],
                request["interface"],
                has_remote_nodes=request["far"],
                ports=request["ports"],
            )
        except Exception as error:
            self._writer.put(encode_message(frames.LISTENING, {"error": str(error)}))
            return
        host, port = self._listener.getsockname()[:2]
        self._writer.put(encode_message(frames.LISTENING, {"host": host, "port": port}))

    def _on_order(self, payload: bytes) -> None:
        """Start the agent."""
        order: dict[str, Any] = json.loads(payload)
        os.environ.update(order["env"])
        fd = self._listener.fileno() if self._listener is not None else None
        agent_payload = {
            **order["agent"],
            "scheduler_fd": fd,
            "nofile": process_setup.user_nofile_limit(),
        }
        start = AgentStart(
            order["node"], json.dumps(agent_payload) + "\n", () if fd is None else (fd,)
        )
        agent = LocalAgentHandle(start, agent_command())
        agent.start()
        if self._listener is not None:
            self._listener.close()
        agent.send_payload()
        self._agent = agent

    def _on_signal(self, payload: bytes) -> None:
        if self._agent is not None and self._agent.exit is None:
            number = int(payload)
            if number == signal.SIGKILL:
                self._agent.kill()
            else:
                self._agent.send_signal(number)

    def _on_hold(self, payload: bytes) -> None:
        self._held_streams = set(json.loads(payload)["streams"])


def _bind_scheduler(
    addresses: list[str],
    interface: str,
    *,
    has_remote_nodes: bool,
    ports: tuple[int, int] | None = None,
) -> socket.socket:
    """
    Return a listening socket on an address by which the other nodes reach this one.

    Args:
        addresses: addresses that the controller knows, the best first. Those of other machines are
            skipped.
        interface: the user's choice, a name or an address of this machine; it overrides the
            addresses.
        has_remote_nodes: some nodes are on other machines, which cannot reach loopback.
        ports: of ``--port-range``.

    Raises:
        ConfigError: no address is one of this machine.
    """
    from pdrun.endpoint import Endpoint
    from pdrun.errors import ConfigError
    from pdrun.launcher.common import network
    from pdrun.rendezvous.transport.listen import bind_listener, use_port_range

    use_port_range(ports)
    own = network.list_addresses()
    if interface:
        found = [address for name, address in own if interface in (name, address)]
        if not found:
            known = ", ".join(dict.fromkeys(name for name, _ in own))
            raise ConfigError(
                f"{interface!r} is not an interface or address there",
                where="--interface",
                hint=f"use one of {known}",
            )
        return bind_listener(Endpoint(found[0], 0), backlog=1024)
    by_plain_address = {address.partition("%")[0]: address for _, address in own}
    for wanted in addresses:
        for address in network.resolve_host(wanted):
            own_address = by_plain_address.get(address.partition("%")[0])
            is_reachable = not (has_remote_nodes and network.is_loopback(address))
            if own_address is not None and is_reachable:
                return bind_listener(Endpoint(own_address, 0), backlog=1024)
    raise ConfigError(
        f"{', '.join(addresses) or 'no address'}: not an address there",
        hint="name one with --interface",
    )


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has received the number already."""


if __name__ == "__main__":
    sys.exit(main())
