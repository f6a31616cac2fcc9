"""
How many agents one scheduler takes: real scheduler and relays, real sockets, agents that are only their conversation.

    python benchmarks/scale.py --agents 1000               CURVE, as a job of that size starts it
    python benchmarks/scale.py --agents 12500 --insecure   100,000 workers of 8 a node, without CURVE
    python benchmarks/scale.py --agents 12500              with CURVE and relays

Shows seconds from the first connection until every agent has its assignment, and until every agent may start; then the
scheduler's and relays' CPU while everybody beats, in percent of one core, and their memory (PSS). The agents share the
machine with them: their CPU is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import select
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import zmq

from pdrun.net import Endpoint
from pdrun.rendezvous import pace, security
from pdrun.rendezvous.child import SchedulerChild
from pdrun.rendezvous.codec import decode, encode
from pdrun.rendezvous.events import SchedulerConfig
from pdrun.rendezvous.messages import (
    PROTOCOL,
    Assign,
    Echo,
    Envelope,
    Finished,
    Heartbeat,
    Hello,
    Join,
    Leave,
    Message,
    Ready,
    Refuse,
    Start,
    StopWorkers,
    Verdict,
    Welcome,
)
from pdrun.rendezvous.security import Secret

_ECHO = re.compile(rb'"type":"Echo","body":\{"number":(\d+)\}')


@dataclass
class Agent:
    """One conversation."""

    name: str
    socket: zmq.Socket[bytes]
    sequence: int = 0
    beats: int = 0
    echo: int = 0
    stage: str = "new"

    def say(self, message: Message) -> None:
        counted = not isinstance(message, Heartbeat)
        self.socket.send(encode(Envelope(self.name, 0, self.sequence if counted else 0, message)))
        self.sequence += counted


def crowd(
    first: int, count: int, nodes: int, endpoint: Endpoint, secret: Secret | None, pipe: Connection, workers: int
) -> None:  # fmt: skip
    """Be ``count`` agents; tell the parent when all are assigned, and when all may start; beat until told to end."""
    context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, 2 * count + 1024)
    epoll = select.epoll()
    keys = security.key_pair(secret, "agent") if secret else None
    server = security.key_pair(secret, "server").public if secret else None
    agents: dict[int, Agent] = {}
    waiting = {"assigned": count, "started": count}
    heartbeat, patience = 5.0, int(pace.handshake(nodes) * 1000)

    def connect(index: int) -> None:
        socket = context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.HANDSHAKE_IVL, patience), (zmq.RECONNECT_IVL, 500)):
            socket.setsockopt(option, value)
        if keys and server:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys.public, keys.private, server
        socket.connect(endpoint.zmq)
        agent = Agent(f"{index:032x}", socket)
        agents[int(socket.getsockopt(zmq.FD))] = agent
        epoll.register(int(socket.getsockopt(zmq.FD)), select.EPOLLIN)
        agent.say(Hello(PROTOCOL, "agent", "scale", agent.name, 0, f"host-{index:05d}", 1, "train.py"))
        read(agent)  # what sending has taken note of is not told again by the descriptor

    def read(agent: Agent) -> None:
        nonlocal heartbeat
        while True:
            try:
                data = agent.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if beat := _ECHO.search(data):
                agent.echo = int(beat[1])
                continue
            match decode(data).body:
                case Welcome() as welcome if agent.stage == "new":
                    agent.stage, heartbeat = "welcomed", welcome.heartbeat
                    index = int(agent.name, 16)
                    agent.say(Join(
                        f"host-{index:05d}", None, workers, {"command": "train.py", "pdrun": "0", "python": "3.11"},
                        f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}:40000",
                    ))  # fmt: skip
                case Assign(generation):
                    waiting["assigned"] -= 1
                    agent.say(Ready(generation))
                case Start():
                    waiting["started"] -= 1
                case StopWorkers(generation):
                    agent.say(Finished(generation))
                case Verdict():
                    agent.say(Leave())
                case Refuse(_, reason):
                    raise SystemExit(f"refused: {reason}")
                case Echo() | _:
                    pass

    def turn(wait: float) -> None:
        for fd, _ in epoll.poll(wait, 4096):
            read(agents[fd])

    order: list[Agent] = []
    began, told = time.monotonic(), 0

    def beat() -> None:
        """Have those whose turn it is say that they live: everybody once in ``heartbeat`` seconds."""
        nonlocal began, told
        if len(order) < len(agents):
            order[:] = agents.values()
            began, told = time.monotonic(), 0
        due = int((time.monotonic() - began) / heartbeat * len(order)) - told
        for agent in (order[(told + step) % len(order)] for step in range(max(0, due))):
            if agent.stage != "new":
                agent.beats += 1
                agent.say(Heartbeat(agent.beats, agent.echo))
                read(agent)
        told += max(0, due)

    pipe.send("ready")
    pipe.recv()
    for index in range(first, first + count):
        connect(index)
        if index % 16 == 0:
            turn(0)
    for stage in ("assigned", "started"):
        while waiting[stage] > 0:
            turn(0.05)
            beat()
        pipe.send((stage, time.monotonic()))
    while not pipe.poll():
        beat()
        turn(0.02)
    silent = sum(1 for agent in order if agent.beats > 2 and agent.beats - agent.echo > 2)
    times = os.times()
    pipe.send({"silent": silent, "cpu": times.user + times.system, "beats": sum(agent.beats for agent in order)})


def family(root: int) -> list[psutil.Process]:
    process = psutil.Process(root)
    return [process, *process.children(recursive=True)]


def used(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8, help="workers a node, as the agents claim")
    parser.add_argument("--insecure", action="store_true", help="without CURVE")
    parser.add_argument("--relays", type=int, default=None, help="relays beside the scheduler (default: as a job does)")
    parser.add_argument("--crowds", type=int, default=2, help="processes that play the agents")
    parser.add_argument("--beat", type=float, default=20.0, help="seconds for which CPU is measured while all beat")
    asked = parser.parse_args()
    secret = None if asked.insecure else Secret.random()
    config = SchedulerConfig(
        job="scale", run="scale", nodes=asked.agents, spec="{}", start_timeout=600.0, relays=asked.relays
    )
    child = SchedulerChild(config, secret, endpoint=Endpoint("127.0.0.1", 0), insecure=asked.insecure)
    crowds: list[tuple[multiprocessing.Process, Connection]] = []
    share = [asked.agents // asked.crowds + (turn < asked.agents % asked.crowds) for turn in range(asked.crowds)]
    for turn, count in enumerate(share):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(
            target=crowd, daemon=True,
            args=(sum(share[:turn]), count, asked.agents, child.endpoint, secret, theirs, asked.workers),
        )
        process.start()
        crowds.append((process, ours))
    try:
        print(json.dumps(measure(asked, child, [pipe for _, pipe in crowds]), indent=1))
    finally:
        for process, _ in crowds:
            process.kill()
        child.close(1.0)


def measure(asked: argparse.Namespace, child: SchedulerChild, pipes: list[Connection]) -> dict[str, object]:
    for pipe in pipes:
        pipe.recv()
    began = time.monotonic()
    for pipe in pipes:
        pipe.send("go")
    found: dict[str, object] = {
        "agents": asked.agents, "workers": asked.agents * asked.workers, "curve": not asked.insecure,
    }  # fmt: skip
    for stage in ("assigned", "started"):
        at = []
        for pipe in pipes:
            if not pipe.poll(900):
                raise SystemExit(f"not all agents were {stage} in 900 s")
            at.append(pipe.recv()[1])
        found[f"{stage}_s"] = round(max(at) - began, 2)
    processes = family(child.pid)
    found["relays"] = len(processes) - 1
    found["cpu_to_started_s"] = round(used(processes), 2)
    time.sleep(3)
    before, at_first = used(processes), time.monotonic()
    time.sleep(asked.beat)
    share = (used(processes) - before) / (time.monotonic() - at_first)
    found["beating_cpu_percent"] = round(100 * share, 1)
    found["pss_mb"] = round(sum(process.memory_full_info().pss for process in processes) / 1e6)
    for pipe in pipes:
        pipe.send("end")
    ends = [pipe.recv() for pipe in pipes]
    found["agents_cpu_s"] = round(sum(end["cpu"] for end in ends), 1)
    found["beats"] = sum(end["beats"] for end in ends)
    found["agents_without_echo"] = sum(end["silent"] for end in ends)
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    cpu = names[0].partition(":")[2].strip() if names else ""
    found["machine"] = f"{os.cpu_count()} x {cpu}, Python {platform.python_version()}, libzmq {zmq.zmq_version()}"
    found["date"] = time.strftime("%Y-%m-%d")
    return found


if __name__ == "__main__":
    sys.exit(main())
