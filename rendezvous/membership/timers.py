"""
What is due: the work of a Tick, and what a successor of the scheduler does about the time that it
did not see.
"""

from __future__ import annotations

from dataclasses import replace

from pdrun.rendezvous.membership import departures as loss
from pdrun.rendezvous.membership import generations
from pdrun.rendezvous.membership import sizing as elastic
from pdrun.rendezvous.membership import worker_reports as reports
from pdrun.rendezvous.membership.job import SIGTERM, Job
from pdrun.rendezvous.membership.nodes import MOST_NAMES, Phase, missing
from pdrun.rendezvous.membership.transitions import JobState, Trigger
from pdrun.rendezvous.policies.texts import count
from pdrun.rendezvous.protocol.events import FAREWELL


def tick(job: Job, now: float) -> None:
    """Do what is due. Looks at every node once, at most."""
    config = job.config
    waited = now - job.since
    match job.state:
        case JobState.GATHERING:
            _gathering(job, waited, now)
        case JobState.ASSIGNING if waited > config.start_timeout:
            _never_ready(job, now)
        case JobState.RUNNING if elastic.should_grow(job, now):
            more = count(job.counts[Phase.STANDBY], f"more {config.unit}")
            generations.stop_all(job, Trigger.CHANGED, f"{more} can take part", now, change=True)
        case JobState.RUNNING:
            reports.look(job, now)
        case JobState.RESTARTING | JobState.STOPPING if job.ending is not None:
            if job.ending.again_at is not None and job.state is JobState.RESTARTING:
                if now >= job.ending.again_at and not _limit_passed(job, now):
                    generations.again(job, job.ending, now)
            elif now >= job.ending.deadline:
                generations.stopped(job, job.ending, now)
        case JobState.DONE if waited > FAREWELL:
            generations.farewell(job)
    if _limit_passed(job, now):
        job.limit_at = None
        generations.give_up(
            job, 124, f"the time limit of {config.time_limit:g} s has passed", SIGTERM, False, now
        )


def _limit_passed(job: Job, now: float) -> bool:
    return job.limit_at is not None and now >= job.limit_at and job.verdict is None


def _gathering(job: Job, waited: float, now: float) -> None:
    config = job.config
    if elastic.should_form(job, now):
        generations.form(job, now)
    elif waited > config.start_timeout:
        lacking = elastic.least(config) - elastic.present(job)
        absent = ", ".join(missing(config, lacking, job.names, job.claims))
        why = f"{job.short}; " if job.short else ""
        generations.end(
            job, 69, f"{why}{absent} did not come within {config.start_timeout:g} s", now
        )
    elif now >= job.waiting_at:
        elastic.tell_waiting(job, now)


def _never_ready(job: Job, now: float) -> None:
    """Nodes that do not become ready hold up all others; an elastic job goes on without them."""
    slow = [member for member in job.members.values() if member.phase is Phase.JOINED]
    why = f"did not become ready within {job.config.start_timeout:g} s"
    named = ", ".join(member.name for member in slow[:MOST_NAMES])
    if len(slow) > MOST_NAMES:
        named += f" and {len(slow) - MOST_NAMES} more"
    if not elastic.is_elastic(job.config):
        generations.end(job, 69, f"{named} {why}", now)
        return
    for member in slow:
        loss.give_up(job, member, f"it {why}", now)


def resumed(job: Job, scheduler: str, now: float) -> None:
    """
    The successor's first step: every connection is gone, and nothing is late because of the time
    between.
    """
    away = job.watch.gap(now)
    job.scheduler = scheduler
    job.sessions = {}
    job.agents = {}
    for agent, member in job.members.items():
        member.peer = None
        job.cut[agent] = member
    job.watch.afresh(job.members.values(), now)
    job.since = job.since + away
    job.joined_at = job.joined_at + away
    job.waiting_at = now
    if job.ending is not None:
        again_at = job.ending.again_at
        job.ending = replace(
            job.ending, deadline=job.ending.deadline + away, again_at=again_at and again_at + away
        )
    if job.inquiry is not None:
        job.inquiry.deadline += away
    job.progress.shift(away)
    job.record("resumed", scheduler=scheduler, away=round(away, 1))
