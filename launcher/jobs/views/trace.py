"""
``pdrun trace``: has the workers of a running job profile some steps, and merges what they write to
one file that Perfetto opens.

    trace_request     the workers of this host
    trace_parts       those of other nodes, over ssh
    merged            process numbers and flows made unique, times on one clock, a row per rank

Times of a trace count from its own base. All bases are wall clock, so ranks of one host are aligned
exactly. Those of other nodes are shifted by the measured offset of their clock.
"""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from pdrun.errors import EXIT_OK, DeadlineExceeded, UsageError
from pdrun.launcher.jobs.lookup import find_job, find_running_job, print_note
from pdrun.launcher.jobs.registry import JobRecord, list_jobs
from pdrun.launcher.jobs.views.local_workers import LocalWorker, find_workers
from pdrun.launcher.jobs.views.trace_parts import DEFAULT_CONNECT, TracePart, serve_part
from pdrun.launcher.jobs.views.trace_request import (
    TraceAnswers,
    TraceRequest,
    await_traces,
    request_traces,
)
from pdrun.launcher.jobs.views.trace_summary import CommunicationMeter
from pdrun.ui.event_reader import EventLogReader
from pdrun.ui.report.communication import SUMMARY_FILE, RankCommunication, TraceSummary

PIDS_PER_RANK = 1_000
"""Process numbers that one rank's trace gets in the merged file."""
MAX_NAMED_RANKS = 8
MAX_OTHER_NODES = 64
START_DELAY_SECONDS = 6.5
"""From the request to the first step, if there are several hosts: a `Run` looks every 5 s."""
HOW_TO_VIEW = "open it at https://ui.perfetto.dev"


def write_trace(
    name: str | None, steps: int, out: str, timeout: float, *, connect: str | None = None
) -> int:
    """
    Trace the next steps of a running job.

    Args:
        name: a job, a run or a prefix; None: the running job.
        steps: steps of each rank.
        out: the file; empty: RUN-trace.json here.
        timeout: longest wait in seconds.
        connect: the command that reaches other nodes (``{node}``); empty: ssh; None: only the
            workers of this host.

    Raises:
        UsageError: no such job runs here, or the file cannot be written.
        DeadlineExceeded: no rank has reported so many steps in time.
    """
    job = choose_running(name)
    workers = find_workers(job.run)
    if not workers and connect is None:
        hint = "call it on a host with workers of the job, or with --all"
        raise UsageError(f"no worker of {job.run} runs on this host", hint=hint)
    path = Path(out or f"{job.run}-trace.json")
    request = TraceRequest(secrets.token_hex(8), steps, timeout)
    if connect is not None:
        with tempfile.TemporaryDirectory(prefix="pdrun-trace-") as folder:
            trace_everywhere(job, workers, request, connect, Path(folder), path)
        return EXIT_OK
    with request_traces(workers, request):
        answers = await_traces(workers, request)
        _write_answers(answers, {}, path, timeout, job)
    _print_result(answers, [worker.rank for worker in workers], path, timeout)
    return EXIT_OK


def trace_everywhere(
    job: JobRecord,
    workers: Sequence[LocalWorker],
    request: TraceRequest,
    connect: str,
    folder: Path,
    path: Path,
) -> None:
    """
    Trace the workers of all nodes of a job, in the same steps.

    Args:
        job: the job.
        workers: those of this host.
        request: without a start.
        connect: the command that reaches other nodes; empty: ssh.
        folder: for the files of other nodes.
        path: the merged file.

    Raises:
        UsageError, DeadlineExceeded: as `write_trace` does.
    """
    nodes = find_other_nodes(job, {worker.rank for worker in workers})
    parts, problems = _start_parts(nodes, job.run, connect or DEFAULT_CONNECT)
    found = TraceAnswers({}, {})
    try:
        with ThreadPoolExecutor(max(1, len(parts))) as pool:
            try:
                list(pool.map(TracePart.prepare, parts))
                request = replace(request, start_at=time.time() + START_DELAY_SECONDS)
                pending = [pool.submit(part.collect, request, folder, found) for part in parts]
                with request_traces(workers, request):
                    longer = replace(request, timeout=request.timeout + START_DELAY_SECONDS)
                    own = await_traces(workers, longer)
                    for one in pending:
                        one.result()
                    found.files.update(own.files)
                    found.errors.update(own.errors)
                    problems |= {part.node: part.error for part in parts if part.error}
                    if problems and not found.files:
                        node, text = next(iter(problems.items()))
                        raise DeadlineExceeded(f"{node}: {text}")
                    clocks = {part.node: part.clock_offset for part in parts}
                    offsets = {
                        rank: clocks.get(node, 0.0) for node in nodes for rank in nodes[node]
                    }
                    _write_answers(found, offsets, path, request.timeout, job)
            finally:
                for part in parts:
                    part.kill()  # the threads of the pool end
    finally:
        for part in parts:
            part.close()
    ranks = [worker.rank for worker in workers]
    ranks += [rank for node in nodes.values() for rank in node]
    _print_result(found, ranks, path, request.timeout)
    for node, text in sorted(problems.items()):
        print_note(f"no trace of {node}: {text}")


def find_other_nodes(job: JobRecord, own: set[int]) -> dict[str, range]:
    """
    Return the nodes whose ranks are not on this host, and their ranks.

    Raises:
        UsageError: the event log is not on this host.
    """
    try:
        status = EventLogReader(Path(job.events)).read_status()
    except OSError as error:
        what = f"the nodes are not known: {error.strerror or error}"
        hint = "call it on the host on which the job was started"
        raise UsageError(what, where=job.events or job.run, hint=hint) from None
    placed = sorted(
        (node for node in status.nodes.values() if node.index >= 0), key=lambda node: node.index
    )
    found, first = {}, 0
    for node in placed:
        ranks = range(first, first + node.workers)
        first += node.workers
        if node.workers and not own & set(ranks):
            found[node.name] = ranks
    return found


def _start_parts(
    nodes: Mapping[str, range], run: str, connect: str
) -> tuple[list[TracePart], dict[str, str]]:
    """Return the commands of other nodes, and why some could not be started."""
    parts: list[TracePart] = []
    problems = {}
    for node in list(nodes)[:MAX_OTHER_NODES]:
        try:
            parts.append(TracePart(node, nodes[node], run, connect))
        except (OSError, ValueError) as error:
            problems[node] = str(error)
    left = len(nodes) - MAX_OTHER_NODES
    if left > 0:
        problems[f"{left} further nodes"] = f"at most {MAX_OTHER_NODES} are traced"
    return parts, problems


def serve_trace_part(run: str) -> int:
    """Trace the workers of a run on this host, for `pdrun trace --all` on another one."""
    return serve_part(find_workers(run), sys.stdin.buffer, sys.stdout.buffer)


def _write_answers(
    answers: TraceAnswers,
    offsets: Mapping[int, float],
    path: Path,
    timeout: float,
    job: JobRecord,
) -> None:
    """Write the merged trace, and what it says about communication for the report of the job."""
    if not answers.files:
        raise DeadlineExceeded(_explain_silence(answers.errors, timeout))
    try:
        with path.open("w", encoding="utf-8") as file:
            ranks = merge_traces(answers.files, file, offsets)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot be written: {reason}", where=str(path)) from None
    if not ranks:
        return
    summary = TraceSummary(str(path.resolve()), ranks)
    print_note(summary.describe())
    folder = Path(job.log_dir) / job.run
    if job.events and folder.is_dir():
        try:
            (folder / SUMMARY_FILE).write_text(summary.to_json(), encoding="utf-8")
        except OSError as error:
            print_note(f"{folder / SUMMARY_FILE} cannot be written: {error.strerror or error}")


def _print_result(answers: TraceAnswers, ranks: Sequence[int], path: Path, timeout: float) -> None:
    print_note(
        f"trace of {len(answers.files)} of {len(ranks)} ranks written to {path}: {HOW_TO_VIEW}"
    )
    missing = [rank for rank in sorted(ranks) if rank not in answers.files]
    if missing:
        shown = ", ".join(map(str, missing[:MAX_NAMED_RANKS]))
        more = (
            f" and {len(missing) - MAX_NAMED_RANKS} more" if len(missing) > MAX_NAMED_RANKS else ""
        )
        print_note(f"no trace of ranks {shown}{more}: {_explain_silence(answers.errors, timeout)}")


def choose_running(name: str | None) -> JobRecord:
    """Return the running job of a name, or the one that runs."""
    known = list_jobs()
    return find_running_job(known) if name is None else find_job(name, known, newest=True)


def _explain_silence(errors: Mapping[int, str], timeout: float) -> str:
    if errors:
        rank, text = next(iter(sorted(errors.items())))
        return f"rank {rank}: {text}"
    return (
        f"they reported too few steps in {timeout:g} s; a trace needs pdrun.progress(step) in the"
        " loop, or a pdrun.Run"
    )


def merge_traces(
    traces: Mapping[int, Path], file: TextIO, offsets: Mapping[int, float] | None = None
) -> tuple[RankCommunication, ...]:
    """
    Write the traces of ranks as one; one is in memory at a time.

    Args:
        traces: rank -> its file.
        file: where to write.
        offsets: rank -> seconds that its clock is ahead of this host's.

    Returns:
        the communication in the steps of each rank whose trace has steps.

    Raises:
        OSError: the file cannot be written.
    """
    found = []
    late = {rank: round(1e9 * seconds) for rank, seconds in (offsets or {}).items()}
    bases = {rank: _read_base(path) - late.get(rank, 0) for rank, path in traces.items()}
    begin = min((base for rank, base in bases.items() if base + late.get(rank, 0)), default=0)
    head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": begin}
    file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
    separator = ""
    for rank, path in sorted(traces.items()):
        meter = CommunicationMeter()
        for event in _iter_events(rank, _read_trace(path), begin + late.get(rank, 0)):
            file.write(separator + json.dumps(event))
            separator = ",\n"
            meter.add(event)
        if (one := meter.read(rank)) is not None:
            found.append(one)
    file.write("\n]}\n")
    return tuple(found)


def _read_trace(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _read_base(path: Path) -> int:
    base = _read_trace(path).get("baseTimeNanoseconds", 0)
    return base if isinstance(base, int) else 0


def _iter_events(rank: int, trace: Mapping[str, Any], begin: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank: its processes numbered apart, its times on the common clock."""
    events = trace.get("traceEvents")
    base = trace.get("baseTimeNanoseconds", 0)
    shift = (base - begin) / 1e3 if isinstance(base, int) and begin else 0.0
    pids: dict[str, int] = {}
    for event in events if isinstance(events, list) else ():
        if not isinstance(event, dict):
            continue
        place = len(pids) % PIDS_PER_RANK
        pid = pids.setdefault(str(event.get("pid")), rank * PIDS_PER_RANK + place + 1)
        event["pid"] = pid
        if isinstance(event.get("ts"), int | float):
            event["ts"] += shift
        if "id" in event:
            event["id"] = f"{rank}.{event['id']}"  # arrows of two ranks must not be joined
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_sort_index"):
            continue
        yield event
    for name, pid in pids.items():
        label = f"rank {rank}" if name.isdecimal() and name != "0" else f"rank {rank} {name}"
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": label.strip()}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
