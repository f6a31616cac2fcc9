"""
The first cause: ranks the failures of a job by kind, then by time, and makes the verdict.

A worker that dies because its peer died has a communication error, often *before* the peer's own
traceback is complete. So the kind of a cause is better evidence than its time. Clocks of two nodes
are never compared: within a node `Cause.at` counts, between nodes the order of arrival at the
scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pdrun.quick_dataclass import dataclass
from pdrun.rendezvous.policies.texts import with_restarts
from pdrun.rendezvous.protocol.messages import Cause, CauseKind, Failure, Verdict

_RANK_OF_KIND: dict[CauseKind, int] = {
    "exception": 0,
    "startup": 0,
    "hang": 0,
    "signal": 1,
    "oom": 1,
    "exit": 2,
    "lost": 3,
    "suspect": 4,
    "communication": 5,
    "stopped": 6,
    "ok": 7,
}

MAX_OTHER_FAILURES = 8
_OTHER_TRACEBACK_CHARS = 4096
_OTHER_TAIL_LINES = 5


@dataclass(frozen=True)
class ReportedFailure:
    """A failure and its arrival at the scheduler."""

    failure: Failure
    order: int
    """Position among the failures of its generation, by arrival."""
    at: float
    """Time of arrival, on the scheduler's clock."""
    clean_exits: str = ""
    """Ranks that had ended without an error, if this failure means that a peer is gone."""


class FailureLog(Sequence[ReportedFailure]):
    """
    The failures of one generation as they arrive.

    Each takes constant time and little memory: only the first cause so far keeps all of its text,
    and a few others the end of theirs.
    """

    def __init__(self) -> None:
        self._all: list[ReportedFailure] = []
        self._first: int | None = None
        self._own: set[int] = set()
        """Ranks with a failure of their own that still have some text."""
        self._own_since: float | None = None

    def add(self, failure: Failure, now: float, ended: str = "") -> None:
        """
        Add a failure at its arrival. A rank that hung has failed already, with any later exit.
        """
        if self.hung_rank == failure.rank:
            return
        new = ReportedFailure(failure, len(self._all), now, ended)
        mine = is_own_failure(failure.cause)
        if mine and self._own_since is None:
            self._own_since = now
        self._all.append(new)
        before = self.first
        if before is None or find_first_cause((before, new)) is new:
            self._first = new.order
            new = before or new
        if new.order == self._first:
            return
        keep = is_own_failure(new.failure.cause) and (
            new.failure.rank in self._own or len(self._own) < MAX_OTHER_FAILURES
        )
        if keep:
            self._own.add(new.failure.rank)
        self._all[new.order] = replace(
            new, failure=_trim_failure(new.failure) if keep else _strip_failure(new.failure)
        )

    @property
    def first(self) -> ReportedFailure | None:
        """The failure that explains the others, equal to `find_first_cause` of all."""
        return None if self._first is None else self._all[self._first]

    @property
    def hung_rank(self) -> int | None:
        """The rank that was stopped because it hung."""
        if self._all and self._all[0].failure.cause.kind == "hang":
            return self._all[0].failure.rank
        return None

    def has_own_before(self, time: float) -> bool:
        """Whether any worker failed itself before ``time``."""
        return self._own_since is not None and self._own_since < time

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]

    def __iter__(self) -> Iterator[ReportedFailure]:
        return iter(self._all)


def is_own_failure(cause: Cause) -> bool:
    """Whether a worker failed itself, not because a peer or pdrun ended it."""
    return _RANK_OF_KIND[cause.kind] <= _RANK_OF_KIND["exit"]


def is_failure(cause: Cause) -> bool:
    """Whether a worker ended with an error."""
    return cause.kind != "ok" or cause.code != 0


def find_first_cause(failures: Sequence[ReportedFailure]) -> ReportedFailure | None:
    """Return the failure that explains the others, or None without a failure."""
    if not failures:
        return None
    best = min(_RANK_OF_KIND[item.failure.cause.kind] for item in failures)
    alike = [item for item in failures if _RANK_OF_KIND[item.failure.cause.kind] == best]
    node = min(alike, key=lambda item: item.order).failure.node
    there = [item for item in alike if item.failure.node == node]
    return min(there, key=lambda item: (item.failure.cause.at, item.order))


def describe_failure(failure: Failure) -> str:
    """Return ``rank 1 on node0 failed: ValueError: boom``, one line."""
    cause = failure.cause
    why = cause.summary.splitlines()[0] if cause.summary.strip() else f"exit code {cause.code}"
    word = "hung" if cause.kind == "hang" else "failed"
    return f"rank {failure.rank} on {failure.node} {word}: {why}"


def make_verdict(
    failures: Sequence[ReportedFailure],
    *,
    restarts: int,
    code: int | None = None,
    reason: str = "",
    why_not: str = "",
) -> Verdict:
    """
    Return the verdict of a job that failed.

    Args:
        failures: all failures of the last generation.
        restarts: number of restarts of the job before.
        code, reason: given if something other than a worker ended the job (a signal, a lost node, a
            limit). Otherwise the code is the worker's own, also after the last restart; the reason
            then has the number of restarts.
        why_not: why the job is not restarted, if that needs a reason.
    """
    first = find_first_cause(failures) if code is None else None
    others = [
        item.failure
        for item in failures
        if item is not first and is_own_failure(item.failure.cause)
    ]
    victims = sum(not is_own_failure(item.failure.cause) for item in failures if item is not first)
    if code is None:
        code = 70
        if first:
            code = first.failure.cause.code or 1
            reason = describe_failure(first.failure)
    if first and first.failure.cause.kind == "communication":
        # The failure that arrived first knows it; it need not be the first in time.
        ended = next((item.clean_exits for item in failures if item.clean_exits), "")
        reason = f"{reason}; {ended}" if ended else reason
    if why_not and first:
        reason = f"{reason} ({why_not})"
    return Verdict(
        code=code,
        reason=with_restarts(reason, restarts),
        first=first.failure if first else None,
        others=tuple(_trim_failure(other) for other in others[:MAX_OTHER_FAILURES]),
        victims=victims,
    )


def _trim_failure(failure: Failure) -> Failure:
    """Shorten the texts of a further failure, so that a verdict always fits in one message."""
    cause = failure.cause
    return replace(
        failure,
        cause=replace(
            cause,
            traceback=cause.traceback[-_OTHER_TRACEBACK_CHARS:],
            tail=cause.tail[-_OTHER_TAIL_LINES:],
        ),
    )


def _strip_failure(failure: Failure) -> Failure:
    """Remove the texts of a failure: there may be a hundred thousand."""
    return replace(failure, cause=replace(failure.cause, traceback="", tail=()))
