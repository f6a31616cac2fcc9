"""
Agents that consist of their messages only: thousands in one process, as cheap as possible, for
`scale.py`.

They send what a real agent sends, at the same times. The product's codec writes each message, most
of them before the clock starts. A heartbeat follows the welcome directly and then every interval.
Only work that they do not need is left out: of incoming messages they read the type only, and
instead of a ZeroMQ socket each has one of

    PlainConnection   a TCP socket that speaks ZeroMQ's protocol (ZMTP 3.1, NULL) in the order of
                      libzmq: signature, greeting, READY, messages; probes (PING) are answered
    CurveConnection   with CURVE, whose arithmetic libzmq does well: a real DEALER
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Protocol

import zmq

from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol import security
from pdrun.rendezvous.protocol.codec import encode
from pdrun.rendezvous.protocol.messages import (
    PROTOCOL,
    Envelope,
    Finished,
    Heartbeat,
    Hello,
    Join,
    Leave,
    Message,
    Ready,
)
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.transport import timeouts as pace

AT_ONCE = 2000
"""
Connections of one process that have not been greeted yet: two processes stay within the kernel's
queue of 4096.
"""
REST = 0.005
"""Seconds between two looks at the sockets: what has come meanwhile is read together."""

_TYPE = re.compile(rb'"type":"(\w+)","body":\{(?:"(?:number|generation)":(\d+))?')
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING = b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"


class AgentConnection(Protocol):
    """One connection."""

    up: bool
    """Whether the other end has greeted."""

    def fileno(self) -> int: ...

    def send(self, data: bytes) -> None: ...

    def take(self) -> Iterator[bytes]:
        """Yield the messages that have come."""
        ...

    def close(self) -> None: ...


class PlainConnection:
    """Without CURVE: see the module."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.up = False
        self._socket = socket.socket()
        self._socket.connect((endpoint.host, endpoint.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._rest = b""
        self._greeted = 0
        self._waiting = [_frame(_READY, 4)]
        self._socket.sendall(_SIGNATURE)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send a message, after the handshake."""
        if self.up:
            self._socket.sendall(_frame(data, 0))
        else:
            self._waiting.append(_frame(data, 0))

    def take(self) -> Iterator[bytes]:
        """Yield the messages that have come; deals with everything else."""
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise SystemExit("the scheduler, or its relay, has ended a connection")
        data = self._rest + data
        at = 0
        if self._greeted < 64:
            self._greet(data)
            if self._greeted < 64:
                self._rest = data
                return
            at = 64
        while len(data) >= at + 2:
            flags, head = data[at], 9 if data[at] & 2 else 2
            if len(data) < at + head:
                break
            size = struct.unpack_from("!Q", data, at + 1)[0] if head == 9 else data[at + 1]
            if len(data) < at + head + size:
                break
            body, at = data[at + head : at + head + size], at + head + size
            if not flags & 4:
                yield body
            elif body.startswith(b"\x05READY"):
                self.up = True
                for one in self._waiting[1:]:
                    self._socket.sendall(one)
            elif body.startswith(b"\x04PING"):
                self._socket.sendall(_frame(b"\x04PONG" + body[7:], 4))
        self._rest = data[at:]

    def close(self) -> None:
        """End it; what was sent still arrives."""
        self._socket.close()

    def _greet(self, data: bytes) -> None:
        """Answer what has come of the other end's greeting."""
        if self._greeted == 0 and len(data) >= 10:
            self._greeted = 10
            self._socket.sendall(_GREETING)
        if len(data) >= 64:
            self._greeted = 64
            self._socket.sendall(self._waiting[0])


class CurveConnection:
    """With CURVE: a DEALER."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        secret: Secret,
        crowd: int,
    ) -> None:
        self.up = False
        self._socket = context.socket(zmq.DEALER)
        probe = pace.probe_milliseconds(crowd)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.HANDSHAKE_IVL, int(pace.handshake_seconds(crowd) * 1000)),
            (zmq.RECONNECT_IVL, 500),
            (zmq.HEARTBEAT_IVL, probe),
            (zmq.HEARTBEAT_TIMEOUT, 3 * probe),
        ):
            self._socket.setsockopt(option, value)
        keys = security.derive_key_pair(secret, "agent")
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.private
        self._socket.curve_serverkey = security.derive_key_pair(secret, "server").public
        self._socket.connect(endpoint.zmq_url)

    def fileno(self) -> int:
        """
        The descriptor that tells of something new, once: after `send`, `take` must be called as
        well.
        """
        return int(self._socket.getsockopt(zmq.FD))

    def send(self, data: bytes) -> None:
        """Send a message, after the handshake."""
        self._socket.send(data)

    def take(self) -> Iterator[bytes]:
        """Yield the messages that have come."""
        with contextlib.suppress(zmq.Again):
            while True:
                data = self._socket.recv(zmq.NOBLOCK)
                self.up = True
                yield data

    def close(self) -> None:
        """End it; what was sent still arrives."""
        self._socket.close(linger=5000)


def _frame(data: bytes, flags: int) -> bytes:
    """Return a frame of ZMTP: flags 4 for a command, 2 for a length of 8 bytes."""
    if len(data) < 256:
        return bytes((flags, len(data))) + data
    return struct.pack("!BQ", flags | 2, len(data)) + data


class Agent:
    """One conversation."""

    def __init__(self, index: int, workers: int) -> None:
        """Write what will be said in any case."""
        self.name = f"{index:032x}"
        self.line: AgentConnection
        self.beats = self.echo = 0
        self.over = False
        host = f"host-{index:05d}"
        self.hello = self._written(
            0, Hello(PROTOCOL, "agent", "scale", self.name, 0, host, 1, "train.py")
        )
        self.join = self._written(
            1,
            Join(
                host,
                None,
                workers,
                {"command": "train.py", "pdrun": "0", "python": "3.11"},
                f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}:40000",
            ),
        )
        self.ready = self._written(2, Ready(0))

    def _written(self, sequence: int, message: Message) -> bytes:
        return encode(Envelope(self.name, 0, sequence, message))

    def beat(self) -> None:
        """Say that it lives."""
        self.beats += 1
        self.line.send(self._written(0, Heartbeat(self.beats, self.echo)))

    def end(self) -> None:
        """Its workers are done."""
        self.line.send(self._written(3, Finished(0)))

    def leave(self) -> None:
        """The verdict is known."""
        self.line.send(self._written(4, Leave()))
        self.over = True


class AgentCrowd:
    """``count`` agents of a job of ``nodes``, starting with number ``first``."""

    def __init__(
        self,
        first: int,
        count: int,
        nodes: int,
        endpoint: Endpoint,
        secret: Secret | None,
        workers: int,
    ) -> None:
        self._endpoint, self._secret, self._nodes = endpoint, secret, nodes
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 2 * count + 1024)
        self._epoll = select.epoll()
        self.agents = [Agent(index, workers) for index in range(first, first + count)]
        self._by_fd: dict[int, Agent] = {}
        self._greeted = 0
        self._heartbeat = 5.0
        self._beats: deque[tuple[float, Agent]] = deque()
        """When each agent beats next, in this order."""
        self.waiting = {"Assign": count, "Start": count, "Verdict": count}

    def come(self) -> None:
        """Let the next ones come, as many as find room in the kernel's queue."""
        while len(self._by_fd) < min(len(self.agents), self._greeted + AT_ONCE):
            agent = self.agents[len(self._by_fd)]
            secret = self._secret
            agent.line = (
                CurveConnection(self._context, self._endpoint, secret, self._nodes)
                if secret
                else PlainConnection(self._endpoint)
            )
            self._by_fd[agent.line.fileno()] = agent
            self._epoll.register(agent.line.fileno(), select.EPOLLIN)
            agent.line.send(agent.hello)
            self._read(agent)
            if len(self._by_fd) % 64 == 0:
                return

    def turn(self) -> None:
        """Do what is due: new connections, incoming messages, heartbeats."""
        self.come()
        ready = self._epoll.poll(0 if len(self._by_fd) < len(self.agents) else 0.02, 4096)
        for fd, _ in ready:
            self._read(self._by_fd[fd])
        now = time.monotonic()
        while self._beats and self._beats[0][0] <= now:
            _, agent = self._beats.popleft()
            if not agent.over:
                agent.beat()
                self._read(agent)
                self._beats.append((now + self._heartbeat, agent))
        if len(self._by_fd) == len(self.agents):
            time.sleep(REST)

    def _read(self, agent: Agent) -> None:
        was_up = agent.line.up
        for data in agent.line.take():
            found = _TYPE.search(data)
            if found is None:
                raise SystemExit(f"not understood: {data[:200]!r}")
            self._told(agent, found[1], found[2], data)
            if agent.over:
                self._epoll.unregister(agent.line.fileno())
                agent.line.close()
                return
        self._greeted += agent.line.up and not was_up

    def _told(self, agent: Agent, kind: bytes, number: bytes, data: bytes) -> None:
        if kind == b"Echo":
            agent.echo = int(number)
        elif kind == b"Welcome":
            agent.line.send(agent.join)
            beat = re.search(rb'"heartbeat":([0-9.]+)', data)
            self._heartbeat = float(beat[1]) if beat else self._heartbeat
            self._beats.appendleft((0.0, agent))
        elif kind == b"Assign":
            self.waiting["Assign"] -= 1
            agent.line.send(agent.ready)
        elif kind == b"Start":
            self.waiting["Start"] -= 1
        elif kind == b"Verdict":
            self.waiting["Verdict"] -= 1
            agent.leave()
        elif kind == b"Refuse":
            raise SystemExit(f"refused: {data!r}")


def crowd(
    first: int,
    count: int,
    nodes: int,
    endpoint: Endpoint,
    secret: Secret | None,
    pipe: Connection,
    workers: int,
) -> None:
    """
    Run ``count`` agents in this process.

    Report to the parent when all are assigned, and when all can start. Send heartbeats until the
    parent ends the run, then bring the job to its end.
    """
    many = AgentCrowd(first, count, nodes, endpoint, secret, workers)
    pipe.send("ready")
    pipe.recv()
    began = _cpu()
    for stage in ("Assign", "Start"):
        while many.waiting[stage] > 0:
            many.turn()
        pipe.send((time.monotonic(), _cpu() - began))
    while not pipe.poll():
        many.turn()
    silent = sum(1 for agent in many.agents if agent.beats > 2 and agent.beats - agent.echo > 2)
    pipe.send(
        {
            "silent": silent,
            "beats": sum(agent.beats for agent in many.agents),
            "cpu": _cpu() - began,
        }
    )
    for agent in many.agents:
        agent.end()
    while many.waiting["Verdict"] > 0:
        many.turn()
    pipe.send(time.monotonic())
    pipe.recv()


def _cpu() -> float:
    times = os.times()
    return times.user + times.system
