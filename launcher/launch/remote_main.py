"""
The far end of one connection: ``python -m pdrun.launcher.launch.remote_main``, started by a front
over ssh.

    front --- ssh --- this process --- agent (pdrun.launcher.launch.agent_main)
              stdin: frames, its end is the lifeline        stdin: order and lifeline
              stdout: frames                                stdout, stderr: whole lines

Everything that the job is made of (arguments, variables, folder, secret) comes over stdin as data;
no shell has seen any of it. It says hello, binds the scheduler's socket where it is told to, starts
the agent, passes on output, signals and the end. When stdin ends, or nothing has come for SILENCE
seconds, the agent loses its lifeline and ends everything.
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
from collections.abc import Callable
from types import FrameType
from typing import Any

from pdrun import process_setup
from pdrun.launcher.agent.lifeline import RUNNING, UP
from pdrun.launcher.controller import frames
from pdrun.launcher.controller.agent_handle import AgentStart, LocalAgent, agent_command
from pdrun.launcher.controller.frames import Frames, Outbox, message

AGENT_LEAVES = 10.0
"""Seconds that an agent without its lifeline may take to end its workers, before it is killed."""
STRAY = 5.0
"""Seconds for which a stray child may hold the agent's pipes open after its end."""
BACKLOG = 4 << 20
"""Bytes that may wait for the connection before the agent's output is left alone."""
_TICK = 0.5
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> int:
    """Serve the connection on stdin and stdout until the agent has ended or the front is gone."""
    process_setup.setup_process()
    try:
        return _FarEnd().run()
    except Exception as error:
        from pdrun.launcher.common.exit import fault

        return fault(error)


class _FarEnd:
    def __init__(self) -> None:
        self._frames = Frames(greeted=True)
        self._out = Outbox(1)
        self._heard = time.monotonic()
        self._held: set[int] = set()
        self._listener: socket.socket | None = None
        self._agent: LocalAgent | None = None
        self._told = b""
        self._gone_at: float | None = None
        """When the front went away."""
        self._handle: dict[bytes, Callable[[bytes], None]] = {
            frames.CHECK: self._check,
            frames.LISTEN: self._listen,
            frames.ORDER: self._order,
            frames.SIGNAL: self._signal,
            frames.HOLD: self._hold,
            frames.ALIVE: lambda payload: None,
        }
        self._signals, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (*_PASSED_ON, signal.SIGCHLD):
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, _noted)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def run(self) -> int:
        while True:
            self._wait()
            agent = self._agent
            if agent is None:
                if self._gone_at is not None:
                    return 0
                continue
            agent.look()
            self._mark(agent)
            if agent.end is not None and (
                agent.drained() or time.monotonic() > agent.end.at + STRAY
            ):
                return self._farewell(agent.end.code or 0)
            if self._gone_at is not None and time.monotonic() > self._gone_at + AGENT_LEAVES:
                agent.kill()

    def _farewell(self, code: int) -> int:
        self._out.put(message(frames.EXIT, {"code": code}))
        deadline = time.monotonic() + frames.SILENCE
        while len(self._out) and self._gone_at is None and time.monotonic() < deadline:
            self._wait()
        return 0

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        if self._gone_at is None:
            poll.register(0, select.POLLIN)
        if len(self._out):
            poll.register(self._out.fd, select.POLLOUT)
        if self._agent is not None:
            for fd, mask in self._agent.descriptors(self._is_held):
                poll.register(fd, mask)
        for fd, _ in poll.poll(_TICK * 1000):
            if fd == self._signals:
                self._take_signals()
            elif fd == 0:
                self._read()
            elif fd == self._out.fd:
                self._out.flush()
            elif self._agent is not None:
                for stream, data in self._agent.take(fd):
                    self._pass(stream, data)
        if self._gone_at is None and time.monotonic() > self._heard + frames.SILENCE:
            self._front_is_gone()

    def _is_held(self, stream: int) -> bool:
        return stream in self._held or (len(self._out) > BACKLOG and self._gone_at is None)

    def _pass(self, stream: int, data: bytes) -> None:
        if data and self._gone_at is None:
            self._out.put(frames.frame(frames.OUTPUT if stream == 1 else frames.ERRORS, data))

    def _mark(self, agent: LocalAgent) -> None:
        """Tell the front once that the agent takes signals, and that it starts workers."""
        for reached, mark in ((agent.up, UP), (agent.running, RUNNING)):
            if reached and mark not in self._told:
                self._told += mark
                self._out.put(frames.frame(frames.MARK, mark))

    def _read(self) -> None:
        try:
            data = os.read(0, 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._front_is_gone()
        self._heard = time.monotonic()
        for kind, payload in self._frames.feed(data):
            self._handle[kind](payload)

    def _front_is_gone(self) -> None:
        self._gone_at = time.monotonic()
        if self._agent is not None:
            self._agent.cut()

    def _take_signals(self) -> None:
        """
        Whoever signals this process means the agent; before there is one, there is nothing to end.
        """
        for number in os.read(self._signals, 64):
            if number in _PASSED_ON and self._agent is not None:
                self._agent.signal(number)
            elif number in _PASSED_ON:
                os._exit(128 + number)

    # What the front says
    # ----------------------------------------------------------------------------------------------

    def _check(self, payload: bytes) -> None:
        import pdrun

        folder = str(json.loads(payload)["folder"])
        error = ""
        try:
            os.chdir(folder)
            os.environ["PWD"] = folder
        except OSError as problem:
            error = f"the folder {folder} cannot be entered there: {problem.strerror}"
        self._out.put(
            frames.GREETING
            + message(
                frames.HELLO,
                {
                    "version": pdrun.__version__,
                    "python": platform.python_version(),
                    "host": socket.gethostname(),
                    "connection": os.environ.get("SSH_CONNECTION", ""),
                    "error": error,
                },
            )
        )

    def _listen(self, payload: bytes) -> None:
        wanted = json.loads(payload)
        try:
            self._listener = _bound(wanted["addresses"], wanted["interface"], far=wanted["far"])
        except Exception as error:
            self._out.put(message(frames.LISTENING, {"error": str(error)}))
            return
        host, port = self._listener.getsockname()[:2]
        self._out.put(message(frames.LISTENING, {"host": host, "port": port}))

    def _order(self, payload: bytes) -> None:
        order: dict[str, Any] = json.loads(payload)
        os.environ.update(order["env"])
        fd = self._listener.fileno() if self._listener is not None else None
        line = (
            json.dumps(
                {**order["agent"], "scheduler_fd": fd, "nofile": process_setup.user_nofile_limit()}
            )
            + "\n"
        )
        agent = LocalAgent(
            AgentStart(order["node"], line, () if fd is None else (fd,)), agent_command()
        )
        agent.start()
        if self._listener is not None:
            self._listener.close()
        agent.order()
        self._agent = agent

    def _signal(self, payload: bytes) -> None:
        if self._agent is not None and self._agent.end is None:
            number = int(payload)
            if number == signal.SIGKILL:
                self._agent.kill()
            else:
                self._agent.signal(number)

    def _hold(self, payload: bytes) -> None:
        self._held = set(json.loads(payload)["streams"])


def _bound(addresses: list[str], interface: str, *, far: bool) -> socket.socket:
    """
    Return a listening socket on an address by which the other nodes reach this one.

    Args:
        addresses: what the front knows of it, the best first; those that are not this machine's are
            passed over.
        interface: the user's choice: a name or an address of this machine; counts before
            everything.
        far: some of the other nodes are other machines, which loopback does not reach.
    """
    from pdrun.endpoint import Endpoint
    from pdrun.errors import ConfigError
    from pdrun.launcher.common import network
    from pdrun.rendezvous.transport.listen import bind_listener

    own = network.addresses()
    if interface:
        found = [address for name, address in own if interface in (name, address)]
        if not found:
            known = ", ".join(dict.fromkeys(name for name, _ in own))
            raise ConfigError(
                f"{interface!r} is no interface or address there",
                where="--interface",
                hint=f"there are {known}",
            )
        return bind_listener(Endpoint(found[0], 0), backlog=1024)
    mine = {address.partition("%")[0]: address for _, address in own}
    for address in (one for wanted in addresses for one in network.resolve(wanted)):
        if address.partition("%")[0] in mine and not (far and network.is_loopback(address)):
            return bind_listener(Endpoint(mine[address.partition("%")[0]], 0), backlog=1024)
    raise ConfigError(
        f"none of {', '.join(addresses) or 'no address'} is an address there",
        hint="name one with --interface",
    )


def _noted(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has told already."""


if __name__ == "__main__":
    sys.exit(main())
