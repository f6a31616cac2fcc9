"""
What is due: the work of a Tick, and what a successor of the scheduler does about the time that it
did not see.
"""

from __future__ import annotations

from dataclasses import replace

from pdrun.rendezvous.membership import generations
from pdrun.rendezvous.membership.departures import mark_lost
from pdrun.rendezvous.membership.job import SIGTERM, Job
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
    """Do what is due. Looks at every node once, at most."""
    config = job.config
    waited = now - job.state_since
    match job.state:
        case JobState.GATHERING:
            _check_gathering(job, waited, now)
        case JobState.ASSIGNING if waited > config.start_timeout:
            _drop_unready(job, now)
        case JobState.RUNNING if should_grow(job, now):
            more = plural(job.roster.counts[Phase.STANDBY], f"more {config.unit}")
            generations.stop_workers(
                job, Trigger.CHANGED, f"{more} can take part", now, is_change=True
            )
        case JobState.RUNNING:
            check_workers(job, now)
        case JobState.RESTARTING | JobState.STOPPING if job.shutdown.stop is not None:
            if job.shutdown.stop.next_at is not None and job.state is JobState.RESTARTING:
                if now >= job.shutdown.stop.next_at and not _is_over_time_limit(job, now):
                    generations.begin_next_generation(job, job.shutdown.stop, now)
            elif now >= job.shutdown.stop.deadline:
                generations.finish_stop(job, job.shutdown.stop, now)
        case JobState.DONE if waited > FAREWELL_SECONDS:
            generations.finish_job(job)
    if _is_over_time_limit(job, now):
        job.shutdown.time_limit_at = None
        generations.abort_job(
            job, 124, f"the time limit of {config.time_limit:g} s has passed", SIGTERM, False, now
        )


def _is_over_time_limit(job: Job, now: float) -> bool:
    return (
        job.shutdown.time_limit_at is not None
        and now >= job.shutdown.time_limit_at
        and job.shutdown.verdict is None
    )


def _check_gathering(job: Job, waited: float, now: float) -> None:
    config = job.config
    if should_form(job, now):
        generations.form_generation(job, now)
    elif waited > config.start_timeout:
        lacking = required_nodes(config) - count_present(job)
        absent = ", ".join(describe_missing(config, lacking, job.roster.names, job.roster.claims))
        why = f"{job.generation.shortage_reason}; " if job.generation.shortage_reason else ""
        generations.end_unstarted(
            job, 69, f"{why}{absent} did not come within {config.start_timeout:g} s", now
        )
    elif now >= job.next_waiting_at:
        send_waiting(job, now)


def _drop_unready(job: Job, now: float) -> None:
    """Nodes that do not become ready hold up all others; an elastic job goes on without them."""
    slow = [member for member in job.roster.members.values() if member.phase is Phase.JOINED]
    why = f"did not become ready within {job.config.start_timeout:g} s"
    named = ", ".join(member.name for member in slow[:MAX_NAMES])
    if len(slow) > MAX_NAMES:
        named += f" and {len(slow) - MAX_NAMES} more"
    if not is_elastic(job.config):
        generations.end_unstarted(job, 69, f"{named} {why}", now)
        return
    for member in slow:
        mark_lost(job, member, f"it {why}", now)


def resume_job(job: Job, scheduler: str, now: float) -> None:
    """
    The successor's first step: every connection is gone, and nothing is late because of the time
    between.
    """
    away = job.detector.seconds_since_event(now)
    job.scheduler = scheduler
    job.roster.sessions = {}
    job.roster.agents = {}
    for agent, member in job.roster.members.items():
        member.peer = None
        job.roster.cut[agent] = member
    job.detector.reset_members(job.roster.members.values(), now)
    job.state_since = job.state_since + away
    job.roster.joined_at = job.roster.joined_at + away
    job.next_waiting_at = now
    if job.shutdown.stop is not None:
        again_at = job.shutdown.stop.next_at
        job.shutdown.stop = replace(
            job.shutdown.stop,
            deadline=job.shutdown.stop.deadline + away,
            next_at=again_at and again_at + away,
        )
    if job.generation.hang is not None:
        job.generation.hang.deadline += away
    job.generation.progress.shift_times(away)
    job.outbox.record_event("resumed", scheduler=scheduler, away=round(away, 1))
