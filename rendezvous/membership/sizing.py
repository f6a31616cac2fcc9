"""
Who may come in, and who takes part: the sizes of a job, the forming of a generation, those who
stand by.

A job has at most ``nodes`` nodes in a generation and at least `least`; up to ``spares`` further
ones stand by. What stands by, because it came too late or there is no place, takes part when the
next generation is formed.
"""

from __future__ import annotations

from pdrun.rendezvous.membership.job import Job
from pdrun.rendezvous.membership.nodes import (
    MAX_NAMES,
    Member,
    Phase,
    describe_missing,
    order_by_rank,
)
from pdrun.rendezvous.membership.transitions import JobState
from pdrun.rendezvous.policies import restart
from pdrun.rendezvous.policies.texts import (
    refuse_full,
    refuse_over,
    refuse_stopping,
    standby_reason,
)
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.messages import Join, Refuse, Standby, Waiting

MAX_ANNOUNCED_NODES = 32
"""Nodes; more are told who is here at intervals only, not at each arrival."""


def required_nodes(config: SchedulerConfig) -> int:
    """Return how many nodes the job needs."""
    return config.min_nodes or config.nodes


def is_elastic(config: SchedulerConfig) -> bool:
    """Whether the job can lose a node and go on without waiting for another one."""
    return required_nodes(config) < config.nodes or config.spares > 0


def lease_seconds(config: SchedulerConfig, dead: float) -> float:
    """
    Return `Welcome.lease`: how long a node may be cut off from the scheduler before it must end its
    workers.
    """
    replaceable = is_elastic(config) or config.max_restarts > 0
    return dead * 2 / 3 if config.heartbeat and replaceable else 0.0


def restarts_left(job: Job, now: float) -> int:
    """Return how many restarts are left."""
    return restart.restarts_left(job.config, job.shutdown.restart_history, now)


# Who may come in
# ------------------------------------------------------------------------------------------------------


def is_open(job: Job) -> bool:
    """Whether a node that was given up, or is new, could be of use: told to it with its refusal."""
    if job.state in (JobState.GATHERING, JobState.RESTARTING):
        return True
    return is_elastic(job.config) and job.state not in (JobState.STOPPING, JobState.DONE)


def find_closed_reason(job: Job) -> Refuse | None:
    """Return why nobody can come in any more, or None."""
    if job.state is JobState.DONE:
        return refuse_over(job.config, job.key)
    if is_open(job):
        return None
    return (refuse_stopping if is_elastic(job.config) else refuse_full)(job.config, job.key)


def is_full(job: Job) -> bool:
    """Whether there is no place left, not even to stand by."""
    return (
        len(job.roster.members) - len(job.roster.departing) >= job.config.nodes + job.config.spares
    )


def find_replaced(job: Job, join: Join, now: float) -> Member | None:
    """
    Return the node whose agent was started again, when that is what a newcomer means: it has the
    same name, and its connection is cut. Only where the job can go on without the old one, and with
    the new.
    """
    old = job.roster.names.get(join.node)
    if old is None or old.peer is not None:
        return None
    if is_open(job) or (job.state is JobState.RUNNING and restarts_left(job, now) > 0):
        return old
    return None


def fence_member(job: Job, member: Member, why: str, code: int = 0) -> None:
    """
    Give a node up that may still have workers: whatever it says from now on counts for nothing.

    Args:
        code: with which its agent is to leave; 0: it may come back as a new one, where the job can
            use it.
    """
    told = f"{member.name} was given up: {why}"
    peer = job.roster.remove_member(member, Phase.LOST)
    job.roster.gone[member.hello.agent] = told
    if peer is not None:
        job.outbox.fenced.append((peer, told, code))
    job.outbox.record_event("lost", node=member.name, reason=why)


# Who takes part
# -------------------------------------------------------------------------------------------------------


def has_enough_nodes(job: Job, incoming: int = 0) -> bool:
    """
    Whether those who are here, with so many who are ``coming`` right now, can form a generation.
    """
    return len(job.roster.members) - len(job.roster.departing) + incoming >= required_nodes(
        job.config
    )


def count_present(job: Job) -> int:
    """While gathering: return how many nodes are connected and stay."""
    leaving = sum(member.peer is not None for member in job.roster.departing.values())
    return job.roster.counts[Phase.JOINED] - len(job.roster.cut) - leaving


def can_form(job: Job) -> bool:
    """
    While gathering: whether as many are here as take part at most, so that nobody else need be
    awaited.
    """
    return count_present(job) >= job.config.nodes


def should_form(job: Job, now: float) -> bool:
    """
    While gathering: whether to form a generation of those who are here, since nobody else seems to
    come.
    """
    if not is_elastic(job.config) or count_present(job) < required_nodes(job.config):
        return False
    overdue = now - job.state_since > job.config.start_timeout
    quiet = now - max(job.roster.joined_at, job.state_since) >= job.config.gather
    return overdue or (quiet and not job.roster.cut)  # who is cut off is back, or given up, soon


def should_grow(job: Job, now: float) -> bool:
    """While running: whether to open a larger generation for those who stand by."""
    grow = job.config.grow
    counts = job.roster.counts
    if grow is None or counts[Phase.STANDBY] == 0 or counts[Phase.RUNNING] >= job.config.nodes:
        return False
    if (
        counts[Phase.FINISHED]
        or job.generation.hang is not None
        or now - max(job.roster.joined_at, job.generation.started_at) < grow
    ):
        return False
    return any(
        member.peer is not None and not member.depart_reason
        for member in job.roster.members.values()
        if member.phase is Phase.STANDBY
    )


def choose_members(job: Job) -> list[Member]:
    """
    Return who takes part in the next generation, in rank order.

    Who was in the last one goes first, then who is connected, then who came first.
    """
    stay = [member for member in job.roster.members.values() if not member.depart_reason]
    stay.sort(
        key=lambda member: (
            member.index < 0,
            member.index if member.index >= 0 else member.peer is None,
        )
    )
    chosen = stay[: job.config.nodes]
    while (
        len(chosen) > required_nodes(job.config)
        and chosen[-1].index < 0
        and chosen[-1].peer is None
    ):
        chosen.pop()  # a newcomer that is cut off is only taken where it is needed
    return order_by_rank(job.config, chosen)


# What they are told
# ---------------------------------------------------------------------------------------------------


def send_waiting(job: Job, now: float) -> None:
    """Tell every node who is here and who is missing."""
    config = job.config
    job.next_waiting_at = now + config.waiting_every
    here = len(job.roster.members)
    elapsed = now - job.state_since
    timeout = config.start_timeout
    expected = required_nodes(config) if here < required_nodes(config) else config.nodes
    if is_elastic(config) and here >= required_nodes(config):
        elapsed = now - max(job.roster.joined_at, job.state_since)
        timeout = min(config.gather, timeout)
    waiting = Waiting(
        tuple(
            member.name
            for member, _ in zip(job.roster.members.values(), range(MAX_NAMES), strict=False)
        ),
        describe_missing(config, expected - here, job.roster.names, job.roster.claims),
        expected,
        round(elapsed, 3),
        timeout,
        here,
    )
    job.broadcast(waiting)


def announce_arrival(job: Job, now: float) -> None:
    """
    A node has come in while the job gathers: tell all of a few, who would not wait in silence.
    """
    if (
        len(job.roster.members) <= MAX_ANNOUNCED_NODES
        and len(job.roster.members) < job.config.nodes
    ):
        send_waiting(job, now)


def send_standby(job: Job, member: Member) -> None:
    """Tell a node why it has no part in the present generation, when that is news to it."""
    reason = standby_reason(job.config, len(job.generation.assigns))
    if reason == member.standby_reason:
        return
    member.standby_reason = reason
    job.outbox.send_to(member, Standby(reason))
    job.outbox.record_event("standby", node=member.name, reason=reason)
