"""
The event log of a job: one JSON object per line, appended, never rewritten.

A job's status is the replay of its log. `pdrun status` and all screens read only the log. Readers
skip incomplete lines, which a crash may leave.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pdrun.async_file import CLOSE_SECONDS, BackgroundFileWriter
from pdrun.text import plural

EVENT_KINDS = (
    "created",
    "joined",
    "refused",
    "assigned",
    "started",
    "exited",
    "stopping",
    "restarting",
    "suspect",
    "recovered",
    "lost",
    "left",
    "standby",
    "gathering",
    "progress",
    "hang",
    "resumed",
    "warning",
    "verdict",
)


@dataclass(frozen=True)
class LogEvent:
    """An event of a job."""

    kind: str
    """One of EVENT_KINDS."""
    time: float
    """Wall clock of the writer, seconds since the epoch; for display only."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON values, named per kind; see docs/protocol.md."""

    def to_line(self) -> str:
        """Return the event as one line of JSON, without the line end."""
        return self._line

    @cached_property
    def _line(self) -> str:
        return json.dumps(
            {"kind": self.kind, "time": round(self.time, 6), **self.data}, ensure_ascii=True
        )


class EventLog:
    """
    Appends events to a file in a thread. A hanging, full or broken disk does not affect the job.

    If the disk answers, the system has a line when `append` returns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = BackgroundFileWriter(path, _gap_line)

    @property
    def lost_events(self) -> int:
        """Number of events that were not written."""
        return self._lines.lost_lines

    def append(self, event: LogEvent) -> None:
        """Write an event; see `BackgroundFileWriter.put` about waiting for the disk."""
        self.extend((event,))

    def extend(self, events: Sequence[LogEvent]) -> None:
        """Write several events with one wait for the disk."""
        self._lines.put(*(event.to_line() for event in events))

    def close(self, timeout: float = CLOSE_SECONDS) -> str:
        """
        Write queued events, for at most ``timeout`` seconds, and close; may be called twice.

        Returns:
            a message if events were lost, or the empty string.
        """
        if not self._lines.close(timeout):
            return ""
        lost = plural(self.lost_events, "line")
        return (
            f"event log {self.path}: {lost} not written ({self._lines.reason}); the job continued"
        )


def _gap_line(count: int) -> str:
    text = f"{plural(count, 'event')} missing here: the disk of the event log did not answer"
    return LogEvent("warning", time.time(), {"text": text}).to_line()


def read_events(path: Path) -> Iterator[LogEvent]:
    """Yield the events of a log; incomplete lines are skipped."""
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from parse_events(file)


def read_last_events(path: Path, size: int) -> Iterator[LogEvent]:
    """Yield the events in the last ``size`` bytes of a log."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - size))
        yield from parse_events(file.read().decode(errors="replace").split("\n"))


def parse_events(lines: Iterable[str]) -> Iterator[LogEvent]:
    """Yield the events in lines of a log; incomplete lines are skipped."""
    for line in lines:
        try:
            data = json.loads(line)
            event = LogEvent(kind=str(data.pop("kind")), time=float(data.pop("time")), data=data)
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
            continue
        if math.isfinite(event.time):
            yield event


@dataclass(frozen=True)
class NodeStatus:
    """Status of a node."""

    name: str
    state: str
    """joined, standby, running, suspect, lost, left or done."""
    index: int = -1
    workers: int = 0


@dataclass(frozen=True)
class RankStatus:
    """Status of a worker."""

    rank: int
    node: str
    state: str
    """running, done, failed, or stopped (by pdrun, after another failure)."""
    code: int | None = None
    cause: str = ""


@dataclass(frozen=True)
class JobStatus:
    """Status of a job: the replay of its log."""

    job: str = ""
    run: str = ""
    state: str = "gathering"
    """gathering, running, restarting, stopping or done."""
    generation: int = 0
    restarts: int = 0
    expected: int = 0
    """Nodes that the job waits for."""
    started_at: float = 0.0
    ended_at: float | None = None
    code: int | None = None
    reason: str = ""
    nodes: Mapping[str, NodeStatus] = field(default_factory=dict)
    ranks: Mapping[int, RankStatus] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    step: int = -1
    """Step of the slowest worker; -1: no worker has reported one."""
    saved: int = -1
    """Last step that all workers have saved; -1: none."""


def replay_events(events: Iterable[LogEvent]) -> JobStatus:
    """
    Return the status after these events.

    Unknown kinds are ignored, so that old readers can read new logs. Events with missing fields or
    fields of another type are ignored, too: a damaged log must not hide a user's other jobs.
    """
    status = JobStatus()
    for event in events:
        status = apply_event(status, event)
    return status


def apply_event(status: JobStatus, event: LogEvent) -> JobStatus:
    """Return the status after one more event; unchanged if its fields do not fit its kind."""
    try:
        return _next_status(status, event)
    except (KeyError, TypeError, ValueError, OverflowError):
        return status


def _next_status(status: JobStatus, event: LogEvent) -> JobStatus:
    data = event.data
    match event.kind:
        case "created":
            return replace(
                status,
                job=str(data.get("job", "")),
                run=str(data.get("run", "")),
                expected=int(data.get("nodes", 0)),
                started_at=event.time,
            )
        case "joined":
            return _set_node(
                status, str(data["node"]), state="joined", workers=int(data.get("workers", 0))
            )
        case "assigned":
            return _apply_assigned(status, data)
        case "started":
            nodes = {
                name: replace(node, state="running")
                for name, node in status.nodes.items()
                if node.index >= 0
            }
            return replace(status, state="running", nodes={**status.nodes, **nodes})
        case "exited":
            return _apply_exited(status, data)
        case "stopping" | "restarting":
            return replace(status, state=event.kind, reason=str(data.get("reason", "")))
        case "gathering":
            status = replace(status, state="gathering", reason=str(data.get("reason", "")))
            return _replace_state(status, "running", "joined")
        case "progress":
            return replace(status, step=int(data.get("step", -1)), saved=int(data.get("saved", -1)))
        case "suspect" | "lost" | "left" | "standby":
            return _set_node(status, str(data["node"]), state=event.kind)
        case "recovered":
            return _set_node(
                status, str(data["node"]), state=_normal_state(status, str(data["node"]))
            )
        case "resumed":
            return _replace_state(status, "suspect", None)
        case "warning":
            return replace(status, warnings=(*status.warnings, str(data.get("text", ""))))
        case "hang":
            text = f"rank {data.get('rank')} on {data.get('node')} hangs: {data.get('reason', '')}"
            return replace(status, warnings=(*status.warnings, text))
        case "verdict":
            return replace(
                status,
                state="done",
                code=int(data["code"]),
                reason=str(data.get("reason", "")),
                ended_at=event.time,
            )
    return status


def _set_node(status: JobStatus, name: str, **changes: Any) -> JobStatus:
    node = status.nodes.get(name, NodeStatus(name, "joined"))
    return replace(status, nodes={**status.nodes, name: replace(node, **changes)})


def _normal_state(status: JobStatus, name: str) -> str:
    """Return the state of a node without problems."""
    node = status.nodes.get(name)
    if status.state == "gathering":
        return "joined"
    return "running" if node is None or node.index >= 0 else "standby"


def _replace_state(status: JobStatus, old: str, new: str | None) -> JobStatus:
    """Change every node in state ``old`` to ``new``, or to its normal state (None)."""
    changed = {
        name: replace(node, state=new or _normal_state(status, name))
        for name, node in status.nodes.items()
        if node.state == old
    }
    return replace(status, nodes={**status.nodes, **changed})


def _apply_assigned(status: JobStatus, data: Mapping[str, Any]) -> JobStatus:
    """
    Apply the event of a new generation.

    ``nodes`` is a list of ``[name, first rank, workers]`` in node order. Other nodes have no part.
    """
    nodes = {name: replace(node, index=-1) for name, node in status.nodes.items()}
    ranks: dict[int, RankStatus] = {}
    for index, (given_name, start, count) in enumerate(data["nodes"]):
        name = str(given_name)
        first = int(start)
        workers = int(count)
        nodes[name] = NodeStatus(
            name, nodes[name].state if name in nodes else "joined", index, workers
        )
        ranks.update(
            {rank: RankStatus(rank, name, "running") for rank in range(first, first + workers)}
        )
    return replace(
        status,
        generation=int(data["generation"]),
        restarts=int(data.get("restarts", 0)),
        nodes=nodes,
        ranks=ranks,
        step=-1,
    )


def _apply_exited(status: JobStatus, data: Mapping[str, Any]) -> JobStatus:
    rank = int(data["rank"])
    code = int(data["code"])
    before = status.ranks.get(rank, RankStatus(rank, str(data.get("node", "")), "running"))
    if not code:
        state = "done"
    elif data.get("how") == "stopped":
        state = "stopped"
    else:
        state = "failed"
    after = replace(before, state=state, code=code, cause=str(data.get("cause", "")))
    return replace(status, ranks={**status.ranks, rank: after})
