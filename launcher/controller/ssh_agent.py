"""
One connection to a remote server (`pdrun.launcher.launch.remote_main`), as its controller sees it:
first a greeting, then an agent.

    connect --> hello or failure --> listen (node 0) --> start, send_payload --> output, marks, exit
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pdrun.errors import RendezvousError
from pdrun.launcher.agent.lifeline import Lifeline
from pdrun.launcher.controller import frames
from pdrun.launcher.controller.agent_handle import READ_BYTES, AgentExit, IsBehind, kill_reason
from pdrun.launcher.controller.frames import (
    FrameReader,
    NonblockingWriter,
    encode_frame,
    encode_message,
)
from pdrun.launcher.output.console import STDERR, STDOUT

KILL_SECONDS = 5.0
"""Time for ssh to exit after its stdin was closed."""
MAX_STDERR_BYTES = 16 << 10
"""Of ssh's stderr, kept to explain a failure."""


class RemoteAgentHandle:
    """See the module. No method waits; call `read_output` with each descriptor that is ready."""

    def __init__(self, node: str, argv: Sequence[str]) -> None:
        self.node = node
        self.exit: AgentExit | None = None
        self.is_up = False
        self.is_running = False
        self.hello: dict[str, Any] | None = None
        """The remote server's answer to CHECK."""
        self.listening: dict[str, Any] | None = None
        """The remote server's answer to LISTEN."""
        self.stderr = b""
        """The end of the stderr of ssh, and of a remote server that could not start."""
        self.text_lines: list[bytes] = []
        """Lines in front of the greeting (`pdrun.launcher.controller.bundle`)."""
        self._argv = argv
        self._payload = b""
        self._frames = FrameReader()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: NonblockingWriter | None = None
        self._open_fds: set[int] = set()
        self._held_streams: tuple[int, ...] = ()
        self._agent_code: int | None = None
        """Exit code of the agent, from the remote server."""
        self._next_alive = 0.0
        self._kill_at: float | None = None

    # Connecting
    # ----------------------------------------------------------------------------------------------

    def connect(self, folder: str, first: bytes = b"") -> None:
        """
        Start ssh and ask the remote server whether it can serve.

        Args:
            folder: working directory of the job.
            first: bytes to send before the first frame.

        Raises:
            OSError: the program cannot be started.
        """
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._open_fds = {self._process.stdout.fileno(), self._process.stderr.fileno()}
        self._writer = NonblockingWriter(self._process.stdin.fileno())
        self._writer.put(first + self.first_question(folder))
        self._next_alive = time.monotonic() + frames.ALIVE_SECONDS

    def first_question(self, folder: str) -> bytes:
        """Return the first question, which the remote server answers by its hello."""
        return encode_message(frames.CHECK, {"folder": folder})

    def listen(
        self,
        addresses: Sequence[str],
        interface: str,
        *,
        far: bool,
        ports: tuple[int, int] | None = None,
    ) -> None:
        """Have the remote server bind the scheduler's socket; ``listening`` gets the answer."""
        question = {
            "addresses": list(addresses),
            "interface": interface,
            "far": far,
            "ports": ports,
        }
        self.send_bytes(encode_message(frames.LISTEN, question))

    def send_bytes(self, data: bytes) -> None:
        """Send bytes, unless the connection is closed."""
        if self._writer is not None:
            self._writer.put(data)

    @property
    def is_connected(self) -> bool:
        """Whether ssh was started."""
        return self._process is not None

    @property
    def ssh_status(self) -> int | None:
        """Exit status of ssh; None while it runs."""
        return self._process.poll() if self._process else None

    def abort(self) -> None:
        """Close the connection; waits only for the end of ssh after SIGKILL."""
        self.close_lifeline()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()
        self._open_fds.clear()

    # As an agent (`pdrun.launcher.controller.agent_handle.AgentHandle`)
    # ----------------------------------------------------------------------------------------------

    def set_payload(self, agent: dict[str, Any], env: dict[str, str]) -> None:
        """Set what `send_payload` sends: the agent's payload, and variables for its environment."""
        order = {"node": self.node, "agent": agent, "env": env}
        self._payload = encode_message(frames.ORDER, order)

    def start(self) -> None:
        """Do nothing: the remote server runs already."""

    def send_payload(self) -> None:
        """Have the remote server start the agent."""
        self.send_bytes(self._payload)
        self._payload = b""

    def poll_descriptors(self, is_behind: IsBehind) -> Iterator[tuple[int, int]]:
        """
        See `AgentHandle`.

        One connection carries both streams, so a frame names the streams that must wait.
        """
        now = time.monotonic()
        held = tuple(stream for stream in (STDOUT, STDERR) if is_behind(stream))
        if held != self._held_streams:
            self._held_streams = held
            self.send_bytes(encode_message(frames.HOLD, {"streams": held}))
        if now >= self._next_alive:
            self._next_alive = now + frames.ALIVE_SECONDS
            self.send_bytes(encode_frame(frames.ALIVE))
        for fd in self._open_fds:
            yield fd, select.POLLIN
        if self._writer is not None and len(self._writer):
            yield self._writer.fd, select.POLLOUT

    def read_output(self, fd: int) -> Iterator[tuple[int, bytes]]:
        """See `AgentHandle`."""
        if self._writer is not None and fd == self._writer.fd:
            self._writer.flush()
            return
        if fd not in self._open_fds:
            return  # a signal that arrived at the same time has closed it
        data = os.read(fd, READ_BYTES)
        if not data:
            self._open_fds.discard(fd)
        assert self._process is not None and self._process.stderr is not None
        if fd == self._process.stderr.fileno():
            yield from self._on_stderr(data)
            return
        try:
            for kind, payload in self._frames.feed(data):
                yield from self._on_frame(kind, payload)
        except RendezvousError as error:
            self.stderr += str(error).encode()
            self.kill()
        self._split_text()

    def _on_frame(self, kind: bytes, payload: bytes) -> Iterator[tuple[int, bytes]]:
        if kind == frames.OUTPUT:
            yield STDOUT, payload
        elif kind == frames.ERRORS:
            yield STDERR, payload
        elif kind == frames.MARK:
            self.is_up = self.is_up or Lifeline.UP in payload
            self.is_running = self.is_running or Lifeline.RUNNING in payload
        elif kind == frames.HELLO:
            self.hello = json.loads(payload)
        elif kind == frames.LISTENING:
            self.listening = json.loads(payload)
        elif kind == frames.EXIT:
            self._agent_code = int(json.loads(payload)["code"])

    def _split_text(self) -> None:
        noise = self._frames.noise
        if not self._frames.is_greeted and b"\n" in noise:
            self.text_lines = noise[: noise.rindex(b"\n")].split(b"\n")

    def _on_stderr(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Keep the stderr of ssh; while the job runs, show it, too."""
        partial = self.stderr.rpartition(b"\n")[2]
        self.stderr = (self.stderr + data)[-MAX_STDERR_BYTES:]
        if self.is_up or self.is_running:
            *lines, _ = (partial + data).split(b"\n")
            prefix = f"pdrun: {self.node}: ".encode()
            yield STDERR, b"".join(prefix + line.rstrip(b"\r") + b"\n" for line in lines)

    def is_drained(self) -> bool:
        """See `AgentHandle`."""
        return not self._open_fds

    def check_exit(self) -> None:
        """See `AgentHandle`."""
        if self.exit is not None or self._process is None:
            return
        if self._agent_code is not None:
            reason = kill_reason(self.node, self._agent_code)
            self.exit = AgentExit(self._agent_code, time.monotonic(), reason)
            self.close_lifeline()
        elif self._process.poll() is not None and not self._open_fds:
            text = self.stderr.decode("utf-8", "replace").strip()
            last_line = text.rpartition("\n")[2].strip()
            why = f" ({last_line})" if last_line else ""
            reason = f"the connection to {self.node} was lost{why}"
            self.exit = AgentExit(None, time.monotonic(), reason)
        elif self._kill_at is not None and time.monotonic() > self._kill_at:
            self._process.kill()

    def send_signal(self, number: int) -> None:
        """See `AgentHandle`."""
        self.send_bytes(encode_frame(frames.SIGNAL, str(int(number)).encode()))

    def kill(self) -> None:
        """
        See `AgentHandle`.

        The end of the remote server's stdin ends the rest. ssh has KILL_SECONDS to exit.
        """
        self.send_signal(signal.SIGKILL)
        self.close_lifeline()
        self._kill_at = time.monotonic() + KILL_SECONDS

    def close_lifeline(self) -> None:
        """See `AgentHandle`."""
        stdin = self._process.stdin if self._process is not None else None
        if stdin is not None and not stdin.closed:
            stdin.close()
            self._writer = None
