"""
Hello and Join: who comes in, who is turned away, and what a node that is back on a new connection
is told.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pdrun.rendezvous.membership import generations
from pdrun.rendezvous.membership.departures import mark_lost
from pdrun.rendezvous.membership.job import Job
from pdrun.rendezvous.membership.nodes import Member, Phase, differing_facts, find_join_objection
from pdrun.rendezvous.membership.roster import Session
from pdrun.rendezvous.membership.sizing import (
    announce_arrival,
    find_closed_reason,
    find_replaced,
    is_full,
    is_open,
    lease_seconds,
    send_standby,
)
from pdrun.rendezvous.membership.transitions import JobState
from pdrun.rendezvous.policies.texts import (
    describe_difference,
    refuse_full,
    refuse_other_job,
    refuse_protocol,
)
from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.protocol.messages import (
    PROTOCOL,
    Hello,
    Join,
    Refuse,
    ShowStacks,
    Standby,
    Start,
    Welcome,
)

STARTED_STATES = (JobState.RUNNING, JobState.RESTARTING, JobState.STOPPING)


def handle_hello(job: Job, peer: Peer, hello: Hello, now: float) -> None:
    """A new connection says who it is."""
    if hello.version != PROTOCOL:
        return job.refuse_peer(peer, hello, refuse_protocol(hello))
    if hello.job and job.key and hello.job != job.key:
        return job.refuse_peer(
            peer, hello, refuse_other_job(job.config, job.key, job.command, hello)
        )
    if (other := job.roster.agents.get(hello.agent)) is not None:
        if job.roster.sessions[other].hello.incarnation >= hello.incarnation:
            return job.refuse_peer(
                peer, hello, Refuse(69, "a newer connection of the same agent is here")
            )
        job.roster.forget_session(other)
        job.outbox.close_peer(other)
    if (told := job.roster.gone.get(hello.agent)) is not None:
        return job.refuse_peer(peer, hello, Refuse(69, told, rejoin=is_open(job)))
    member = job.roster.members.get(hello.agent)
    if member is not None and member.hello.incarnation >= hello.incarnation:
        return job.refuse_peer(
            peer, hello, Refuse(69, "a newer connection of the same agent was here")
        )
    if not job.key and hello.job and hello.role == "agent":
        job.key = hello.job
        job.command = hello.command
        job.record_created()
    job.roster.sessions[peer] = Session(hello)
    job.roster.agents[hello.agent] = peer
    _send_welcome(job, peer)
    if member is not None:
        _resume_member(job, member, peer, hello, now)
    return None


def _send_welcome(job: Job, peer: Peer) -> None:
    times = job.detector.times
    job.outbox.send(
        peer,
        _cached_welcome(
            job.key,
            job.config.run,
            job.spec,
            job.scheduler,
            times.heartbeat,
            times.dead,
            lease_seconds(job.config, times.dead),
            job.config.patience,
        ),
    )


@lru_cache(4)
def _cached_welcome(*fields: Any) -> Welcome:
    """All are told the same, by one object: it is made, and written, once."""
    return Welcome(*fields)


def _resume_member(job: Job, member: Member, peer: Peer, hello: Hello, now: float) -> None:
    """A node is back on a new connection: tell it again all that holds now."""
    member.peer = peer
    member.hello = hello
    job.roster.cut.pop(hello.agent, None)
    mark_alive(job, member, now)
    job.detector.mark_reachable(member, now)
    if member.phase is Phase.STANDBY and member.standby_reason:
        job.outbox.send(peer, Standby(member.standby_reason))
    if assign := job.generation.assigns.get(hello.agent):
        job.outbox.send(peer, assign)
        if job.state in STARTED_STATES:
            job.outbox.send(peer, Start(job.generation.number))
    if job.shutdown.stop and member.phase is Phase.RUNNING:
        job.outbox.send(peer, generations.stop_message(job, job.shutdown.stop))
    if job.generation.hang is not None and hello.agent in job.generation.hang.waiting:
        job.outbox.send(peer, ShowStacks(job.generation.number))
    if job.shutdown.verdict:
        job.outbox.send(peer, job.shutdown.verdict)


def mark_alive(job: Job, member: Member, now: float) -> None:
    """Something came from a node."""
    if member.is_suspect:
        job.outbox.record_event("recovered", node=member.name)
    job.detector.mark_alive(member, now)


def handle_join(job: Job, peer: Peer, hello: Hello, join: Join, now: float) -> None:
    """A node asks to take part."""
    if hello.agent in job.roster.members:
        return None
    old = find_replaced(job, join, now)
    refuse = None if old else find_closed_reason(job)
    refuse = refuse or _find_objection(job, old, hello, join)
    if old and not refuse:
        mark_lost(job, old, "its agent was started again", now, incoming=1)
        refuse = find_closed_reason(job)
    if not refuse and is_full(job):
        refuse = refuse_full(job.config, job.key)
    if refuse:
        return job.refuse_peer(peer, hello, refuse, node=join.node)
    _admit_member(job, peer, hello, join, now)
    return None


def _find_objection(job: Job, old: Member | None, hello: Hello, join: Join) -> Refuse | None:
    """What speaks against a newcomer, once ``old``, whose place it takes, is gone."""
    first = next((member for member in job.roster.members.values() if member is not old), None)
    namesake = job.roster.names.get(join.node)
    rival = job.roster.claims.get(join.node_rank) if join.node_rank is not None else None
    return find_join_objection(
        job.config,
        first,
        None if namesake is old else namesake,
        None if rival is old else rival,
        hello,
        join,
    )


def _admit_member(job: Job, peer: Peer, hello: Hello, join: Join, now: float) -> None:
    config = job.config
    first = next(iter(job.roster.members.values()), None)
    if first is not None:
        for key in differing_facts(config.should_agree, first, join):
            job.outbox.record_event("warning", text=describe_difference(key, first.join, join))
    gathering = job.state is JobState.GATHERING
    member = Member(
        hello, join, peer, now, now, join.store, Phase.JOINED if gathering else Phase.STANDBY
    )
    job.roster.add_member(member)
    job.detector.mark_reachable(member, now)
    job.roster.joined_at = now
    job.command = job.command or join.facts.get("command", "")
    if join.spec and not job.spec:
        job.spec = join.spec
        for other in job.roster.find_visitors():
            _send_welcome(job, other)
    job.outbox.record_event(
        "joined", node=join.node, workers=join.workers, host=hello.host, pid=hello.pid
    )
    if gathering:
        announce_arrival(job, now)
    else:
        send_standby(job, member)
