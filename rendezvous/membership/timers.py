"""The work of a Tick, and what a resumed scheduler does about the time that it missed."""

from __future__ import annotations

from dataclasses import replace

from pdrun.rendezvous.membership.departures import mark_lost
from pdrun.rendezvous.membership.generations import (
    abort_job,
    begin_next_generation,
    end_unstarted,
    finish_job,
    finish_stop,
    form_generation,
    stop_workers,
)
from pdrun.rendezvous.membership.job import SIGTERM, Job, StopPlan
from pdrun.rendezvous.membership.nodes import MAX_NAMES, Phase, describe_missing
from pdrun.rendezvous.membership.sizing import (
    count_present,
    is_elastic,
    required_nodes,
    send_waiting,
    should_form,
    should_grow,
)
from pdrun.rendezvous.membership.transitions import JobState, Trigger
from pdrun.rendezvous.membership.worker_reports import check_workers
from pdrun.rendezvous.protocol.events import FAREWELL_SECONDS
from pdrun.text import plural


def run_timers(job: Job, now: float) -> None:
    """Do what is due. Looks at each node at most once."""
    config = job.config
    waited = now - job.state_since
    match job.state:
        case JobState.GATHERING:
            _check_gathering(job, waited, now)
        case JobState.ASSIGNING if waited > config.start_timeout:
            _drop_unready(job, now)
        case JobState.RUNNING if should_grow(job, now):
            more = plural(job.roster.counts[Phase.STANDBY], f"more {config.unit}")
            stop_workers(job, Trigger.CHANGED, f"{more} can take part", now, is_change=True)
        case JobState.RUNNING:
            check_workers(job, now)
        case JobState.RESTARTING | JobState.STOPPING if job.shutdown.stop is not None:
            _check_stop(job, job.shutdown.stop, now)
        case JobState.DONE if waited > FAREWELL_SECONDS:
            finish_job(job)
    if _is_over_time_limit(job, now):
        job.shutdown.time_limit_at = None
        reason = f"the time limit of {config.time_limit:g} s has passed"
        abort_job(job, 124, reason, SIGTERM, False, now)


def _is_over_time_limit(job: Job, now: float) -> bool:
    limit = job.shutdown.time_limit_at
    return limit is not None and now >= limit and job.shutdown.verdict is None


def _check_gathering(job: Job, waited: float, now: float) -> None:
    config = job.config
    roster = job.roster
    if should_form(job, now):
        form_generation(job, now)
    elif waited > config.start_timeout:
        lacking = required_nodes(config) - count_present(roster)
        absent = ", ".join(describe_missing(config, lacking, roster.names, roster.claims))
        reason = f"{absent} did not join within {config.start_timeout:g} s"
        if job.generation.shortage_reason:
            reason = f"{job.generation.shortage_reason}; {reason}"
        end_unstarted(job, 69, reason, now)
    elif now >= job.next_waiting_at:
        send_waiting(job, now)


def _check_stop(job: Job, stop: StopPlan, now: float) -> None:
    if stop.next_at is not None and job.state is JobState.RESTARTING:
        if now >= stop.next_at and not _is_over_time_limit(job, now):
            begin_next_generation(job, stop, now)
    elif now >= stop.deadline:
        finish_stop(job, stop, now)


def _drop_unready(job: Job, now: float) -> None:
    """Some nodes are not ready in time: an elastic job continues without them, others end."""
    slow = [member for member in job.roster.members.values() if member.phase is Phase.JOINED]
    why = f"did not become ready within {job.config.start_timeout:g} s"
    names = ", ".join(member.name for member in slow[:MAX_NAMES])
    if len(slow) > MAX_NAMES:
        names += f" and {len(slow) - MAX_NAMES} more"
    if not is_elastic(job.config):
        end_unstarted(job, 69, f"{names} {why}", now)
        return
    for member in slow:
        mark_lost(job, member, f"it {why}", now)


def resume_job(job: Job, scheduler: str, now: float) -> None:
    """
    First step of a resumed scheduler.

    Every connection has ended, and the time without a scheduler makes nothing late.
    """
    away = job.detector.seconds_since_event(now)
    roster = job.roster
    job.scheduler = scheduler
    roster.sessions = {}
    roster.agents = {}
    for agent, member in roster.members.items():
        member.peer = None
        roster.cut[agent] = member
    job.detector.reset_members(roster.members.values(), now)
    job.state_since += away
    roster.joined_at += away
    job.next_waiting_at = now
    stop = job.shutdown.stop
    if stop is not None:
        next_at = stop.next_at
        if next_at is not None:
            next_at += away
        job.shutdown.stop = replace(stop, deadline=stop.deadline + away, next_at=next_at)
    if job.generation.hang is not None:
        job.generation.hang.deadline += away
    job.generation.idle.exit_at += away
    job.generation.progress.shift_times(away)
    job.outbox.record_event("resumed", scheduler=scheduler, away=round(away, 1))
