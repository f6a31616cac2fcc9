"""
What `pdrun top` shows of a job: rows of nodes, ranks and messages, and curves. No terminal.

Rows are kept as they are in the status and become text when they are on the screen: a job of 12,500
nodes has a hundred thousand ranks, a screen has fifty rows.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdrun.text import escape_text
from pdrun.ui.job_status import JobStatus, NodeStatus, RankStatus
from pdrun.ui.live_line import LiveLine
from pdrun.ui.report.numbers import StepRow
from pdrun.ui.status import describe_values, failed_lines, job_state, node_state
from pdrun.ui.usage import format_use

MAX_CURVE_POINTS = 1_000
MAX_CURVES = 32
SPARK_CHARACTERS = "▁▂▃▄▅▆▇█"
NODE_HEAD = ("node", "state", "workers", "ranks")
NODE_WIDTHS = (32, 10, 9, 16)
RANK_HEAD = ("rank", "node", "state", "exit", "cause")
RANK_WIDTHS = (7, 24, 8, 4, 0)
CURVE_HEAD = ("number", "now", "least", "largest", "")
CURVE_WIDTHS = (24, 14, 12, 12, 0)
_SEVERITY = {"lost": 0, "dead": 0, "failed": 0, "suspect": 1, "left": 2, "stopped": 2, "standby": 3}
"""State -> place in the order of rows; others are last."""


@dataclass
class TopModel:
    """The newest status of a job, and what the screen remembers of older ones."""

    status: JobStatus = field(default_factory=JobStatus)
    curves: dict[str, deque[tuple[int, float | None]]] = field(default_factory=dict)
    """Name of a number -> (step, mean), the newest last."""
    first_ranks: dict[str, int] = field(default_factory=dict)
    """Node -> its first rank."""
    seeded_until: float = 0.0
    """Wall clock of the last step from `seed`."""
    _line: LiveLine = field(default_factory=LiveLine)

    def update(self, status: JobStatus) -> bool:
        """Take a new status; return whether it differs."""
        if status is self.status:
            return False
        before, self.status = self.status, status
        if status.step >= 0 and status.step_at > max(before.step_at, self.seeded_until):
            for name, (mean, _, _) in status.values.items():
                self._add_point(name, status.step, mean)
        if status.usage is not before.usage:
            for name, (mean, _, _) in status.usage.items():
                self._add_point(name, status.step, mean)
        if status.nodes is not before.nodes:
            self.first_ranks = _find_first_ranks(status)
        return True

    def seed(self, rows: Iterable[StepRow]) -> None:
        """Fill the curves with the steps that the log has already."""
        for row in rows:
            self.seeded_until = max(self.seeded_until, row.time)
            for name, number in row.values.items():
                self._add_point(name, row.step, number.mean)

    def _add_point(self, name: str, step: int, value: float | None) -> None:
        if name in self.curves or len(self.curves) < MAX_CURVES:
            points = self.curves.setdefault(name, deque(maxlen=MAX_CURVE_POINTS))
            points.append((step, value))

    def head(self, now: float, width: int) -> list[str]:
        """Return the lines above the tabs: the job, and the live line."""
        status = self.status
        state = job_state(status)
        if status.code is not None:
            state += f", exit code {status.code}"
        states = Counter(node_state(node) for node in status.nodes.values())
        counts = ", ".join(f"{count} {name}" for name, count in states.most_common(4))
        first = f"{escape_text(status.job)} ({escape_text(status.run)})  {state}  nodes: {counts}"
        second = self._line.format(status, now, width) or escape_text(status.reason)
        return [first[:width], second[:width]]

    def nodes(self, text: str = "") -> Sequence[NodeStatus]:
        """Return the nodes that contain a text, those with trouble first."""
        found = [node for node in self.status.nodes.values() if _has(text, node.name, node.state)]
        return sorted(found, key=_node_order)

    def ranks(self, text: str = "") -> Sequence[RankStatus]:
        """Return the ranks that contain a text, those with trouble first."""
        ranks = self.status.ranks.values()
        found = [one for one in ranks if _has(text, str(one.rank), one.node, one.state)]
        return sorted(found, key=lambda one: (_SEVERITY.get(one.state, 9), one.rank))

    def messages(self, text: str = "") -> Sequence[str]:
        """Return failures and warnings, the newest warning last."""
        lines = [f"failed: {line}" for line in failed_lines(self.status)]
        lines += [f"warning: {escape_text(line)}" for line in self.status.warnings]
        return [line for line in lines if _has(text, line)]

    def format_node(self, node: NodeStatus) -> tuple[str, ...]:
        """Return the cells of a node."""
        first = self.first_ranks.get(node.name)
        ranks = ""
        if first is not None and node.workers:
            ranks = f"{first}-{first + node.workers - 1}" if node.workers > 1 else str(first)
        return (escape_text(node.name), node_state(node), str(node.workers), ranks)

    def format_rank(self, one: RankStatus) -> tuple[str, ...]:
        """Return the cells of a rank."""
        code = "" if one.code is None else str(one.code)
        return (str(one.rank), escape_text(one.node), one.state, code, escape_text(one.cause))

    def curve_rows(self, width: int) -> Sequence[tuple[str, ...]]:
        """Return the cells of each number, with its curve in ``width`` characters."""
        texts = dict(describe_values(self.status))
        for name, (mean, _, _) in self.status.usage.items():
            texts.setdefault(name, format_use(name, mean))
        rows = []
        for name, points in sorted(self.curves.items()):
            known = [value for _, value in points if value is not None and math.isfinite(value)]
            spark = draw_spark([value for _, value in points], width)
            least, most = (f"{min(known):.5g}", f"{max(known):.5g}") if known else ("", "")
            rows.append((escape_text(name), texts.get(name, ""), least, most, spark))
        return rows


def draw_spark(values: Sequence[float | None], width: int) -> str:
    """Return a curve of the last values, one character each; ``!``: a value is not finite."""
    shown = list(values)[-max(1, width) :]
    known = [value for value in shown if value is not None and math.isfinite(value)]
    if not known:
        return "!" * len(shown)
    low, high = min(known), max(known)
    span = high / 2 - low / 2  # halved: the difference of two large numbers must be finite
    found = []
    for value in shown:
        if value is None or not math.isfinite(value):
            found.append("!")
            continue
        share = (value / 2 - low / 2) / span if span > 0 else 0.5
        found.append(SPARK_CHARACTERS[min(7, int(share * 8))])
    return "".join(found)


def _find_first_ranks(status: JobStatus) -> dict[str, int]:
    placed = sorted(
        (node for node in status.nodes.values() if node.index >= 0), key=lambda node: node.index
    )
    found, first = {}, 0
    for node in placed:
        found[node.name] = first
        first += node.workers
    return found


def _node_order(node: NodeStatus) -> tuple[int, bool, int, str]:
    return (_SEVERITY.get(node.state, 9), node.index < 0, node.index, node.name)


def _has(text: str, *parts: str) -> bool:
    """Return whether one of the parts contains a text, in any case."""
    if not text:
        return True
    small = text.lower()
    return any(small in part.lower() for part in parts)
