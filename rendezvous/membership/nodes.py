"""
Nodes: their state, objections to a join, and the rank order. Pure functions over plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pdrun.rendezvous.policies.texts import rank_label, refuse_difference, refuse_same_name
from pdrun.rendezvous.protocol.events import Peer, SchedulerConfig
from pdrun.rendezvous.protocol.messages import Assign, Hello, Join, Refuse
from pdrun.text import is_node_name, natural_key, plural

MAX_WORKERS_PER_NODE = 1 << 16
"""A larger number is a mistake, and would need a table of ranks that does not fit in memory."""

MAX_NAMES = 16
"""Maximum names of present or missing nodes in a message."""


class Phase(Enum):
    """State of a node in the present generation."""

    STANDBY = "standby"
    """It does not take part."""
    JOINED = "joined"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    LEFT = "left"
    LOST = "lost"

    __hash__ = object.__hash__
    """
    By identity, as equality is. Enum's own hash is a Python function, and phases are counted at
    every step.
    """


class CutKind(Enum):
    """How the connection of a node ended, as far as the scheduler sees it."""

    CLOSED = "its connection was closed"
    """While messages were exchanged: by the end of its agent, or by a network that resets it."""
    SILENT = "the probes of its connection were not answered"
    UNANSWERED = "it closed a connection on which it received nothing"
    RELAY = "its relay ended"
    RESUMED = "the scheduler was started again"


@dataclass(eq=False)
class Member:
    """A node of the job. Only the membership machine changes it."""

    hello: Hello
    join: Join
    peer: Peer | None
    """Its connection; None while it is cut."""
    alive_at: float
    """Time of its last message, on the clock of the `FailureDetector`."""
    answered_at: float
    """
    Time since which it may not receive the scheduler's messages: that of its last heartbeat that it
    knows to be answered.
    """
    store: str
    """Address of its socket for the store of the next generation."""
    phase: Phase = Phase.JOINED
    cut_at: float = 0.0
    """While cut: time of the cut, on the scheduler's clock."""
    cut_kind: CutKind = CutKind.CLOSED
    """While cut: what was seen of the cut."""
    lost_at: float = 0.0
    """While cut: time at which it is lost, on the detector's clock."""
    is_suspect: bool = False
    challenge: tuple[str, int, float] | None = None
    """
    Host and pid of an agent that asks for its name or rank, and the time of its first request, on
    the detector's clock.
    """
    index: int = -1
    """Node rank in the present generation, or in the last one while another is formed; -1: none."""
    first_rank: int = 0
    exit_codes: dict[int, int] = field(default_factory=dict)
    """rank -> exit code, in the present generation."""
    standby_reason: str = ""
    """The reason that it was sent with Standby."""
    depart_reason: str = ""
    """Why it is about to leave; empty: it stays."""

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.join.node

    @property
    def label(self) -> str:
        """The node's name, with its host if that differs."""
        if self.hello.host in ("", self.name):
            return self.name
        return f"{self.name} (host {self.hello.host})"

    @property
    def ranks(self) -> range:
        """Its global ranks in the present generation."""
        if self.index < 0:
            return range(0)
        return range(self.first_rank, self.first_rank + self.join.workers)

    @property
    def is_present(self) -> bool:
        """Whether it is a node of the job: neither lost nor left."""
        return self.phase not in (Phase.LOST, Phase.LEFT)


def find_join_objection(
    config: SchedulerConfig,
    first: Member | None,
    namesake: Member | None,
    rival: Member | None,
    hello: Hello,
    join: Join,
) -> Refuse | None:
    """
    Return why a node cannot join, or None if it can.

    Args:
        first: any present node; present nodes agree with each other.
        namesake: the present node with the same name.
        rival: the present node that asked for the same node rank.
    """
    least = 0 if config.unit == "worker" else 1
    if not is_node_name(join.node) or not least <= join.workers <= MAX_WORKERS_PER_NODE:
        return Refuse(
            78,
            f"a {config.unit} must have a name (letters, digits and . _ - : %) and "
            f"1 to {MAX_WORKERS_PER_NODE} workers, "
            f"got {join.node!r} with {join.workers}",
        )
    if first is not None and (different := differing_facts(config.must_agree, first, join)):
        return refuse_difference(different[0], first.join, join)
    if namesake is not None:
        return refuse_same_name(config, join.node, namesake.hello, hello)
    if rival is not None and join.node_rank is not None:
        return Refuse(
            78,
            f"{rank_label(config, join.node_rank)} is claimed twice: by {rival.name} on host "
            f"{rival.hello.host} and by {join.node} on host {hello.host}",
        )
    if join.node_rank is not None and not 0 <= join.node_rank < config.nodes:
        return Refuse(
            78,
            f"{join.node} asks for {rank_label(config, join.node_rank)}, but the job has "
            f"{plural(config.nodes, config.unit)}: 0 to {config.nodes - 1}",
        )
    return None


def differing_facts(keys: Iterable[str], first: Member, join: Join) -> list[str]:
    """Return those of ``keys`` that are facts of both nodes and differ."""
    mine = first.join.facts
    theirs = join.facts
    return [key for key in keys if key in mine and key in theirs and mine[key] != theirs[key]]


def order_by_rank(config: SchedulerConfig, members: Sequence[Member]) -> list[Member]:
    """
    Return the nodes in rank order.

    Nodes of the last generation keep their order. The others get the node rank that they asked for,
    if there is such a place. The rest fill the free places behind, in the order of the host list,
    or in the natural order of their names. So the first generation depends only on which nodes are
    present, not on the order of their joins. In a dynamic cluster a process that has the place it
    asked for keeps it, too: another may have left before it for a moment, to start again. Nodes
    without workers come last: they are parameter servers of a dynamic cluster.
    """
    given = {name: place for place, name in enumerate(config.hosts)}
    is_dynamic = config.unit == "worker"
    claimed: dict[int | None, Member] = {
        member.join.node_rank: member
        for member in members
        if (member.index < 0 or (is_dynamic and member.index == member.join.node_rank))
        and member.join.node_rank is not None
        and member.join.node_rank < len(members)
    }
    stay = sorted(
        (
            member
            for member in members
            if member.index >= 0 and member is not claimed.get(member.join.node_rank)
        ),
        key=lambda member: member.index,
    )
    new = sorted(
        (
            member
            for member in members
            if member.index < 0 and member is not claimed.get(member.join.node_rank)
        ),
        key=lambda m: (given.get(m.name, given.get(m.hello.host, len(given))), natural_key(m.name)),
    )
    free = iter([*stay, *new])
    placed = [claimed[place] if place in claimed else next(free) for place in range(len(members))]
    return sorted(placed, key=lambda member: member.join.workers == 0)


def describe_missing(
    config: SchedulerConfig, lacking: int, names: Mapping[str, Member], claims: Mapping[int, Member]
) -> tuple[str, ...]:
    """
    Return the missing nodes: names if known, otherwise node ranks, otherwise a count.

    A node of the host list is known by its name, its host or its requested rank: a list may have
    addresses, and other names than the hosts call themselves.

    Args:
        lacking: number of missing nodes.
        names, claims: present nodes, by name and by requested node rank.
    """
    if lacking <= 0:
        return ()
    if config.hosts and lacking <= MAX_NAMES:
        places = {name: place for place, name in enumerate(config.hosts)}
        here = {
            places.get(name, places.get(member.hello.host, member.join.node_rank))
            for name, member in names.items()
        }
        absent = [name for place, name in enumerate(config.hosts) if place not in here]
        if len(absent) == lacking:
            return tuple(absent)
    if claims and len(claims) == len(names) and lacking <= MAX_NAMES:
        return tuple(
            rank_label(config, rank) for rank in range(config.nodes) if rank not in claims
        )[:lacking]
    return (plural(lacking, f"more {config.unit}"),)


def assign_ranks(
    nodes: Sequence[Member], generation: int, restarts: int, agreed_step: int
) -> list[Assign]:
    """
    Number the nodes, which are in rank order, and return each one's place.

    Sets ``index`` and ``first_rank`` of each. Local ranks count the workers of nodes that share a
    host. ``agreed_step``: see `Assign.agreed_step`.
    """
    world = sum(member.join.workers for member in nodes)
    shared: dict[str, int] = {}
    for member in nodes:
        host = _host_key(member)
        shared[host] = shared.get(host, 0) + member.join.workers
    first = 0
    seen = dict.fromkeys(shared, 0)
    result = []
    for index, member in enumerate(nodes):
        host = _host_key(member)
        member.index = index
        member.first_rank = first
        result.append(
            Assign(
                generation=generation,
                node_rank=index,
                nodes=len(nodes),
                first_rank=first,
                world_size=world,
                restarts=restarts,
                master=nodes[0].store,
                local_rank=seen[host],
                local_world_size=shared[host],
                agreed_step=agreed_step,
            )
        )
        seen[host] += member.join.workers
        first += member.join.workers
    return result


def _host_key(member: Member) -> str:
    return member.join.facts.get("host", member.hello.host)
