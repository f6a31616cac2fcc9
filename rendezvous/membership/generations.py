"""
From generation to generation: forming, starting, ending one, trying again or not, and the verdict.
"""

from __future__ import annotations

from dataclasses import replace

from pdrun.rendezvous.membership.job import SIGKILL, SIGTERM, Job, StopPlan
from pdrun.rendezvous.membership.nodes import Phase, assign_ranks
from pdrun.rendezvous.membership.sizing import (
    can_form,
    choose_members,
    fence_member,
    has_enough_nodes,
    is_elastic,
    required_nodes,
    restarts_left,
    send_standby,
    send_waiting,
)
from pdrun.rendezvous.membership.transitions import JobState, Trigger
from pdrun.rendezvous.policies.progress import ProgressTracker
from pdrun.rendezvous.policies.restart import (
    count_restart,
    find_refusal,
    note_failure,
    restart_delay,
)
from pdrun.rendezvous.policies.texts import (
    describe_clean_exits,
    refuse_over,
    verdict_data,
    with_restarts,
)
from pdrun.rendezvous.policies.verdict import FailureLog, describe_failure, make_verdict
from pdrun.rendezvous.protocol.events import JobDone
from pdrun.rendezvous.protocol.messages import Failure, Start, StopWorkers, Verdict

STOP_REPORT_SECONDS = 5.0
"""Seconds beyond the grace in which a node must have reported the end of its workers."""


def advance_job(job: Job, now: float) -> None:
    """Do what follows from the phases of all nodes together."""
    counts = job.roster.counts
    if job.state is JobState.GATHERING:
        if can_form(job):
            form_generation(job, now)
    elif job.state is JobState.ASSIGNING:
        if job.generation.reform_reason:
            _reform_generation(job, now)
        elif not counts[Phase.JOINED]:
            _start_workers(job, now)
    elif job.state is JobState.RUNNING:
        if not counts[Phase.RUNNING]:
            world = next(iter(job.generation.assigns.values())).world_size
            every = f"all {world} workers" if world > 1 else "the worker"
            conclude_job(job, Trigger.FINISHED, Verdict(0, f"{every} succeeded"), now)
    elif job.state in (JobState.RESTARTING, JobState.STOPPING):
        if not counts[Phase.RUNNING] and job.shutdown.stop and job.shutdown.stop.next_at is None:
            finish_stop(job, job.shutdown.stop, now)
    elif not job.roster.members:
        finish_job(job)


# Beginning a generation
# -----------------------------------------------------------------------------------------------


def form_generation(job: Job, now: float) -> None:
    """Enough have come together: open a generation of those who are here."""
    job.change_state(Trigger.FULL, now)
    _assign_nodes(job, now)


def _reform_generation(job: Job, now: float) -> None:
    """Nodes have come or gone before anything started: what was assigned is void."""
    reason = job.generation.reform_reason
    job.generation.reform_reason = ""
    if has_enough_nodes(job):
        job.change_state(Trigger.CHANGED, now)
        _assign_nodes(job, now)
    elif restarts_left(job, now) > 0:
        _count_restart(job, now)
        _gather_again(job, reason, now)
    else:
        end_unstarted(job, 69, reason, now)


def _assign_nodes(job: Job, now: float) -> None:
    """Number the nodes that take part, and tell each its place."""
    nodes = choose_members(job)
    _close_generation(job)
    for member in job.roster.members.values():
        member.index = -1
        member.exit_codes = {}
        job.roster.set_phase(member, Phase.STANDBY)
    job.generation.number += 1
    (
        job.generation.failures,
        job.shutdown.stop,
        job.generation.progress,
        job.generation.shortage_reason,
    ) = FailureLog(), None, ProgressTracker(now), ""
    assigns = assign_ranks(
        nodes, job.generation.number, job.shutdown.restarts, job.generation.agreed_step
    )
    job.generation.assigns = {
        member.hello.agent: assign for member, assign in zip(nodes, assigns, strict=True)
    }
    job.outbox.record_event(
        "assigned",
        generation=job.generation.number,
        restarts=job.shutdown.restarts,
        master=nodes[0].store,
        nodes=[[member.name, member.first_rank, member.join.workers] for member in nodes],
    )
    for member, assign in zip(nodes, assigns, strict=True):
        job.roster.set_phase(member, Phase.JOINED)
        member.standby_reason = ""
        job.outbox.send_to(member, assign)
    if job.roster.counts[Phase.STANDBY]:
        for member in job.roster.members.values():
            if member.phase is Phase.STANDBY and not member.depart_reason:
                send_standby(job, member)


def _start_workers(job: Job, now: float) -> None:
    job.change_state(Trigger.READY, now)
    job.generation.started_at = now
    job.outbox.record_event("started", generation=job.generation.number)
    if job.shutdown.time_limit_at is None and job.config.time_limit is not None:
        job.shutdown.time_limit_at = now + job.config.time_limit
    for member in job.roster.members.values():
        if member.phase is Phase.READY:
            job.roster.set_phase(member, Phase.RUNNING)
            job.outbox.send_to(member, Start(job.generation.number))


def _close_generation(job: Job) -> None:
    """Keep of the last generation what the next one is told."""
    job.generation.agreed_step = job.generation.progress.find_agreed_step(
        job.generation.assigns, job.generation.agreed_step
    )
    job.generation.hang = None


# Ending one
# -----------------------------------------------------------------------------------------------------------


def on_worker_failure(job: Job, failure: Failure, now: float) -> None:
    """
    A worker has failed: end the others. Whether for another attempt, `stopped` decides: the cause
    may come later.
    """
    lonely = failure.cause.kind == "communication" and job.state is JobState.RUNNING
    job.generation.failures.add(failure, now, _describe_clean_exits(job) if lonely else "")
    if job.state is JobState.RUNNING:
        again = restarts_left(job, now) > 0 and failure.cause.retry
        stop_workers(job, Trigger.FAILED if again else Trigger.STOP, describe_failure(failure), now)


def _describe_clean_exits(job: Job) -> str:
    """Name the ranks that have ended without an error; the empty string where there are none."""
    places = {
        rank: member.name
        for member in job.roster.members.values()
        for rank, code in member.exit_codes.items()
        if code == 0
    }
    return describe_clean_exits(places)


def stop_workers(
    job: Job,
    trigger: Trigger,
    reason: str,
    now: float,
    *,
    code: int | None = None,
    signal: int = SIGTERM,
    grace: float | None = None,
    is_change: bool = False,
    counts_as_restart: bool = False,
) -> None:
    """
    End the workers of the generation, for good (STOP) or for another one. The options are those of
    `Ending`.
    """
    grace = job.config.grace if grace is None else grace
    job.change_state(trigger, now)
    job.generation.hang = None
    late = grace + STOP_REPORT_SECONDS
    if code is None and is_elastic(job.config):  # whether a silent node is lost is known by then
        late = max(late, job.detector.times.dead + STOP_REPORT_SECONDS)
    job.shutdown.stop = StopPlan(
        reason, signal, grace, now + late, code, is_change, counts_as_restart
    )
    job.outbox.record_event(
        "stopping" if trigger is Trigger.STOP else "restarting",
        reason=reason,
        generation=job.generation.number,
    )
    _send_stop(job, job.shutdown.stop)


def stop_message(job: Job, stop: StopPlan) -> StopWorkers:
    """Return what a node is told."""
    return StopWorkers(job.generation.number, stop.signal, stop.grace, stop.reason)


def _send_stop(job: Job, stop: StopPlan) -> None:
    message = stop_message(job, stop)
    for member in job.roster.members.values():
        if member.phase is Phase.RUNNING:
            job.outbox.send_to(member, message)


def finish_stop(job: Job, stop: StopPlan, now: float) -> None:
    """Every worker has ended, or had its time."""
    late = [member for member in job.roster.members.values() if member.phase is Phase.RUNNING]
    for member in late:
        job.outbox.record_event(
            "warning", text=f"{member.name} did not report the end of its workers in time"
        )
    first = job.generation.failures.first
    why_not = None
    failed = first is not None and stop.code is None and not stop.is_change
    if first is not None and failed:
        job.shutdown.restart_history = note_failure(
            job.shutdown.restart_history,
            first.failure,
            job.state_since - job.generation.started_at,
            job.generation.progress.has_reports,
        )
        why_not = find_refusal(
            job.config, job.shutdown.restart_history, job.generation.failures, first.failure, now
        )
    stuck = bool(late) and not is_elastic(job.config)
    if job.state is JobState.STOPPING or stuck or why_not is not None:
        conclude_job(job, Trigger.FINISHED, _make_verdict(job, stop, why_not or ""), now)
        return
    for member in late:
        fence_member(job, member, "it did not report the end of its workers in time")
    counts = stop.counts_as_restart or failed
    delay = _count_restart(job, now) if counts else 0.0
    job.shutdown.stop = stop = replace(stop, counts_as_restart=counts, next_at=now + delay)
    if not delay:
        begin_next_generation(job, stop, now)
        return
    job.outbox.record_event(
        "restarting", reason=stop.reason, generation=job.generation.number, delay=delay
    )
    job.send_notice(
        f"restart {job.shutdown.restarts} of {job.config.max_restarts} in {delay:g} s: the last ones came quickly"
    )


def begin_next_generation(job: Job, stop: StopPlan, now: float) -> None:
    """
    The next generation, where enough nodes are left; else wait for others, as one of the restarts.
    """
    if has_enough_nodes(job):
        job.change_state(Trigger.AGAIN, now)
        _assign_nodes(job, now)
        return
    left = len(job.roster.members) - len(job.roster.departing)
    reason = (
        stop.reason
        if stop.is_change
        else (f"too few {job.config.unit}s are left: {left} of {required_nodes(job.config)}")
    )
    if not stop.counts_as_restart and restarts_left(job, now) > 0:
        _count_restart(job, now)
    elif not stop.counts_as_restart:
        conclude_job(job, Trigger.FINISHED, _make_verdict(job, stop, ""), now)
        return
    _gather_again(job, reason, now)


def _count_restart(job: Job, now: float) -> float:
    """One of the restarts is used; return the seconds to wait before it."""
    job.shutdown.restart_history = count_restart(
        job.config, job.shutdown.restart_history, job.state_since - job.generation.started_at, now
    )
    return restart_delay(job.config, job.shutdown.restart_history)


def _gather_again(job: Job, reason: str, now: float) -> None:
    """Nothing runs, and too few are here: wait for others."""
    job.change_state(Trigger.SHORT, now)
    _close_generation(job)
    job.generation.shortage_reason = reason
    job.shutdown.stop = None
    job.generation.assigns = {}
    for member in job.roster.members.values():
        member.exit_codes = {}
        member.standby_reason = ""
        job.roster.set_phase(member, Phase.JOINED)
    job.outbox.record_event("gathering", reason=reason, generation=job.generation.number)
    send_waiting(job, now)


# The end
# --------------------------------------------------------------------------------------------------------------


def stop_job(job: Job, signal: int, by: str, force: bool, now: float) -> None:
    """Somebody wants the job to end."""
    if job.shutdown.verdict is None:
        abort_job(
            job,
            128 + signal,
            f"stopped by {by}" if by else f"stopped by signal {signal}",
            signal,
            force,
            now,
        )


def abort_job(job: Job, code: int, reason: str, signal: int, force: bool, now: float) -> None:
    """
    End the job for a reason that no worker's exit code changes; a repetition with ``force``
    shortens the end.
    """
    if job.state in (JobState.GATHERING, JobState.ASSIGNING):
        end_unstarted(job, code, reason, now)
    elif job.state in (JobState.RUNNING, JobState.RESTARTING):
        stop_workers(
            job, Trigger.STOP, reason, now, code=code, signal=signal, grace=0.0 if force else None
        )
    elif force and job.shutdown.stop and job.shutdown.stop.grace > 0:
        job.shutdown.stop = replace(
            job.shutdown.stop, signal=SIGKILL, grace=0.0, deadline=now + STOP_REPORT_SECONDS
        )
        _send_stop(job, job.shutdown.stop)


def on_agent_lost(job: Job, reason: str, now: float) -> None:
    """The node of the scheduler is gone, and soon the scheduler."""
    if job.shutdown.verdict is not None:
        return
    if job.state in (JobState.RUNNING, JobState.RESTARTING):
        _send_stop(job, StopPlan(reason, SIGTERM, job.config.grace, now))
    conclude_job(job, Trigger.ORPHANED, Verdict(69, reason), now)


def end_unstarted(job: Job, code: int, reason: str, now: float) -> None:
    """End a job none of whose workers runs."""
    conclude_job(job, Trigger.END, Verdict(code, with_restarts(reason, job.shutdown.restarts)), now)


def _make_verdict(job: Job, stop: StopPlan, why_not: str) -> Verdict:
    code = 69 if stop.is_change and stop.code is None else stop.code
    return make_verdict(
        job.generation.failures,
        restarts=job.shutdown.restarts,
        code=code,
        reason=stop.reason,
        why_not=why_not,
    )


def conclude_job(job: Job, trigger: Trigger, verdict: Verdict, now: float) -> None:
    """The verdict, for everybody."""
    job.change_state(trigger, now)
    job.shutdown.verdict = verdict
    job.generation.hang = None
    job.outbox.record_event("verdict", **verdict_data(verdict))
    job.broadcast(verdict)
    if not job.spec:  # who waits to be told what the job runs waits in vain
        for peer in job.roster.find_visitors():
            job.refuse_peer(peer, job.roster.sessions[peer].hello, refuse_over(job.config, job.key))


def finish_job(job: Job) -> None:
    """Everybody knows the verdict, or had time to."""
    if job.shutdown.verdict is not None and not job.shutdown.is_done:
        job.shutdown.is_done = True
        job.outbox.actions.append(JobDone(job.shutdown.verdict.code))
