"""
Who may come in, and who takes part: the sizes of a job, the forming of a generation, those who
stand by.

A job has at most ``nodes`` nodes in a generation and at least `least`; up to ``spares`` further
ones stand by. What stands by, because it came too late or there is no place, takes part when the
next generation is formed.
"""

from __future__ import annotations

from pdrun.rendezvous.membership.job import Job
from pdrun.rendezvous.membership.nodes import MOST_NAMES, Member, Phase, missing, ordered
from pdrun.rendezvous.membership.transitions import JobState
from pdrun.rendezvous.policies import restart as policy
from pdrun.rendezvous.policies import texts as wording
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.messages import Join, Refuse, Standby, Waiting

MANY = 32
"""Nodes; more are told who is here at intervals only, not at each arrival."""


def least(config: SchedulerConfig) -> int:
    """Return how many nodes the job needs."""
    return config.min_nodes or config.nodes


def is_elastic(config: SchedulerConfig) -> bool:
    """Whether the job can lose a node and go on without waiting for another one."""
    return least(config) < config.nodes or config.spares > 0


def lease(config: SchedulerConfig, dead: float) -> float:
    """
    Return `Welcome.lease`: how long a node may be cut off from the scheduler before it must end its
    workers.
    """
    replaceable = is_elastic(config) or config.max_restarts > 0
    return dead * 2 / 3 if config.heartbeat and replaceable else 0.0


def budget(job: Job, now: float) -> int:
    """Return how many restarts are left."""
    return policy.budget(job.config, job.attempts, now)


# Who may come in
# ------------------------------------------------------------------------------------------------------


def is_open(job: Job) -> bool:
    """Whether a node that was given up, or is new, could be of use: told to it with its refusal."""
    if job.state in (JobState.GATHERING, JobState.RESTARTING):
        return True
    return is_elastic(job.config) and job.state not in (JobState.STOPPING, JobState.DONE)


def closed(job: Job) -> Refuse | None:
    """Return why nobody can come in any more, or None."""
    if job.state is JobState.DONE:
        return wording.over(job.config, job.key)
    if is_open(job):
        return None
    return (wording.stopping if is_elastic(job.config) else wording.full)(job.config, job.key)


def is_full(job: Job) -> bool:
    """Whether there is no place left, not even to stand by."""
    return len(job.members) - len(job.departing) >= job.config.nodes + job.config.spares


def replaced(job: Job, join: Join, now: float) -> Member | None:
    """
    Return the node whose agent was started again, when that is what a newcomer means: it has the
    same name, and its connection is cut. Only where the job can go on without the old one, and with
    the new.
    """
    old = job.names.get(join.node)
    if old is None or old.peer is not None:
        return None
    if is_open(job) or (job.state is JobState.RUNNING and budget(job, now) > 0):
        return old
    return None


def fence(job: Job, member: Member, why: str, code: int = 0) -> None:
    """
    Give a node up that may still have workers: whatever it says from now on counts for nothing.

    Args:
        code: with which its agent is to leave; 0: it may come back as a new one, where the job can
            use it.
    """
    told = f"{member.name} was given up: {why}"
    peer = job.remove(member, Phase.LOST)
    job.gone[member.hello.agent] = told
    if peer is not None:
        job.fenced.append((peer, told, code))
    job.record("lost", node=member.name, reason=why)


# Who takes part
# -------------------------------------------------------------------------------------------------------


def are_enough(job: Job, coming: int = 0) -> bool:
    """
    Whether those who are here, with so many who are ``coming`` right now, can form a generation.
    """
    return len(job.members) - len(job.departing) + coming >= least(job.config)


def present(job: Job) -> int:
    """While gathering: return how many nodes are connected and stay."""
    leaving = sum(member.peer is not None for member in job.departing.values())
    return job.counts[Phase.JOINED] - len(job.cut) - leaving


def can_form(job: Job) -> bool:
    """
    While gathering: whether as many are here as take part at most, so that nobody else need be
    awaited.
    """
    return present(job) >= job.config.nodes


def should_form(job: Job, now: float) -> bool:
    """
    While gathering: whether to form a generation of those who are here, since nobody else seems to
    come.
    """
    if not is_elastic(job.config) or present(job) < least(job.config):
        return False
    overdue = now - job.since > job.config.start_timeout
    quiet = now - max(job.joined_at, job.since) >= job.config.gather
    return overdue or (quiet and not job.cut)  # who is cut off is back, or given up, soon


def should_grow(job: Job, now: float) -> bool:
    """While running: whether to open a larger generation for those who stand by."""
    grow = job.config.grow
    counts = job.counts
    if grow is None or counts[Phase.STANDBY] == 0 or counts[Phase.RUNNING] >= job.config.nodes:
        return False
    if (
        counts[Phase.FINISHED]
        or job.inquiry is not None
        or now - max(job.joined_at, job.started_at) < grow
    ):
        return False
    return any(
        member.peer is not None and not member.departs
        for member in job.members.values()
        if member.phase is Phase.STANDBY
    )


def choose(job: Job) -> list[Member]:
    """
    Return who takes part in the next generation, in rank order.

    Who was in the last one goes first, then who is connected, then who came first.
    """
    stay = [member for member in job.members.values() if not member.departs]
    stay.sort(
        key=lambda member: (
            member.index < 0,
            member.index if member.index >= 0 else member.peer is None,
        )
    )
    chosen = stay[: job.config.nodes]
    while len(chosen) > least(job.config) and chosen[-1].index < 0 and chosen[-1].peer is None:
        chosen.pop()  # a newcomer that is cut off is only taken where it is needed
    return ordered(job.config, chosen)


# What they are told
# ---------------------------------------------------------------------------------------------------


def tell_waiting(job: Job, now: float) -> None:
    """Tell every node who is here and who is missing."""
    config = job.config
    job.waiting_at = now + config.waiting_every
    here = len(job.members)
    elapsed = now - job.since
    timeout = config.start_timeout
    expected = least(config) if here < least(config) else config.nodes
    if is_elastic(config) and here >= least(config):
        elapsed = now - max(job.joined_at, job.since)
        timeout = min(config.gather, timeout)
    waiting = Waiting(
        tuple(
            member.name for member, _ in zip(job.members.values(), range(MOST_NAMES), strict=False)
        ),
        missing(config, expected - here, job.names, job.claims),
        expected,
        round(elapsed, 3),
        timeout,
        here,
    )
    job.tell_all(waiting)


def tell_arrival(job: Job, now: float) -> None:
    """
    A node has come in while the job gathers: tell all of a few, who would not wait in silence.
    """
    if len(job.members) <= MANY and len(job.members) < job.config.nodes:
        tell_waiting(job, now)


def stand_by(job: Job, member: Member) -> None:
    """Tell a node why it has no part in the present generation, when that is news to it."""
    reason = wording.standby(job.config, len(job.assigns))
    if reason == member.standby:
        return
    member.standby = reason
    job.tell(member, Standby(reason))
    job.record("standby", node=member.name, reason=reason)
