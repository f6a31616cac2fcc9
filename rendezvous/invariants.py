"""What is true of a membership after every step, whatever happened. For tests, and for reading as a specification."""

from __future__ import annotations

from pdrun.rendezvous.members import Phase
from pdrun.rendezvous.state import JobState, Membership


class InvariantError(AssertionError):
    """The machine is in a state that must not exist."""


def check(machine: Membership) -> None:
    """Raise InvariantError when something is true of ``machine`` that never may be."""
    for problem in _problems(machine):
        raise InvariantError(f"{problem} (job is {machine.state.value}, generation {machine.generation})")


def _problems(machine: Membership) -> list[str]:
    return [*_about_job(machine), *_about_ranks(machine), *_about_connections(machine)]


def _about_job(machine: Membership) -> list[str]:
    found = []
    if (machine.state is JobState.DONE) != (machine.verdict is not None):
        found.append("a job is done exactly when it has a verdict")
    if machine.done and machine.verdict is None:
        found.append("the scheduler goes before the verdict")
    if machine.restarts > machine.config.max_restarts:
        found.append(f"{machine.restarts} restarts of {machine.config.max_restarts}")
    if machine.generation > machine.restarts or machine.generation < -1:
        found.append("generations and restarts do not fit")
    if machine.state is JobState.GATHERING and machine.generation != -1:
        found.append("a job gathers only before its first generation")
    ending = machine.state in (JobState.RESTARTING, JobState.STOPPING)
    if ending and machine.ending is None:
        found.append("workers are being ended without a deadline")
    if machine.state is JobState.RUNNING and machine.failures:
        found.append("a failure is known and nobody was told to stop")
    return found


def _about_ranks(machine: Membership) -> list[str]:
    nodes = machine.nodes
    found = []
    if len(nodes) > machine.config.nodes:
        found.append(f"{len(nodes)} nodes of {machine.config.nodes}")
    if len({node.name for node in nodes}) != len(nodes):
        found.append("two nodes have one name")
    numbered = [node for node in machine.members.values() if node.index >= 0]
    if sorted(node.index for node in numbered) not in ([], list(range(machine.config.nodes))):
        found.append("node indices are not 0 to n-1")
    ranks = [rank for node in numbered for rank in node.ranks]
    if sorted(ranks) != list(range(len(ranks))):
        found.append("ranks are not 0 to n-1, each once")
    if any(rank not in node.ranks for node in numbered for rank in node.exits):
        found.append("a worker ended on a node that does not have its rank")
    if machine.state is JobState.RUNNING and any(node.phase in (Phase.JOINED, Phase.READY) for node in nodes):
        found.append("the job runs and a node was not started")
    return found


def _about_connections(machine: Membership) -> list[str]:
    found = []
    for node in machine.members.values():
        if node.peer is not None and node.peer not in machine.sessions:
            found.append(f"{node.name} has a connection that is not open")
        if node.peer is not None and not node.here:
            found.append(f"{node.name} is gone and still connected")
    agents = [session.hello.agent for session in machine.sessions.values()]
    if len(set(agents)) != len(agents):
        found.append("one agent has two connections")
    return found
