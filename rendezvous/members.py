"""
Nodes: what is known of each, who may come in, and in which order they stand. Pure functions over plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pdrun.names import natural_key
from pdrun.rendezvous import wording
from pdrun.rendezvous.events import Peer, SchedulerConfig
from pdrun.rendezvous.messages import Assign, Hello, Join, Refuse

MOST_WORKERS = 1 << 16
"""Workers of one node; what claims more is a mistake, and would make a table of ranks that no memory holds."""


class Phase(Enum):
    """Where a node stands in the present generation."""

    JOINED = "joined"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    LEFT = "left"
    LOST = "lost"


@dataclass
class Member:
    """A node that takes part. Owned and changed by the membership machine only."""

    hello: Hello
    join: Join
    peer: Peer | None
    """Its connection; None while it is cut."""
    heard: float
    """When it was last heard, on the scheduler's clock, moved by the scheduler's own stalls."""
    store: str
    """Where it holds a socket for the store of the next generation."""
    phase: Phase = Phase.JOINED
    cut_at: float = 0.0
    """While cut: since when."""
    gone_at: float = 0.0
    """While cut: when it will be given up."""
    suspect: bool = False
    index: int = -1
    first_rank: int = 0
    exits: dict[int, int] = field(default_factory=dict)
    """rank -> code, of the present generation."""
    why_lost: str = ""

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.join.node

    @property
    def place(self) -> str:
        """The node, and its host where that is another name."""
        return self.name if self.hello.host in ("", self.name) else f"{self.name} (host {self.hello.host})"

    @property
    def ranks(self) -> range:
        """Its global ranks in the present generation."""
        return range(self.first_rank, self.first_rank + self.join.workers)

    @property
    def here(self) -> bool:
        """Whether it still counts: neither lost nor gone."""
        return self.phase not in (Phase.LOST, Phase.LEFT)


def objection(config: SchedulerConfig, members: Sequence[Member], hello: Hello, join: Join) -> Refuse | None:
    """Return why a node cannot join those who are here, or None when it can."""
    if not join.node or not 1 <= join.workers <= MOST_WORKERS:
        return Refuse(
            78, f"a {config.unit} needs a name and 1 to {MOST_WORKERS} workers, not {join.node!r} with {join.workers}"
        )
    if members and (different := disagreement(config.must_agree, members[0], join)):
        return wording.must_agree(different[0], members[0].join, join)
    for other in members:
        if other.name == join.node:
            return wording.same_name(config, join.node, other.hello, hello)
        if join.node_rank is not None and other.join.node_rank == join.node_rank:
            return Refuse(
                78, f"{wording.place(config, join.node_rank)} is claimed twice: by {other.name} on host "
                f"{other.hello.host} and by {join.node} on host {hello.host}",
            )  # fmt: skip
    if join.node_rank is not None and not 0 <= join.node_rank < config.nodes:
        return Refuse(
            78, f"{join.node} asks for {wording.place(config, join.node_rank)}, but the job has "
            f"{wording.count(config.nodes, config.unit)}: 0 to {config.nodes - 1}",
        )  # fmt: skip
    return None


def disagreement(keys: Iterable[str], first: Member, join: Join) -> list[str]:
    """Return those of ``keys`` that are facts of both nodes and differ."""
    mine, theirs = first.join.facts, join.facts
    return [key for key in keys if key in mine and key in theirs and mine[key] != theirs[key]]


def ordered(config: SchedulerConfig, members: Iterable[Member]) -> list[Member]:
    """
    Return the nodes in rank order.

    A node rank that was asked for wins; the others fill the free places in the order of the host list, else of the
    natural sort of their names. The result depends on who is here only, not on who came first.
    """
    members = list(members)
    given = {name: place for place, name in enumerate(config.hosts)}
    claimed = {member.join.node_rank: member for member in members if member.join.node_rank is not None}
    free = iter(sorted(
        (member for member in members if member.join.node_rank is None),
        key=lambda m: (given.get(m.name, given.get(m.hello.host, len(given))), natural_key(m.name)),
    ))  # fmt: skip
    return [claimed[place] if place in claimed else next(free) for place in range(len(members))]


def missing(config: SchedulerConfig, members: Sequence[Member]) -> tuple[str, ...]:
    """Return who is not here: names where they are known, else node ranks, else a count."""
    lacking = config.nodes - len(members)
    if lacking <= 0:
        return ()
    names = {member.name for member in members} | {member.hello.host for member in members}
    absent = [host for host in config.hosts if host not in names]
    if len(absent) == lacking:
        return tuple(absent)
    claimed = {member.join.node_rank for member in members}
    if members and None not in claimed and lacking <= 64:
        return tuple(wording.place(config, rank) for rank in range(config.nodes) if rank not in claimed)
    return (wording.count(lacking, f"more {config.unit}"),)


def assignments(nodes: Sequence[Member], generation: int, restarts: int) -> list[Assign]:
    """
    Number the nodes, which stand in rank order, and return each one's place.

    Sets ``index`` and ``first_rank`` of each. Local ranks count the workers of nodes that share a host.
    """
    world = sum(member.join.workers for member in nodes)
    shared: dict[str, int] = {}
    for member in nodes:
        host = _machine(member)
        shared[host] = shared.get(host, 0) + member.join.workers
    first, seen, result = 0, dict.fromkeys(shared, 0), []
    for index, member in enumerate(nodes):
        host = _machine(member)
        member.index, member.first_rank = index, first
        result.append(Assign(
            generation=generation, node_rank=index, nodes=len(nodes), first_rank=first, world_size=world,
            restarts=restarts, master=nodes[0].store, local_rank=seen[host], local_world_size=shared[host],
        ))  # fmt: skip
        seen[host] += member.join.workers
        first += member.join.workers
    return result


def _machine(member: Member) -> str:
    return member.join.facts.get("host", member.hello.host)
