"""
One life: a job of many nodes, and what goes wrong in it, all drawn from one seed.

    life(seed, nodes) -> Life      raises Violation, InvariantError or LivelockError, whose text names the seed
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.messages import Verdict

from .agent import Job, Run, SimAgent
from .judge import Judge, Violation
from .network import Network
from .scheduler import SimScheduler, quick_disk
from .world import World

TROUBLE = 120.0
"""Faults happen in the first so many virtual seconds; then everything is healed."""
LIMIT = 4000.0
"""Virtual seconds in which any job must be over."""


@dataclass
class Life:
    """What one seed led to."""

    seed: int
    nodes: int
    events: int
    seconds: float
    faults: int
    generations: int
    restarts: int
    code: int
    kinds: dict[str, int] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)


class Play:
    """The scene: scheduler, network, agents, and the hand that breaks things."""

    def __init__(
        self, seed: int, nodes: int, folder: Path, *, traced: bool = False, still: bool = True
    ) -> None:
        self.still = still
        self.world = world = World(seed)
        rng = world.random
        self.config = draw_config(world, nodes)
        self.job = Job(
            work=rng.choice((10, 30, 60)),
            grace=self.config.grace,
            obey=rng.choice((1.0, 1.0, 0.8)),
            elastic=elastic(self.config),
            hang_timeout=rng.choice((5.0, 20.0)),
        )
        self.network = Network(world, self._wake)
        most = self.config.max_restarts if self.config.restart_window is None else None
        self.judge = Judge(most, elastic(self.config))
        self.scheduler = SimScheduler(
            world, self.network, self.config, folder / "scheduler.journal"
        )
        self.agents: list[SimAgent] = []
        self.by_node: dict[str, SimAgent] = {}
        self.faults: dict[str, int] = {}
        self.trace: list[str] = []
        self.traced = traced
        self.scheduler.note = self.note

    def note(self, text: str) -> None:
        """Keep a line for people who replay a seed."""
        if self.traced:
            self.trace.append(f"{self.world.now:9.3f}  {text}")

    def _wake(self) -> None:
        self.scheduler.wake()

    def begin(self) -> None:
        """Plan the arrivals and the trouble."""
        world, rng, config = self.world, self.world.random, self.config
        quick = rng.random() < 0.7
        for index in range(config.nodes + rng.randrange(0, config.spares + 2)):
            way = self.network.way(f"n{index}")
            way.delay = rng.choice((0.001, 0.001, 0.02, 0.3))
            way.stall = rng.choice((0.0, 0.0, 0.0, 2.0))
            world.after(rng.random() * (3.0 if quick else 40.0), self.join, f"n{index}")
        world.after(0.0, self.scheduler.start)
        severity = rng.choice((0, 1, 2, 4, 8, 16))
        for _ in range(severity):
            name, act = rng.choice(FAULTS)
            world.after(rng.random() * TROUBLE, self._fault, name, act)
        if self.still:  # drawn apart: without them, a seed leads to the life that it always had
            own = random.Random(f"{world.seed} stands still")
            for _ in range(own.choice((0, 1, 2, 4))):
                name, act = own.choice(STANDSTILLS)
                world.after(own.random() * TROUBLE, self._fault, name, act)
        world.after(TROUBLE + 60.0, self._heal_all)

    def join(self, node: str) -> None:
        """Somebody starts an agent on a node."""
        if self.scheduler.over or (node in self.by_node and self.by_node[node].alive):
            return
        agent = SimAgent(self.world, self.network, self.job, node, 2, self._started)
        self.agents.append(agent)
        self.by_node[node] = agent

    def _started(self, run: Run) -> None:
        self.note(
            f"{run.agent.node} starts generation {run.assign.generation}, "
            f"ranks {sorted(run.living)}"
        )
        self.judge.started(run)

    def _fault(self, name: str, act: Callable[[Play], str | None]) -> None:
        if self.scheduler.over:
            return
        done = act(self)
        if done is not None:
            self.faults[name] = self.faults.get(name, 0) + 1
            self.note(f"FAULT {name}: {done}")

    def _heal_all(self) -> None:
        for node in list(self.network.ways):
            self.network.heal(node)
            self.network.way(node).stall = 0.0

    def some(self) -> SimAgent | None:
        """Return a random living agent."""
        living = [agent for agent in self.by_node.values() if agent.alive]
        return self.world.random.choice(living) if living else None

    @property
    def over(self) -> bool:
        """Whether nothing more can happen."""
        return self.scheduler.over and not any(agent.alive for agent in self.agents)

    @property
    def verdict(self) -> Verdict | None:
        """The scheduler's, the first one there ever was."""
        return self.scheduler.verdict


def elastic(config: SchedulerConfig) -> bool:
    """Whether a job may change its size."""
    return bool(config.spares or 0 < config.min_nodes < config.nodes)


def draw_config(world: World, nodes: int) -> SchedulerConfig:
    """Return a job of at most ``nodes`` nodes."""
    rng = world.random
    count = rng.randint(1, nodes)
    return SchedulerConfig(
        job="job",
        run="run",
        spec="{}",
        nodes=count,
        min_nodes=rng.choice((0, 0, 1, count, rng.randint(1, count))),
        spares=rng.choice((0, 0, 1, 2)),
        gather=rng.choice((1.0, 10.0)),
        grow=rng.choice((None, 3.0, 20.0)),
        max_restarts=rng.choice((0, 1, 3, 10)),
        restart_window=rng.choice((None, None, 30.0)),
        restart_on=rng.choice(((), (), (1, 137))),
        no_restart_on=rng.choice(((), (), (3,))),
        backoff=rng.choice((0.0, 1.0)),
        grace=rng.choice((0.5, 2.0, 10.0)),
        start_timeout=rng.choice((30.0, 120.0)),
        time_limit=rng.choice((None, None, None, 100.0)),
        patience=60.0,
    )


# What goes wrong
# ---------------


def _worker_fails(play: Play) -> str | None:
    agent, rng = play.some(), play.world.random
    if agent is None or agent.run is None or not agent.run.living:
        return None
    rank = rng.choice(sorted(agent.run.living))
    kind, code = rng.choice((("exception", 1), ("exit", 3), ("signal", 139), ("oom", 137)))
    agent.fail(rank, kind, code)
    for peer in list(
        play.by_node.values()
    ):  # its peers lose their connections to it, and may say so first
        if peer.run and peer.run.living and rng.random() < 0.3:
            peer.later(rng.random() * 0.05, peer.fail, min(peer.run.living), "communication", 1)
    return f"rank {rank} on {agent.node}: {kind} {code}"


def _worker_hangs(play: Play) -> str | None:
    agent = play.some()
    if agent is None or agent.run is None or not agent.run.living:
        return None
    rank = play.world.random.choice(sorted(agent.run.living))
    agent.hang(rank)
    return f"rank {rank} on {agent.node}"


def _dies(silently: bool) -> Callable[[Play], str | None]:
    def act(play: Play) -> str | None:
        agent = play.some()
        if agent is None:
            return None
        agent.die(silently=silently)
        if play.world.random.random() < 0.6:
            play.world.after(play.world.random.choice((0.3, 1.0, 15.0)), play.join, agent.node)
        return agent.node

    return act


def _freezes(play: Play) -> str | None:
    agent = play.some()
    if agent is None or agent.frozen:
        return None
    seconds = play.world.random.choice((2.0, 5.0, 12.0, 20.0, 40.0))
    agent.freeze(seconds)
    play.world.after(seconds, play.judge.thawed.__setitem__, agent.node, play.world.now + seconds)
    return f"{agent.node} for {seconds} s"


def _cut(play: Play) -> str | None:
    rng = play.world.random
    agent = play.some()
    if agent is None:
        return None
    seconds = rng.choice((0.5, 2.0, 5.0, 9.0, 30.0))
    up, down = rng.choice(((True, True), (True, False), (False, True)))
    play.network.cut(agent.node, up=up, down=down)
    play.world.after(seconds, play.network.heal, agent.node)
    return f"{agent.node} {'up' if up else ''}{'down' if down else ''} for {seconds} s"


def _partition(play: Play) -> str | None:
    rng = play.world.random
    nodes = [node for node in play.by_node if rng.random() < 0.5]
    seconds = rng.choice((1.0, 5.0, 30.0))
    for node in nodes:
        play.network.cut(node, up=True, down=True)
        play.world.after(seconds, play.network.heal, node)
    return f"{len(nodes)} nodes for {seconds} s"


def _flaps(play: Play) -> str | None:
    agent = play.some()
    if agent is None:
        return None
    for turn in range(10):
        play.world.after(
            2.0 * turn, lambda node=agent.node: play.network.cut(node, up=True, down=True)
        )
        play.world.after(2.0 * turn + 1.0, play.network.heal, agent.node)
    return agent.node


def _reset(play: Play) -> str | None:
    agent = play.some()
    if agent is None or agent.connection is None or not agent.connection.here:
        return None
    connection, agent.reset_at = agent.connection, play.world.now
    play.network.client_gone(connection)
    agent.disconnected(connection)
    return agent.node


def _scheduler_dies(play: Play) -> str | None:
    return play.scheduler.kill(in_the_middle=play.world.random.random() < 0.5)


def _scheduler_pauses(play: Play) -> str | None:
    seconds = play.world.random.choice((1.0, 5.0, 12.0, 25.0))
    return play.scheduler.pause(seconds)


def _departs(play: Play) -> str | None:
    agent = play.some()
    if agent is None or not play.job.elastic:
        return None
    agent.depart()
    return agent.node


def _late(play: Play) -> str | None:
    node = f"n{play.world.random.randrange(100, 110)}"
    if node in play.by_node and play.by_node[node].alive:
        return None
    play.join(node)
    return node


def _stopped(play: Play) -> str | None:
    agent = play.some()
    if agent is None or play.world.random.random() < 0.7:
        return None
    agent.stop()
    return agent.node


def _unready(play: Play) -> str | None:
    agent = play.some()
    if agent is None or play.world.random.random() < 0.7:
        return None
    agent.unready = "the disk is full"
    return agent.node


def _stands_still(agent: bool, supervisor: bool) -> Callable[[Play], str | None]:
    def act(play: Play) -> str | None:
        one = play.some()
        if one is None or one.frozen or play.world.now < one.still_until:
            return None
        seconds = play.world.random.choice((3.0, 7.5, 9.5, 12.0, 30.0))
        if supervisor:
            one.stop_supervisor(seconds)
        if agent:
            one.stop_agent(seconds)
        return f"{one.node} for {seconds} s"

    return act


def _scheduler_stands_still(play: Play) -> str | None:
    return play.scheduler.stand_still(play.world.random.choice((4.0, 9.0, 40.0)))


STANDSTILLS: tuple[tuple[str, Callable[[Play], str | None]], ...] = (
    ("agent stops", _stands_still(True, False)),
    ("agent stops", _stands_still(True, False)),
    ("supervisor stops", _stands_still(False, True)),
    ("both stop", _stands_still(True, True)),
    ("scheduler stops", _scheduler_stands_still),
    ("cut", _cut),
)
"""Single processes that are stopped (SIGSTOP), not whole machines; with a cut now and then."""

FAULTS: tuple[tuple[str, Callable[[Play], str | None]], ...] = (
    ("worker", _worker_fails),
    ("worker", _worker_fails),
    ("hang", _worker_hangs),
    ("crash", _dies(False)),
    ("power", _dies(True)),
    ("freeze", _freezes),
    ("cut", _cut),
    ("partition", _partition),
    ("flap", _flaps),
    ("reset", _reset),
    ("scheduler", _scheduler_dies),
    ("pause", _scheduler_pauses),
    ("depart", _departs),
    ("late", _late),
    ("stop", _stopped),
    ("unready", _unready),
)


def life(seed: int, nodes: int, *, traced: bool = False, still: bool = True) -> Life:
    """
    Let one job live and return what happened; ``still``: processes are stopped in it, too.

    Raises:
        AssertionError: a rule was broken; the text begins with the seed, the notes say what had
            happened.
    """
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shm) as folder, quick_disk():
        return _lived(Play(seed, nodes, Path(folder), traced=traced, still=still), seed, nodes)


def _lived(play: Play, seed: int, nodes: int) -> Life:
    try:
        play.begin()
        play.world.run(LIMIT, lambda: play.over)
        play.judge.at_the_end(play.agents, play.verdict)
        if not play.scheduler.over:
            raise Violation("the scheduler never ended")
    except Exception as error:
        error.args = (
            f"seed {seed} with {nodes} nodes, at {play.world.now:.3f} s: {error}",
            *error.args[1:],
        )
        for line in play.trace:
            error.add_note(line)
        raise
    finally:
        play.scheduler.close()
    machine = play.scheduler.machine
    assert machine is not None and play.verdict is not None
    return Life(
        seed,
        play.config.nodes,
        play.world.events,
        play.world.now,
        sum(play.faults.values()),
        machine.generation.number + 1,
        machine.shutdown.restarts,
        play.verdict.code,
        play.faults,
        play.trace,
    )
