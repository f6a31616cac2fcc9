"""
The replay of an event log: from lines to the status of a job.

The log of a large job has a million lines, and most of them are superseded: of the progress of a
job, the states of a node and the exits of a rank only the last one counts. `StatusReplay` defers
such lines unread, and parses the last one of each when another event depends on it. The result is
that of a replay line by line.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from pdrun.eventlog import LogEvent, take_event
from pdrun.ui.event_fields import read_fields
from pdrun.ui.job_status import JobStatus, RankStatus
from pdrun.ui.node_table import NodeTable

MAX_WARNINGS = 1000
"""Warnings that a status keeps: the newest ones."""
MAX_DEFERRED_LINES = 500_000
"""Lines that are deferred before they are parsed, not counting those fed together."""
LineSource = Callable[[], Sequence[bytes]]
ReplayedEvent = tuple[str, float, Any]
"""Kind, time, and the fields of the kind."""
_PREFIX = b'{"kind": "'
_HEAD_BYTES = len(_PREFIX) + 4
"""Start of a line that tells the kinds of events apart."""


_KINDS = {
    "node": ("suspect", "recovered", "lost", "left", "standby"),
    "joined": ("joined",),
    "exited": ("exited",),
    "progress": ("progress",),
    "text": ("warning", "hang"),
    "ignored": ("refused",),
}
"""Kinds of events that are deferred, in groups that are superseded in the same way."""
_GROUPS = {_PREFIX + kind[:4].encode(): group for group, kinds in _KINDS.items() for kind in kinds}


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


class DeferredLines:
    """Lines that only change the state of single nodes and ranks, the progress and warnings."""

    def __init__(self) -> None:
        self.count = 0
        """Number of lines."""
        self._sources: list[tuple[LineSource, int, int]] = []
        """All of them, in order: where they are read again, first and last index."""
        self.nodes: dict[bytes, bytes] = {}
        """The last line of each node."""
        self.joined: dict[bytes, bytes] = {}
        """The last line of the kind joined of each node: the others do not have its workers."""
        self.exits: dict[bytes, bytes] = {}
        """The last exit of each rank."""
        self.progress = b""
        self.texts: deque[bytes] = deque(maxlen=MAX_WARNINGS)

    def all_lines(self) -> list[bytes]:
        """Return all lines, in order."""
        return [line for source, start, end in self._sources for line in source()[start:end]]

    def add_lines(self, lines: Sequence[bytes], start: int, source: LineSource) -> int:
        """
        Add lines from ``start`` on; return the index of the first one of another kind.

        Args:
            source: returns the same lines again. They are not kept, so that their memory, which is
                in the processor's cache, is used again.

        This is the innermost loop of `pdrun status`: it must not parse a line.
        """
        nodes = self.nodes
        group_of = _GROUPS.get
        progress = self.progress
        end = len(lines)
        for index, line in enumerate(islice(lines, start, None), start):
            group = group_of(line[:_HEAD_BYTES])
            if group == "progress":
                progress = line
            elif group == "node" or group == "joined":
                name, _, _ = line.partition(b', "node": "')[2].partition(b'"')
                nodes[name] = line
                if group == "joined":
                    self.joined[name] = line
            elif group == "exited":
                rank, _, rest = line.partition(b', "rank": ')[2].partition(b",")
                if not rest.startswith(b' "node": "'):
                    end = index
                    break
                self.exits[rank] = line
            elif group == "text":
                self.texts.append(line)
            elif group is None:
                end = index
                break
        self.progress = progress
        if end > start:
            self._sources.append((source, start, end))
            self.count += end - start
        return end

    def are_nodes_certain(self) -> bool:
        """Return whether all names were found: an escaped quote, or a cut line, hides one."""
        return not any(name.endswith(b"\\") or not name for name in self.nodes)

    def last_lines(self) -> Iterator[bytes]:
        """Yield the lines that are not superseded."""
        for name, last in self.nodes.items():
            joined = self.joined.get(name, last)
            if joined is not last:
                yield joined
            yield last
        yield from self.exits.values()
        if self.progress:
            yield self.progress
        yield from self.texts


class StatusReplay:
    """The status of a job while its log is read."""

    def __init__(self) -> None:
        self._deferred = DeferredLines()
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
        self._feed(lines, lambda: lines)

    def feed_block(self, block: bytes) -> None:
        """Replay the lines of a block of the log."""
        self._feed(block.split(b"\n"), lambda: block.split(b"\n"))

    def _feed(self, lines: Sequence[bytes], source: LineSource) -> None:
        index = 0
        while (index := self._deferred.add_lines(lines, index, source)) < len(lines):
            if found := _read_line(lines[index]):
                self._apply_deferred(is_assigned_next=found[0] == "assigned")
                self._apply(*found)
            index += 1
        if self._deferred.count > MAX_DEFERRED_LINES:
            self._apply_deferred()

    def make_status(self) -> JobStatus:
        """Return the status after all lines so far; the same object if nothing has changed."""
        self._apply_deferred()
        if self._status is None:
            self._status = replace(
                self._facts,
                nodes=self._nodes.snapshot(),
                ranks={**self._running_ranks(), **self._exits},
                warnings=tuple(self._warnings),
            )
        return self._status

    def _running_ranks(self) -> dict[int, RankStatus]:
        if self._running is None:
            self._running = {
                rank: RankStatus(rank, name, "running")
                for name, first, workers in self._assigned
                for rank in range(first, first + workers)
            }
        return self._running

    def _apply_deferred(self, *, is_assigned_next: bool = False) -> None:
        deferred = self._deferred
        if not deferred.count:
            return
        self._deferred = DeferredLines()
        if is_assigned_next:
            deferred.exits.clear()  # of the earlier generation
        found = _read_lines(list(deferred.last_lines()))
        is_certain = deferred.are_nodes_certain()
        if not is_certain or not all(self._is_independent(event) for event in found):
            # One of them is damaged, so what it seemed to supersede counts.
            found = _read_lines(deferred.all_lines())
        for event in found:
            if event is not None:
                self._apply(*event)

    def _is_independent(self, event: ReplayedEvent | None) -> bool:
        """Return whether an event has the same effect without those that it supersedes."""
        if event is None:
            return False
        return event[0] != "recovered" or event[2] in self._nodes

    def _apply(self, kind: str, when: float, fields: Any) -> None:
        self._status = None
        match kind:
            case "joined":
                self._nodes.set_state(fields[0], "joined", fields[1])
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
                step, saved, total, values = fields
                self._facts = replace(
                    self._facts, step=step, saved=saved, total=total, values=values
                )
            case "created":
                job, run, expected = fields
                self._facts = replace(
                    self._facts, job=job, run=run, expected=expected, started_at=when
                )
            case "verdict":
                self._facts = replace(
                    self._facts, state="done", code=fields[0], reason=fields[1], ended_at=when
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
        self._facts = replace(self._facts, generation=generation, restarts=restarts, step=-1)


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
