"""Hello and Join: which agents are accepted or refused, and what a reconnected node is sent."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from pdrun.rendezvous.membership.departures import mark_lost
from pdrun.rendezvous.membership.generations import stop_message
from pdrun.rendezvous.membership.job import Job
from pdrun.rendezvous.membership.nodes import Member, Phase, differing_facts, find_join_objection
from pdrun.rendezvous.membership.roster import Roster, Session
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
    refuse_stopping,
)
from pdrun.rendezvous.protocol.events import JoinDeferred, Peer, SchedulerConfig
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

VERSION_FACTS = ("python", "torch", "pdrun", "device")
"""Facts of a node that its record has."""
MAX_DIFFERENCES = 8
"""Differences between nodes that are shown, and named at the end of a job that fails."""
STARTED_STATES = (JobState.RUNNING, JobState.RESTARTING, JobState.STOPPING)


def handle_hello(job: Job, peer: Peer, hello: Hello, now: float) -> None:
    """Accept or refuse a new connection."""
    roster = job.roster
    refuse = _find_hello_objection(job, hello)
    if refuse is not None:
        job.refuse_peer(peer, hello, refuse)
        return
    older = roster.agents.get(hello.agent)
    if older is not None:
        roster.forget_session(older)
        job.outbox.close_peer(older)
    member = roster.members.get(hello.agent)
    if not job.key and hello.job and hello.role == "agent":
        job.key = hello.job
        job.command = hello.command
        job.record_created()
    roster.sessions[peer] = Session(hello)
    roster.agents[hello.agent] = peer
    _send_welcome(job, peer)
    if member is not None:
        _resume_member(job, member, peer, hello, now)


def _find_hello_objection(job: Job, hello: Hello) -> Refuse | None:
    """Return why a connection is refused, or None."""
    roster = job.roster
    if hello.version != PROTOCOL:
        return refuse_protocol(hello)
    if hello.job and job.key and hello.job != job.key:
        return refuse_other_job(job.config, job.key, job.command, hello)
    older = roster.agents.get(hello.agent)
    if older is not None and roster.sessions[older].hello.incarnation >= hello.incarnation:
        return Refuse(69, "a newer connection of the same agent is here")
    if (reason := roster.gone.get(hello.agent)) is not None:
        return Refuse(69, reason, rejoin=is_open(job.config, job.state))
    member = roster.members.get(hello.agent)
    if member is not None and member.hello.incarnation >= hello.incarnation:
        return Refuse(69, "a newer connection of the same agent was here")
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
            job.config.keeps_port,
        ),
    )


@lru_cache(4)
def _cached_welcome(*fields: Any) -> Welcome:
    """Return one object for all agents: the codec encodes the same object only once."""
    return Welcome(*fields)


def _resume_member(job: Job, member: Member, peer: Peer, hello: Hello, now: float) -> None:
    """A node has reconnected: send it the present state again."""
    outbox = job.outbox
    member.peer = peer
    member.hello = hello
    job.roster.cut.pop(hello.agent, None)
    mark_alive(job, member, now)
    job.detector.mark_reachable(member, now)
    if member.phase is Phase.STANDBY and member.standby_reason:
        outbox.send(peer, Standby(member.standby_reason))
    if assign := job.generation.assigns.get(hello.agent):
        outbox.send(peer, assign)
        if job.state in STARTED_STATES:
            outbox.send(peer, Start(job.generation.number))
    if job.shutdown.stop and member.phase is Phase.RUNNING:
        outbox.send(peer, stop_message(job.generation, job.shutdown.stop))
    hang = job.generation.hang
    if hang is not None and hello.agent in hang.waiting:
        outbox.send(peer, ShowStacks(job.generation.number))
    if job.shutdown.verdict:
        outbox.send(peer, job.shutdown.verdict)


def mark_alive(job: Job, member: Member, now: float) -> None:
    """Note that a node has sent something."""
    if member.is_suspect:
        job.outbox.record_event("recovered", node=member.name)
    job.detector.mark_alive(member, now)


def handle_join(job: Job, peer: Peer, hello: Hello, join: Join, now: float) -> None:
    """Accept or refuse a node."""
    if hello.agent in job.roster.members:
        return
    if job.shutdown.verdict and join.node in job.roster.deferred:
        job.roster.sessions[peer].deferred_node = join.node
        job.outbox.send(peer, job.shutdown.verdict)
        return
    old = find_replaced(job, join, now)
    refuse = None if old else find_closed_reason(job)
    if refuse is None:
        refuse = _find_objection(job.config, job.roster, old, hello, join)
    if refuse is None and old is not None:
        mark_lost(job, old, "its agent was started again", now, incoming=1)
        refuse = find_closed_reason(job)
    if refuse is None and is_full(job.config, job.roster):
        refuse = refuse_full(job.config, job.key)
    if refuse is not None:
        job.roster.deferred.pop(join.node, None)
        job.refuse_peer(peer, hello, refuse, node=join.node)
    else:
        _admit_member(job, peer, hello, join, now)


def defer_join(job: Job, peer: Peer, hello: Hello, join: Join, now: float) -> JoinDeferred | None:
    """
    Refuse for now a node whose name or rank an earlier one has that may be ending or have ended.

    It asks again until the earlier one has left, is lost or has proved to be alive, or until it
    gets the verdict. Return None if the join has to be decided now, otherwise what the journal
    keeps: the decision depends on the detector's times.
    """
    refuse = _find_deferral(job, hello, join, now)
    if refuse is None:
        return None
    job.outbox.send(peer, replace(refuse, retry=True))
    job.outbox.close_peer(peer)
    note_deferred(job.roster, peer, join.node, now)
    return JoinDeferred(peer, join.node)


def note_deferred(roster: Roster, peer: Peer, node: str, now: float) -> None:
    """Note that a node was refused for now; its connection is being closed."""
    roster.forget_session(peer)
    roster.deferred[node] = now


def _find_deferral(job: Job, hello: Hello, join: Join, now: float) -> Refuse | None:
    """Return why a node cannot join yet, or None."""
    config, roster = job.config, job.roster
    if job.state is JobState.STOPPING and join.node in roster.deferred:
        return refuse_stopping(config, job.key)
    rival = roster.claims.get(join.node_rank) if join.node_rank is not None else None
    old = roster.names.get(join.node, rival)
    is_over = job.state in (JobState.STOPPING, JobState.DONE)
    is_usable = is_open(config, job.state) or job.restarts_left(now) > 0
    if old is None or is_over or not is_usable or not _is_in_doubt(job, old, hello, join, now):
        return None
    if _find_objection(config, roster, old, hello, join) is not None:
        return None  # it cannot join in any case
    refuse = _find_objection(config, roster, None, hello, join)
    assert refuse is not None, "the earlier node is the objection"
    return refuse


def _is_in_doubt(job: Job, old: Member, hello: Hello, join: Join, now: float) -> bool:
    """
    Whether ``old`` neither can be replaced already nor is alive for certain.

    An agent whose connection its kernel has closed has ended, and its workers with it. Silence, and
    the end of a silent connection, prove nothing: its workers run until the failure detector gives
    it up. An earlier pod may run on another machine, so it is never refused for good.
    """
    if old.peer is not None and not (join.is_pod and old.name == join.node):
        return job.detector.may_have_ended(old, hello, now)
    if job.state is JobState.GATHERING and old.peer is None and old.name == join.node:
        return False  # it has no workers
    return old is not find_replaced(job, join, now) or not job.detector.is_expired(old, now)


def _find_objection(
    config: SchedulerConfig, roster: Roster, old: Member | None, hello: Hello, join: Join
) -> Refuse | None:
    """Return what is wrong with a new node, compared with all nodes except ``old``."""
    first = next((member for member in roster.members.values() if member is not old), None)
    namesake = roster.names.get(join.node)
    rival = roster.claims.get(join.node_rank) if join.node_rank is not None else None
    return find_join_objection(
        config,
        first,
        None if namesake is old else namesake,
        None if rival is old else rival,
        hello,
        join,
    )


def _admit_member(job: Job, peer: Peer, hello: Hello, join: Join, now: float) -> None:
    roster = job.roster
    outbox = job.outbox
    first = next(iter(roster.members.values()), None)
    if first is not None:
        _warn_about_differences(job, first, join)
    is_gathering = job.state is JobState.GATHERING
    phase = Phase.JOINED if is_gathering else Phase.STANDBY
    member = Member(hello, join, peer, now, now, join.store, phase)
    roster.add_member(member)
    job.detector.mark_reachable(member, now)
    roster.joined_at = now
    job.command = job.command or join.facts.get("command", "")
    if join.spec and not job.spec:
        job.spec = join.spec
        for other in roster.find_visitors():
            _send_welcome(job, other)
    outbox.record_event(
        "joined",
        node=join.node,
        workers=join.workers,
        host=hello.host,
        pid=hello.pid,
        **_find_new_versions(job, join),
    )
    if is_gathering:
        announce_arrival(job, now)
    else:
        send_standby(job, member)


def _warn_about_differences(job: Job, first: Member, join: Join) -> None:
    """Record in what a node differs from the first; show each other value once at the terminals."""
    for key in differing_facts(job.config.should_agree, first, join):
        text = describe_difference(key, first.join, join)
        job.outbox.record_event("warning", text=text)
        if (key, join.facts[key]) not in job.differences and len(job.differences) < MAX_DIFFERENCES:
            job.differences[key, join.facts[key]] = text
            job.send_notice(text)


def _find_new_versions(job: Job, join: Join) -> dict[str, dict[str, str]]:
    """Return what the record of a node has about its versions: what differs from the first one."""
    versions = {key: join.facts[key] for key in VERSION_FACTS if key in join.facts}
    if not job.first_versions:
        job.first_versions = versions
    else:
        first = job.first_versions
        versions = {key: value for key, value in versions.items() if first.get(key) != value}
    return {"versions": versions} if versions else {}
