"""Nodes that go: given up by the failure detector, leaving, or departing in order."""

from __future__ import annotations

from dataclasses import replace

from pdrun.rendezvous.membership import generations
from pdrun.rendezvous.membership.job import SIGTERM, Job
from pdrun.rendezvous.membership.nodes import Member, Phase
from pdrun.rendezvous.membership.sizing import (
    fence_member,
    has_enough_nodes,
    is_elastic,
    restarts_left,
)
from pdrun.rendezvous.membership.transitions import JobState, Trigger
from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.protocol.messages import Leave


def mark_lost(job: Job, member: Member, why: str, now: float, *, incoming: int = 0) -> None:
    """
    A node is lost.

    Args:
        why: half a sentence for people.
        coming: nodes that are about to come in in its place.
    """
    if job.state is JobState.GATHERING or member.phase is Phase.STANDBY:
        return _remove_idle(job, member, why)
    if job.state is JobState.DONE or member.phase is Phase.FINISHED:
        return _remove_finished(job, member, why)
    reason = f"{job.config.unit} {member.label} was lost: {why}"
    fence_member(job, member, why)
    incoming = incoming if is_elastic(job.config) else 0
    if job.state is JobState.ASSIGNING:
        job.generation.reform_reason = reason
    elif job.state is JobState.RUNNING:
        if has_enough_nodes(job, incoming):
            generations.stop_workers(job, Trigger.CHANGED, reason, now, is_change=True)
        elif restarts_left(job, now) > 0:
            generations.stop_workers(
                job, Trigger.CHANGED, reason, now, is_change=True, counts_as_restart=True
            )
        else:
            generations.stop_workers(job, Trigger.STOP, reason, now, code=69)
    else:
        _lost_during_stop(job, member, reason, incoming, now)
    return None


def _lost_during_stop(job: Job, member: Member, reason: str, incoming: int, now: float) -> None:
    """A node is lost while workers are being ended already: perhaps because of it."""
    ending = job.shutdown.stop
    if ending is None or (job.state is JobState.STOPPING and ending.code is not None):
        return
    enough = has_enough_nodes(job, incoming)
    can_wait = restarts_left(job, now) > 0
    if job.generation.failures.has_own_before(
        member.cut_at
    ):  # a worker failed before: it stays the cause
        if job.state is JobState.RESTARTING and not (enough or can_wait):
            generations.stop_workers(job, Trigger.STOP, reason, now)
        return
    if enough or can_wait:
        if job.state is JobState.STOPPING:
            job.change_state(Trigger.CHANGED, now)
            job.outbox.record_event("restarting", reason=reason, generation=job.generation.number)
        counts = not enough or (ending.is_change and ending.counts_as_restart)
        job.shutdown.stop = replace(
            ending, reason=reason, code=None, is_change=True, counts_as_restart=counts
        )
    elif job.state is JobState.RESTARTING:
        generations.stop_workers(job, Trigger.STOP, reason, now, code=69)
    else:
        job.shutdown.stop = replace(ending, reason=reason, code=69)


def handle_leave(job: Job, peer: Peer, member: Member | None, message: Leave, now: float) -> None:
    """An agent goes."""
    job.outbox.close_peer(peer)
    job.roster.forget_session(peer)
    if member is None or member.peer != peer:
        return
    member.peer = None
    member.cut_at = now
    if job.state is not JobState.GATHERING and member.depart_reason:
        _remove_finished(job, member, message.reason or member.depart_reason)
    elif (
        job.state is JobState.GATHERING
        or job.state is JobState.DONE
        or member.phase is Phase.FINISHED
    ):
        (_remove_idle if job.state is JobState.GATHERING else _remove_finished)(
            job, member, message.reason
        )
    else:
        mark_lost(
            job,
            member,
            f"it left before the end{': ' + message.reason if message.reason else ''}",
            now,
        )


def handle_depart(job: Job, member: Member, reason: str, now: float) -> None:
    """A node must go: form a generation without it, where that is possible, else stop the job."""
    if member.depart_reason or job.state in (JobState.STOPPING, JobState.DONE):
        return
    member.depart_reason = reason or "it was told to"
    job.roster.departing[member.hello.agent] = member
    if job.state is JobState.GATHERING or member.phase is Phase.STANDBY:
        return
    if job.state is JobState.RUNNING and member.phase is Phase.FINISHED:
        return  # it has done its part
    if not is_elastic(job.config) or not has_enough_nodes(job):
        generations.stop_job(job, SIGTERM, reason, False, now)
        return
    why = f"{job.config.unit} {member.name} departs: {member.depart_reason}"
    if job.state is JobState.ASSIGNING:
        job.generation.reform_reason = why
    elif job.state is JobState.RUNNING:
        generations.stop_workers(job, Trigger.CHANGED, why, now, is_change=True)


def _remove_finished(job: Job, member: Member, why: str) -> None:
    """A node that has done its part goes; nothing is lost with it."""
    if (peer := job.roster.remove_member(member, Phase.LEFT)) is not None:
        job.outbox.close_peer(peer)
    job.roster.gone[member.hello.agent] = (
        f"{member.name} has left: {why}" if why else f"{member.name} has left"
    )
    job.outbox.record_event("left", node=member.name, reason=why)


def _remove_idle(job: Job, member: Member, why: str) -> None:
    """
    A node without workers goes: its place is free again, and it may come back as if it had never
    been here.
    """
    if (peer := job.roster.remove_member(member, Phase.LEFT)) is not None:
        job.outbox.close_peer(peer)
    job.outbox.record_event("left", node=member.name, reason=why)
