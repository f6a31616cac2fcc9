"""
What nodes tell of their workers while a generation runs: how they end, how far they are, that one
hangs.
"""

from __future__ import annotations

from pdrun.rendezvous.membership import generations
from pdrun.rendezvous.membership import sizing as elastic
from pdrun.rendezvous.membership.job import Job
from pdrun.rendezvous.membership.nodes import Member, Phase
from pdrun.rendezvous.membership.transitions import JobState
from pdrun.rendezvous.policies import texts as wording
from pdrun.rendezvous.policies import verdict as judge
from pdrun.rendezvous.policies.hang_report import WITHIN, Inquiry
from pdrun.rendezvous.protocol.messages import (
    Cause,
    Failure,
    Finished,
    Hung,
    Progress,
    Ready,
    ShowStacks,
    Stacks,
    Unready,
    WorkerExit,
)

MOST_WARNINGS = 8
"""Stragglers that are named at once."""


def ready(job: Job, member: Member, message: Ready | Unready, now: float) -> None:
    """A node can start its workers, or cannot."""
    if job.state is not JobState.ASSIGNING or member.phase not in (Phase.JOINED, Phase.READY):
        return
    if isinstance(message, Ready):
        job.set_phase(member, Phase.READY)
        return
    why = f"{member.name} cannot start: {message.reason}"
    if job.generation and elastic.is_elastic(
        job.config
    ):  # the others have shown that the program can run
        elastic.fence(job, member, f"it cannot start: {message.reason}", message.code or 70)
        job.changed = why
    else:
        generations.end(job, message.code or 70, why, now)


def finished(job: Job, member: Member, message: Finished) -> None:
    """Every worker of a node has ended."""
    if member.phase is Phase.RUNNING:
        job.set_phase(member, Phase.FINISHED)
        member.store = message.store or member.store


def finished_before(job: Job, member: Member, message: Finished) -> None:
    """
    A node that was cut off for long tells of a generation that is over: only its store address is
    news.
    """
    if member.phase is Phase.STANDBY or job.state is JobState.GATHERING:
        member.store = message.store or member.store


def worker_exit(job: Job, member: Member, message: WorkerExit, now: float) -> None:
    """One worker has ended."""
    cause = message.cause
    if message.rank in member.exits:
        return
    member.exits[message.rank] = cause.code
    job.progress.ended(message.rank)
    job.record(
        "exited",
        generation=job.generation,
        rank=message.rank,
        node=member.name,
        code=cause.code,
        how=cause.kind,
        cause=cause.summary,
    )
    if not judge.failed(cause):
        return
    if job.inquiry is not None:  # it was hanging before this
        conclude_inquiry(job, job.inquiry, now)
    generations.fail(job, Failure(message.rank, member.name, cause), now)


def progress(job: Job, member: Member, message: Progress) -> bool:
    """Workers are further; return whether a journal must keep this."""
    return job.progress.take(member.hello.agent, message, member.ranks)


def look(job: Job, now: float) -> None:
    """
    Once a tick while the workers run: how far they are, who is slower than the others, whether a
    hang is clear.
    """
    if (data := job.progress.record(now)) is not None:
        saved = job.progress.agreed(job.assigns, job.agreed)
        job.record("progress", generation=job.generation, **{**data, "saved": saved})
    if found := job.progress.stragglers(now):
        named = [
            wording.straggler(rank, _node_of(job, rank), why) for rank, why in found[:MOST_WARNINGS]
        ]
        if len(found) > MOST_WARNINGS:
            named.append(f"{len(found) - MOST_WARNINGS} more workers are slower than the others")
        for text in named:
            job.record("warning", text=text)
        job.notice("\n".join(named))
    if job.inquiry is not None and now >= job.inquiry.deadline:
        conclude_inquiry(job, job.inquiry, now)


# A hang
# ---------------------------------------------------------------------------------------------------------------


def hung(job: Job, member: Member, message: Hung, now: float) -> None:
    """A worker seems to hang: before it is ended, ask every node what its workers are doing."""
    if job.state is not JobState.RUNNING or job.inquiry is not None or message.rank in member.exits:
        return
    asked = {
        agent: job.members[agent].name
        for agent in job.assigns
        if agent in job.members and job.members[agent].phase is Phase.RUNNING
    }
    job.inquiry = Inquiry(
        message.rank, member.name, message.why, now + WITHIN, asked, waits=message.waits
    )
    for agent in asked:
        job.tell(job.members[agent], ShowStacks(job.generation))


def stacks(job: Job, member: Member, message: Stacks, now: float) -> None:
    """A node tells what its workers are doing."""
    if job.inquiry is None:
        return
    job.inquiry.take(member.hello.agent, message.groups, member.ranks, message.active)
    if not job.inquiry.waiting:
        conclude_inquiry(job, job.inquiry, now)


def conclude_inquiry(job: Job, inquiry: Inquiry, now: float) -> None:
    """
    Show where everybody is; the worker that hangs has failed. Unless it only waits for one that is
    at work.
    """
    job.inquiry = None
    if inquiry.unfounded:
        return
    rank = inquiry.culprit()
    node = inquiry.node if rank == inquiry.rank else _node_of(job, rank)
    silent = {
        name: job.members[agent].ranks
        for agent, name in inquiry.waiting.items()
        if agent in job.members
    }
    picture = inquiry.picture(silent)
    job.record(
        "hang",
        generation=job.generation,
        rank=rank,
        node=node,
        reason=inquiry.why,
        text=picture[-wording.MOST_TRACEBACK :],
    )
    job.notice(f"rank {rank} on {node} hangs: {inquiry.why}\n{picture}")
    cause = Cause("hang", 124, summary=inquiry.why, traceback=picture)
    generations.fail(job, Failure(rank, node, cause), now)


def _node_of(job: Job, rank: int) -> str:
    return next(
        (member.name for member in job.members.values() if rank in member.ranks),
        "a node that is gone",
    )
