"""What is true of a membership after every step. For tests, and to read as a specification."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from pdrun.rendezvous.membership.machine import JobState, Membership
from pdrun.rendezvous.membership.nodes import Phase
from pdrun.rendezvous.membership.sizing import required_nodes
from pdrun.rendezvous.policies.verdict import find_first_cause

IDLE_STATES = (JobState.GATHERING, JobState.DONE)


class InvariantError(AssertionError):
    """The machine is in a state that must not exist."""


def check_invariants(machine: Membership) -> None:
    """Raise InvariantError if an invariant of ``machine`` is violated."""
    for about in (_check_job, _check_waits, _check_nodes, _check_ranks, _check_connections):
        for problem in about(machine):
            raise InvariantError(
                f"{problem} (job is {machine.state.value}, generation {machine.generation.number})"
            )


def _check_job(machine: Membership) -> Iterator[str]:
    if (machine.state is JobState.DONE) != (machine.shutdown.verdict is not None):
        yield "a job is done exactly when it has a verdict"
    if machine.shutdown.is_done and machine.shutdown.verdict is None:
        yield "the scheduler exits before the verdict"
    config = machine.config
    attempts = machine.shutdown.restart_history
    if config.restart_window is None and machine.shutdown.restarts > config.max_restarts:
        yield f"{machine.shutdown.restarts} restarts of {config.max_restarts}"
    if len(attempts.times) > config.max_restarts:
        yield f"{len(attempts.times)} restarts of {config.max_restarts} in the window"
    if machine.state in (JobState.ASSIGNING, JobState.RUNNING) and machine.generation.failures:
        yield "a worker has failed and no worker is being stopped"
    if machine.generation.failures.first != find_first_cause(machine.generation.failures):
        yield "the first cause that was kept is not the first cause"


def _check_waits(machine: Membership) -> Iterator[str]:
    """Every wait has an end."""
    ending = machine.state in (JobState.RESTARTING, JobState.STOPPING)
    if ending and machine.shutdown.stop is None:
        yield "workers are being ended without a deadline"
    if not ending and machine.shutdown.stop is not None and machine.state is not JobState.DONE:
        yield "there is a deadline for a stop, and no stop"
    if machine.generation.hang is not None and machine.state is not JobState.RUNNING:
        yield "a hang is looked into and nothing runs"
    if machine.generation.reform_reason or machine.outbox.fenced:
        yield "what was decided has not been done"


def _check_nodes(machine: Membership) -> Iterator[str]:
    config = machine.config
    members = machine.roster.members
    if len(members) - len(machine.roster.departing) > config.nodes + config.spares:
        yield f"{len(members)} nodes of {config.nodes} and {config.spares} spares"
    if {member.name: member for member in members.values()} != machine.roster.names or len(
        machine.roster.names
    ) != len(members):
        yield "two nodes have one name"
    claims = {m.join.node_rank: m for m in members.values() if m.join.node_rank is not None}
    if claims != machine.roster.claims:
        yield "two nodes asked for one place"
    phases = Counter(member.phase for member in members.values())
    if any(phases[phase] != count for phase, count in machine.roster.counts.items()):
        yield "the phases are not counted right"
    if machine.roster.cut != {
        agent: member for agent, member in members.items() if member.peer is None
    }:
        yield "the nodes that are cut off are not those without a connection"
    if machine.roster.departing != {
        agent: member for agent, member in members.items() if member.depart_reason
    }:
        yield "the departing nodes are not those that have a reason"
    if any(agent in machine.roster.gone for agent in members):
        yield "a node that was given up is here"
    allowed = {
        JobState.GATHERING: {Phase.JOINED},
        JobState.ASSIGNING: {Phase.STANDBY, Phase.JOINED, Phase.READY},
    }.get(machine.state, {Phase.STANDBY, Phase.RUNNING, Phase.FINISHED})
    if machine.state is not JobState.DONE and not set(phases) <= allowed:
        yield f"nodes are {', '.join(phase.value for phase in phases)}"


def _check_ranks(machine: Membership) -> Iterator[str]:
    """One generation at a time, each rank once, and no rank on a node that stands by."""
    assigns = sorted(machine.generation.assigns.values(), key=lambda assign: assign.node_rank)
    if (
        machine.state not in IDLE_STATES
        and not required_nodes(machine.config) <= len(assigns) <= machine.config.nodes
    ):
        yield f"a generation of {len(assigns)} nodes"
    if assigns and {assign.generation for assign in assigns} != {machine.generation.number}:
        yield "two generations at a time"
    if [assign.node_rank for assign in assigns] != list(range(len(assigns))):
        yield "node indices are not 0 to n-1"
    if (
        len(
            {
                (assign.world_size, assign.master, assign.restarts, assign.agreed_step)
                for assign in assigns
            }
        )
        > 1
    ):
        yield "nodes of one generation were sent different values"
    firsts = [assign.first_rank for assign in assigns] + [
        assign.world_size for assign in assigns[:1]
    ]
    if any(lower >= upper for lower, upper in itertools.pairwise(firsts)) or firsts[:1] not in (
        [],
        [0],
    ):
        yield "ranks are not 0 to n-1, each once"
    for agent, member in machine.roster.members.items():
        assign = machine.generation.assigns.get(agent)
        if assign is None and member.phase in (Phase.READY, Phase.RUNNING, Phase.FINISHED):
            yield f"{member.name} runs without a place"
        if assign is not None and (
            assign.node_rank != member.index or assign.first_rank != member.first_rank
        ):
            yield f"{member.name} was sent another place than it has"
        if member.phase is Phase.STANDBY and (
            assign is not None or member.ranks or member.exit_codes
        ):
            yield f"{member.name} stands by and has ranks"
        if member.exit_codes and not set(member.exit_codes) <= set(member.ranks):
            yield "a worker ended on a node that does not have its rank"


def _check_connections(machine: Membership) -> Iterator[str]:
    for member in machine.roster.members.values():
        if member.peer is not None and member.peer not in machine.roster.sessions:
            yield f"{member.name} has a connection that is not open"
    if machine.roster.agents != {
        session.hello.agent: peer for peer, session in machine.roster.sessions.items()
    }:
        yield "the connections of the agents are not the open ones"
    if len(machine.roster.agents) != len(machine.roster.sessions):
        yield "one agent has two connections"
    if any(
        session.hello.agent in machine.roster.gone for session in machine.roster.sessions.values()
    ):
        yield "an agent that was given up is still connected"
