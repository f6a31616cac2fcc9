"""The progress of the workers: the last step of each, the step that all have saved, stragglers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdrun.rendezvous.policies.numbers import describe_numbers, find_bad_steps
from pdrun.rendezvous.protocol.messages import NodeNumber, PlanFact, Progress

LAG_STEPS = 2
LAG_SECONDS = 10.0
"""A worker that is LAG_STEPS behind the median for LAG_SECONDS is a straggler."""
SLOW_FACTOR = 1.5
SLOW_REPORTS = 5
"""So is a worker whose own work takes SLOW_FACTOR times the median's over SLOW_REPORTS reports."""
SLOW_SHARE = 0.05
"""It must also be this share of a step more: milliseconds in a step of seconds do not matter."""
LOOK_SECONDS = 2.0
WARN_SECONDS = 60.0
RECORD_SECONDS = 5.0
USAGE_SECONDS = 30.0
MAX_PLANS = 8
"""Messages about a plan that are recorded in a generation; a script may make many runs."""
MAX_PLAN_CHARS = 32_000
FIRST_USAGE_SECONDS = 1.0
"""Time from the first sample of a generation to its record: other nodes send theirs meanwhile."""


@dataclass
class _WorkerProgress:
    """The progress of one worker."""

    step: int
    busy: list[float] = field(default_factory=list)
    """The last reports, at most SLOW_REPORTS."""
    behind_since: float | None = None
    """Time since which it lags, as of the last check."""
    warned_at: float | None = None
    is_sampled: bool = False
    """Only some of its steps are reported."""


class ProgressTracker:
    """The progress of one generation; `Membership` creates one per generation."""

    def __init__(self, now: float) -> None:
        self.saved_steps: dict[str, int] = {}
        """agent -> the last step that all of its workers have saved."""
        self.has_reports = False
        """Whether there was any report."""
        self._tracks: dict[int, _WorkerProgress] = {}
        self._ended_ranks: set[int] = set()
        """A node that has reconnected repeats their last steps."""
        self._numbers: dict[str, tuple[NodeNumber, ...]] = {}
        """agent -> what its workers report with their steps."""
        self._usage: dict[str, tuple[NodeNumber, ...]] = {}
        """agent -> what its workers and its host use."""
        self._has_usage_news = False
        self._plans: list[tuple[PlanFact, ...]] = []
        """Not recorded yet."""
        self._plan_count = 0
        self._usage_at: float | None = None
        self._total = 0
        self._look_at = now + LOOK_SECONDS
        self._pace_anchor: tuple[float, int] | None = None
        """Time and median step from which the pace counts."""
        self._step_seconds = 0.0
        """Time of a step, of all workers together; 0: not known yet."""
        self._record_at = now
        self._has_news = False
        self._is_ending = False
        """Whether a worker has ended."""

    def add_report(self, agent: str, message: Progress, ranks: range) -> bool:
        """
        Note a report; return whether a journal must keep it: the first one, or one with a saved
        step.
        """
        if message.usage:
            self._usage[agent] = message.usage
            self._has_usage_news = True
            return False
        if message.plan:
            size = sum(len(one.name + one.value + one.source) for one in message.plan)
            if self._plan_count < MAX_PLANS and size <= MAX_PLAN_CHARS:
                self._plan_count += 1
                self._plans.append(message.plan)
            return False
        first = not self.has_reports
        self.has_reports = True
        self._has_news = True
        self._total = max(self._total, message.total)
        if message.numbers:
            self._numbers[agent] = message.numbers
        for item in message.steps:
            if item.rank not in ranks or item.rank in self._ended_ranks:
                continue
            track = self._tracks.setdefault(item.rank, _WorkerProgress(item.step))
            track.step = item.step
            track.is_sampled = item.sampled
            if item.busy > 0:
                track.busy = [*track.busy[1 - SLOW_REPORTS :], item.busy]
        if message.saved > self.saved_steps.get(agent, -1):
            self.saved_steps[agent] = message.saved
            return True
        return first

    def drop_worker(self, rank: int) -> None:
        """Drop a worker that has ended: it is not a straggler any more."""
        self._tracks.pop(rank, None)
        self._ended_ranks.add(rank)

    def find_agreed_step(self, agents: Iterable[str], earlier: int) -> int:
        """
        Return the last step that the workers of all ``agents`` have saved, or the one agreed
        ``earlier``.
        """
        return max(earlier, min((self.saved_steps.get(agent, -1) for agent in agents), default=-1))

    def take_record(self, now: float, *, is_ending: bool = False) -> Mapping[str, Any] | None:
        """
        Return the data of a ``progress`` event if one is due: every RECORD_SECONDS, and when the
        first and the last worker end (``is_ending``), so that the last steps of a job are on
        record.
        """
        if is_ending:
            is_due, self._is_ending = not self._is_ending or len(self._tracks) == 1, True
        else:
            is_due = now >= self._record_at
        if not self._has_news or not is_due or not self._tracks:
            return None
        self._has_news = False
        self._record_at = now + RECORD_SECONDS
        rank, slowest = min(self._tracks.items(), key=lambda item: (item[1].step, item[0]))
        fastest = max(track.step for track in self._tracks.values())
        record: dict[str, Any] = {
            "step": slowest.step,
            "most": fastest,
            "saved": min(self.saved_steps.values(), default=-1),
        }
        if not self._tracks[rank].is_sampled:
            record["rank"] = rank
        if self._total:
            record["total"] = self._total
        if self._numbers:
            record["values"] = describe_numbers(self._numbers.values())
            if bad := find_bad_steps(self._numbers.values()):
                record["bad"] = bad
        return record

    def take_usage(self, now: float, *, is_ending: bool = False) -> Mapping[str, Any] | None:
        """
        Return the data of a ``usage`` event if one is due: soon after the first sample, then every
        USAGE_SECONDS, and once when the first worker ends (``is_ending``).
        """
        if not self._has_usage_news:
            return None
        if self._usage_at is None:
            self._usage_at = now + FIRST_USAGE_SECONDS
        if now < self._usage_at and not is_ending:
            return None
        self._has_usage_news = False
        self._usage_at = now + USAGE_SECONDS
        return {"values": describe_numbers(self._usage.values())}

    def take_plans(self) -> list[list[list[str]]]:
        """Return what ``plan`` events that are due say: lists of [name, value, source]."""
        plans, self._plans = self._plans, []
        return [[[one.name, one.value, one.source] for one in plan] for plan in plans]

    def find_stragglers(self, now: float) -> list[tuple[int, str]]:
        """
        Return (rank, why) of the workers to warn about. Checked every LOOK_SECONDS; each worker is
        named once in WARN_SECONDS.
        """
        if now < self._look_at or len(self._tracks) < 2:
            return []
        self._look_at = now + LOOK_SECONDS
        middle = statistics.median_high([track.step for track in self._tracks.values()])
        self._note_pace(now, middle)
        full = {
            rank: statistics.median(track.busy)
            for rank, track in self._tracks.items()
            if len(track.busy) >= SLOW_REPORTS
        }
        usual = statistics.median_low(full.values()) if len(full) > 1 else 0.0
        found = []
        for rank, track in sorted(self._tracks.items()):
            why = self._explain_lag(track, now, middle)
            why = why or self._explain_work(full.get(rank, 0.0), usual)
            if why and (track.warned_at is None or now - track.warned_at >= WARN_SECONDS):
                track.warned_at = now
                found.append((rank, why))
        return found

    def _note_pace(self, now: float, middle: int) -> None:
        """Note the median step, and with it the time of a step since it last changed."""
        before = self._pace_anchor
        if before is not None and before[1] == middle:
            return
        if before is not None and before[1] < middle:
            self._step_seconds = (now - before[0]) / (middle - before[1])
        self._pace_anchor = (now, middle)

    @staticmethod
    def _explain_lag(track: _WorkerProgress, now: float, middle: int) -> str:
        if track.is_sampled or middle - track.step < LAG_STEPS:
            track.behind_since = None
        elif track.behind_since is None:
            track.behind_since = now
        if track.behind_since is None or now - track.behind_since < LAG_SECONDS:
            return ""
        behind = middle - track.step
        return f"is {behind} steps behind the others (step {track.step}, most are at {middle})"

    def _explain_work(self, busy: float, usual: float) -> str:
        is_material = busy - usual >= SLOW_SHARE * self._step_seconds
        if usual > 0 and busy >= SLOW_FACTOR * usual and is_material:
            return f"needs {busy:.3g} s per step, the others {usual:.3g} s"
        return ""

    def shift_times(self, seconds: float) -> None:
        """Shift all times by ``seconds`` without a scheduler, in which no worker fell behind."""
        self._look_at += seconds
        if self._usage_at is not None:
            self._usage_at += seconds
        for track in self._tracks.values():
            if track.behind_since is not None:
                track.behind_since += seconds
        if self._pace_anchor is not None:
            self._pace_anchor = (self._pace_anchor[0] + seconds, self._pace_anchor[1])
