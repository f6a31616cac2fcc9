"""Reports of nodes about their workers: ready, ended, progress, hangs."""

from __future__ import annotations

from pdrun.rendezvous.membership.generations import end_unstarted, on_worker_failure
from pdrun.rendezvous.membership.job import Generation, Job
from pdrun.rendezvous.membership.nodes import Member, Phase
from pdrun.rendezvous.membership.roster import Roster
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
"""Stragglers that are named at a time."""


def handle_ready(job: Job, member: Member, message: Ready | Unready, now: float) -> None:
    """A node can start its workers, or cannot."""
    if job.state is not JobState.ASSIGNING or member.phase not in (Phase.JOINED, Phase.READY):
        return
    if isinstance(message, Ready):
        job.roster.set_phase(member, Phase.READY)
        return
    why = f"{member.name} cannot start: {message.reason}"
    code = message.code or 70
    if job.generation.number and is_elastic(job.config):
        # An earlier generation ran, so the program can run: the error is this node's.
        reason = f"it cannot start: {message.reason}"
        fence_member(job.roster, job.outbox, member, reason, code)
        job.generation.reform_reason = why
    else:
        end_unstarted(job, code, why, now)


def handle_finished(roster: Roster, member: Member, message: Finished) -> None:
    """Every worker of a node has ended."""
    if member.phase is Phase.RUNNING:
        roster.set_phase(member, Phase.FINISHED)
        member.store = message.store or member.store


def handle_old_finished(job: Job, member: Member, message: Finished) -> None:
    """A node reports the end of an old generation after a long cut: take its store address."""
    if member.phase is Phase.STANDBY or job.state is JobState.GATHERING:
        member.store = message.store or member.store


def handle_worker_exit(job: Job, member: Member, message: WorkerExit, now: float) -> None:
    """One worker has ended."""
    cause = message.cause
    generation = job.generation
    if message.rank in member.exit_codes:
        return
    member.exit_codes[message.rank] = cause.code
    _record_progress(job, now, is_ending=True)
    generation.progress.drop_worker(message.rank)
    generation.idle.on_exit(message.rank, now)
    job.outbox.record_event(
        "exited",
        generation=generation.number,
        rank=message.rank,
        node=member.name,
        code=cause.code,
        how=cause.kind,
        cause=cause.summary,
    )
    if generation.hang is not None and generation.hang.may_be_waiting:
        # A worker worked, or ended, while others waited: they may wait for it.
        generation.hang = None
    if not is_failure(cause):
        return
    if generation.hang is not None:
        # The hang was first, so it must be judged before this exit.
        conclude_hang(job, generation.hang, now)
    on_worker_failure(job, Failure(message.rank, member.name, cause), now)


def handle_progress(generation: Generation, member: Member, message: Progress) -> bool:
    """Note the progress of workers; return whether a journal must keep the message."""
    return generation.progress.add_report(member.hello.agent, message, member.ranks)


def check_workers(job: Job, now: float) -> None:
    """At each tick while workers run: record progress, warn about stragglers, judge a hang."""
    generation = job.generation
    _record_progress(job, now)
    if stragglers := generation.progress.find_stragglers(now):
        _warn_about_stragglers(job, stragglers)
    if generation.hang is not None:
        _conclude_if_complete(job, generation.hang, now)
    elif generation.idle.is_inquiry_due(now):
        rank, (node, why) = next(iter(generation.idle.reports.items()))
        _open_inquiry(job, rank, node, why, now, may_be_waiting=True)


def _record_progress(job: Job, now: float, *, is_ending: bool = False) -> None:
    """Record plans, and the progress and what the workers use, if that is due."""
    generation = job.generation
    for facts in generation.progress.take_plans():
        job.outbox.record_event("plan", generation=generation.number, facts=facts)
    data = generation.progress.take_record(now, is_ending=is_ending)
    if data is not None:
        saved = generation.progress.find_agreed_step(generation.assigns, generation.agreed_step)
        job.outbox.record_event(
            "progress", generation=generation.number, **{**data, "saved": saved}
        )
    usage = generation.progress.take_usage(now, is_ending=is_ending)
    if usage is not None:
        job.outbox.record_event("usage", generation=generation.number, **usage)


def _warn_about_stragglers(job: Job, stragglers: list[tuple[int, str]]) -> None:
    texts = [
        describe_straggler(rank, _find_node_name(job.roster, rank), why)
        for rank, why in stragglers[:MAX_STRAGGLER_WARNINGS]
    ]
    more = len(stragglers) - MAX_STRAGGLER_WARNINGS
    if more > 0:
        texts.append(f"{more} more workers are slower than the others")
    for text in texts:
        job.outbox.record_event("warning", text=text)
    job.send_notice("\n".join(texts))


# Hangs
# -----


def handle_hung(job: Job, member: Member, message: Hung, now: float) -> None:
    """
    A worker seems to hang: ask every node for the stacks of its workers before a stop.

    A worker that may be waiting is only noted while another one is known to work.
    """
    generation = job.generation
    if job.state is not JobState.RUNNING or message.rank in member.exit_codes:
        return
    rank = message.rank
    hang = generation.hang
    if message.waits:
        generation.idle.add_report(rank, member.name, message.why, message.timeout)
        if hang is not None:
            hang.active.discard(rank)
        elif not generation.idle.is_inquiry_due(now):
            return
    elif hang is not None:
        hang.blame(rank, member.name, message.why)
    if hang is None:
        _open_inquiry(job, rank, member.name, message.why, now, may_be_waiting=message.waits)
    else:
        _conclude_if_complete(job, hang, now)


def _open_inquiry(
    job: Job, rank: int, node: str, why: str, now: float, *, may_be_waiting: bool
) -> None:
    generation = job.generation
    members = job.roster.members
    asked = {
        agent: members[agent].name
        for agent in generation.assigns
        if agent in members and members[agent].phase is Phase.RUNNING
    }
    generation.hang = HangInquiry(
        rank,
        node,
        why,
        now + STACK_SECONDS,
        asked,
        may_be_waiting=may_be_waiting,
    )
    for agent in asked:
        job.outbox.send_to(members[agent], ShowStacks(generation.number))


def handle_stacks(job: Job, member: Member, message: Stacks, now: float) -> None:
    """A node sends the stacks of its workers."""
    hang = job.generation.hang
    if hang is None:
        return
    active = [rank for rank in message.active if rank not in member.exit_codes]
    if member.hello.agent in hang.waiting:
        hang.add_collectives(message.collectives, message.spinning, member.ranks)
        hang.known_ranks -= member.exit_codes.keys()
    hang.add_answer(member.hello.agent, message.groups, member.ranks, active)
    _conclude_if_complete(job, hang, now)


def _conclude_if_complete(job: Job, hang: HangInquiry, now: float) -> None:
    if not hang.is_complete(now):
        return
    if hang.may_be_waiting:
        # The workers of a node that has not answered may work.
        for agent in hang.waiting:
            if (member := job.roster.members.get(agent)) is not None:
                hang.active |= set(member.ranks) - member.exit_codes.keys()
    conclude_hang(job, hang, now)


def conclude_hang(job: Job, hang: HangInquiry, now: float) -> None:
    """
    Show the stacks of all workers and treat the worker that hangs as failed.

    If it only waits for others that work, the reports of these are awaited.
    """
    job.generation.hang = None
    if hang.is_false_alarm:
        job.generation.idle.active = hang.active | hang.spinning
        job.outbox.has_changed_state = True
        return
    rank = hang.find_culprit()
    node = hang.node if rank == hang.rank else _find_node_name(job.roster, rank)
    why = hang.explain(rank)
    silent = {
        name: job.roster.members[agent].ranks
        for agent, name in hang.waiting.items()
        if agent in job.roster.members
    }
    report = hang.render_report(silent)
    job.outbox.record_event(
        "hang",
        generation=job.generation.number,
        rank=rank,
        node=node,
        reason=why,
        text=report[-MAX_TRACEBACK_CHARS:],
    )
    job.send_notice(f"rank {rank} on {node} hangs: {why}\n{report}")
    cause = Cause("hang", 124, summary=why, traceback=report)
    on_worker_failure(job, Failure(rank, node, cause), now)


def _find_node_name(roster: Roster, rank: int) -> str:
    for member in roster.members.values():
        if rank in member.ranks:
            return member.name
    return "a lost node"
