"""
Hello and Join: who comes in, who is turned away, and what a node that is back on a new connection
is told.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pdrun.rendezvous.membership import departures as loss
from pdrun.rendezvous.membership import generations
from pdrun.rendezvous.membership import sizing as elastic
from pdrun.rendezvous.membership.job import Job, Session
from pdrun.rendezvous.membership.nodes import Member, Phase, disagreement, objection
from pdrun.rendezvous.membership.transitions import JobState
from pdrun.rendezvous.policies import texts as wording
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

STARTED = (JobState.RUNNING, JobState.RESTARTING, JobState.STOPPING)


def hello(job: Job, peer: Peer, hello: Hello, now: float) -> None:
    """A new connection says who it is."""
    if hello.version != PROTOCOL:
        return job.refuse(peer, hello, wording.other_protocol(hello))
    if hello.job and job.key and hello.job != job.key:
        return job.refuse(peer, hello, wording.other_job(job.config, job.key, job.command, hello))
    if (other := job.agents.get(hello.agent)) is not None:
        if job.sessions[other].hello.incarnation >= hello.incarnation:
            return job.refuse(
                peer, hello, Refuse(69, "a newer connection of the same agent is here")
            )
        job.forget_session(other)
        job.close(other)
    if (told := job.gone.get(hello.agent)) is not None:
        return job.refuse(peer, hello, Refuse(69, told, rejoin=elastic.is_open(job)))
    member = job.members.get(hello.agent)
    if member is not None and member.hello.incarnation >= hello.incarnation:
        return job.refuse(peer, hello, Refuse(69, "a newer connection of the same agent was here"))
    if not job.key and hello.job and hello.role == "agent":
        job.key = hello.job
        job.command = hello.command
        job.record_created()
    job.sessions[peer] = Session(hello)
    job.agents[hello.agent] = peer
    _welcome(job, peer)
    if member is not None:
        _resume(job, member, peer, hello, now)
    return None


def _welcome(job: Job, peer: Peer) -> None:
    times = job.watch.times
    job.send(
        peer,
        _the_welcome(
            job.key,
            job.config.run,
            job.spec,
            job.scheduler,
            times.heartbeat,
            times.dead,
            elastic.lease(job.config, times.dead),
            job.config.patience,
        ),
    )


@lru_cache(4)
def _the_welcome(*fields: Any) -> Welcome:
    """All are told the same, by one object: it is made, and written, once."""
    return Welcome(*fields)


def _resume(job: Job, member: Member, peer: Peer, hello: Hello, now: float) -> None:
    """A node is back on a new connection: tell it again all that holds now."""
    member.peer = peer
    member.hello = hello
    job.cut.pop(hello.agent, None)
    heard(job, member, now)
    job.watch.met(member, now)
    if member.phase is Phase.STANDBY and member.standby:
        job.send(peer, Standby(member.standby))
    if assign := job.assigns.get(hello.agent):
        job.send(peer, assign)
        if job.state in STARTED:
            job.send(peer, Start(job.generation))
    if job.ending and member.phase is Phase.RUNNING:
        job.send(peer, generations.for_node(job, job.ending))
    if job.inquiry is not None and hello.agent in job.inquiry.waiting:
        job.send(peer, ShowStacks(job.generation))
    if job.verdict:
        job.send(peer, job.verdict)


def heard(job: Job, member: Member, now: float) -> None:
    """Something came from a node."""
    if member.suspect:
        job.record("recovered", node=member.name)
    job.watch.heard(member, now)


def join(job: Job, peer: Peer, hello: Hello, join: Join, now: float) -> None:
    """A node asks to take part."""
    if hello.agent in job.members:
        return None
    old = elastic.replaced(job, join, now)
    refuse = None if old else elastic.closed(job)
    refuse = refuse or _objection(job, old, hello, join)
    if old and not refuse:
        loss.give_up(job, old, "its agent was started again", now, coming=1)
        refuse = elastic.closed(job)
    if not refuse and elastic.is_full(job):
        refuse = wording.full(job.config, job.key)
    if refuse:
        return job.refuse(peer, hello, refuse, node=join.node)
    _admit(job, peer, hello, join, now)
    return None


def _objection(job: Job, old: Member | None, hello: Hello, join: Join) -> Refuse | None:
    """What speaks against a newcomer, once ``old``, whose place it takes, is gone."""
    first = next((member for member in job.members.values() if member is not old), None)
    namesake = job.names.get(join.node)
    rival = job.claims.get(join.node_rank) if join.node_rank is not None else None
    return objection(
        job.config,
        first,
        None if namesake is old else namesake,
        None if rival is old else rival,
        hello,
        join,
    )


def _admit(job: Job, peer: Peer, hello: Hello, join: Join, now: float) -> None:
    config = job.config
    first = next(iter(job.members.values()), None)
    if first is not None:
        for key in disagreement(config.should_agree, first, join):
            job.record("warning", text=wording.differs(key, first.join, join))
    gathering = job.state is JobState.GATHERING
    member = Member(
        hello, join, peer, now, now, join.store, Phase.JOINED if gathering else Phase.STANDBY
    )
    job.add(member)
    job.watch.met(member, now)
    job.joined_at = now
    job.command = job.command or join.facts.get("command", "")
    if join.spec and not job.spec:
        job.spec = join.spec
        for other in job.visitors():
            _welcome(job, other)
    job.record("joined", node=join.node, workers=join.workers, host=hello.host, pid=hello.pid)
    if gathering:
        elastic.tell_arrival(job, now)
    else:
        elastic.stand_by(job, member)
