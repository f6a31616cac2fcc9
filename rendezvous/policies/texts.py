"""What the scheduler says to people: refusals with their exit codes, and the data of an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.messages import PROTOCOL, Hello, Join, Refuse, Verdict
from pdrun.text import plural

CLEAN_EXIT_TEXT = "had ended before, without an error"
"""Said of ranks whose absence another one failed of."""
MAX_TRACEBACK_CHARS = 8192
"""Characters of a traceback in the event log; the worker's own log has all of it."""


def refuse_protocol(hello: Hello) -> Refuse:
    """Two versions of pdrun meet."""
    return Refuse(
        78,
        f"this scheduler speaks version {PROTOCOL} of the protocol, {hello.host or 'you'} speaks {hello.version}: "
        "install the same pdrun on every node",
    )


def describe_clean_exits(places: Mapping[int, str]) -> str:
    """
    Return ``rank 1 on node0 had ended before, without an error``; the empty string for no rank.
    """
    if not places:
        return ""
    first = min(places)
    more = f" and {plural(len(places) - 1, 'other')}" if len(places) > 1 else ""
    return f"rank {first} on {places[first]}{more} {CLEAN_EXIT_TEXT}"


def rank_label(config: SchedulerConfig, rank: int) -> str:
    """
    Return what a member's rank is called: ``node rank 2``; of a member that is one worker, ``rank
    2``.
    """
    return f"node rank {rank}" if config.unit == "node" else f"rank {rank}"


def refuse_other_job(config: SchedulerConfig, job: str, command: str, hello: Hello) -> Refuse:
    """
    Two jobs meet at one address: both are named, and what they run where that is what differs.
    """
    mine, theirs = (
        (f" with `{command}`", f" with `{hello.command}`")
        if command and hello.command
        else ("", "")
    )
    advice = "type the same on every node, or give one of the jobs another port"
    if mine == theirs:
        mine = ""
        theirs = ""
        advice = "give both the same --job, or one of them another port"
    started = f", started on {config.host}" if config.host else ""
    sender = f" on {hello.host}" if hello.host else ""
    return Refuse(
        69,
        f"this scheduler serves job '{job}' (run {config.run}{started}){mine}, you are job '{hello.job}'{sender}"
        f"{theirs}: {advice}",
    )


def refuse_same_name(config: SchedulerConfig, name: str, older: Hello, newer: Hello) -> Refuse:
    """Two members have one name."""
    cure = "--node-name" if config.unit == "node" else "PDRUN_WORKER_ID"
    return Refuse(
        78,
        f"two {config.unit}s are called '{name}': one on host {older.host} (pid {older.pid}), "
        f"one on host {newer.host} (pid {newer.pid}); give each its own {cure}, or end the older one",
    )


def refuse_difference(key: str, first: Join, join: Join) -> Refuse:
    """Two nodes cannot be of one job, though they say so."""
    if key == "command":
        return Refuse(
            78,
            f"the commands differ: `{first.facts[key]}` on {first.node}, `{join.facts[key]}` on {join.node}: "
            "type the same on every node, or give one of the jobs another port",
        )
    return Refuse(78, f"{describe_difference(key, first, join)}: all nodes must run the same")


def describe_difference(key: str, first: Join, join: Join) -> str:
    """Return a line about a fact in which two nodes differ, naming nodes and values."""
    return (
        f"{key} differs: {first.facts[key]!r} on {first.node}, {join.facts[key]!r} on {join.node}"
    )


def refuse_full(config: SchedulerConfig, job: str) -> Refuse:
    """One node too many."""
    spares = f" and {plural(config.spares, 'spare')}" if config.spares else ""
    return Refuse(69, f"job '{job}' already has its {plural(config.nodes, config.unit)}{spares}")


def refuse_stopping(config: SchedulerConfig, job: str) -> Refuse:
    """Too late for an elastic job."""
    return Refuse(69, f"job '{job}' (run {config.run}) is being stopped")


def standby_reason(config: SchedulerConfig, running: int) -> str:
    """Why a node has no part in the generation of so many nodes that is running, or about to."""
    has = f"the job runs with {plural(running, config.unit)}"
    if running >= config.nodes:
        return f"{has}, as many as it takes: this one is a spare"
    if config.grow is not None:
        return f"{has}: a larger generation begins when nobody else has come for {config.grow:g} s"
    return f"{has}: this one takes part when the next generation is formed"


def refuse_over(config: SchedulerConfig, job: str) -> Refuse:
    """Too late."""
    return Refuse(69, f"job '{job}' (run {config.run}) is over")


def with_restarts(reason: str, restarts: int) -> str:
    """Return the reason, and how often the job was started again before."""
    if restarts:
        return f"{reason}, after {restarts} restart{'s' if restarts > 1 else ''}"
    return reason


def verdict_data(verdict: Verdict) -> dict[str, Any]:
    """Return the data of a ``verdict`` event."""
    data: dict[str, Any] = {
        "code": verdict.code,
        "reason": verdict.reason,
        "victims": verdict.victims,
    }
    if verdict.first:
        cause = verdict.first.cause
        data.update(
            rank=verdict.first.rank,
            node=verdict.first.node,
            how=cause.kind,
            log=cause.log,
            traceback=cause.traceback[-MAX_TRACEBACK_CHARS:],
        )
    return data


def describe_straggler(rank: int, node: str, why: str) -> str:
    """Return the line about a worker that is slower than the others."""
    return f"rank {rank} on {node} {why}"


def start_instructions(config: SchedulerConfig, endpoint: Endpoint, *, insecure: bool) -> str:
    """
    Return how nodes come to a scheduler that was started by itself: the first says what the job
    runs.
    """
    trust = " --insecure" if insecure else ""
    return (
        f"on each node: pdrun --nodes {config.nodes} --scheduler {endpoint} --no-serve{trust} SCRIPT ARGUMENTS; "
        f"or, once one is there: pdrun join{trust} {endpoint}"
    )
