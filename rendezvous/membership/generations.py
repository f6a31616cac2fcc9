"""Start and end generations: form, start, stop, restart, conclude."""

from __future__ import annotations

from dataclasses import replace

from pdrun.rendezvous.membership.job import SIGKILL, SIGTERM, Generation, Job, StopPlan
from pdrun.rendezvous.membership.nodes import Phase, assign_ranks
from pdrun.rendezvous.membership.roster import Roster
from pdrun.rendezvous.membership.sizing import (
    can_form,
    choose_members,
    fence_member,
    has_enough_nodes,
    is_elastic,
    required_nodes,
    send_standby,
    send_waiting,
)
from pdrun.rendezvous.membership.transitions import JobState, Trigger
from pdrun.rendezvous.policies.hang_report import IdleWorkers
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
"""Time beyond the grace in which a node must report the end of its workers."""
DEFERRED_SECONDS = 4.0
"""Time in which a node that was refused for now asks again; it waits for one second."""


def advance_job(job: Job, now: float) -> None:
    """Do what follows from the phases of all nodes together."""
    counts = job.roster.counts
    stop = job.shutdown.stop
    if job.state is JobState.GATHERING:
        if can_form(job.config, job.roster):
            form_generation(job, now)
    elif job.state is JobState.ASSIGNING:
        if job.generation.reform_reason:
            _reform_generation(job, now)
        elif not counts[Phase.JOINED]:
            _start_workers(job, now)
    elif job.state is JobState.RUNNING:
        is_cluster = job.config.unit == "worker"
        if not counts[Phase.RUNNING] or (is_cluster and not _is_worker_running(job.roster)):
            world_size = next(iter(job.generation.assigns.values())).world_size
            workers = f"all {world_size} workers" if world_size > 1 else "the worker"
            conclude_job(job, Trigger.FINISHED, Verdict(0, f"{workers} succeeded"), now)
    elif job.state in (JobState.RESTARTING, JobState.STOPPING):
        if not counts[Phase.RUNNING] and stop is not None and stop.next_at is None:
            finish_stop(job, stop, now)
    elif not job.roster.members and not _is_awaited(job.roster, now):
        finish_job(job)


def _is_awaited(roster: Roster, now: float) -> bool:
    """Whether a node that was refused for now has yet to ask again: it gets the verdict."""
    return any(now - at <= DEFERRED_SECONDS for at in roster.deferred.values())


# Start of a generation
# ---------------------


def form_generation(job: Job, now: float) -> None:
    """While gathering: open a generation of the nodes that are present."""
    job.change_state(Trigger.FULL, now)
    _assign_nodes(job, now)


def _reform_generation(job: Job, now: float) -> None:
    """The nodes have changed before any worker started: assign again, gather again, or end."""
    reason = job.generation.reform_reason
    job.generation.reform_reason = ""
    if has_enough_nodes(job.config, job.roster):
        job.change_state(Trigger.CHANGED, now)
        _assign_nodes(job, now)
    elif job.restarts_left(now) > 0:
        _count_restart(job, now)
        _gather_again(job, reason, now)
    else:
        end_unstarted(job, 69, reason, now)


def _assign_nodes(job: Job, now: float) -> None:
    """Number the nodes that take part and send each its place."""
    roster = job.roster
    generation = job.generation
    nodes = choose_members(job.config, roster)
    _close_generation(generation)
    for member in roster.members.values():
        member.index = -1
        member.exit_codes = {}
        roster.set_phase(member, Phase.STANDBY)
    generation.number += 1
    generation.failures = FailureLog()
    generation.stop_notes = []
    generation.progress = ProgressTracker(now)
    generation.shortage_reason = ""
    job.shutdown.stop = None
    assigns = assign_ranks(nodes, generation.number, job.shutdown.restarts, generation.agreed_step)
    generation.assigns = {
        member.hello.agent: assign for member, assign in zip(nodes, assigns, strict=True)
    }
    job.outbox.record_event(
        "assigned",
        generation=generation.number,
        restarts=job.shutdown.restarts,
        master=nodes[0].store,
        nodes=[[member.name, member.first_rank, member.join.workers] for member in nodes],
    )
    for member, assign in zip(nodes, assigns, strict=True):
        roster.set_phase(member, Phase.JOINED)
        member.standby_reason = ""
        job.outbox.send_to(member, assign)
    if roster.counts[Phase.STANDBY]:
        for member in roster.members.values():
            if member.phase is Phase.STANDBY and not member.depart_reason:
                send_standby(job, member)


def _start_workers(job: Job, now: float) -> None:
    """Every node is ready: send Start."""
    job.change_state(Trigger.READY, now)
    job.generation.started_at = now
    job.outbox.record_event("started", generation=job.generation.number)
    if job.shutdown.time_limit_at is None and job.config.time_limit is not None:
        job.shutdown.time_limit_at = now + job.config.time_limit
    for member in job.roster.members.values():
        if member.phase is Phase.READY:
            job.roster.set_phase(member, Phase.RUNNING)
            job.outbox.send_to(member, Start(job.generation.number))


def _close_generation(generation: Generation) -> None:
    """Keep what the next generation is sent of this one."""
    generation.agreed_step = generation.progress.find_agreed_step(
        generation.assigns, generation.agreed_step
    )
    generation.hang = None
    generation.idle = IdleWorkers()


def _is_worker_running(roster: Roster) -> bool:
    """Whether a node with workers runs: parameter servers of a dynamic cluster have none."""
    return any(
        member.join.workers and member.phase is Phase.RUNNING for member in roster.members.values()
    )


# End of a generation
# -------------------


def on_worker_failure(job: Job, failure: Failure, now: float) -> None:
    """
    Stop all workers after the failure of one.

    `finish_stop` decides about a restart, when all workers have ended: the cause may arrive later.
    """
    clean_exits = ""
    if failure.cause.kind == "communication" and job.state is JobState.RUNNING:
        clean_exits = _find_clean_exits(job.roster)
    job.generation.failures.add(failure, now, clean_exits)
    if job.state is JobState.RUNNING:
        can_restart = job.restarts_left(now) > 0 and failure.cause.retry
        trigger = Trigger.FAILED if can_restart else Trigger.STOP
        stop_workers(job, trigger, describe_failure(failure), now)


def _find_clean_exits(roster: Roster) -> str:
    """Name the ranks that have ended without an error; return an empty string if there are none."""
    places = {
        rank: member.name
        for member in roster.members.values()
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
    Stop the workers of the generation, for good (`Trigger.STOP`) or for another generation.

    The options are the fields of `StopPlan`.
    """
    if grace is None:
        grace = job.config.grace
    job.change_state(trigger, now)
    job.generation.hang = None
    seconds = grace + STOP_REPORT_SECONDS
    if code is None and is_elastic(job.config):
        # By then the failure detector has judged a silent node.
        seconds = max(seconds, job.detector.times.dead + STOP_REPORT_SECONDS)
    job.shutdown.stop = StopPlan(
        reason, signal, grace, now + seconds, code, is_change, counts_as_restart
    )
    job.outbox.record_event(
        "stopping" if trigger is Trigger.STOP else "restarting",
        reason=reason,
        generation=job.generation.number,
    )
    _send_stop(job, job.shutdown.stop)


def stop_message(generation: Generation, stop: StopPlan) -> StopWorkers:
    """Return the message that stops the workers of a node."""
    return StopWorkers(generation.number, stop.signal, stop.grace, stop.reason)


def _send_stop(job: Job, stop: StopPlan) -> None:
    message = stop_message(job.generation, stop)
    for member in job.roster.members.values():
        if member.phase is Phase.RUNNING:
            job.outbox.send_to(member, message)


def finish_stop(job: Job, stop: StopPlan, now: float) -> None:
    """Every worker has ended, or the deadline has passed: restart, or conclude the job."""
    late = [member for member in job.roster.members.values() if member.phase is Phase.RUNNING]
    for member in late:
        text = f"{member.name} did not report the end of its workers in time"
        job.outbox.record_event("warning", text=text)
        job.generation.note_stop(text)
    first = job.generation.failures.first
    is_failure = first is not None and stop.code is None and not stop.is_change
    refusal = _find_restart_refusal(job, now) if is_failure else None
    is_stuck = bool(late) and not is_elastic(job.config)
    if is_failure and refusal is None and is_stuck and job.state is JobState.RESTARTING:
        refusal = "not restarted: a node did not report the end of its workers in time"
    if job.state is JobState.STOPPING or is_stuck or refusal is not None:
        conclude_job(job, Trigger.FINISHED, _make_verdict(job, stop, refusal or ""), now)
        return
    for member in late:
        why = "it did not report the end of its workers in time"
        fence_member(job.roster, job.outbox, member, why)
    _plan_next_generation(job, stop, stop.counts_as_restart or is_failure, now)


def _find_restart_refusal(job: Job, now: float) -> str | None:
    """Note the first cause of the generation; return why it is not restarted, or None."""
    failures = job.generation.failures
    assert failures.first is not None
    failure = failures.first.failure
    shutdown = job.shutdown
    shutdown.restart_history = note_failure(
        shutdown.restart_history,
        failure,
        job.state_since - job.generation.started_at,
        job.generation.progress.has_reports,
    )
    return find_refusal(job.config, shutdown.restart_history, failures, failure, now)


def _plan_next_generation(job: Job, stop: StopPlan, is_restart: bool, now: float) -> None:
    """Open the next generation, now or after the delay of a restart."""
    delay = _count_restart(job, now) if is_restart else 0.0
    stop = replace(stop, counts_as_restart=is_restart, next_at=now + delay)
    job.shutdown.stop = stop
    if not delay:
        begin_next_generation(job, stop, now)
        return
    job.outbox.record_event(
        "restarting", reason=stop.reason, generation=job.generation.number, delay=delay
    )
    job.send_notice(
        f"restart {job.shutdown.restarts} of {job.config.max_restarts} in {delay:g} s: "
        "the last restarts followed each other quickly"
    )


def begin_next_generation(job: Job, stop: StopPlan, now: float) -> None:
    """
    Open the next generation if enough nodes are left; otherwise wait for other nodes.

    The wait counts as a restart.
    """
    if has_enough_nodes(job.config, job.roster):
        job.change_state(Trigger.AGAIN, now)
        _assign_nodes(job, now)
        return
    reason = stop.reason
    if not stop.is_change:
        left = job.roster.staying_count
        reason = f"too few {job.config.unit}s are left: {left} of {required_nodes(job.config)}"
    if not stop.counts_as_restart:
        if job.restarts_left(now) <= 0:
            conclude_job(job, Trigger.FINISHED, _make_verdict(job, stop, ""), now)
            return
        _count_restart(job, now)
    _gather_again(job, reason, now)


def _count_restart(job: Job, now: float) -> float:
    """Use one restart; return the seconds to wait before it."""
    shutdown = job.shutdown
    lived = job.state_since - job.generation.started_at
    shutdown.restart_history = count_restart(job.config, shutdown.restart_history, lived, now)
    return restart_delay(job.config, shutdown.restart_history)


def _gather_again(job: Job, reason: str, now: float) -> None:
    """No worker runs and too few nodes are left: wait for other nodes."""
    job.change_state(Trigger.SHORT, now)
    _close_generation(job.generation)
    job.generation.shortage_reason = reason
    job.generation.assigns = {}
    job.shutdown.stop = None
    for member in job.roster.members.values():
        member.exit_codes = {}
        member.standby_reason = ""
        job.roster.set_phase(member, Phase.JOINED)
    job.outbox.record_event("gathering", reason=reason, generation=job.generation.number)
    send_waiting(job, now)


# End of the job
# --------------


def stop_job(job: Job, signal: int, by: str, force: bool, now: float) -> None:
    """Stop the job on request of ``by``, with ``signal`` for the workers."""
    if job.shutdown.verdict is None:
        reason = f"stopped by {by}" if by else f"stopped by signal {signal}"
        abort_job(job, 128 + signal, reason, signal, force, now)


def abort_job(job: Job, code: int, reason: str, signal: int, force: bool, now: float) -> None:
    """
    End the job with ``code``, for any exit of the workers.

    A second call with ``force`` kills the workers without grace.
    """
    stop = job.shutdown.stop
    if job.state in (JobState.GATHERING, JobState.ASSIGNING):
        end_unstarted(job, code, reason, now)
    elif job.state in (JobState.RUNNING, JobState.RESTARTING):
        grace = 0.0 if force else None
        stop_workers(job, Trigger.STOP, reason, now, code=code, signal=signal, grace=grace)
    elif force and stop is not None and stop.grace > 0:
        deadline = now + STOP_REPORT_SECONDS
        job.shutdown.stop = replace(stop, signal=SIGKILL, grace=0.0, deadline=deadline)
        _send_stop(job, job.shutdown.stop)


def on_agent_lost(job: Job, reason: str, now: float) -> None:
    """The agent of the scheduler's own node has died. The scheduler exits soon."""
    if job.shutdown.verdict is not None:
        return
    stop = job.shutdown.stop
    if job.state is JobState.STOPPING and stop is not None:
        # The workers are being stopped for a reason that stays the cause.
        job.generation.note_stop(reason)
        conclude_job(job, Trigger.ORPHANED, _make_verdict(job, stop, ""), now)
        return
    if job.state in (JobState.RUNNING, JobState.RESTARTING):
        _send_stop(job, StopPlan(reason, SIGTERM, job.config.grace, now))
    conclude_job(job, Trigger.ORPHANED, Verdict(69, reason), now)


def end_unstarted(job: Job, code: int, reason: str, now: float) -> None:
    """End a job that has no running worker."""
    verdict = Verdict(code, with_restarts(reason, job.shutdown.restarts))
    conclude_job(job, Trigger.END, verdict, now)


def _make_verdict(job: Job, stop: StopPlan, refusal: str) -> Verdict:
    code = stop.code
    if stop.is_change and code is None:
        code = 69
    return make_verdict(
        job.generation.failures,
        restarts=job.shutdown.restarts,
        code=code,
        reason=stop.reason,
        why_not=refusal,
    )


def conclude_job(job: Job, trigger: Trigger, verdict: Verdict, now: float) -> None:
    """Set the verdict and send it to every node."""
    job.change_state(trigger, now)
    if verdict.code:
        notes = (*job.differences.values(), *job.generation.stop_notes)
        verdict = replace(verdict, notes=notes)
    job.shutdown.verdict = verdict
    job.generation.hang = None
    job.outbox.record_event("verdict", **verdict_data(verdict))
    job.broadcast(verdict)
    if not job.spec:
        # These agents wait for the specification, which will not come.
        for peer in job.roster.find_visitors():
            refuse = refuse_over(job.config, job.key)
            job.refuse_peer(peer, job.roster.sessions[peer].hello, refuse)


def finish_job(job: Job) -> None:
    """Every node has the verdict, or had time for it: the scheduler can exit."""
    if job.shutdown.verdict is not None and not job.shutdown.is_done:
        job.shutdown.is_done = True
        job.outbox.actions.append(JobDone(job.shutdown.verdict.code))
