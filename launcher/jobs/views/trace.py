"""
``pdrun trace``: has the workers of a running job on this host profile some steps, and merges what
they write to one file that Perfetto opens.

    request      FOLDER/trace.json beside each agent's socket; workers look for it twice a second
    answer       FOLDER/trace-ID-RANK.json: a Chrome trace of torch's profiler
    merged       process numbers and flows made unique, times on one clock, a row per rank

Times of a trace count from its own base. All bases are wall clock, so ranks of one host are aligned
exactly; files of several hosts as well as their clocks are.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from pdrun.elastic import TRACE_REQUEST
from pdrun.errors import EXIT_OK, DeadlineExceeded, UsageError
from pdrun.launcher.common import procfs
from pdrun.launcher.jobs.lookup import find_job, find_running_job, print_note
from pdrun.launcher.jobs.registry import JobRecord, list_jobs
from pdrun.launcher.jobs.views.local_workers import LocalWorker, find_workers

POLL_SECONDS = 0.1
PIDS_PER_RANK = 1_000
"""Process numbers that one rank's trace gets in the merged file."""
MAX_NAMED_RANKS = 8
HOW_TO_VIEW = "open it at https://ui.perfetto.dev"


def write_trace(name: str | None, steps: int, out: str, timeout: float) -> int:
    """
    Trace the next steps of a running job.

    Args:
        name: a job, a run or a prefix; None: the running job.
        steps: steps of each rank.
        out: the file; empty: RUN-trace.json here.
        timeout: longest wait in seconds.

    Raises:
        UsageError: no such job runs here, or the file cannot be written.
        DeadlineExceeded: no rank has reported so many steps in time.
    """
    job = choose_running(name)
    workers = find_workers(job.run)
    if not workers:
        hint = "call it on a host with workers of the job"
        raise UsageError(f"no worker of {job.run} runs on this host", hint=hint)
    path = Path(out or f"{job.run}-trace.json")
    token = secrets.token_hex(8)
    folders = {worker.folder for worker in workers}
    try:
        for folder in folders:
            _write_request(folder, token, steps)
        _await_answers(workers, token, timeout)
        traces = {
            worker.rank: worker.folder / f"trace-{token}-{worker.rank}.json" for worker in workers
        }
        traces = {rank: file for rank, file in traces.items() if file.exists()}
        errors = _read_errors(workers, token)
        if not traces:
            raise DeadlineExceeded(_explain_silence(errors, timeout))
        try:
            with path.open("w", encoding="utf-8") as file:
                merge_traces(traces, file)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"cannot be written: {reason}", where=str(path)) from None
    finally:
        _clean_up(folders, token)
    print_note(f"trace of {len(traces)} of {len(workers)} ranks written to {path}: {HOW_TO_VIEW}")
    missing = [worker.rank for worker in workers if worker.rank not in traces]
    if missing:
        shown = ", ".join(map(str, missing[:MAX_NAMED_RANKS]))
        more = (
            f" and {len(missing) - MAX_NAMED_RANKS} more" if len(missing) > MAX_NAMED_RANKS else ""
        )
        print_note(f"no trace of ranks {shown}{more}: {_explain_silence(errors, timeout)}")
    return EXIT_OK


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


def _write_request(folder: Path, token: str, steps: int) -> None:
    try:
        draft = folder / f".{TRACE_REQUEST}-{token}"
        draft.write_text(json.dumps({"id": token, "steps": steps}))
        draft.replace(folder / TRACE_REQUEST)
    except OSError as error:
        what = f"the agent's folder cannot be used: {error.strerror}"
        raise UsageError(what, where=str(folder), hint="is the job still running?") from None


def _await_answers(workers: Sequence[LocalWorker], token: str, timeout: float) -> None:
    """Wait until every worker has answered or ended, or the time is over."""
    deadline = time.monotonic() + timeout
    left = list(workers)
    while left and time.monotonic() < deadline:
        left = [worker for worker in left if not _has_answered(worker, token)]
        if left:
            time.sleep(POLL_SECONDS)


def _has_answered(worker: LocalWorker, token: str) -> bool:
    stem = worker.folder / f"trace-{token}-{worker.rank}"
    if stem.with_suffix(".json").exists() or stem.with_suffix(".error").exists():
        return True
    state = procfs.read_state(worker.pid)
    return state is None or state.letter == "Z"


def _read_errors(workers: Sequence[LocalWorker], token: str) -> dict[int, str]:
    found = {}
    for worker in workers:
        try:
            text = (worker.folder / f"trace-{token}-{worker.rank}.error").read_text()
        except OSError:
            continue
        found[worker.rank] = text[:200]
    return found


def _clean_up(folders: set[Path], token: str) -> None:
    for folder in folders:
        try:
            (folder / TRACE_REQUEST).unlink(missing_ok=True)
            for path in folder.glob(f"trace-{token}-*"):
                path.unlink(missing_ok=True)
        except OSError:
            pass  # the agent has ended and removed it


def merge_traces(traces: Mapping[int, Path], file: TextIO) -> None:
    """
    Write the traces of ranks as one; one is in memory at a time.

    Raises:
        OSError: the file cannot be written.
    """
    begin = min((base for path in traces.values() if (base := _read_base(path))), default=0)
    head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": begin}
    file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
    separator = ""
    for rank, path in sorted(traces.items()):
        for event in _iter_events(rank, _read_trace(path), begin):
            file.write(separator + json.dumps(event))
            separator = ",\n"
    file.write("\n]}\n")


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
