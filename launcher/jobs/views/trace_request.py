"""
A request for traces to the workers of this host, and their answers.

    request      FOLDER/trace.json beside each agent's socket; workers look for it twice a second
    answer       FOLDER/trace-ID-RANK.json, a Chrome trace of torch's profiler, or .error
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdrun.elastic import TRACE_REQUEST
from pdrun.errors import UsageError
from pdrun.launcher.common import procfs
from pdrun.launcher.jobs.views.local_workers import LocalWorker
from pdrun.quick_dataclass import dataclass

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class TraceRequest:
    """What is traced."""

    token: str
    """Unique: names the answers."""
    steps: int
    timeout: float
    """Longest wait in seconds."""
    start_at: float = 0.0
    """Wall clock before which no worker starts, so that all trace the same steps; 0: now."""


@dataclass(frozen=True)
class TraceAnswers:
    """What the workers have answered."""

    files: dict[int, Path]
    """Rank -> its trace."""
    errors: dict[int, str]


@contextmanager
def request_traces(workers: Sequence[LocalWorker], request: TraceRequest) -> Iterator[None]:
    """
    Ask the workers for traces; afterwards their files are removed.

    Raises:
        UsageError: the folder of an agent cannot be written.
    """
    folders = {worker.folder for worker in workers}
    try:
        for folder in folders:
            _write_request(folder, request)
        yield
    finally:
        _clean_up(folders, request.token)


def await_traces(workers: Sequence[LocalWorker], request: TraceRequest) -> TraceAnswers:
    """Wait until every worker has answered or ended, or the time is over."""
    deadline = time.monotonic() + request.timeout
    left = list(workers)
    while left and time.monotonic() < deadline:
        left = [worker for worker in left if not _has_answered(worker, request.token)]
        if left:
            time.sleep(POLL_SECONDS)
    files = {worker.rank: _stem(worker, request.token).with_suffix(".json") for worker in workers}
    files = {rank: file for rank, file in files.items() if file.exists()}
    return TraceAnswers(files, _read_errors(workers, request.token))


def _stem(worker: LocalWorker, token: str) -> Path:
    return worker.folder / f"trace-{token}-{worker.rank}"


def _write_request(folder: Path, request: TraceRequest) -> None:
    data = {"id": request.token, "steps": request.steps, "at": request.start_at}
    try:
        draft = folder / f".{TRACE_REQUEST}-{request.token}"
        draft.write_text(json.dumps(data))
        draft.replace(folder / TRACE_REQUEST)
    except OSError as error:
        what = f"the agent's folder cannot be used: {error.strerror}"
        raise UsageError(what, where=str(folder), hint="is the job still running?") from None


def _has_answered(worker: LocalWorker, token: str) -> bool:
    stem = _stem(worker, token)
    if stem.with_suffix(".json").exists() or stem.with_suffix(".error").exists():
        return True
    state = procfs.read_state(worker.pid)
    return state is None or state.letter == "Z"


def _read_errors(workers: Sequence[LocalWorker], token: str) -> dict[int, str]:
    found = {}
    for worker in workers:
        try:
            text = _stem(worker, token).with_suffix(".error").read_text()
        except OSError:
            continue
        found[worker.rank] = text[:200]
    return found


def _clean_up(folders: Iterable[Path], token: str) -> None:
    for folder in folders:
        try:
            (folder / TRACE_REQUEST).unlink(missing_ok=True)
            for path in folder.glob(f"trace-{token}-*"):
                path.unlink(missing_ok=True)
        except OSError:
            pass  # the agent has ended and removed it
