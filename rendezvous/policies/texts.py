"""Texts of the scheduler: refusals with their exit codes, warnings, and the data of an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.messages import PROTOCOL, Hello, Join, Refuse, Verdict
from pdrun.text import CLEAN_EXIT_TEXT, plural, quote_command

MAX_TRACEBACK_CHARS = 8192
"""Maximum characters of a traceback in the event log; the worker's own log has all of it."""


def refuse_protocol(hello: Hello) -> Refuse:
    """Refuse another version of the protocol."""
    return Refuse(
        78,
        f"this scheduler uses version {PROTOCOL} of the protocol, {hello.host or 'this node'} "
        f"version {hello.version}: install the same pdrun on every node",
    )


def describe_clean_exits(places: Mapping[int, str]) -> str:
    """Return ``rank 1 on node0 had ended before, without an error``; empty for no rank."""
    if not places:
        return ""
    first = min(places)
    more = f" and {plural(len(places) - 1, 'other')}" if len(places) > 1 else ""
    return f"rank {first} on {places[first]}{more} {CLEAN_EXIT_TEXT}"


def rank_label(config: SchedulerConfig, rank: int) -> str:
    """
    Return the name of a member's rank: ``node rank 2``, or ``rank 2`` if a member is one worker.
    """
    return f"node rank {rank}" if config.unit == "node" else f"rank {rank}"


def refuse_other_job(config: SchedulerConfig, job: str, command: str, hello: Hello) -> Refuse:
    """Refuse another job: name both jobs, and their commands if these differ."""
    mine = ""
    theirs = ""
    if command and hello.command:
        mine = f" with `{command}`"
        theirs = f" with `{hello.command}`"
    advice = "use the same command on every node, or another port for one of the jobs"
    if mine == theirs:
        mine = ""
        theirs = ""
        advice = "use the same --job for both, or another port for one of them"
    started = f", started on {config.host}" if config.host else ""
    sender = f" on {hello.host}" if hello.host else ""
    return Refuse(
        69,
        f"this scheduler serves job '{job}' (run {config.run}{started}){mine}, "
        f"not job '{hello.job}'{sender}{theirs}: {advice}",
    )


def refuse_same_name(config: SchedulerConfig, name: str, older: Hello, newer: Hello) -> Refuse:
    """Refuse a second member with the same name."""
    option = "--node-name" if config.unit == "node" else "PDRUN_WORKER_ID"
    return Refuse(
        78,
        f"two {config.unit}s are called '{name}': one on host {older.host} (pid {older.pid}), "
        f"one on host {newer.host} (pid {newer.pid}); set {option} on one, or end the older one",
    )


def refuse_difference(key: str, first: Join, join: Join) -> Refuse:
    """Refuse a node that differs in a fact that must be equal."""
    if key == "command":
        return Refuse(
            78,
            f"the commands differ: `{first.facts[key]}` on {first.node}, "
            f"`{join.facts[key]}` on {join.node}: "
            "use the same command on every node, or another port for one of the jobs",
        )
    return Refuse(78, f"{describe_difference(key, first, join)}: all nodes must run the same")


def describe_difference(key: str, first: Join, join: Join) -> str:
    """Return a line about a fact in which two nodes differ, with names and values."""
    return (
        f"{key} differs: {first.facts[key]!r} on {first.node}, {join.facts[key]!r} on {join.node}"
    )


def refuse_full(config: SchedulerConfig, job: str) -> Refuse:
    """Refuse a node when all places are taken."""
    spares = f" and {plural(config.spares, 'spare')}" if config.spares else ""
    return Refuse(69, f"job '{job}' already has its {plural(config.nodes, config.unit)}{spares}")


def refuse_stopping(config: SchedulerConfig, job: str) -> Refuse:
    """Refuse a node of an elastic job that is being stopped."""
    return Refuse(69, f"job '{job}' (run {config.run}) is being stopped")


def standby_reason(config: SchedulerConfig, running: int) -> str:
    """Return why a node does not take part in a generation of ``running`` nodes."""
    has = f"the job runs with {plural(running, config.unit)}"
    if running >= config.nodes:
        return f"{has}, the maximum: this one is a spare"
    if config.grow is not None:
        return f"{has}: a larger generation starts when no other node joins for {config.grow:g} s"
    return f"{has}: this one takes part when the next generation is formed"


def refuse_over(config: SchedulerConfig, job: str) -> Refuse:
    """Refuse a node when the job is over."""
    return Refuse(69, f"job '{job}' (run {config.run}) is over")


def with_restarts(reason: str, restarts: int) -> str:
    """Return the reason with the number of restarts before it."""
    if restarts:
        return f"{reason}, after {plural(restarts, 'restart')}"
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
    """Return how nodes join a scheduler without a job: the first node brings the job's command."""
    trust = ["--insecure"] if insecure else []
    place = ("--nodes", config.nodes, "--scheduler", endpoint, "--no-serve")
    start = quote_command("pdrun", *place, *trust, "SCRIPT", "ARGUMENTS")
    join = quote_command("pdrun", "join", *trust, endpoint)
    return f"on each node: {start}; or, after the first node: {join}"
