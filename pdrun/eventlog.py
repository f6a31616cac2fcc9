"""
The event log is the truth: one JSON object a line, appended, never rewritten.

A job's status is the replay of its log; `pdrun status` and every screen read nothing else.
A line that was cut by a crash is left out by the reader, not an error.
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
    """One thing that happened to a job."""

    kind: str
    """One of KINDS."""
    time: float
    """Wall clock of the writer, seconds since the epoch: for people, never for decisions."""
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
    Appends events to a file, in a thread: a disk that hangs holds up nobody, a full or broken one
    never fails the job.

    On a disk that answers, a line is with the system when `append` returns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = BackgroundFileWriter(path, _gap_line)

    @property
    def lost_events(self) -> int:
        """Events that were not written."""
        return self._lines.lost_lines

    def append(self, event: LogEvent) -> None:
        """Write one line; waits a moment for the disk, and not again before it has caught up."""
        self.extend((event,))

    def extend(self, events: Sequence[LogEvent]) -> None:
        """Write what happened together: as `append` of each, with one wait for all."""
        self._lines.put(*(event.to_line() for event in events))

    def close(self, timeout: float = CLOSE_SECONDS) -> str:
        """
        Write out what waits, for at most ``timeout`` seconds, and close; closing twice is allowed.

        Return a line for people where something is missing, else the empty string.
        """
        if not self._lines.close(timeout):
            return ""
        return f"event log {self.path}: {self.lost_events} line(s) not written ({self._lines.reason}); the job went on"


def _gap_line(count: int) -> str:
    text = f"{count} event(s) are missing here: the disk of the event log did not answer"
    return LogEvent("warning", time.time(), {"text": text}).to_line()


def read_events(path: Path) -> Iterator[LogEvent]:
    """Yield the events of a log; lines that are no whole event are passed over."""
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from parse_events(file)


def read_last_events(path: Path, size: int) -> Iterator[LogEvent]:
    """Yield the events at the end of a log, of its last ``size`` bytes."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - size))
        yield from parse_events(file.read().decode(errors="replace").split("\n"))


def parse_events(lines: Iterable[str]) -> Iterator[LogEvent]:
    """Yield the events that lines of a log hold; lines that are no whole event are passed over."""
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
    """A node, as the log tells it."""

    name: str
    state: str
    """joined, standby, running, suspect, lost, left or done."""
    index: int = -1
    workers: int = 0


@dataclass(frozen=True)
class RankStatus:
    """A worker, as the log tells it."""

    rank: int
    node: str
    state: str
    """running, done, failed, or stopped (by pdrun, after something else had failed)."""
    code: int | None = None
    cause: str = ""


@dataclass(frozen=True)
class JobStatus:
    """A job, as the replay of its log."""

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
    """The step of the worker that is the furthest behind; -1: nobody has reported any."""
    saved: int = -1
    """The last step that all workers have saved."""


def replay_events(events: Iterable[LogEvent]) -> JobStatus:
    """
    Return the status that a log leads to; unknown kinds change nothing, so that old readers read
    new logs.

    Nor does an event whose fields are missing or of another type: one damaged log must not hide a
    user's other jobs.
    """
    status = JobStatus()
    for event in events:
        status = apply_event(status, event)
    return status


def apply_event(status: JobStatus, event: LogEvent) -> JobStatus:
    """
    Return the status after one more event; unchanged where that does not say what its kind says.
    """
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
    """The state of a node about which nothing is wrong."""
    node = status.nodes.get(name)
    if status.state == "gathering":
        return "joined"
    return "running" if node is None or node.index >= 0 else "standby"


def _replace_state(status: JobStatus, old: str, new: str | None) -> JobStatus:
    """Every node in state ``old`` is in state ``new`` now; None: as is usual for it."""
    changed = {
        name: replace(node, state=new or _normal_state(status, name))
        for name, node in status.nodes.items()
        if node.state == old
    }
    return replace(status, nodes={**status.nodes, **changed})


def _apply_assigned(status: JobStatus, data: Mapping[str, Any]) -> JobStatus:
    """
    One event a generation: ``nodes`` is a list of ``[name, first rank, workers]`` in node order.
    """
    nodes = {
        name: replace(node, index=-1) for name, node in status.nodes.items()
    }  # some may have no part in this one
    ranks: dict[int, RankStatus] = {}
    for index, (said, start, count) in enumerate(data["nodes"]):
        name = str(said)
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
    state = "done" if not code else "stopped" if data.get("how") == "stopped" else "failed"
    after = replace(before, state=state, code=code, cause=str(data.get("cause", "")))
    return replace(status, ranks={**status.ranks, rank: after})
