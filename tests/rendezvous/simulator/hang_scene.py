"""
A job of any number of nodes in virtual time, whose workers become idle one after another.

The product's own machine and the product's own `WorkerMonitor` on each node; processes, sockets and
stacks are only numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from pdrun.launcher.agent import monitor
from pdrun.launcher.agent.monitor import WorkerMonitor
from pdrun.rendezvous.membership.machine import JobState, Membership
from pdrun.rendezvous.protocol.events import (
    MembershipEvent,
    MessageReceived,
    SchedulerConfig,
    SendMessage,
    Tick,
)
from pdrun.rendezvous.protocol.messages import (
    PROTOCOL,
    Hello,
    Join,
    Message,
    Ready,
    ShowStacks,
)
from tests.lib.agent_fakes import FakeOutput, FakeSupervisor

from .world import World

STACK_DELAY = 0.25
"""Seconds in which a node collects the stacks of its workers."""


class SimNode:
    """The workers of one node: each uses a CPU until its time, and nothing after it."""

    has_started, is_done, is_stopping, generation = True, False, False, 0

    def __init__(self, scene: HangScene, name: str, first: int, works_until: list[float]) -> None:
        self.scene, self.name = scene, name
        self.ranks = range(first, first + len(works_until))
        self.works_until = dict(zip(self.ranks, works_until, strict=True))
        self.monitor = WorkerMonitor(scene.world, self.send, lambda line: None)
        self.monitor._is_wrapped = False
        self.monitor._hang_timeout = scene.timeout
        self.planned_at = float("inf")

    def alive_workers(self) -> list[tuple[int, int, int]]:
        return [(rank, rank, rank + 1) for rank in self.ranks]

    def begin(self) -> None:
        group: Any = self
        self.monitor.begin_generation(group, FakeOutput(), FakeSupervisor())
        self.plan()

    def plan(self) -> None:
        """Wake at the monitor's next deadline; a busy machine is a little late."""
        world = self.scene.world
        due = self.monitor.next_deadline()
        if due is not None:
            late = world.random.random() * 0.02
            world.after(due - world.monotonic() + late, self.wake)

    def wake(self) -> None:
        self.monitor.run_once()
        self.plan()

    def send(self, message: Message) -> None:
        self.scene.to_scheduler(self.name, message)

    def take(self, message: Message) -> None:
        if isinstance(message, ShowStacks):
            self.scene.world.after(STACK_DELAY, self.monitor.show_stacks, message.generation)


class HangScene:
    """Call `play` once; then `found_at` and `asked` tell what the scheduler did."""

    def __init__(self, seed: int, timeout: float, works_until: list[list[float]]) -> None:
        self.world, self.timeout = World(seed), timeout
        config = SchedulerConfig("job", "run", len(works_until), heartbeat=0.0)
        self.machine = Membership(config, "s" * 32, self.world.monotonic())
        self.found_at: float | None = None
        """Virtual seconds at which the scheduler decided that a rank hangs."""
        self.asked = 0
        """Messages that asked a node for stacks."""
        self.nodes: dict[str, SimNode] = {}
        self._last_arrival: dict[tuple[str, str], float] = {}
        first = 0
        for index, times in enumerate(works_until):
            node = SimNode(self, f"n{index}", first, times)
            self.nodes[node.name] = node
            first += len(times)
        self._places = {
            rank + 1: (node, rank) for node in self.nodes.values() for rank in node.ranks
        }

    def play(self, seconds: float) -> None:
        """Let the job run for so many virtual seconds, or until a hang is found."""
        with self._numbers_for_processes():
            for name, node in self.nodes.items():
                workers = len(node.ranks)
                self._step(MessageReceived(name, Hello(PROTOCOL, "agent", "job", name, 0, name, 1)))
                rank = int(name[1:])
                self._step(MessageReceived(name, Join(name, rank, workers, {}, f"{name}:1")))
            for name in self.nodes:
                self._step(MessageReceived(name, Ready(0)))
            for node in self.nodes.values():
                self.world.after(self.world.random.random() * 0.4, node.begin)
            self._tick()
            self.world.run(seconds, lambda: self.found_at is not None)

    def to_scheduler(self, name: str, message: Message) -> None:
        self._deliver(("to", name), self._step, MessageReceived(name, message))

    def _deliver(self, way: tuple[str, str], act: Any, *arguments: Any) -> None:
        """Messages take up to 30 ms; those of one connection arrive in order."""
        now = self.world.now
        at = max(self._last_arrival.get(way, 0.0), now + 0.001 + self.world.random.random() * 0.03)
        self._last_arrival[way] = at
        self.world.after(at - now, act, *arguments)

    def _tick(self) -> None:
        self._step(Tick())
        self.world.after(0.25, self._tick)

    def _step(self, event: MembershipEvent) -> None:
        for action in self.machine.step(event, self.world.monotonic()):
            if isinstance(action, SendMessage):
                self.asked += isinstance(action.message, ShowStacks)
                self._deliver(("from", action.peer), self.nodes[action.peer].take, action.message)
        if self.found_at is None and self.machine.state is JobState.STOPPING:
            self.found_at = self.world.now

    @contextmanager
    def _numbers_for_processes(self) -> Iterator[None]:
        before = monitor.procfs
        scene = self

        class CpuMeter:
            def __init__(self, pid: int, scan_seconds: float) -> None:
                self.node, self.rank = scene._places[pid]

            def read_seconds(self, now: float) -> float:
                return 1.0 + min(scene.world.now, self.node.works_until[self.rank])

        state = SimpleNamespace(letter="S", tracer_pid=0)
        fake: Any = SimpleNamespace(CpuMeter=CpuMeter, read_state=lambda pid: state)
        monitor.procfs = fake
        try:
            yield
        finally:
            monitor.procfs = before
