"""What the scheduler says to people: refusals with their exit codes, and the data of an event."""

from __future__ import annotations

from typing import Any

from pdrun.rendezvous.events import SchedulerConfig
from pdrun.rendezvous.messages import PROTOCOL, Hello, Refuse, Verdict

MOST_TRACEBACK = 8192
"""Characters of a traceback in the event log; the worker's own log has all of it."""


def other_protocol(hello: Hello) -> Refuse:
    """Two versions of pdrun meet."""
    return Refuse(
        78, f"this scheduler speaks version {PROTOCOL} of the protocol, {hello.host or 'you'} speaks {hello.version}: "
        "install the same pdrun on every node",
    )  # fmt: skip


def other_job(config: SchedulerConfig, job: str, hello: Hello) -> Refuse:
    """Two unrelated jobs meet at one address: both are named."""
    started = f", started on {config.host}" if config.host else ""
    sender = f" on {hello.host}" if hello.host else ""
    return Refuse(
        69, f"this scheduler serves job '{job}' (run {config.run}{started}), you are job '{hello.job}'{sender}: "
        "give one of them another port",
    )  # fmt: skip


def full(config: SchedulerConfig, job: str) -> Refuse:
    """One node too many."""
    return Refuse(69, f"job '{job}' already has its {config.nodes} node(s)")


def over(config: SchedulerConfig, job: str) -> Refuse:
    """Too late."""
    return Refuse(69, f"job '{job}' (run {config.run}) is over")


def after_restarts(reason: str, restarts: int) -> str:
    """Return the reason, and how often the job was started again before."""
    return f"{reason}, after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else reason


def verdict_data(verdict: Verdict) -> dict[str, Any]:
    """Return the data of a ``verdict`` event."""
    data: dict[str, Any] = {"code": verdict.code, "reason": verdict.reason, "victims": verdict.victims}
    if verdict.first:
        cause = verdict.first.cause
        data.update(
            rank=verdict.first.rank, node=verdict.first.node, how=cause.kind, log=cause.log,
            traceback=cause.traceback[-MOST_TRACEBACK:],
        )  # fmt: skip
    return data
