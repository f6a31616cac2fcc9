"""
From generation to generation: forming, starting, ending one, trying again or not, and the verdict.
"""

from __future__ import annotations

from dataclasses import replace

from pdrun.rendezvous.membership import sizing as elastic
from pdrun.rendezvous.membership.job import SIGKILL, SIGTERM, Ending, Job
from pdrun.rendezvous.membership.nodes import Phase, assignments
from pdrun.rendezvous.membership.transitions import JobState, Trigger
from pdrun.rendezvous.policies import restart as policy
from pdrun.rendezvous.policies import texts as wording
from pdrun.rendezvous.policies import verdict as judge
from pdrun.rendezvous.policies.progress import ProgressBook
from pdrun.rendezvous.policies.verdict import Failures
from pdrun.rendezvous.protocol.events import Done
from pdrun.rendezvous.protocol.messages import Failure, Start, StopWorkers, Verdict

LATE = 5.0
"""Seconds beyond the grace in which a node must have reported the end of its workers."""


def settle(job: Job, now: float) -> None:
    """Do what follows from the phases of all nodes together."""
    counts = job.counts
    if job.state is JobState.GATHERING:
        if elastic.can_form(job):
            form(job, now)
    elif job.state is JobState.ASSIGNING:
        if job.changed:
            _form_anew(job, now)
        elif not counts[Phase.JOINED]:
            _start(job, now)
    elif job.state is JobState.RUNNING:
        if not counts[Phase.RUNNING]:
            world = next(iter(job.assigns.values())).world_size
            every = f"all {world} workers" if world > 1 else "the worker"
            conclude(job, Trigger.FINISHED, Verdict(0, f"{every} succeeded"), now)
    elif job.state in (JobState.RESTARTING, JobState.STOPPING):
        if not counts[Phase.RUNNING] and job.ending and job.ending.again_at is None:
            stopped(job, job.ending, now)
    elif not job.members:
        farewell(job)


# Beginning a generation
# -----------------------------------------------------------------------------------------------


def form(job: Job, now: float) -> None:
    """Enough have come together: open a generation of those who are here."""
    job.move(Trigger.FULL, now)
    _assign(job, now)


def _form_anew(job: Job, now: float) -> None:
    """Nodes have come or gone before anything started: what was assigned is void."""
    reason = job.changed
    job.changed = ""
    if elastic.are_enough(job):
        job.move(Trigger.CHANGED, now)
        _assign(job, now)
    elif elastic.budget(job, now) > 0:
        _count_restart(job, now)
        _gather_again(job, reason, now)
    else:
        end(job, 69, reason, now)


def _assign(job: Job, now: float) -> None:
    """Number the nodes that take part, and tell each its place."""
    nodes = elastic.choose(job)
    _close_generation(job)
    for member in job.members.values():
        member.index = -1
        member.exits = {}
        job.set_phase(member, Phase.STANDBY)
    job.generation += 1
    job.failures, job.ending, job.progress, job.short = Failures(), None, ProgressBook(now), ""
    assigns = assignments(nodes, job.generation, job.restarts, job.agreed)
    job.assigns = {
        member.hello.agent: assign for member, assign in zip(nodes, assigns, strict=True)
    }
    job.record(
        "assigned",
        generation=job.generation,
        restarts=job.restarts,
        master=nodes[0].store,
        nodes=[[member.name, member.first_rank, member.join.workers] for member in nodes],
    )
    for member, assign in zip(nodes, assigns, strict=True):
        job.set_phase(member, Phase.JOINED)
        member.standby = ""
        job.tell(member, assign)
    if job.counts[Phase.STANDBY]:
        for member in job.members.values():
            if member.phase is Phase.STANDBY and not member.departs:
                elastic.stand_by(job, member)


def _start(job: Job, now: float) -> None:
    job.move(Trigger.READY, now)
    job.started_at = now
    job.record("started", generation=job.generation)
    if job.limit_at is None and job.config.time_limit is not None:
        job.limit_at = now + job.config.time_limit
    for member in job.members.values():
        if member.phase is Phase.READY:
            job.set_phase(member, Phase.RUNNING)
            job.tell(member, Start(job.generation))


def _close_generation(job: Job) -> None:
    """Keep of the last generation what the next one is told."""
    job.agreed = job.progress.agreed(job.assigns, job.agreed)
    job.inquiry = None


# Ending one
# -----------------------------------------------------------------------------------------------------------


def fail(job: Job, failure: Failure, now: float) -> None:
    """
    A worker has failed: end the others. Whether for another attempt, `stopped` decides: the cause
    may come later.
    """
    lonely = failure.cause.kind == "communication" and job.state is JobState.RUNNING
    job.failures.add(failure, now, _ended_well(job) if lonely else "")
    if job.state is JobState.RUNNING:
        again = elastic.budget(job, now) > 0 and failure.cause.retry
        stop_all(job, Trigger.FAILED if again else Trigger.STOP, judge.describe(failure), now)


def _ended_well(job: Job) -> str:
    """Name the ranks that have ended without an error; the empty string where there are none."""
    places = {
        rank: member.name
        for member in job.members.values()
        for rank, code in member.exits.items()
        if code == 0
    }
    return wording.ended_well(places)


def stop_all(
    job: Job,
    trigger: Trigger,
    reason: str,
    now: float,
    *,
    code: int | None = None,
    signal: int = SIGTERM,
    grace: float | None = None,
    change: bool = False,
    counts: bool = False,
) -> None:
    """
    End the workers of the generation, for good (STOP) or for another one. The options are those of
    `Ending`.
    """
    grace = job.config.grace if grace is None else grace
    job.move(trigger, now)
    job.inquiry = None
    late = grace + LATE
    if code is None and elastic.is_elastic(
        job.config
    ):  # whether a silent node is lost is known by then
        late = max(late, job.watch.times.dead + LATE)
    job.ending = Ending(reason, signal, grace, now + late, code, change, counts)
    job.record(
        "stopping" if trigger is Trigger.STOP else "restarting",
        reason=reason,
        generation=job.generation,
    )
    _tell_stop(job, job.ending)


def for_node(job: Job, stop: Ending) -> StopWorkers:
    """Return what a node is told."""
    return StopWorkers(job.generation, stop.signal, stop.grace, stop.reason)


def _tell_stop(job: Job, stop: Ending) -> None:
    message = for_node(job, stop)
    for member in job.members.values():
        if member.phase is Phase.RUNNING:
            job.tell(member, message)


def stopped(job: Job, ending: Ending, now: float) -> None:
    """Every worker has ended, or had its time."""
    late = [member for member in job.members.values() if member.phase is Phase.RUNNING]
    for member in late:
        job.record("warning", text=f"{member.name} did not report the end of its workers in time")
    first = job.failures.first
    why_not = None
    failed = first is not None and ending.code is None and not ending.change
    if first is not None and failed:
        job.attempts = policy.after_failure(
            job.attempts, first.failure, job.since - job.started_at, job.progress.any
        )
        why_not = policy.refusal(job.config, job.attempts, job.failures, first.failure, now)
    stuck = bool(late) and not elastic.is_elastic(job.config)
    if job.state is JobState.STOPPING or stuck or why_not is not None:
        conclude(job, Trigger.FINISHED, _judged(job, ending, why_not or ""), now)
        return
    for member in late:
        elastic.fence(job, member, "it did not report the end of its workers in time")
    counts = ending.counts or failed
    delay = _count_restart(job, now) if counts else 0.0
    job.ending = ending = replace(ending, counts=counts, again_at=now + delay)
    if not delay:
        again(job, ending, now)
        return
    job.record("restarting", reason=ending.reason, generation=job.generation, delay=delay)
    job.notice(
        f"restart {job.restarts} of {job.config.max_restarts} in {delay:g} s: the last ones came quickly"
    )


def again(job: Job, ending: Ending, now: float) -> None:
    """
    The next generation, where enough nodes are left; else wait for others, as one of the restarts.
    """
    if elastic.are_enough(job):
        job.move(Trigger.AGAIN, now)
        _assign(job, now)
        return
    left = len(job.members) - len(job.departing)
    reason = (
        ending.reason
        if ending.change
        else (f"too few {job.config.unit}s are left: {left} of {elastic.least(job.config)}")
    )
    if not ending.counts and elastic.budget(job, now) > 0:
        _count_restart(job, now)
    elif not ending.counts:
        conclude(job, Trigger.FINISHED, _judged(job, ending, ""), now)
        return
    _gather_again(job, reason, now)


def _count_restart(job: Job, now: float) -> float:
    """One of the restarts is used; return the seconds to wait before it."""
    job.attempts = policy.counted(job.config, job.attempts, job.since - job.started_at, now)
    return policy.delay(job.config, job.attempts)


def _gather_again(job: Job, reason: str, now: float) -> None:
    """Nothing runs, and too few are here: wait for others."""
    job.move(Trigger.SHORT, now)
    _close_generation(job)
    job.short = reason
    job.ending = None
    job.assigns = {}
    for member in job.members.values():
        member.exits = {}
        member.standby = ""
        job.set_phase(member, Phase.JOINED)
    job.record("gathering", reason=reason, generation=job.generation)
    elastic.tell_waiting(job, now)


# The end
# --------------------------------------------------------------------------------------------------------------


def stop_ordered(job: Job, signal: int, by: str, force: bool, now: float) -> None:
    """Somebody wants the job to end."""
    if job.verdict is None:
        give_up(
            job,
            128 + signal,
            f"stopped by {by}" if by else f"stopped by signal {signal}",
            signal,
            force,
            now,
        )


def give_up(job: Job, code: int, reason: str, signal: int, force: bool, now: float) -> None:
    """
    End the job for a reason that no worker's exit code changes; a repetition with ``force``
    shortens the end.
    """
    if job.state in (JobState.GATHERING, JobState.ASSIGNING):
        end(job, code, reason, now)
    elif job.state in (JobState.RUNNING, JobState.RESTARTING):
        stop_all(
            job, Trigger.STOP, reason, now, code=code, signal=signal, grace=0.0 if force else None
        )
    elif force and job.ending and job.ending.grace > 0:
        job.ending = replace(job.ending, signal=SIGKILL, grace=0.0, deadline=now + LATE)
        _tell_stop(job, job.ending)


def orphaned(job: Job, reason: str, now: float) -> None:
    """The node of the scheduler is gone, and soon the scheduler."""
    if job.verdict is not None:
        return
    if job.state in (JobState.RUNNING, JobState.RESTARTING):
        _tell_stop(job, Ending(reason, SIGTERM, job.config.grace, now))
    conclude(job, Trigger.ORPHANED, Verdict(69, reason), now)


def end(job: Job, code: int, reason: str, now: float) -> None:
    """End a job none of whose workers runs."""
    conclude(job, Trigger.END, Verdict(code, wording.after_restarts(reason, job.restarts)), now)


def _judged(job: Job, ending: Ending, why_not: str) -> Verdict:
    code = 69 if ending.change and ending.code is None else ending.code
    return judge.worded(
        job.failures, restarts=job.restarts, code=code, reason=ending.reason, why_not=why_not
    )


def conclude(job: Job, trigger: Trigger, verdict: Verdict, now: float) -> None:
    """The verdict, for everybody."""
    job.move(trigger, now)
    job.verdict = verdict
    job.inquiry = None
    job.record("verdict", **wording.verdict_data(verdict))
    job.tell_all(verdict)
    if not job.spec:  # who waits to be told what the job runs waits in vain
        for peer in job.visitors():
            job.refuse(peer, job.sessions[peer].hello, wording.over(job.config, job.key))


def farewell(job: Job) -> None:
    """Everybody knows the verdict, or had time to."""
    if job.verdict is not None and not job.done:
        job.done = True
        job.out.append(Done(job.verdict.code))
