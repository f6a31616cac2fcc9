"""
A job's status for people: a table on a terminal, plain lines elsewhere. Reads nothing but
`pdrun.eventlog.JobStatus`.

A job of a thousand nodes still fits a screen: nodes that are as they should be are counted, the
others are listed, and of the ranks only those that failed are named. Names and reasons come from
other machines: they are shown, never obeyed.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pdrun.eventlog import JobStatus, NodeStatus, RankStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_LISTED_NODES = 32
"""Nodes that are listed one by one; of more only those that are not as they should be."""
MAX_LISTED_FAILURES = 16
_COLOURS = {
    "running": "green",
    "done": "green",
    "joined": "cyan",
    "gathering": "cyan",
    "suspect": "yellow",
    "standby": "cyan",
    "restarting": "yellow",
    "stopping": "yellow",
    "stopped": "yellow",
    "lost": "red",
    "dead": "red",
    "failed": "red",
}


def show_status(found: Sequence[JobStatus], *, out: Any = None, now: float | None = None) -> None:
    """
    Print one status in full, or several as a list.

    Args:
        found: what to show; none is said, too.
        out: text stream; stdout by default. A terminal gets tables, anything else plain lines.
        now: wall clock, for ages.
    """
    out = out or sys.stdout
    now = time.time() if now is None else now
    if out.isatty():
        from rich.console import Console

        Console(file=out).print(render_status(found, now))
    else:
        print("\n".join(format_plain(found, now)), file=out)


def format_plain(found: Sequence[JobStatus], now: float) -> list[str]:
    """Return the lines that `show` prints where there is no terminal."""
    if not found:
        return ["no jobs known here"]
    if len(found) > 1:
        return _align_columns(
            [
                ("JOB", "STATE", "CODE", "NODES", "TIME", "RUN"),
                *(_make_row(one, now) for one in found),
            ]
        )
    one = found[0]
    lines = [f"{name:<9} {value}" for name, value in list_facts(one, now)]
    nodes = _align_columns(
        [(node.name, node_state(node), _rank_text(one, node)) for node in listed_nodes(one)]
    )
    lines += [f"{'node':<9} {line}" for line in nodes]
    lines += [f"{'failed':<9} {line}" for line in failed_lines(one)]
    return lines + [f"{'warning':<9} {escape_text(text)}" for text in one.warnings]


def render_status(found: Sequence[JobStatus], now: float) -> RenderableType:
    """Return the same as something that rich prints."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if len(found) != 1:
        if not found:
            return Text("no jobs known here")
        table = Table("job", "state", "code", "nodes", "time", "run", box=None, header_style="bold")
        for one in found:
            job, state, *rest = _make_row(one, now)
            table.add_row(Text(job), _colour_state(state), *(Text(cell) for cell in rest))
        return table
    one = found[0]
    head = Table.grid(padding=(0, 2))
    for name, value in list_facts(one, now):
        head.add_row(
            Text(name, style="bold"), _colour_state(value) if name == "state" else Text(value)
        )
    nodes = Table("node", "state", "ranks", box=None, header_style="bold")
    for node in listed_nodes(one):
        nodes.add_row(
            Text(escape_text(node.name)),
            _colour_state(node_state(node)),
            Text(_rank_text(one, node)),
        )
    notes = [Text(f"failed  {line}", style="red") for line in failed_lines(one)]
    notes += [Text(f"warning {escape_text(text)}", style="yellow") for text in one.warnings]
    return Group(head, nodes, *notes)


def list_facts(one: JobStatus, now: float) -> list[tuple[str, str]]:
    """Return the head of a status: pairs of name and value, without colours."""
    state = job_state(one) if one.code is None else f"{job_state(one)}, exit code {one.code}"
    rows = [("job", escape_text(one.job)), ("run", escape_text(one.run)), ("state", state)]
    if one.reason:
        rows.append(("reason", escape_text(one.reason)))
    rows.append(("time", format_age(one, now)))
    if one.restarts or one.generation:
        rows.append(("restarts", f"{one.restarts} (generation {one.generation})"))
    if one.step >= 0:
        rows.append(("step", f"{one.step}{f', saved {one.saved}' if one.saved >= 0 else ''}"))
    here = list_present(one)
    states = Counter(node_state(node) for node in here)
    gone = Counter(node_state(node) for node in one.nodes.values() if node not in here)
    parts = [_format_counts(states)] * bool(states) + [f"gone: {_format_counts(gone)}"] * bool(gone)
    rows.append(
        (
            "nodes",
            f"{_format_node_count(one)}: {'; '.join(parts)}" if parts else _format_node_count(one),
        )
    )
    if one.ranks:
        rows.append(
            (
                "ranks",
                f"{len(one.ranks)}: {_format_counts(Counter(rank.state for rank in one.ranks.values()))}",
            )
        )
    return rows


def job_state(one: JobStatus) -> str:
    """
    Return the word for people: a job that is over is ``done``, ``failed`` or, if somebody wanted
    it, ``stopped``.
    """
    if one.state != "done" or not one.code:
        return one.state
    if one.reason.startswith(("stopped by", "the time limit")):
        return "stopped"
    return "failed"


def node_state(node: NodeStatus) -> str:
    """Return the word for people: a node that has left is not one that is left."""
    return "ended" if node.state == "left" else node.state


def listed_nodes(one: JobStatus) -> list[NodeStatus]:
    """Return the nodes that are shown one by one, in rank order."""
    nodes = sorted(one.nodes.values(), key=lambda node: (node.index < 0, node.index, node.name))
    if len(nodes) <= MAX_LISTED_NODES:
        return nodes
    usual = Counter(node.state for node in nodes).most_common(1)[0][0]
    return [node for node in nodes if node.state != usual][:MAX_LISTED_NODES]


def failed_lines(one: JobStatus) -> list[str]:
    """Return a line for each failed rank, at most MOST_FAILED, and one that counts the rest."""
    failed = sorted(
        (rank for rank in one.ranks.values() if rank.state == "failed"), key=lambda rank: rank.rank
    )
    lines = [_failed_text(rank) for rank in failed[:MAX_LISTED_FAILURES]]
    return lines + [f"and {len(failed) - MAX_LISTED_FAILURES} more"] * (
        len(failed) > MAX_LISTED_FAILURES
    )


def format_age(one: JobStatus, now: float) -> str:
    """Return how long the job has run, or did: ``1:02:03``; ``-`` when that is not known."""
    if not one.started_at:
        return "-"
    if one.state == "dead" and one.ended_at is None:
        return "-"
    seconds = max(0, round((one.ended_at or now) - one.started_at))
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def escape_text(text: str) -> str:
    """Return a text from elsewhere with what a terminal would obey made visible."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _make_row(one: JobStatus, now: float) -> tuple[str, ...]:
    code = "" if one.code is None else str(one.code)
    return (
        escape_text(one.job),
        job_state(one),
        code,
        _format_node_count(one),
        format_age(one, now),
        escape_text(one.run),
    )


def list_present(one: JobStatus) -> list[NodeStatus]:
    """
    Return the nodes that count: not those that went before the last generation was formed, or
    before any was.
    """
    return [
        node for node in one.nodes.values() if node.index >= 0 or node.state not in ("lost", "left")
    ]


def _format_node_count(one: JobStatus) -> str:
    count = len(list_present(one))
    if one.expected:
        return f"{count} of {one.expected}"
    if one.nodes:
        return str(count)
    return "-"


def _format_counts(states: Counter[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.most_common())


def _rank_text(one: JobStatus, node: NodeStatus) -> str:
    ranks = sorted(rank.rank for rank in one.ranks.values() if rank.node == node.name)
    if not ranks:
        return f"{node.workers} worker{'s' * (node.workers != 1)}"
    return f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


def _failed_text(rank: RankStatus) -> str:
    cause = f": {escape_text(rank.cause)}" if rank.cause else ""
    return f"{escape_text(rank.node)}:{rank.rank} exit code {rank.code}{cause}"


def _align_columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    rows = [tuple(escape_text(cell) for cell in row) for row in rows]
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _colour_state(state: str) -> Any:
    from rich.text import Text

    word = state.split(",")[0]
    colour = (
        "red" if ", exit code " in state and not state.endswith(" 0") else _COLOURS.get(word, "")
    )
    return Text(state, style=colour)
