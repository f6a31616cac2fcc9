"""
Format a job's status: tables on a terminal, plain lines elsewhere. Reads only JobStatus.

A job of a thousand nodes fits a screen: nodes in the usual state are counted, the others are
listed, and only failed ranks are named. Names and reasons are sent by other machines, so control
characters in them are escaped.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from pdrun.text import escape_text, plural
from pdrun.ui.job_status import JobStatus, NodeStatus, RankStatus
from pdrun.ui.usage import describe_usage

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_LISTED_NODES = 32
"""If there are more nodes, only those in an unusual state are listed."""
MAX_LISTED_FAILURES = 16
MAX_LISTED_WARNINGS = 50
MAX_LISTED_PLAN = 24
MAX_PLAN_CHARS = 200
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
        found: the statuses; may be empty.
        out: text stream; default: stdout. A terminal gets tables, other streams plain lines.
        now: wall clock, for run times.
    """
    out = out or sys.stdout
    now = time.time() if now is None else now
    if out.isatty():
        from rich.console import Console

        Console(file=out).print(render_status(found, now))
    else:
        print("\n".join(format_plain(found, now)), file=out)


def format_plain(found: Sequence[JobStatus], now: float) -> list[str]:
    """Return the lines that `show_status` prints if there is no terminal."""
    if not found:
        return ["no jobs found"]
    if len(found) > 1:
        return _align_columns(
            [
                ("JOB", "STATE", "CODE", "NODES", "TIME", "RUN"),
                *(_make_row(status, now) for status in found),
            ]
        )
    status = found[0]
    lines = [f"{name:<9} {value}" for name, value in list_facts(status, now)]
    lines += [f"{'plan':<9} {line}" for line in plan_lines(status)]
    nodes = _align_columns(list_node_rows(status))
    lines += [f"{'node':<9} {line}" for line in nodes]
    lines += [f"{'failed':<9} {line}" for line in failed_lines(status)]
    return lines + [f"{'warning':<9} {line}" for line in warning_lines(status)]


def render_status(found: Sequence[JobStatus], now: float) -> RenderableType:
    """Return the same as a rich renderable."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if len(found) != 1:
        if not found:
            return Text("no jobs found")
        table = Table("job", "state", "code", "nodes", "time", "run", box=None, header_style="bold")
        for status in found:
            job, state, *rest = _make_row(status, now)
            table.add_row(Text(job), _colour_state(state), *(Text(cell) for cell in rest))
        return table
    status = found[0]
    head = Table.grid(padding=(0, 2))
    for name, value in list_facts(status, now):
        head.add_row(
            Text(name, style="bold"), _colour_state(value) if name == "state" else Text(value)
        )
    for line in plan_lines(status):
        head.add_row(Text("plan", style="bold"), Text(line))
    nodes = Table("node", "state", "ranks", box=None, header_style="bold")
    for name, state, ranks in list_node_rows(status):
        nodes.add_row(Text(escape_text(name)), _colour_state(state), Text(ranks))
    notes = [Text(f"failed  {line}", style="red") for line in failed_lines(status)]
    notes += [Text(f"warning {line}", style="yellow") for line in warning_lines(status)]
    return Group(head, nodes, *notes)


def describe_values(status: JobStatus) -> list[tuple[str, str]]:
    """Return (name, text) of the numbers that the script reports with its steps."""
    rows = []
    for name, (mean, _, bad_rank) in sorted(status.values.items(), key=_value_order):
        text = "" if mean is None else f"{mean:.6g}"
        if name == "mfu" and mean is not None and 0 <= mean <= 1:
            name, text = "MFU", f"{100 * mean:.3g} %"
        if bad_rank >= 0:
            text = f"{text}, not finite on rank {bad_rank}".removeprefix(", ")
            if name in status.bad_steps:
                text += f" since step {status.bad_steps[name]:,}"
        rows.append((name, text))
    return rows


def _value_order(item: tuple[str, object]) -> tuple[int, str]:
    """Put the loss first, and the use of the devices next: a line has room for a few."""
    return {"loss": 0, "mfu": 1}.get(item[0], 2), item[0]


def plan_lines(status: JobStatus) -> list[str]:
    """Return a line per decision about the run of the script: value, and where it came from."""
    lines = []
    for name, (value, source) in status.plan.items():
        if not name.startswith("cells "):  # of the report's picture
            text = f"{name}: {value}" + (f" ({source})" if source else "")
            lines.append(escape_text(text)[:MAX_PLAN_CHARS])
    more = len(lines) - MAX_LISTED_PLAN
    return [*lines[:MAX_LISTED_PLAN], f"{more} more in pdrun report"] if more > 0 else lines


def list_facts(status: JobStatus, now: float) -> list[tuple[str, str]]:
    """Return the head of a status as (name, value) pairs, without colours."""
    state = job_state(status)
    if status.code is not None:
        state = f"{state}, exit code {status.code}"
    rows = [("job", escape_text(status.job)), ("run", escape_text(status.run)), ("state", state)]
    if status.reason:
        rows.append(("reason", escape_text(status.reason)))
    rows += [("hint", escape_text(hint)) for hint in status.hints]
    rows.append(("time", format_age(status, now)))
    if status.restarts or status.generation:
        rows.append(("restarts", f"{status.restarts} (generation {status.generation})"))
    if status.step >= 0:
        step = f"{status.step:,}"
        if status.total:
            step += f" of {status.total:,}"
        if status.saved >= 0:
            step = f"{step}, saved {status.saved}"
        rows.append(("step", step))
        rows += [(escape_text(name), text) for name, text in describe_values(status)]
    if use := describe_usage(status.usage):
        rows.append(("use", use))
    states = Counter(node_state(node) for node in status.nodes.values() if is_present(node))
    gone = Counter(node_state(node) for node in status.nodes.values() if not is_present(node))
    parts = []
    if states:
        parts.append(_format_counts(states))
    if gone:
        parts.append(f"gone: {_format_counts(gone)}")
    nodes = _format_node_count(status)
    if parts:
        nodes = f"{nodes}: {'; '.join(parts)}"
    rows.append(("nodes", nodes))
    if status.ranks:
        rank_states = Counter(map(attrgetter("state"), status.ranks.values()))
        rows.append(("ranks", f"{len(status.ranks)}: {_format_counts(rank_states)}"))
    return rows


def job_state(status: JobStatus) -> str:
    """Return the state to show: an ended job is ``done``, ``failed`` or ``stopped`` (by a user)."""
    if status.state != "done" or not status.code:
        return status.state
    if status.reason.startswith(("stopped by", "the time limit")):
        return "stopped"
    return "failed"


def node_state(node: NodeStatus) -> str:
    """Return the state to show: ``ended`` for left, which could be misread as remaining."""
    if node.state == "left":
        return "ended"
    return node.state


def listed_nodes(status: JobStatus) -> list[NodeStatus]:
    """Return the nodes that are listed, in rank order."""
    nodes = sorted(status.nodes.values(), key=lambda node: (node.index < 0, node.index, node.name))
    if len(nodes) <= MAX_LISTED_NODES:
        return nodes
    usual = Counter(node.state for node in nodes).most_common(1)[0][0]
    return [node for node in nodes if node.state != usual][:MAX_LISTED_NODES]


def list_node_rows(status: JobStatus) -> list[tuple[str, str, str]]:
    """Return name, state and ranks of each node that is listed."""
    nodes = listed_nodes(status)
    ranks: dict[str, list[int]] = {node.name: [] for node in nodes}
    for number, name, *_ in [rank for rank in status.ranks.values() if rank[1] in ranks]:
        ranks[name].append(number)
    return [(node.name, node_state(node), _rank_text(node, ranks[node.name])) for node in nodes]


def warning_lines(status: JobStatus) -> list[str]:
    """Return a line per warning: the newest MAX_LISTED_WARNINGS, and one that counts the others."""
    older = len(status.warnings) - MAX_LISTED_WARNINGS
    lines = [escape_text(text) for text in status.warnings[-MAX_LISTED_WARNINGS:]]
    if older > 0:
        lines.insert(0, f"{older} older ones are in the event log")
    return lines


def failed_lines(status: JobStatus) -> list[str]:
    """Return a line per failed rank, at most MAX_LISTED_FAILURES, and one that counts the rest."""
    failed = [rank for rank in status.ranks.values() if rank.state == "failed"]
    failed.sort(key=itemgetter(0))
    lines = [_failed_text(rank) for rank in failed[:MAX_LISTED_FAILURES]]
    if len(failed) > MAX_LISTED_FAILURES:
        lines.append(f"and {len(failed) - MAX_LISTED_FAILURES} more")
    return lines


def format_age(status: JobStatus, now: float) -> str:
    """Return the run time of a job: ``1:02:03``; ``-`` if unknown."""
    if not status.started_at:
        return "-"
    if status.state == "dead" and status.ended_at is None:
        return "-"
    seconds = max(0, round((status.ended_at or now) - status.started_at))
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def _make_row(status: JobStatus, now: float) -> tuple[str, ...]:
    code = "" if status.code is None else str(status.code)
    return (
        escape_text(status.job),
        job_state(status),
        code,
        _format_node_count(status),
        format_age(status, now),
        escape_text(status.run),
    )


def is_present(node: NodeStatus) -> bool:
    """Return False for a node that was lost or left before the last generation."""
    return node.index >= 0 or node.state not in ("lost", "left")


def _format_node_count(status: JobStatus) -> str:
    count = sum(map(is_present, status.nodes.values()))
    if status.expected:
        return f"{count} of {status.expected}"
    if status.nodes:
        return str(count)
    return "-"


def _format_counts(states: Counter[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.most_common())


def _rank_text(node: NodeStatus, ranks: list[int]) -> str:
    if not ranks:
        return plural(node.workers, "worker")
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {min(ranks)}-{max(ranks)}"


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

    colour = _COLOURS.get(state.split(",")[0], "")
    if ", exit code " in state and not state.endswith(" 0"):
        colour = "red"
    return Text(state, style=colour)
