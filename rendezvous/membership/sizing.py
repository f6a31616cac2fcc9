"""
The size of a job: who may join, who takes part in a generation, who stands by.

A generation has at most ``nodes`` nodes and at least `required_nodes`. Up to ``spares`` further
nodes stand by. A node that stands by takes part when the next generation is formed.
"""

from __future__ import annotations

from itertools import islice

from pdrun.rendezvous.membership.job import ActionOutbox, Job
from pdrun.rendezvous.membership.nodes import (
    MAX_NAMES,
    Member,
    Phase,
    describe_missing,
    order_by_rank,
)
from pdrun.rendezvous.membership.roster import Roster
from pdrun.rendezvous.membership.transitions import JobState
from pdrun.rendezvous.policies.texts import (
    refuse_full,
    refuse_over,
    refuse_stopping,
    standby_reason,
)
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.messages import Join, Refuse, Standby, Waiting

MAX_ANNOUNCED_NODES = 32
"""In a larger job Waiting is sent at intervals only, not at each join."""


def required_nodes(config: SchedulerConfig) -> int:
    """Return the minimum number of nodes of a generation."""
    return config.min_nodes or config.nodes


def is_elastic(config: SchedulerConfig) -> bool:
    """Whether the job can lose a node and continue without waiting for another one."""
    return required_nodes(config) < config.nodes or config.spares > 0


def lease_seconds(config: SchedulerConfig, dead: float) -> float:
    """
    Return `Welcome.lease`: the time without the scheduler after which a node stops its workers.

    Two thirds of ``dead``, so that the workers have ended when the node is marked lost.
    """
    replaceable = is_elastic(config) or config.max_restarts > 0
    return dead * 2 / 3 if config.heartbeat and replaceable else 0.0


# Who may join
# ------------


def is_open(config: SchedulerConfig, state: JobState) -> bool:
    """Whether the job can use another node, new or marked lost. A refusal contains it."""
    if state in (JobState.GATHERING, JobState.RESTARTING):
        return True
    return is_elastic(config) and state not in (JobState.STOPPING, JobState.DONE)


def find_closed_reason(job: Job) -> Refuse | None:
    """Return why no node can join any more, or None."""
    if job.state is JobState.DONE:
        return refuse_over(job.config, job.key)
    if is_open(job.config, job.state):
        return None
    if is_elastic(job.config):
        return refuse_stopping(job.config, job.key)
    return refuse_full(job.config, job.key)


def is_full(config: SchedulerConfig, roster: Roster) -> bool:
    """Whether all places are taken, those of the spares included."""
    return roster.staying_count >= config.nodes + config.spares


def find_replaced(job: Job, join: Join, now: float) -> Member | None:
    """
    Return the node that a joining node replaces: same name, and its connection is cut.

    That is an agent that was started again. None if the job cannot continue without the old node,
    or cannot use the new one.
    """
    old = job.roster.names.get(join.node)
    if old is None or old.peer is not None:
        return None
    is_running = job.state is JobState.RUNNING
    if is_open(job.config, job.state) or (is_running and job.restarts_left(now) > 0):
        return old
    return None


def fence_member(
    roster: Roster, outbox: ActionOutbox, member: Member, why: str, code: int = 0
) -> None:
    """
    Mark a node lost that may still have workers. All its later messages are refused.

    Args:
        code: exit code for its agent; 0: it may join again as a new node, if the job can use it.
    """
    reason = f"{member.name} was given up: {why}"
    peer = roster.remove_member(member, Phase.LOST)
    roster.gone[member.hello.agent] = reason
    if peer is not None:
        outbox.fenced.append((peer, reason, code))
    outbox.record_event("lost", node=member.name, reason=why)


# Who takes part
# --------------


def has_enough_nodes(config: SchedulerConfig, roster: Roster, incoming: int = 0) -> bool:
    """Whether the staying nodes and ``incoming`` others, which join now, can form a generation."""
    return roster.staying_count + incoming >= required_nodes(config)


def count_present(roster: Roster) -> int:
    """While gathering: return the number of nodes that are connected and stay."""
    leaving = sum(member.peer is not None for member in roster.departing.values())
    return roster.counts[Phase.JOINED] - len(roster.cut) - leaving


def can_form(config: SchedulerConfig, roster: Roster) -> bool:
    """While gathering: whether a generation of full size can be formed."""
    return count_present(roster) >= config.nodes


def should_form(job: Job, now: float) -> bool:
    """While gathering: whether to form a smaller generation, because no other node joins."""
    config = job.config
    if not is_elastic(config) or count_present(job.roster) < required_nodes(config):
        return False
    overdue = now - job.state_since > config.start_timeout
    quiet = now - max(job.roster.joined_at, job.state_since) >= config.gather
    # A node whose connection is cut reconnects or is marked lost soon.
    return overdue or (quiet and not job.roster.cut)


def should_grow(job: Job, now: float) -> bool:
    """While running: whether to form a larger generation with the nodes that stand by."""
    grow = job.config.grow
    roster = job.roster
    counts = roster.counts
    if grow is None or counts[Phase.STANDBY] == 0 or counts[Phase.RUNNING] >= job.config.nodes:
        return False
    if counts[Phase.FINISHED] or job.generation.hang is not None:
        return False
    if now - max(roster.joined_at, job.generation.started_at) < grow:
        return False
    return any(
        member.peer is not None and not member.depart_reason
        for member in roster.members.values()
        if member.phase is Phase.STANDBY
    )


def choose_members(config: SchedulerConfig, roster: Roster) -> list[Member]:
    """
    Return the nodes of the next generation, in rank order.

    Nodes of the last generation come first, then connected nodes, then the others; within each
    group in the order of their joins.
    """

    def priority(member: Member) -> tuple[bool, int]:
        if member.index >= 0:
            return False, member.index
        return True, member.peer is None

    staying = [member for member in roster.members.values() if not member.depart_reason]
    chosen = sorted(staying, key=priority)[: config.nodes]
    # A new node whose connection is cut takes part only if it is needed.
    while len(chosen) > required_nodes(config) and chosen[-1].index < 0 and chosen[-1].peer is None:
        chosen.pop()
    return order_by_rank(config, chosen)


# What nodes are sent
# -------------------


def send_waiting(job: Job, now: float) -> None:
    """Send every node the names of present and missing nodes."""
    config = job.config
    roster = job.roster
    job.next_waiting_at = now + config.waiting_every
    here = len(roster.members)
    elapsed = now - job.state_since
    timeout = config.start_timeout
    expected = required_nodes(config) if here < required_nodes(config) else config.nodes
    if is_elastic(config) and here >= required_nodes(config):
        elapsed = now - max(roster.joined_at, job.state_since)
        timeout = min(config.gather, timeout)
    waiting = Waiting(
        tuple(member.name for member in islice(roster.members.values(), MAX_NAMES)),
        describe_missing(config, expected - here, roster.names, roster.claims),
        expected,
        round(elapsed, 3),
        timeout,
        here,
    )
    job.broadcast(waiting)


def announce_arrival(job: Job, now: float) -> None:
    """Send Waiting after a join, if the job is small and still incomplete."""
    count = len(job.roster.members)
    if count <= MAX_ANNOUNCED_NODES and count < job.config.nodes:
        send_waiting(job, now)


def send_standby(job: Job, member: Member) -> None:
    """Send a node why it does not take part in the present generation, if the reason is new."""
    reason = standby_reason(job.config, len(job.generation.assigns))
    if reason == member.standby_reason:
        return
    member.standby_reason = reason
    job.outbox.send_to(member, Standby(reason))
    job.outbox.record_event("standby", node=member.name, reason=reason)
