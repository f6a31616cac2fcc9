"""
One connection to a far end (`pdrun.launcher.launch.remote_main`), as the front sees it: first a
greeting, then an agent.

    RemoteAgent.connect --> hello or failure --> listen (the first node) --> start, order --> output, marks, end
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
from pdrun.launcher.agent.lifeline import RUNNING, UP
from pdrun.launcher.common.signals import signal_name
from pdrun.launcher.controller import frames
from pdrun.launcher.controller.agent_handle import End, Held
from pdrun.launcher.controller.frames import Frames, Outbox, message
from pdrun.launcher.output.console import ERR, OUT

KILL_AFTER = 5.0
_KEPT = 16 << 10
"""Bytes of what ssh says that are kept to explain a failure."""


class RemoteAgent:
    """See the module. Nothing here ever waits; `take` whatever descriptor is ready."""

    def __init__(self, node: str, argv: Sequence[str]) -> None:
        self.node = node
        self.end: End | None = None
        self.up = self.running = False
        self.hello: dict[str, Any] | None = None
        self.listening: dict[str, Any] | None = None
        self.said = b""
        """The last of what ssh, and a far end that could not begin, wrote to stderr."""
        self.asked: list[bytes] = []
        """
        Lines of the text conversation before the greeting (`pdrun.launcher.controller.bundle`).
        """
        self._argv = argv
        self._order = b""
        self._frames = Frames()
        self._process: subprocess.Popen[bytes] | None = None
        self._out: Outbox | None = None
        self._open: set[int] = set()
        self._held: tuple[int, ...] = ()
        self._code: int | None = None
        """What the far end said of its agent."""
        self._alive_at = 0.0
        self._kill_at: float | None = None

    # Coming together
    # --------------------------------------------------------------------------------------------------

    def connect(self, folder: str, first: bytes = b"") -> None:
        """
        Start ssh and ask the far end whether it can serve.

        Args:
            folder: working directory of the job.
            first: bytes that go before everything else.

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
        self._open = {self._process.stdout.fileno(), self._process.stderr.fileno()}
        self._out = Outbox(self._process.stdin.fileno())
        self._out.put(first + self.check(folder))
        self._alive_at = time.monotonic() + frames.ALIVE_EVERY

    def check(self, folder: str) -> bytes:
        """Return the first question: what the far end answers with its hello."""
        return message(frames.CHECK, {"folder": folder})

    def listen(self, addresses: Sequence[str], interface: str, *, far: bool) -> None:
        """Have the far end bind the scheduler's socket; ``listening`` has the answer."""
        self._say(
            message(
                frames.LISTEN, {"addresses": list(addresses), "interface": interface, "far": far}
            )
        )

    def send(self, data: bytes) -> None:
        """Send bytes outside of the frames (`pdrun.launcher.controller.bundle`)."""
        self._say(data)

    @property
    def connected(self) -> bool:
        """Whether the connection was begun."""
        return self._process is not None

    @property
    def status(self) -> int | None:
        """Exit status of ssh itself; None while it runs."""
        return self._process.poll() if self._process else None

    def drop(self) -> None:
        """Give the connection up; waits for nothing but ssh's own end after SIGKILL."""
        self.cut()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()
        self._open.clear()

    # As an agent (`pdrun.launcher.controller.agent_handle.Started`)
    # -------------------------------------------------------------------

    def set_order(self, agent: dict[str, Any], env: dict[str, str]) -> None:
        """Say what `order` will send: the agent's own order, and variables for its environment."""
        self._order = message(frames.ORDER, {"node": self.node, "agent": agent, "env": env})

    def start(self) -> None:
        """The far end is there already."""

    def order(self) -> None:
        """Have the far end start the agent."""
        self._say(self._order)
        self._order = b""

    def descriptors(self, held: Held) -> Iterator[tuple[int, int]]:
        """
        See `Started`. One connection carries both streams, so the far end is told which of them is
        held.
        """
        now = time.monotonic()
        streams = tuple(stream for stream in (OUT, ERR) if held(stream))
        if streams != self._held:
            self._held = streams
            self._say(message(frames.HOLD, {"streams": streams}))
        if now >= self._alive_at:
            self._alive_at = now + frames.ALIVE_EVERY
            self._say(frames.frame(frames.ALIVE))
        for fd in self._open:
            yield fd, select.POLLIN
        if self._out is not None and len(self._out):
            yield self._out.fd, select.POLLOUT

    def take(self, fd: int) -> Iterator[tuple[int, bytes]]:
        """See `Started`."""
        if self._out is not None and fd == self._out.fd:
            self._out.flush()
            return
        if (
            fd not in self._open
        ):  # closed since it was ready, by a signal that came in the same moment
            return
        data = os.read(fd, 1 << 18)
        if not data:
            self._open.discard(fd)
        assert self._process is not None and self._process.stderr is not None
        if fd == self._process.stderr.fileno():
            yield from self._ssh_says(data)
            return
        try:
            for kind, payload in self._frames.feed(data):
                yield from self._frame(kind, payload)
        except RendezvousError as error:
            self.said += str(error).encode()
            self.kill()
        self._hear_text()

    def _frame(self, kind: bytes, payload: bytes) -> Iterator[tuple[int, bytes]]:
        if kind in (frames.OUTPUT, frames.ERRORS):
            yield (OUT if kind == frames.OUTPUT else ERR), payload
        elif kind == frames.MARK:
            self.up = self.up or UP in payload
            self.running = self.running or RUNNING in payload
        elif kind == frames.HELLO:
            self.hello = json.loads(payload)
        elif kind == frames.LISTENING:
            self.listening = json.loads(payload)
        elif kind == frames.EXIT:
            self._code = int(json.loads(payload)["code"])

    def _hear_text(self) -> None:
        if not self._frames.greeted and b"\n" in self._frames.noise:
            self.asked = self._frames.noise[: self._frames.noise.rindex(b"\n")].split(b"\n")

    def _ssh_says(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Keep it; while the job runs, show it, too."""
        before = self.said.rpartition(b"\n")[2]
        self.said = (self.said + data)[-_KEPT:]
        if self.up or self.running:
            *lines, _ = (before + data).split(b"\n")
            yield (
                ERR,
                b"".join(
                    b"pdrun: %s: %s\n" % (self.node.encode(), line.rstrip(b"\r")) for line in lines
                ),
            )

    def drained(self) -> bool:
        """See `Started`."""
        return not self._open

    def look(self) -> None:
        """See `Started`."""
        if self.end is not None or self._process is None:
            return
        if self._code is not None:
            killed = (
                f"the agent of {self.node} was killed by {signal_name(-self._code)}"
                if self._code < 0
                else ""
            )
            self.end = End(self._code, time.monotonic(), killed)
            self.cut()
        elif self._process.poll() is not None and not self._open:
            said = self.said.decode("utf-8", "replace").strip().rpartition("\n")[2].strip()
            why = f" ({said})" if said else ""
            self.end = End(None, time.monotonic(), f"the connection to {self.node} was lost{why}")
        elif self._kill_at is not None and time.monotonic() > self._kill_at:
            self._process.kill()

    def signal(self, number: int) -> None:
        """See `Started`."""
        self._say(frames.frame(frames.SIGNAL, str(int(number)).encode()))

    def kill(self) -> None:
        """
        See `Started`. The end of the far end's stdin ends what is left there; ssh itself has
        KILL_AFTER seconds.
        """
        self.signal(signal.SIGKILL)
        self.cut()
        self._kill_at = time.monotonic() + KILL_AFTER

    def cut(self) -> None:
        """See `Started`."""
        if (
            self._process is not None
            and self._process.stdin is not None
            and not self._process.stdin.closed
        ):
            self._process.stdin.close()
            self._out = None

    def _say(self, data: bytes) -> None:
        if self._out is not None:
            self._out.put(data)
