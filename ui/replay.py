"""
The replay of an event log: from lines to the status of a job.

The log of a large job has a million lines, and most of them are superseded (`DeferredLines`).
`StatusReplay` parses only the others, and the last one of each when it is needed: when a generation
has started, which sets the states of its nodes, or when the status is read. The result is that of a
replay line by line.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, NamedTuple

from pdrun.eventlog import LogEvent, take_event
from pdrun.ui.deferred_lines import MAX_WARNINGS, DeferredLines
from pdrun.ui.event_fields import join_plan, make_exits, make_rank, read_fields
from pdrun.ui.job_status import JobStatus, RankStatus
from pdrun.ui.node_table import NodeTable

MAX_DEFERRED_BYTES = 1 << 27
"""Bytes of lines that are deferred before the last ones of each are parsed."""
MAX_DAMAGED_ROUNDS = 8
"""Times that damaged lines are taken out of deferred ones before all of these are parsed."""
ReplayedEvent = tuple[str, float, Any]
"""Kind, time, and the fields of the kind."""
_MEMBER_KINDS = ("joined", "lost", "left", "standby")
_OF_KNOWN_NODES = ("suspect", "recovered")
"""Kinds of events that are ignored if the node has never joined."""


def replay_events(events: Iterable[LogEvent]) -> JobStatus:
    """
    Return the status after these events.

    Unknown kinds are ignored, so that old readers can read new logs. Events with missing fields or
    fields of another type are ignored, too: a damaged log must not hide a user's other jobs.
    """
    replay = StatusReplay()
    for event in events:
        replay.apply_event(event)
    return replay.make_status()


def replay_lines(lines: Iterable[str]) -> JobStatus:
    """Return the status after these lines of an event log; incomplete lines are ignored."""
    replay = StatusReplay()
    replay.feed_lines([line.encode("utf-8", "replace") for line in lines])
    return replay.make_status()


class LogSegment(NamedTuple):
    """An event of the log, and the lines after it that are deferred."""

    event: ReplayedEvent | None
    """None: it is replayed already."""
    lines: DeferredLines


class StatusReplay:
    """The status of a job while its log is read."""

    def __init__(self) -> None:
        self._segments = [LogSegment(None, DeferredLines())]
        """What is not replayed yet."""
        self._deferred_bytes = 0
        self._nodes = NodeTable()
        self._assigned: list[tuple[str, int, int]] = []
        """Name, first rank and workers of each node in the generation."""
        self._running: dict[int, RankStatus] | None = None
        """The ranks of the generation, as they started; None: not made yet."""
        self._exits: dict[int, RankStatus] = {}
        self._warnings: deque[str] = deque(maxlen=MAX_WARNINGS)
        self._facts = JobStatus()
        """All but nodes, ranks and warnings."""
        self._status: JobStatus | None = None

    def apply_event(self, event: LogEvent) -> None:
        """Replay an event; it is ignored if its fields do not fit its kind."""
        self._apply_deferred()
        if found := _check_fields(event.kind, event.time, event.data):
            self._apply(*found)

    def feed_lines(self, lines: Sequence[bytes]) -> None:
        """Replay lines of the log; those that are no events are ignored."""
        if lines:
            block = b"\n".join((b"", *lines))
            self.feed_block(block, len(block))

    def feed_block(self, block: bytes, end: int) -> None:
        """Replay the lines of a block of the log up to ``end``, each with a line end before it."""
        self._deferred_bytes += end
        position = 0
        while position < end:
            first, position = self._segments[-1].lines.add_lines(block, position, end)
            if first < position and (found := _read_line(block[first:position])):
                self._add_event(found)
        if self._deferred_bytes > MAX_DEFERRED_BYTES:
            self._apply_deferred()

    def _add_event(self, event: ReplayedEvent) -> None:
        """Replay an event that is not deferred, now or together with the lines around it."""
        if event[0] == "assigned":
            for segment in self._segments:
                segment.lines.drop_exits()  # of the earlier generation
        self._segments.append(LogSegment(event, DeferredLines()))
        if event[0] == "started":
            self._apply_deferred(has_started=True)

    def make_status(self) -> JobStatus:
        """Return the status after all lines so far; the same object if nothing has changed."""
        self._apply_deferred()
        if self._status is None:
            running = self._running_ranks()
            ranks = {**running, **self._exits}
            if len(ranks) > len(running):  # exits of ranks that the log does not place
                ranks = dict(sorted(ranks.items()))
            self._status = replace(
                self._facts,
                nodes=self._nodes.snapshot(),
                ranks=ranks,
                warnings=tuple(self._warnings),
            )
        return self._status

    def _running_ranks(self) -> dict[int, RankStatus]:
        if self._running is None:
            # Without a call in Python for each: there may be a hundred thousand.
            every = [range(first, first + workers) for _, first, workers in self._assigned]
            ranks = list(chain.from_iterable(every))
            names = chain.from_iterable(
                repeat(name, len(placed))
                for (name, _, _), placed in zip(self._assigned, every, strict=True)
            )
            fields = zip(ranks, names, repeat("running"), repeat(None), repeat(""), strict=False)
            self._running = dict(zip(ranks, map(make_rank, fields), strict=True))
        return self._running

    def _apply_deferred(self, *, has_started: bool = False) -> None:
        """Replay all lines so far; ``has_started``: the last event is the start of a generation."""
        segments = self._segments
        if len(segments) == 1 and not segments[0].lines:
            return
        self._segments = [LogSegment(None, DeferredLines())]
        self._deferred_bytes = 0
        assigned, superseded = 0, frozenset[bytes]()
        if has_started:
            assigned, superseded = self._find_superseded(segments)
        for index, (event, lines) in enumerate(segments):
            if event is not None:
                self._apply(*event)
            if lines:
                self._apply_lines(lines, superseded if index < assigned else ())

    def _find_superseded(self, segments: Sequence[LogSegment]) -> tuple[int, frozenset[bytes]]:
        """
        Return the segment of the last assignment, and the nodes that it names.

        Their states before it have no effect: it has started.
        """
        assignments = [
            (index, segment.event[2][2])
            for index, segment in enumerate(segments)
            if segment.event is not None and segment.event[0] == "assigned"
        ]
        if not assignments:
            return 0, frozenset()
        assigned, nodes = assignments[-1]
        placed_names = {name for name, _, _ in nodes}
        is_complete = _are_plain(placed_names)
        is_complete &= all(event is None or event[0] not in _MEMBER_KINDS for event, _ in segments)
        is_complete &= placed_names.issuperset(self._nodes)
        for _, old in assignments:
            is_complete = is_complete and all(name in placed_names for name, _, _ in old)
        # A name that the log escapes is not found among those of its lines.
        plain = placed_names if is_complete else {n for n in placed_names if _are_plain((n,))}
        placed = frozenset(name.encode() for name in plain)
        for segment in segments[:assigned]:
            if is_complete and segment.lines.member_names() <= placed:
                segment.lines.drop_nodes()
            else:
                is_complete = False
        return assigned, placed

    def _apply_lines(self, lines: DeferredLines, superseded: Collection[bytes]) -> None:
        known = (name.encode("utf-8", "surrogatepass") for name in self._nodes)
        exits, events = self._read_last_lines(lines, superseded, set(known))
        if events is None:
            exits, events = {}, _read_lines(lines.all_lines())
        self._status = None
        self._exits.update(exits)
        for event in events:
            if event is not None:
                self._apply(*event)

    def _read_last_lines(
        self, lines: DeferredLines, superseded: Collection[bytes], known: Collection[bytes]
    ) -> tuple[dict[int, RankStatus], list[ReplayedEvent | None] | None]:
        """Return the exits and events that are not superseded; None: all lines must be read."""
        for _ in range(MAX_DAMAGED_ROUNDS):
            last = lines.last_lines(superseded, known)
            exits = make_exits(last.exits)
            if exits is None:
                return {}, None
            events = _read_lines(last.lines)
            damaged = {
                line for line, event in zip(last.lines, events, strict=True) if event is None
            }
            if last.unclear:
                for line, event in zip(last.unclear, _read_lines(last.unclear), strict=True):
                    if event is not None:
                        return {}, None
                    damaged.add(line)
            if not damaged:
                return exits, events if self._are_independent(events) else None
            # What they seemed to supersede counts.
            lines.drop_lines(damaged)
        return {}, None

    def _are_independent(self, events: Iterable[ReplayedEvent | None]) -> bool:
        """Return whether events have the same effect without those that they supersede."""
        joined = set()
        for event in events:
            if event is None:
                return False
            kind, _, fields = event
            if kind == "joined":
                joined.add(fields[0])
            elif kind in _OF_KNOWN_NODES and fields not in joined and fields not in self._nodes:
                return False
        return True

    def _apply(self, kind: str, when: float, fields: Any) -> None:
        self._status = None
        match kind:
            case "joined":
                self._nodes.set_state(fields[0], "joined", fields[1])
            case "suspect" | "recovered" if fields not in self._nodes:
                pass
            case "suspect" | "lost" | "left" | "standby":
                self._nodes.set_state(fields, kind)
            case "recovered":
                is_placed = self._nodes.is_placed(fields)
                self._nodes.set_state(fields, self._normal_state(is_placed))
            case "resumed":
                self._nodes.change_state(
                    "suspect", self._normal_state(True), self._normal_state(False)
                )
            case "exited":
                self._apply_exit(fields)
            case "assigned":
                self._apply_assigned(*fields)
            case "started":
                self._nodes.change_placed("running")
                self._facts = replace(self._facts, state="running")
            case "gathering":
                self._nodes.change_state("running", "joined", "joined")
                self._facts = replace(self._facts, state="gathering", reason=fields)
            case "stopping" | "restarting":
                self._facts = replace(self._facts, state=kind, reason=fields)
            case "warning" | "hang":
                self._warnings.append(fields)
            case "progress":
                step, saved, total, values, bad_steps = fields
                self._facts = replace(
                    self._facts,
                    step=step,
                    step_at=when,
                    saved=saved,
                    total=total,
                    values=values,
                    bad_steps=bad_steps,
                )
            case "usage":
                self._facts = replace(self._facts, usage=fields)
            case "plan":
                plan = join_plan(self._facts.plan, fields)
                self._facts = replace(self._facts, plan=plan)
            case "created":
                job, run, expected = fields
                self._facts = replace(
                    self._facts, job=job, run=run, expected=expected, started_at=when
                )
            case "verdict":
                self._facts = replace(
                    self._facts,
                    state="done",
                    code=fields[0],
                    reason=fields[1],
                    hints=fields[2],
                    ended_at=when,
                )

    def _normal_state(self, is_placed: bool) -> str:
        """Return the state of a node without problems."""
        if self._facts.state == "gathering":
            return "joined"
        return "running" if is_placed else "standby"

    def _apply_exit(self, after: RankStatus) -> None:
        if not after.node:
            before = self._exits.get(after.rank) or self._running_ranks().get(after.rank)
            if before is not None:
                after = after._replace(node=before.node)
        self._exits[after.rank] = after

    def _apply_assigned(
        self, generation: int, restarts: int, nodes: list[tuple[str, int, int]]
    ) -> None:
        """Apply the event of a new generation; nodes that are not in it have no part."""
        self._nodes.place_nodes((name, workers) for name, _, workers in nodes)
        self._assigned = nodes
        self._running = None
        self._exits = {}
        self._facts = replace(
            self._facts, generation=generation, restarts=restarts, step=-1, plan={}
        )


def _read_lines(lines: list[bytes]) -> list[ReplayedEvent | None]:
    """Return what `_read_line` returns for each line."""
    try:
        # One call for all is several times faster. A cut line makes it fail.
        objects = json.loads(b"[%b]" % b",".join(lines))
    except (ValueError, RecursionError):
        return [_read_line(line) for line in lines]
    if len(objects) != len(lines):
        return [_read_line(line) for line in lines]
    return [_check_event(data) for data in objects]


def _read_line(line: bytes) -> ReplayedEvent | None:
    """Return the event of a line; None if it does not change a status."""
    try:
        return _check_event(json.loads(line.decode("utf-8", "replace")))
    except (ValueError, RecursionError):
        return None


def _check_event(data: object) -> ReplayedEvent | None:
    found = take_event(data)
    return None if found is None else _check_fields(*found)


def _check_fields(kind: str, when: float, data: Any) -> ReplayedEvent | None:
    try:
        fields = read_fields(kind, data)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return None if fields is None else (kind, when, fields)


def _are_plain(names: Iterable[str]) -> bool:
    """Whether all names are the same text in a line of the log; not if one is empty."""
    names = tuple(names)
    text = "".join(names)
    return (
        all(names)
        and text.isascii()
        and text.isprintable()
        and '"' not in text
        and "\\" not in text
    )
