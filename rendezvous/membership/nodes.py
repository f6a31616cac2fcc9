"""
Nodes: what is known of each, who may come in, and in which order they stand. Pure functions over
plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pdrun.names import natural_key
from pdrun.rendezvous.policies.texts import rank_label, refuse_difference, refuse_same_name
from pdrun.rendezvous.protocol.events import Peer, SchedulerConfig
from pdrun.rendezvous.protocol.messages import Assign, Hello, Join, Refuse
from pdrun.text import plural

MAX_WORKERS_PER_NODE = 1 << 16
"""
Workers of one node; what claims more is a mistake, and would make a table of ranks that no memory
holds.
"""

MAX_NAMES = 16
"""Names in one message about who is here and who is not."""


class Phase(Enum):
    """Where a node stands in the present generation."""

    STANDBY = "standby"
    """It has no part in it."""
    JOINED = "joined"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    LEFT = "left"
    LOST = "lost"

    __hash__ = object.__hash__
    """
    By identity, as equality is: Enum's own is a function of Python's, and phases are counted at
    every step.
    """


@dataclass(eq=False)
class Member:
    """A node that is, or was, in the job. Owned and changed by the membership machine only."""

    hello: Hello
    join: Join
    peer: Peer | None
    """Its connection; None while it is cut."""
    alive_at: float
    """When it was last heard, on the clock of the failure detector (`Watch`)."""
    answered_at: float
    """
    Since when it may not have heard the scheduler: the time of its last heartbeat that it knows to
    be answered.
    """
    store: str
    """Where it holds a socket for the store of the next generation."""
    phase: Phase = Phase.JOINED
    cut_at: float = 0.0
    """While cut: since when, on the scheduler's clock."""
    lost_at: float = 0.0
    """While cut: when it will be given up, on the detector's clock."""
    is_suspect: bool = False
    index: int = -1
    """
    Place in the present generation, in the last one while another is being formed; -1: it had no
    part.
    """
    first_rank: int = 0
    exit_codes: dict[int, int] = field(default_factory=dict)
    """rank -> code, of the present generation."""
    standby_reason: str = ""
    """What it was told about why it has no part."""
    depart_reason: str = ""
    """Why it is about to leave."""

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.join.node

    @property
    def label(self) -> str:
        """The node, and its host where that is another name."""
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
        """Whether it still counts: neither lost nor gone."""
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
    Return why a node cannot join those who are here, or None when it can.

    Args:
        first: one of those who are here, if any are; they agree with each other.
        namesake: who is here and has the newcomer's name.
        rival: who is here and asked for the place that the newcomer asks for.
    """
    if not join.node or not 1 <= join.workers <= MAX_WORKERS_PER_NODE:
        return Refuse(
            78,
            f"a {config.unit} needs a name and 1 to {MAX_WORKERS_PER_NODE} workers, not {join.node!r} with {join.workers}",
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

    Those who were in the last generation keep their order. The others get the node rank that they
    asked for, where there is such a place, and fill what is free behind, in the order of the host
    list, else of the natural sort of their names. So of a first generation the result depends on
    who is here only, not on who came first.
    """
    given = {name: place for place, name in enumerate(config.hosts)}
    stay = sorted(
        (member for member in members if member.index >= 0), key=lambda member: member.index
    )
    claimed: dict[int | None, Member] = {
        member.join.node_rank: member
        for member in members
        if member.index < 0
        and member.join.node_rank is not None
        and member.join.node_rank < len(members)
    }
    new = sorted(
        (
            member
            for member in members
            if member.index < 0 and member is not claimed.get(member.join.node_rank)
        ),
        key=lambda m: (given.get(m.name, given.get(m.hello.host, len(given))), natural_key(m.name)),
    )
    free = iter([*stay, *new])
    return [claimed[place] if place in claimed else next(free) for place in range(len(members))]


def describe_missing(
    config: SchedulerConfig, lacking: int, names: Mapping[str, Member], claims: Mapping[int, Member]
) -> tuple[str, ...]:
    """
    Return who is not here: names where they are known, else node ranks, else a count.

    Args:
        lacking: how many are.
        names, claims: those who are here, by name and by the node rank that they asked for.
    """
    if lacking <= 0:
        return ()
    if config.hosts and lacking <= MAX_NAMES:
        hosts = {member.hello.host for member in names.values()}
        absent = [host for host in config.hosts if host not in names and host not in hosts]
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
    Number the nodes, which stand in rank order, and return each one's place. ``agreed``: see
    `Assign.agreed_step`.

    Sets ``index`` and ``first_rank`` of each. Local ranks count the workers of nodes that share a
    host.
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
