"""Where a job comes from, on its page: versions of its nodes, settings and their sources."""

from __future__ import annotations

from collections.abc import Iterator

from pdrun.text import plural
from pdrun.ui.report.history import JobHistory
from pdrun.ui.report.text import clean_line, render_table

MAX_NAMED_NODES = 4


def render_differences(history: JobHistory) -> Iterator[str]:
    """Yield a line for each version in which nodes differ: it may be why the job failed."""
    for name, holders in sorted(history.versions.items()):
        if len(holders) > 1:
            groups = sorted(holders.items(), key=lambda item: (-len(item[1]), item[0]))
            text = "; ".join(f"{value} on {_name_nodes(nodes)}" for value, nodes in groups)
            yield f'<p class="verdict">{clean_line(f"{name} differs between nodes: {text}")}</p>'


def render_origin(history: JobHistory) -> Iterator[str]:
    """Yield the versions that all nodes have, and the settings that are not defaults."""
    equal = [
        (name, next(iter(holders)))
        for name, holders in sorted(history.versions.items())
        if len(holders) == 1
    ]
    if equal:
        yield "<h2>Versions</h2>"
        yield render_table((), equal)
    if history.settings:
        yield "<h2>Settings and where they came from</h2>"
        yield render_table(("setting", "value", "from"), history.settings)


def _name_nodes(nodes: list[str]) -> str:
    shown = ", ".join(nodes[:MAX_NAMED_NODES])
    more = len(nodes) - MAX_NAMED_NODES
    return f"{shown} and {plural(more, 'more node')}" if more > 0 else shown
