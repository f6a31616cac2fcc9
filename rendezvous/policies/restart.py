"""
Whether a job is restarted after a failure, and when. Pure: settings, history and the failure.

A restart is refused if it cannot help (the program is missing, an import fails on every worker, the
same failure repeats quickly), if the user's exit codes say so, and if no restart is left.
Membership changes of an elastic job are not restarts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from pdrun.quick_dataclass import dataclass
from pdrun.rendezvous.policies.verdict import ReportedFailure, is_own_failure
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.messages import Cause, Failure

PERMANENT_ERRORS = frozenset(
    {"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"}
)
"""Errors that every restart meets again, if all failed workers died of them."""
LOOP_LENGTH = 4
"""
The same failure so many times in a row, each within LOOP_SECONDS of the start, is a crash loop.
"""
LOOP_SECONDS = 10.0
QUICK_SECONDS = 60.0
"""The restart of a generation that lived for less is a quick restart."""
MAX_DELAY_SECONDS = 30.0
_VARYING_TEXT = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class RestartHistory:
    """The restarts so far. `count_restart` and `note_failure` return the next history."""

    restarts: int = 0
    """Number of restarts of the job, as its workers see it."""
    times: tuple[float, ...] = ()
    """Times of the restarts that may still count."""
    quick_restarts: int = 0
    """Number of quick restarts in a row."""
    signature: str = ""
    """Of the last first cause, if it came soon after a start."""
    repeats: int = 0
    """Number of times that it has come in a row."""


def restarts_left(config: SchedulerConfig, attempts: RestartHistory, now: float) -> int:
    """Return how many restarts are left."""
    return config.max_restarts - len(_counted_times(config, attempts, now))


def count_restart(
    config: SchedulerConfig, attempts: RestartHistory, lived: float, now: float
) -> RestartHistory:
    """Return the history with one more restart, of a generation that ``lived`` so many seconds."""
    return replace(
        attempts,
        restarts=attempts.restarts + 1,
        times=(*_counted_times(config, attempts, now), now),
        quick_restarts=attempts.quick_restarts + 1 if lived < QUICK_SECONDS else 1,
    )


def restart_delay(config: SchedulerConfig, attempts: RestartHistory) -> float:
    """
    Return the seconds to wait before the restart that was just counted: 0, b, 2b, 4b ... for quick
    ones.
    """
    if attempts.quick_restarts < 2:
        return 0.0
    return min(MAX_DELAY_SECONDS, config.backoff * 2.0 ** min(attempts.quick_restarts - 2, 16))


def note_failure(
    attempts: RestartHistory, first: Failure, lived: float, progressed: bool
) -> RestartHistory:
    """Return the history with the first cause of the failed generation."""
    if lived >= LOOP_SECONDS or progressed:
        return replace(attempts, signature="", repeats=0)
    signature = f"{first.rank} {first.cause.kind} {mask_numbers(first.cause.summary)}"
    return replace(
        attempts,
        signature=signature,
        repeats=attempts.repeats + 1 if signature == attempts.signature else 1,
    )


def find_refusal(
    config: SchedulerConfig,
    attempts: RestartHistory,
    failures: Sequence[ReportedFailure],
    first: Failure,
    now: float,
) -> str | None:
    """
    Return None if the job is restarted, otherwise why it is not, for the verdict; empty: no reason
    needed.

    Args:
        attempts: the history with this failure (`note_failure`).
        failures: all failures of the generation.
        first: the one that explains them.
    """
    if not config.max_restarts:
        return ""
    code = first.cause.code or 1
    if not first.cause.retry:
        return "not restarted: another attempt cannot help"
    if config.restart_on and code not in config.restart_on:
        return f"not restarted: exit code {code} is not one of --restart-on"
    if code in config.no_restart_on:
        return f"not restarted: exit code {code} is one of --no-restart-on"
    if is_permanent([item.failure.cause for item in failures]):
        return "not restarted: all failed workers met an import or syntax error"
    if attempts.repeats >= LOOP_LENGTH:
        times = f"{attempts.repeats} times in a row"
        return f"not restarted: the same failure {times}, each soon after the start"
    if restarts_left(config, attempts, now) <= 0:
        if config.restart_window is not None:
            return f"no restart is left: {config.max_restarts} within {config.restart_window:g} s"
        return "no restart is left"
    return None


def is_permanent(causes: Sequence[Cause]) -> bool:
    """
    Whether every worker that failed itself met an error that the next restart meets again.
    """
    mine = [cause for cause in causes if is_own_failure(cause)]
    return bool(mine) and all(
        cause.kind == "exception"
        and re.split(r"[:\s]", cause.summary, maxsplit=1)[0].rsplit(".", 1)[-1] in PERMANENT_ERRORS
        for cause in mine
    )


def mask_numbers(text: str) -> str:
    """Return a text without the numbers and addresses that differ between restarts or processes."""
    return _VARYING_TEXT.sub("#", text)


def _counted_times(
    config: SchedulerConfig, attempts: RestartHistory, now: float
) -> tuple[float, ...]:
    if config.restart_window is None:
        return attempts.times
    return tuple(at for at in attempts.times if now - at < config.restart_window)
