"""
The history of a job: what its event log says about time, where a status keeps only the end.

The log is read once, line by line. What grows with the length of a job is thinned while it is read,
so that a log of a million lines needs little memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdrun.eventlog import take_event
from pdrun.ui.event_fields import (
    join_plan,
    read_bad_steps,
    read_hints,
    read_plan,
    read_usage,
    read_values,
)
from pdrun.ui.event_reader import read_log_lines

MAX_POINTS = 2_000
"""Points of the curve of steps."""
MAX_CURVES = 64
MAX_STALLS = 2_000
MAX_TEXTS = 200
MAX_FAILURES = 64
MAX_NODES = 20_000
MAX_SETTINGS = 100
_decode = json.JSONDecoder().raw_decode
_COUNT = r"(?:0|[1-9]\d{0,15})"
_NUMBER = r"-?(?:0|[1-9]\d{0,15})(?:\.\d{1,20})?(?:[eE][-+]?\d{1,2})?"
_VALUE = rf'"[A-Za-z0-9_.]{{1,64}}": \[{_NUMBER}, {_NUMBER}, {_NUMBER}, {_COUNT}, -1\]'
match_plain_progress = re.compile(
    rf'\{{"kind": "progress", "time": ({_COUNT}(?:\.\d{{1,9}})?), "generation": {_COUNT}'
    rf', "step": ({_COUNT}), "most": ({_COUNT}), "saved": (-1|{_COUNT})(?:, "rank": ({_COUNT}))?'
    rf'(?:, "total": ({_COUNT}))?(?:, "values": \{{(?:{_VALUE}(?:, {_VALUE})*)?\}})?\}}',
    re.ASCII,
).fullmatch
"""Match progress as `pdrun.eventlog` writes it, with finite values only."""


@dataclass
class GenerationSpan:
    """One start of the workers on a set of nodes."""

    number: int
    assigned_at: float
    nodes: tuple[tuple[str, int, int], ...]
    """(name, first rank, workers), in node order."""
    started_at: float | None = None
    ended_at: float | None = None
    end: str = ""
    """Why it ended; empty: it is the last one."""
    steps: tuple[int, int] | None = None
    """First and last step of the slowest worker."""


@dataclass(frozen=True)
class FailedWorker:
    """A worker that failed."""

    time: float
    generation: int
    rank: int
    node: str
    code: int
    cause: str


@dataclass(frozen=True)
class Interval:
    """A time in which a node did not answer, or was lost."""

    node: str
    start: float
    end: float | None
    what: str
    """``silent``, ``lost`` or ``left``."""


@dataclass(frozen=True)
class ProgressPoint:
    """Step of the slowest and of the fastest worker at a time."""

    time: float
    step: int
    most: int


@dataclass(frozen=True)
class ValuePoint:
    """One number of the script at a time."""

    time: float
    mean: float | None
    """None: not finite on any rank."""
    bad_rank: int


@dataclass(frozen=True)
class UsagePoint:
    """A number of workers, hosts or devices at a time: mean, largest, and whose that is."""

    time: float
    mean: float
    most: float
    rank: int


@dataclass
class JobHistory:
    """All that a report shows."""

    job: str = ""
    run: str = ""
    nodes: int = 0
    begin: float = 0.0
    """Wall clock of the first event."""
    end: float = 0.0
    """Wall clock of the last event."""
    generations: list[GenerationSpan] = field(default_factory=list)
    joined: dict[str, float] = field(default_factory=dict)
    """Node -> when it joined first, in the order of joining."""
    intervals: list[Interval] = field(default_factory=list)
    failures: list[FailedWorker] = field(default_factory=list)
    """The first failed workers of each generation, in order of time."""
    failure_count: int = 0
    points: list[ProgressPoint] = field(default_factory=list)
    values: dict[str, list[ValuePoint]] = field(default_factory=dict)
    """Name of a number that the script reports -> its curve."""
    bad_values: list[tuple[float, str, int, int]] = field(default_factory=list)
    """(time, name, rank, step): the first value of each name that was not finite."""
    total: int = 0
    """Steps of the whole run; 0: not known."""
    slowest: dict[int, int] = field(default_factory=dict)
    """Rank -> how often it was the slowest, by at least one step."""
    saved: int = -1
    usage: dict[str, list[UsagePoint]] = field(default_factory=dict)
    """Name -> CPU, memory and devices over time."""
    plan: dict[str, tuple[str, str]] = field(default_factory=dict)
    """What rank 0 says about its last run: name -> value, where it came from."""
    settings: list[tuple[str, str, str]] = field(default_factory=list)
    """(path, value, source) of what the user or the environment chose."""
    versions: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Name -> value -> nodes that have it, of the nodes that joined first."""
    hangs: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    code: int | None = None
    """Exit code of the job; None: no verdict."""
    reason: str = ""
    hints: tuple[str, ...] = ()
    """What a user can do about the first cause."""
    cause: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the verdict: the first cause."""
    unreadable_lines: int = 0


def read_history(path: Path) -> JobHistory:
    """
    Read an event log.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    return HistoryReader().read(read_log_lines(path))


class HistoryReader:
    """Reads the lines of one log."""

    def __init__(self) -> None:
        self._history = JobHistory()
        self._open: dict[str, Interval] = {}
        """Node -> the interval that has not ended."""
        self._first_versions: dict[str, str] | None = None
        self._plan_generation = -1
        self._stride = 1
        """Of so many progress events one becomes a point."""
        self._skipped = 0

    def read(self, lines: Iterable[str]) -> JobHistory:
        """Return the history after these lines; damaged lines are counted and left out."""
        history = self._history
        for kind, when, data in self._iter_events(self._skip_plain_progress(lines)):
            if not history.begin:
                history.begin = when
            history.end = max(history.end, when)
            try:
                self._apply(kind, when, data)
            except (KeyError, TypeError, ValueError, OverflowError):
                history.unreadable_lines += 1
        history.intervals += self._open.values()
        history.intervals.sort(key=lambda one: (one.start, one.node))
        if history.code is not None and history.generations:
            self._close_generation(history.end, "")
        return history

    def _skip_plain_progress(self, lines: Iterable[str]) -> Iterator[str]:
        """
        Yield the lines that must be parsed.

        Between two points of the curve, progress in the form in which pdrun writes it, with finite
        values, has few effects: they are taken from the text, several times faster.
        """
        history = self._history
        for line in lines:
            may_skip = self._skipped + 1 < self._stride and history.begin
            found = match_plain_progress(line) if may_skip else None
            if found is None:
                yield line
            else:
                when, step, most, saved, rank, total = found.groups()
                history.end = max(history.end, float(when))
                self._note_step(int(step), int(most), int(saved), rank, int(total or 0))
                self._skipped += 1

    def _iter_events(self, lines: Iterable[str]) -> Iterator[tuple[str, float, dict[str, Any]]]:
        for line in lines:
            try:
                found = take_event(_load_line(line))
            except (ValueError, RecursionError):
                found = None
            if found is None:
                self._history.unreadable_lines += bool(line.strip())
            else:
                yield found

    def _apply(self, kind: str, when: float, data: dict[str, Any]) -> None:
        history = self._history
        match kind:
            case "progress":
                self._add_progress(when, data)
            case "exited":
                self._add_exit(when, data)
            case "usage":
                self._add_usage(when, read_usage(data["values"]))
            case "plan":
                self._add_plan(int(data["generation"]), read_plan(data["facts"]))
            case "created":
                history.job, history.run = str(data["job"]), str(data["run"])
                history.nodes = int(data.get("nodes", 0))
                rows = [(str(p), str(v), str(s)) for p, v, s in data.get("settings") or ()]
                history.settings = rows[:MAX_SETTINGS]
            case "joined":
                name = str(data["node"])
                if len(history.joined) < MAX_NODES and name not in history.joined:
                    history.joined[name] = when
                    self._note_versions(name, data.get("versions"))
                self._end_interval(str(data["node"]), when)
            case "suspect" | "lost" | "left":
                self._begin_interval(str(data["node"]), when, kind)
            case "recovered":
                self._end_interval(str(data["node"]), when)
            case "assigned":
                self._close_generation(when, "")
                nodes = tuple((str(name), int(first), int(n)) for name, first, n in data["nodes"])
                history.generations.append(
                    GenerationSpan(int(data["generation"]), when, nodes[:MAX_NODES])
                )
            case "started":
                if history.generations:
                    history.generations[-1].started_at = when
            case "restarting" | "gathering":
                self._close_generation(when, str(data.get("reason", "")))
            case "hang":
                text = data.get("text") or f"rank {data.get('rank')}: {data.get('reason', '')}"
                _append(history.hangs, str(text))
            case "warning":
                _append(history.warnings, str(data.get("text", "")))
            case "verdict":
                history.code = int(data.pop("code"))
                history.hints = read_hints({"code": history.code, **data})
                history.reason = str(data.pop("reason", ""))
                history.cause = data

    def _add_progress(self, when: float, data: dict[str, Any]) -> None:
        history = self._history
        step, most = int(data.get("step", -1)), int(data.get("most", data.get("step", -1)))
        saved, total = int(data.get("saved", -1)), int(data.get("total", 0))
        if step < 0:
            history.saved = max(history.saved, saved)
            return
        self._note_step(step, most, saved, data.get("rank"), total)
        values = read_values(data.get("values") or {})
        self._note_bad_values(when, step, values, read_bad_steps(data.get("bad") or {}))
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        history.points.append(ProgressPoint(when, step, most))
        for name, (mean, _, bad_rank) in values.items():
            if name in history.values or len(history.values) < MAX_CURVES:
                history.values.setdefault(name, []).append(ValuePoint(when, mean, bad_rank))
        if len(history.points) >= 2 * MAX_POINTS:
            del history.points[1::2]
            for curve in history.values.values():
                del curve[1::2]
            self._stride *= 2

    def _note_step(self, step: int, most: int, saved: int, slowest: Any, total: int) -> None:
        """Note what each report of progress changes; ``slowest``: the rank, if it is known."""
        history = self._history
        if saved > history.saved:
            history.saved = saved
        if total > history.total:
            history.total = total
        if most > step and slowest is not None:
            rank = int(slowest)
            history.slowest[rank] = history.slowest.get(rank, 0) + 1
        if history.generations:
            generation = history.generations[-1]
            generation.steps = (generation.steps[0] if generation.steps else step, step)

    def _add_plan(self, generation: int, facts: Sequence[tuple[str, str, str]]) -> None:
        """Keep the plan of the last generation that has one."""
        if generation != self._plan_generation:
            self._plan_generation = generation
            self._history.plan = {}
        self._history.plan = join_plan(self._history.plan, facts)

    def _note_versions(self, node: str, data: Mapping[str, Any] | None) -> None:
        """Note the versions of a node; the record of any but the first has what differs."""
        if data is None and self._first_versions is None:
            return  # an older log
        found = {str(name): str(value) for name, value in (data or {}).items()}
        if self._first_versions is None:
            self._first_versions = found
        for name, value in {**self._first_versions, **found}.items():
            self._history.versions.setdefault(name, {}).setdefault(value, []).append(node)

    def _add_usage(self, when: float, values: Mapping[str, tuple[float, float, int]]) -> None:
        usage = self._history.usage
        for name, (mean, most, rank) in values.items():
            if name not in usage and len(usage) >= MAX_CURVES:
                continue
            points = usage.setdefault(name, [])
            points.append(UsagePoint(when, mean, most, rank))
            if len(points) >= 2 * MAX_POINTS:
                # of two neighbours the one with more: a peak of memory is what counts
                pairs = zip(points[::2], points[1::2], strict=False)
                points[:] = [max(pair, key=lambda point: point.most) for pair in pairs]

    def _note_bad_values(
        self, when: float, step: int, values: Mapping[str, Any], bad_steps: Mapping[str, int]
    ) -> None:
        known = {name for _, name, _, _ in self._history.bad_values}
        for name, (_, _, bad_rank) in values.items():
            if bad_rank >= 0 and name not in known and len(known) < MAX_CURVES:
                first = bad_steps.get(name, step)
                self._history.bad_values.append((when, name, bad_rank, first))

    def _add_exit(self, when: float, data: dict[str, Any]) -> None:
        code = int(data["code"])
        if not code or data.get("how") == "stopped":
            return
        history = self._history
        history.failure_count += 1
        if len(history.failures) < MAX_FAILURES:
            history.failures.append(
                FailedWorker(
                    when,
                    int(data.get("generation", 0)),
                    int(data["rank"]),
                    str(data.get("node", "")),
                    code,
                    str(data.get("cause", "")),
                )
            )

    def _close_generation(self, when: float, reason: str) -> None:
        if self._history.generations:
            last = self._history.generations[-1]
            if last.ended_at is None:
                last.ended_at, last.end = when, reason

    def _begin_interval(self, node: str, when: float, kind: str) -> None:
        self._end_interval(node, when)
        if len(self._open) + len(self._history.intervals) < MAX_STALLS:
            what = "silent" if kind == "suspect" else kind
            self._open[node] = Interval(node, when, None, what)

    def _end_interval(self, node: str, when: float) -> None:
        found = self._open.pop(node, None)
        if found is not None:
            self._history.intervals.append(Interval(node, found.start, when, found.what))


def _load_line(line: str) -> Any:
    """
    Return the value of a line of JSON; quicker than `json.loads` for a line without spaces around.

    Raises:
        ValueError, RecursionError: it is damaged.
    """
    try:
        value, end = _decode(line)
    except ValueError:
        return json.loads(line)
    return value if end == len(line) else json.loads(line)


def _append(texts: list[str], text: str) -> None:
    if len(texts) < MAX_TEXTS and text not in texts[-3:]:
        texts.append(text)
