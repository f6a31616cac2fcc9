"""Nodes that are lost (by the failure detector's judgement), leave, or depart on request."""

from __future__ import annotations

from dataclasses import replace

from pdrun.rendezvous.membership.generations import stop_job, stop_workers
from pdrun.rendezvous.membership.job import SIGTERM, ActionOutbox, Job, StopPlan
from pdrun.rendezvous.membership.nodes import CutKind, Member, Phase
from pdrun.rendezvous.membership.roster import Roster
from pdrun.rendezvous.membership.sizing import fence_member, has_enough_nodes, is_elastic
from pdrun.rendezvous.membership.transitions import JobState, Trigger
from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.protocol.messages import Leave


def mark_lost(job: Job, member: Member, why: str, now: float, *, incoming: int = 0) -> None:
    """
    Handle the loss of a node.

    Args:
        why: half a sentence for people.
        incoming: number of nodes that join now in its place.
    """
    if job.state is JobState.GATHERING or member.phase is Phase.STANDBY:
        _remove_idle(job.roster, job.outbox, member, why)
        return
    if job.state is JobState.DONE or member.phase is Phase.FINISHED:
        if _has_ended(job, member):
            why = ""
        _remove_finished(job.roster, job.outbox, member, why)
        return
    reason = f"{job.config.unit} {_name_with_rank(job, member)} was lost: {why}"
    fence_member(job.roster, job.outbox, member, why)
    if not is_elastic(job.config):
        incoming = 0
    if job.state is JobState.ASSIGNING:
        job.generation.reform_reason = reason
    elif job.state is JobState.RUNNING:
        _stop_after_loss(job, reason, incoming, now)
    elif job.shutdown.stop is not None:
        _change_stop_after_loss(job, job.shutdown.stop, member, reason, incoming, now)


def _has_ended(job: Job, member: Member) -> bool:
    """
    Whether a worker of a dynamic cluster has reported its end, and then closed its connection.

    Its process was about to end: no other node waits for its Leave.
    """
    if job.config.unit != "worker" or member.phase is not Phase.FINISHED:
        return False
    return member.peer is None and member.cut_kind is CutKind.CLOSED


def _name_with_rank(job: Job, member: Member) -> str:
    """Return a node's name; that of a worker of a dynamic cluster begins with its rank."""
    if job.config.unit != "worker" or not member.ranks:
        return member.label
    return f"of rank {member.first_rank}, {member.label},"


def _stop_after_loss(job: Job, reason: str, incoming: int, now: float) -> None:
    """A node of a running generation is lost: continue without it, restart, or end the job."""
    if has_enough_nodes(job.config, job.roster, incoming):
        stop_workers(job, Trigger.CHANGED, reason, now, is_change=True)
    elif job.restarts_left(now) > 0:
        stop_workers(job, Trigger.CHANGED, reason, now, is_change=True, counts_as_restart=True)
    else:
        stop_workers(job, Trigger.STOP, reason, now, code=69)


def _change_stop_after_loss(
    job: Job, stop: StopPlan, member: Member, reason: str, incoming: int, now: float
) -> None:
    """A node is lost while the workers are being stopped. The loss may be the cause of the stop."""
    if job.state is JobState.STOPPING and stop.code is not None:
        job.generation.note_stop(reason)
        return
    enough = has_enough_nodes(job.config, job.roster, incoming)
    can_wait = job.restarts_left(now) > 0
    if job.generation.failures.has_own_before(member.cut_at):
        # A worker failed before the loss: that failure stays the cause.
        job.generation.note_stop(reason)
        if job.state is JobState.RESTARTING and not (enough or can_wait):
            stop_workers(job, Trigger.STOP, reason, now)
        return
    if enough or can_wait:
        if job.state is JobState.STOPPING:
            job.change_state(Trigger.CHANGED, now)
            job.outbox.record_event("restarting", reason=reason, generation=job.generation.number)
        job.shutdown.stop = replace(
            stop,
            reason=reason,
            code=None,
            is_change=True,
            counts_as_restart=not enough or (stop.is_change and stop.counts_as_restart),
        )
    elif job.state is JobState.RESTARTING:
        stop_workers(job, Trigger.STOP, reason, now, code=69)
    else:
        job.shutdown.stop = replace(stop, reason=reason, code=69)


def handle_leave(job: Job, peer: Peer, member: Member | None, message: Leave, now: float) -> None:
    """Handle Leave."""
    job.outbox.close_peer(peer)
    job.roster.forget_session(peer)
    if member is None or member.peer != peer:
        return
    member.peer = None
    member.cut_at = now
    is_gathering = job.state is JobState.GATHERING
    if not is_gathering and member.depart_reason:
        _remove_finished(job.roster, job.outbox, member, message.reason or member.depart_reason)
    elif is_gathering:
        _remove_idle(job.roster, job.outbox, member, message.reason)
    elif job.state is JobState.DONE or member.phase is Phase.FINISHED:
        _remove_finished(job.roster, job.outbox, member, message.reason)
    else:
        why = "it left before the end"
        if message.reason:
            why += f": {message.reason}"
        mark_lost(job, member, why, now)


def handle_depart(job: Job, member: Member, reason: str, now: float) -> None:
    """Handle Depart: form a generation without the node if possible, otherwise stop the job."""
    if member.depart_reason or job.state in (JobState.STOPPING, JobState.DONE):
        return
    member.depart_reason = reason or "requested"
    job.roster.departing[member.hello.agent] = member
    if job.state is JobState.GATHERING or member.phase is Phase.STANDBY:
        return
    if job.state is JobState.RUNNING and member.phase is Phase.FINISHED:
        return
    if not is_elastic(job.config) or not has_enough_nodes(job.config, job.roster):
        stop_job(job, SIGTERM, reason, False, now)
        return
    why = f"{job.config.unit} {member.name} departs: {member.depart_reason}"
    if job.state is JobState.ASSIGNING:
        job.generation.reform_reason = why
    elif job.state is JobState.RUNNING:
        stop_workers(job, Trigger.CHANGED, why, now, is_change=True)


def _remove_finished(roster: Roster, outbox: ActionOutbox, member: Member, why: str) -> None:
    """Remove a node whose workers have ended. Later messages of its agent are refused."""
    _remove_idle(roster, outbox, member, why)
    reason = f"{member.name} has left"
    if why:
        reason += f": {why}"
    roster.gone[member.hello.agent] = reason


def _remove_idle(roster: Roster, outbox: ActionOutbox, member: Member, why: str) -> None:
    """Remove a node that has no workers. Its place is free, and the same agent may join again."""
    if (peer := roster.remove_member(member, Phase.LEFT)) is not None:
        outbox.close_peer(peer)
    outbox.record_event("left", node=member.name, reason=why)
