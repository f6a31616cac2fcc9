"""
The page of a report: verdict first, then the cause, then what happened when.

No script, no external reference; a Content-Security-Policy says so to the browser.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pdrun.text import plural
from pdrun.ui.report.communication import TraceSummary, render_communication
from pdrun.ui.report.history import GenerationSpan, JobHistory
from pdrun.ui.report.origin import render_differences, render_origin
from pdrun.ui.report.pipeline import (
    CELLS_PREFIX,
    PIPELINE_STYLE,
    idle_share,
    parse_cells,
    render_pipeline,
)
from pdrun.ui.report.svg import (
    MAX_ROWS,
    format_seconds,
    render_curve,
    render_timeline,
    render_values,
)
from pdrun.ui.report.text import clean_block, clean_line, render_table
from pdrun.ui.usage import format_use

MAX_SLOW_RANKS = 10
_TITLES = {"mfu": "MFU: use of the devices, %"}
_EXPLANATIONS = {
    "mfu": "FLOPs of the model in a step, without recomputation, over the seconds of a step times "
    "the peak of all devices."
}
MAX_GENERATIONS = 100
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { --text: #1c2430; --soft: #5b6573; --line: #e5e7eb; --back: #fff; --panel: #f5f6f8;
  --blue: #2563eb; --light: #60a5fa; --grey: #9ca3af; --red: #b91c1c; --green: #15803d;
  --amber: #f59e0b; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --text: #e5e7eb; --soft: #a3adba; --line: #374151;
  --back: #111827; --panel: #1f2937; --blue: #60a5fa; --light: #93c5fd; --grey: #6b7280;
  --red: #f87171; --green: #4ade80; --amber: #fbbf24; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 64rem; margin: 2rem auto 4rem; padding: 0 1.2rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0 0 .6rem; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .6rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--line); }
.verdict { margin: .6rem 0; padding: .7rem 1rem; border-left: .4rem solid var(--grey);
  background: var(--panel); }
.verdict.done { border-color: var(--green); } .verdict.failed { border-color: var(--red); }
pre { background: var(--panel); padding: .7rem 1rem; overflow-x: auto; font-size: 12.5px;
  line-height: 1.45; overflow-wrap: normal; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .25rem 1.4rem .25rem 0; vertical-align: top; }
tr + tr > * { border-top: 1px solid var(--line); }
td { min-width: 4rem; } th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td:first-child { white-space: nowrap; } td:last-child:not(:nth-child(-n+2)) { min-width: 11rem; }
svg { display: block; max-width: 100%; height: auto; font: 11px system-ui, sans-serif; }
svg text { fill: var(--soft); } svg .name { text-anchor: end; dominant-baseline: middle; }
svg .grid { stroke: var(--line); } svg .g0 { fill: var(--light); } svg .g1 { fill: var(--blue); }
svg .silent { fill: var(--amber); } svg .lost { fill: var(--red); } svg .left { fill: var(--grey); }
svg .failure { fill: var(--red); stroke: var(--back); }
svg polyline { fill: none; stroke-width: 1.5; } svg .step { stroke: var(--blue); }
svg .most { stroke: var(--grey); }
.key { color: var(--soft); font-size: 13px; margin: .3rem 0 0; }
@media (max-width: 40rem) { body { margin-top: 1rem; padding: 0 .8rem; }
  td, th { padding-right: .8rem; } .chart { overflow-x: auto; } .chart svg { min-width: 40rem; } }
@media print { body { max-width: none; margin: 0; } }
"""


@dataclass(frozen=True)
class LogTail:
    """The last lines of a worker's log."""

    rank: int
    name: str
    """Of the file."""
    text: str


def render_page(
    history: JobHistory, tails: Sequence[LogTail] = (), trace: TraceSummary | None = None
) -> str:
    """
    Return the report as HTML.

    Args:
        history: what `read_history` returned.
        tails: last lines of the failed workers' logs.
        trace: what a trace of the job says about communication.
    """
    title = clean_line(f"{history.job or 'job'} {history.run}")
    sections = [
        *_render_head(history),
        *render_differences(history),
        *_render_cause(history, tails),
        *_render_texts("Hangs", history.hangs),
        *_render_timeline_section(history),
        *_render_progress(history),
        *_render_values(history),
        *_render_usage(history),
        *render_communication(trace),
        *_render_plan(history),
        *_render_generations(history.generations),
        *_render_texts("Warnings", history.warnings),
        *render_origin(history),
    ]
    body = "\n".join(sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{_STYLE}{PIPELINE_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _render_head(history: JobHistory) -> Iterator[str]:
    yield f"<h1>{clean_line(history.job or 'job')}</h1>"
    code = history.code
    if code is None:
        style, verdict = "", "no verdict in the log: the job is running, or its scheduler was lost"
    elif code == 0:
        style, verdict = "done", "done"
    else:
        style, verdict = "failed", f"failed with exit code {code}"
    reason = f": {clean_line(history.reason)}" if history.reason and code else ""
    yield f'<p class="verdict {style}"><strong>{verdict}</strong>{reason}</p>'
    for hint in history.hints:
        yield f'<p class="verdict {style}"><strong>hint</strong>: {clean_line(hint)}</p>'
    first = history.generations[0] if history.generations else None
    last = history.generations[-1] if history.generations else None
    workers = sum(count for _, _, count in last.nodes) if last else 0
    rows = [
        ("run", history.run),
        ("began", _format_time(history.begin)),
        ("time", format_seconds(history.end - history.begin)),
        (
            "size",
            f"{plural(workers, 'worker')} on {plural(len(last.nodes), 'node')}" if last else "",
        ),
        ("restarts", str(len(history.generations) - 1) if len(history.generations) > 1 else ""),
        ("meeting", _format_meeting(history, first)),
        ("last step", _format_step(history)),
        ("saved step", f"{history.saved:,}" if history.saved >= 0 else ""),
        ("damaged lines", str(history.unreadable_lines) if history.unreadable_lines else ""),
    ]
    yield render_table((), [row for row in rows if row[1]])


def _format_step(history: JobHistory) -> str:
    if not history.points:
        return ""
    step = f"{history.points[-1].step:,}"
    return f"{step} of {history.total:,}" if history.total else step


def _format_meeting(history: JobHistory, first: GenerationSpan | None) -> str:
    """Return how long the nodes took to meet, and which came last."""
    if first is None or not history.joined:
        return ""
    name, when = max(history.joined.items(), key=lambda item: item[1])
    text = format_seconds(first.assigned_at - history.begin)
    if len(history.joined) > 1 and when <= first.assigned_at:
        text += f", last {name} after {format_seconds(when - history.begin)}"
    return text


def _format_time(when: float) -> str:
    if not when:
        return ""
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _render_cause(history: JobHistory, tails: Sequence[LogTail]) -> Iterator[str]:
    if not history.failures and not tails:
        return
    yield "<h2>What failed</h2>"
    rows = [
        (
            format_seconds(failure.time - history.begin),
            f"rank {failure.rank}",
            failure.node,
            f"exit code {failure.code}",
            failure.cause,
        )
        for failure in history.failures
    ]
    yield render_table(("after", "worker", "node", "end", "cause"), rows)
    hidden = history.failure_count - len(history.failures)
    if hidden > 0:
        yield f"<p>{plural(hidden, 'further failed worker')}.</p>"
    for tail in tails:
        yield f"<h2>Last lines of rank {tail.rank}</h2>"
        yield f'<p class="key">{clean_line(tail.name)}</p>'
        yield f"<pre>{clean_block(tail.text)}</pre>"


def _render_timeline_section(history: JobHistory) -> Iterator[str]:
    if not history.generations and not history.joined:
        return
    yield "<h2>Nodes over time</h2>"
    yield render_timeline(history)
    yield (
        '<p class="key">Blue: a generation of workers. Amber: the node did not answer. Red: it was '
        "lost. Grey: it left. Dots: failed workers.</p>"
    )
    count = len(history.joined)
    if count > MAX_ROWS:
        yield f'<p class="key">{MAX_ROWS} of {count} nodes: those with trouble first.</p>'


def _render_progress(history: JobHistory) -> Iterator[str]:
    curve = render_curve(history.points, history.begin, history.end)
    if not curve:
        return
    yield "<h2>Steps</h2>"
    yield curve
    rate = _step_rate(history)
    text = f"Blue: the slowest worker, grey: the fastest. {rate}".strip()
    yield f'<p class="key">{text}</p>'
    slow = sorted(history.slowest.items(), key=lambda item: (-item[1], item[0]))[:MAX_SLOW_RANKS]
    if slow:
        yield "<h2>Slowest workers</h2>"
        rows = [(f"rank {rank}", f"{count:,}") for rank, count in slow]
        yield render_table(("worker", "times behind"), rows)


def _render_values(history: JobHistory) -> Iterator[str]:
    for when, name, rank, step in history.bad_values:
        after = format_seconds(when - history.begin)
        yield (
            f'<p class="verdict failed">{clean_line(name)} was not finite on rank {rank}: seen '
            f"after {after}, at step {step:,}</p>"
        )
    for name, points in sorted(history.values.items()):
        if name == "mfu":
            points = [
                replace(one, mean=None if one.mean is None else 100 * one.mean) for one in points
            ]
        curve = render_values(points, history.begin, history.end)
        if curve:
            yield f"<h2>{clean_line(_TITLES.get(name, name))}</h2>"
            yield curve
            yield f'<p class="key">{_EXPLANATIONS.get(name, "Mean over all workers.")}</p>'


def _render_usage(history: JobHistory) -> Iterator[str]:
    rows = []
    for name, points in sorted(history.usage.items()):
        peak = max(points, key=lambda point: point.most)
        mean = sum(point.mean for point in points) / len(points)
        after = format_seconds(peak.time - history.begin)
        whose = f"rank {peak.rank}, after {after}" if peak.rank >= 0 else f"after {after}"
        label = name.removesuffix("_bytes").removesuffix("_percent").replace("_", " ")
        rows.append((label, format_use(name, mean), format_use(name, peak.most), whose))
    if rows:
        yield "<h2>CPU, memory and devices</h2>"
        yield render_table(("", "mean", "most", "of"), rows)
        text = "A sample each 15 s, on record each 30 s: shorter peaks are not seen. Values of a "
        yield f'<p class="key">{text}host have the first rank of its node.</p>'


def _render_plan(history: JobHistory) -> Iterator[str]:
    """Yield what the run does and where each value came from, and the picture of a pipeline."""
    cells = parse_cells({name: value for name, (value, _) in history.plan.items()})
    if picture := render_pipeline(cells):
        yield "<h2>Pipeline</h2>"
        yield picture
        yield (
            f'<p class="key">One step, by the schedule: blue forward, green backward, grey idle: '
            f"{idle_share(cells):.1%} of the ranks' time. A backward counts as two forwards, a "
            "stage by its share of the cost. Numbers are micro-batches.</p>"
        )
    rows = [
        (name, value, source)
        for name, (value, source) in history.plan.items()
        if not name.startswith(CELLS_PREFIX)
    ]
    if rows:
        yield "<h2>Plan of the run</h2>"
        yield render_table(("", "value", "from"), rows)


def _step_rate(history: JobHistory) -> str:
    """Return the rate of the last generation with steps."""
    last = history.points[-1]
    begin = max(
        (one.assigned_at for one in history.generations if one.assigned_at <= last.time),
        default=history.begin,
    )
    points = [point for point in history.points if point.time >= begin]
    seconds = points[-1].time - points[0].time
    steps = points[-1].step - points[0].step
    if seconds <= 0 or steps <= 0:
        return ""
    return f"Last generation: {steps / seconds:.3g} steps per second."


def _render_generations(generations: Sequence[GenerationSpan]) -> Iterator[str]:
    if len(generations) < 2:
        return
    yield "<h2>Generations</h2>"
    rows = []
    for one in generations[-MAX_GENERATIONS:]:
        steps = f"{one.steps[0]:,} to {one.steps[1]:,}" if one.steps else ""
        lasted = ""
        if one.started_at is not None and one.ended_at is not None:
            lasted = format_seconds(one.ended_at - one.started_at)
        rows.append((str(one.number), plural(len(one.nodes), "node"), lasted, steps, one.end))
    yield render_table(("", "nodes", "lasted", "steps", "ended by"), rows)


def _render_texts(title: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        yield f"<h2>{title}</h2>"
        yield from (f"<pre>{clean_block(text)}</pre>" for text in texts)
