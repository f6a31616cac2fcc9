"""
What nodes tell of their workers while a generation runs: how they end, how far they are, that one
hangs.
"""

from __future__ import annotations

from pdrun.rendezvous.membership import generations
from pdrun.rendezvous.membership.job import Job
from pdrun.rendezvous.membership.nodes import Member, Phase
from pdrun.rendezvous.membership.sizing import fence_member, is_elastic
from pdrun.rendezvous.membership.transitions import JobState
from pdrun.rendezvous.policies.hang_report import STACK_SECONDS, HangInquiry
from pdrun.rendezvous.policies.texts import MAX_TRACEBACK_CHARS, describe_straggler
from pdrun.rendezvous.policies.verdict import is_failure
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

MAX_STRAGGLER_WARNINGS = 8
"""Stragglers that are named at once."""


def handle_ready(job: Job, member: Member, message: Ready | Unready, now: float) -> None:
    """A node can start its workers, or cannot."""
    if job.state is not JobState.ASSIGNING or member.phase not in (Phase.JOINED, Phase.READY):
        return
    if isinstance(message, Ready):
        job.roster.set_phase(member, Phase.READY)
        return
    why = f"{member.name} cannot start: {message.reason}"
    if job.generation.number and is_elastic(
        job.config
    ):  # the others have shown that the program can run
        fence_member(job, member, f"it cannot start: {message.reason}", message.code or 70)
        job.generation.reform_reason = why
    else:
        generations.end_unstarted(job, message.code or 70, why, now)


def handle_finished(job: Job, member: Member, message: Finished) -> None:
    """Every worker of a node has ended."""
    if member.phase is Phase.RUNNING:
        job.roster.set_phase(member, Phase.FINISHED)
        member.store = message.store or member.store


def handle_old_finished(job: Job, member: Member, message: Finished) -> None:
    """
    A node that was cut off for long tells of a generation that is over: only its store address is
    news.
    """
    if member.phase is Phase.STANDBY or job.state is JobState.GATHERING:
        member.store = message.store or member.store


def handle_worker_exit(job: Job, member: Member, message: WorkerExit, now: float) -> None:
    """One worker has ended."""
    cause = message.cause
    if message.rank in member.exit_codes:
        return
    member.exit_codes[message.rank] = cause.code
    job.generation.progress.drop_worker(message.rank)
    job.outbox.record_event(
        "exited",
        generation=job.generation.number,
        rank=message.rank,
        node=member.name,
        code=cause.code,
        how=cause.kind,
        cause=cause.summary,
    )
    if not is_failure(cause):
        return
    if job.generation.hang is not None:  # it was hanging before this
        conclude_hang(job, job.generation.hang, now)
    generations.on_worker_failure(job, Failure(message.rank, member.name, cause), now)


def handle_progress(job: Job, member: Member, message: Progress) -> bool:
    """Workers are further; return whether a journal must keep this."""
    return job.generation.progress.add_report(member.hello.agent, message, member.ranks)


def check_workers(job: Job, now: float) -> None:
    """
    Once a tick while the workers run: how far they are, who is slower than the others, whether a
    hang is clear.
    """
    if (data := job.generation.progress.take_record(now)) is not None:
        saved = job.generation.progress.find_agreed_step(
            job.generation.assigns, job.generation.agreed_step
        )
        job.outbox.record_event(
            "progress", generation=job.generation.number, **{**data, "saved": saved}
        )
    if found := job.generation.progress.find_stragglers(now):
        named = [
            describe_straggler(rank, _find_node_name(job, rank), why)
            for rank, why in found[:MAX_STRAGGLER_WARNINGS]
        ]
        if len(found) > MAX_STRAGGLER_WARNINGS:
            named.append(
                f"{len(found) - MAX_STRAGGLER_WARNINGS} more workers are slower than the others"
            )
        for text in named:
            job.outbox.record_event("warning", text=text)
        job.send_notice("\n".join(named))
    if job.generation.hang is not None and now >= job.generation.hang.deadline:
        conclude_hang(job, job.generation.hang, now)


# A hang
# ---------------------------------------------------------------------------------------------------------------


def handle_hung(job: Job, member: Member, message: Hung, now: float) -> None:
    """A worker seems to hang: before it is ended, ask every node what its workers are doing."""
    if (
        job.state is not JobState.RUNNING
        or job.generation.hang is not None
        or message.rank in member.exit_codes
    ):
        return
    asked = {
        agent: job.roster.members[agent].name
        for agent in job.generation.assigns
        if agent in job.roster.members and job.roster.members[agent].phase is Phase.RUNNING
    }
    job.generation.hang = HangInquiry(
        message.rank,
        member.name,
        message.why,
        now + STACK_SECONDS,
        asked,
        may_be_waiting=message.waits,
    )
    for agent in asked:
        job.outbox.send_to(job.roster.members[agent], ShowStacks(job.generation.number))


def handle_stacks(job: Job, member: Member, message: Stacks, now: float) -> None:
    """A node tells what its workers are doing."""
    if job.generation.hang is None:
        return
    job.generation.hang.add_answer(member.hello.agent, message.groups, member.ranks, message.active)
    if not job.generation.hang.waiting:
        conclude_hang(job, job.generation.hang, now)


def conclude_hang(job: Job, inquiry: HangInquiry, now: float) -> None:
    """
    Show where everybody is; the worker that hangs has failed. Unless it only waits for one that is
    at work.
    """
    job.generation.hang = None
    if inquiry.is_false_alarm:
        return
    rank = inquiry.find_culprit()
    node = inquiry.node if rank == inquiry.rank else _find_node_name(job, rank)
    silent = {
        name: job.roster.members[agent].ranks
        for agent, name in inquiry.waiting.items()
        if agent in job.roster.members
    }
    picture = inquiry.render_report(silent)
    job.outbox.record_event(
        "hang",
        generation=job.generation.number,
        rank=rank,
        node=node,
        reason=inquiry.why,
        text=picture[-MAX_TRACEBACK_CHARS:],
    )
    job.send_notice(f"rank {rank} on {node} hangs: {inquiry.why}\n{picture}")
    cause = Cause("hang", 124, summary=inquiry.why, traceback=picture)
    generations.on_worker_failure(job, Failure(rank, node, cause), now)


def _find_node_name(job: Job, rank: int) -> str:
    return next(
        (member.name for member in job.roster.members.values() if rank in member.ranks),
        "a node that is gone",
    )
