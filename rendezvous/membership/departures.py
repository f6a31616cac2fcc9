"""Nodes that go: given up by the failure detector, leaving, or departing in order."""

from __future__ import annotations

from dataclasses import replace

from pdrun.rendezvous.membership import generations
from pdrun.rendezvous.membership import sizing as elastic
from pdrun.rendezvous.membership.job import SIGTERM, Job
from pdrun.rendezvous.membership.nodes import Member, Phase
from pdrun.rendezvous.membership.transitions import JobState, Trigger
from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.protocol.messages import Leave


def give_up(job: Job, member: Member, why: str, now: float, *, coming: int = 0) -> None:
    """
    A node is lost.

    Args:
        why: half a sentence for people.
        coming: nodes that are about to come in in its place.
    """
    if job.state is JobState.GATHERING or member.phase is Phase.STANDBY:
        return _forget(job, member, why)
    if job.state is JobState.DONE or member.phase is Phase.FINISHED:
        return _part(job, member, why)
    reason = f"{job.config.unit} {member.place} was lost: {why}"
    elastic.fence(job, member, why)
    coming = coming if elastic.is_elastic(job.config) else 0
    if job.state is JobState.ASSIGNING:
        job.changed = reason
    elif job.state is JobState.RUNNING:
        if elastic.are_enough(job, coming):
            generations.stop_all(job, Trigger.CHANGED, reason, now, change=True)
        elif elastic.budget(job, now) > 0:
            generations.stop_all(job, Trigger.CHANGED, reason, now, change=True, counts=True)
        else:
            generations.stop_all(job, Trigger.STOP, reason, now, code=69)
    else:
        _lost_meanwhile(job, member, reason, coming, now)
    return None


def _lost_meanwhile(job: Job, member: Member, reason: str, coming: int, now: float) -> None:
    """A node is lost while workers are being ended already: perhaps because of it."""
    ending = job.ending
    if ending is None or (job.state is JobState.STOPPING and ending.code is not None):
        return
    enough = elastic.are_enough(job, coming)
    can_wait = elastic.budget(job, now) > 0
    if job.failures.own_before(member.cut_at):  # a worker failed before: it stays the cause
        if job.state is JobState.RESTARTING and not (enough or can_wait):
            generations.stop_all(job, Trigger.STOP, reason, now)
        return
    if enough or can_wait:
        if job.state is JobState.STOPPING:
            job.move(Trigger.CHANGED, now)
            job.record("restarting", reason=reason, generation=job.generation)
        counts = not enough or (ending.change and ending.counts)
        job.ending = replace(ending, reason=reason, code=None, change=True, counts=counts)
    elif job.state is JobState.RESTARTING:
        generations.stop_all(job, Trigger.STOP, reason, now, code=69)
    else:
        job.ending = replace(ending, reason=reason, code=69)


def leave(job: Job, peer: Peer, member: Member | None, message: Leave, now: float) -> None:
    """An agent goes."""
    job.close(peer)
    job.forget_session(peer)
    if member is None or member.peer != peer:
        return
    member.peer = None
    member.cut_at = now
    if job.state is not JobState.GATHERING and member.departs:
        _part(job, member, message.reason or member.departs)
    elif (
        job.state is JobState.GATHERING
        or job.state is JobState.DONE
        or member.phase is Phase.FINISHED
    ):
        (_forget if job.state is JobState.GATHERING else _part)(job, member, message.reason)
    else:
        give_up(
            job,
            member,
            f"it left before the end{': ' + message.reason if message.reason else ''}",
            now,
        )


def depart(job: Job, member: Member, reason: str, now: float) -> None:
    """A node must go: form a generation without it, where that is possible, else stop the job."""
    if member.departs or job.state in (JobState.STOPPING, JobState.DONE):
        return
    member.departs = reason or "it was told to"
    job.departing[member.hello.agent] = member
    if job.state is JobState.GATHERING or member.phase is Phase.STANDBY:
        return
    if job.state is JobState.RUNNING and member.phase is Phase.FINISHED:
        return  # it has done its part
    if not elastic.is_elastic(job.config) or not elastic.are_enough(job):
        generations.stop_ordered(job, SIGTERM, reason, False, now)
        return
    why = f"{job.config.unit} {member.name} departs: {member.departs}"
    if job.state is JobState.ASSIGNING:
        job.changed = why
    elif job.state is JobState.RUNNING:
        generations.stop_all(job, Trigger.CHANGED, why, now, change=True)


def _part(job: Job, member: Member, why: str) -> None:
    """A node that has done its part goes; nothing is lost with it."""
    if (peer := job.remove(member, Phase.LEFT)) is not None:
        job.close(peer)
    job.gone[member.hello.agent] = (
        f"{member.name} has left: {why}" if why else f"{member.name} has left"
    )
    job.record("left", node=member.name, reason=why)


def _forget(job: Job, member: Member, why: str) -> None:
    """
    A node without workers goes: its place is free again, and it may come back as if it had never
    been here.
    """
    if (peer := job.remove(member, Phase.LEFT)) is not None:
        job.close(peer)
    job.record("left", node=member.name, reason=why)
