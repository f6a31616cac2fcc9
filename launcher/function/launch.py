"""
`pdrun.launch(fn, ...)`: run a Python function on several workers and return their results.

    losses = pdrun.launch(train, "data/", devices=4)   # in rank order; fn may call pdrun.init()

The job has the same plan, agent, devices, CPU binding and verdict as ``pdrun SCRIPT``. A child
process runs it, so that the caller may be a thread, a notebook or a test and keeps its signal
handlers.

Limits: all workers run on this machine (``nodes`` above 1 are simulated). A function and its
results travel by pickle through a private folder that exists during the call only.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pdrun import process_setup
from pdrun.errors import (
    EXIT_CONFIG,
    EXIT_DEADLINE,
    EXIT_OK,
    EXIT_SOFTWARE,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    ConfigError,
    DeadlineExceeded,
    JobFailed,
    PdrunError,
    RendezvousError,
    UsageError,
)
from pdrun.eventlog import read_events
from pdrun.launcher.config.spec import (
    ClusterOptions,
    JobSpec,
    Output,
    Policy,
    Program,
    Resources,
)
from pdrun.launcher.function.transfer import WorkerResult, read_results, write_call
from pdrun.launcher.jobs import registry
from pdrun.text import make_name
from pdrun.worker_env import refuse_reserved

ERROR_OF_EXIT_CODE: Mapping[int, type[PdrunError]] = {
    EXIT_USAGE: UsageError,
    EXIT_CONFIG: ConfigError,
    EXIT_UNAVAILABLE: RendezvousError,
    EXIT_SOFTWARE: PdrunError,
    EXIT_DEADLINE: DeadlineExceeded,
}
"""Errors of pdrun: no worker caused the job's end."""
SOURCES = {
    "program.target": "launch(fn)",
    "resources.nodes": "launch(nodes=)",
    "resources.devices": "launch(devices=)",
    "resources.backend": "launch(backend=)",
    "policy.grace": "launch(grace=)",
    "policy.time_limit": "launch(timeout=)",
    "output.log_dir": "launch(log_dir=)",
    "env": "launch(env=)",
}
"""Field path and the argument that gives it; errors name the argument."""
KILL_MARGIN_SECONDS = 10.0
"""Time beyond the grace time before an interrupted job is killed."""
MAX_TAIL_LINES = 200


def launch(
    fn: Callable[..., Any],
    /,
    *args: Any,
    nodes: int = 1,
    devices: int | Literal["auto"] = "auto",
    backend: str = "auto",
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    grace: float = 30.0,
    timeout: float | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    quiet: bool = True,
) -> list[Any]:
    """
    Call ``fn(*args, **kwargs)`` in ``nodes * devices`` worker processes; return their results in
    rank order.

    Args:
        fn: the function that every worker calls; functions of ``__main__``, lambdas and closures
            are supported.
        args: its positional arguments, the same for all workers.
        nodes: number of nodes. Above 1, they are simulated on this machine.
        devices: workers per node. auto: one per visible accelerator, or one worker if there is no
            accelerator.
        backend: kind of device. auto: the kind of this machine.
        kwargs: its keyword arguments.
        env: environment variables of the workers.
        grace: seconds for the workers to exit when another failed or the call was interrupted.
        timeout: seconds after which the job is stopped.
        log_dir: folder for the workers' output. Default: the output is not kept, or with
            ``quiet=False`` in pdrun-logs, as by the command.
        quiet: False: the workers' output is also written to this process's standard output.

    Raises:
        JobFailed: a worker failed. It has the worker's rank, host, exit code and traceback, and the
            exception as ``__cause__``.
        UsageError, ConfigError: the call cannot be started.
        DeadlineExceeded: ``timeout`` passed.
        KeyboardInterrupt: the job has been stopped.
    """
    _check_counts(nodes, devices)
    _check_durations(grace, timeout)
    _check_env(env)
    folder = Path(tempfile.mkdtemp(prefix="pdrun-launch-"))
    try:
        call = folder / f"{make_name(getattr(fn, '__name__', 'function'))}.call"
        search_path = [str(Path(entry).absolute()) for entry in sys.path]
        write_call(call, fn, args, kwargs or {}, search_path)
        logs = folder / "logs"
        if log_dir is not None:
            logs = Path(log_dir)
        elif not quiet:
            logs = Path(Output.log_dir)  # the messages name it
        spec = JobSpec(
            program=Program("function", str(call), python=sys.executable),
            resources=Resources(nodes=nodes, devices=devices, backend=backend),
            policy=Policy(grace=grace, time_limit=timeout),
            output=Output(log_dir=str(logs.absolute())),
            place=ClusterOptions(local=True),
            job=f"{call.stem[:40]}-{folder.name.removeprefix('pdrun-launch-')}",
            env=dict(env or {}),
        )
        job = JobProcess(spec, folder, is_quiet=quiet)
        code = job.wait(grace)
        verdict = _read_verdict(logs, spec.job)
        return _collect_results(read_results(folder), verdict, code, job.tail)
    finally:
        registry.remove_jobs(folder / "logs")
        shutil.rmtree(folder, ignore_errors=True)


# Arguments: errors name the argument as the caller of `launch` knows it.
# --------------------------------------------------------------------------------------------------


def _check_counts(nodes: object, devices: object) -> None:
    for name, count in (("nodes", nodes), ("devices", devices)):
        if name == "devices" and count == "auto":
            continue
        if not isinstance(count, int) or isinstance(count, bool):
            raise UsageError(
                f"must be a whole number, got {count!r}",
                where=f"launch({name}=)",
                hint="" if name == "nodes" else "give a whole number or 'auto'",
            )
        if count < 1:
            raise UsageError(f"must be at least 1, got {count}", where=f"launch({name}=)")


def _check_durations(grace: object, timeout: object) -> None:
    _check_duration("grace", grace, allow_zero=True)
    if timeout is not None:
        _check_duration("timeout", timeout, allow_zero=False)


def _check_duration(name: str, value: object, *, allow_zero: bool) -> None:
    is_valid = False
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_valid = 0 < value < math.inf or (allow_zero and value == 0)
    if not is_valid:
        raise UsageError(
            f"must be a number of seconds, got {value!r}",
            where=f"launch({name}=)",
            hint="give 600 for 10m",
        )


def _check_env(env: object) -> None:
    if env is None:
        return
    if not isinstance(env, Mapping):
        raise UsageError(f"must be a mapping of str to str, got {env!r}", where="launch(env=)")
    for name, text in env.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise UsageError(
                f"names and values must be str, got {name!r}: {text!r}", where="launch(env=)"
            )
        refuse_reserved(name, where="launch(env=)")


class JobProcess:
    """The child process that runs the job, and its output."""

    def __init__(self, spec: JobSpec, folder: Path, *, is_quiet: bool) -> None:
        self.tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        """The last lines of the output."""
        self._is_quiet = is_quiet
        # In its own session: Ctrl-C on the terminal reaches only the caller, which then stops the
        # job.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdrun.launcher.function.job_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=process_setup.env_without_token(os.environ),
        )
        assert self._process.stdin is not None
        payload = {"spec": spec.to_json(), "sources": SOURCES, "folder": str(folder)}
        with suppress(BrokenPipeError):  # it has ended: its exit code and output say why
            self._process.stdin.write(json.dumps(payload).encode("ascii") + b"\n")
            self._process.stdin.flush()
        self._reader = threading.Thread(
            target=self._read_output, daemon=True, name="pdrun.launch output"
        )
        self._reader.start()

    def _read_output(self) -> None:
        """Read to the end, even if the echo fails: workers block while nothing reads."""
        assert self._process.stdout is not None
        echoes = not self._is_quiet
        for line in self._process.stdout:
            text = line.decode("utf-8", "replace")
            self.tail.append(text.rstrip("\n"))
            echoes = echoes and _echo_text(text)

    def wait(self, grace: float) -> int:
        """
        Return the job's exit code.

        A KeyboardInterrupt stops the job with its grace time, a second one kills it.
        """
        try:
            return self._process.wait()
        except BaseException:
            self._stop_job(grace)
            raise
        finally:
            self._close_streams()

    def _stop_job(self, grace: float) -> None:
        try:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(grace + KILL_MARGIN_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()  # its supervisor kills every worker
            self._process.wait()

    def _close_streams(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the rest of a payload that it did not read
            self._process.stdin.close()
        self._reader.join(2.0)


def _echo_text(text: str) -> bool:
    """Write to this process's standard output; return False if that is not possible."""
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError as error:
            sys.stdout.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        sys.stdout.flush()
    except Exception:  # closed, without a reader, or any object, as in a notebook
        return False
    return True


def _read_verdict(logs: Path, job: str) -> Mapping[str, Any]:
    """Return the data of the job's verdict from its event log; empty: there is no verdict."""
    for path in logs.glob("*/events.jsonl"):
        events = list(read_events(path))
        if any(event.data.get("job") == job for event in events):
            for event in reversed(events):
                if event.kind == "verdict":
                    return event.data
            return {}
    return {}


def _collect_results(
    results: list[WorkerResult], verdict: Mapping[str, Any], code: int, tail: deque[str]
) -> list[Any]:
    """Return the values, or raise the error that the job's end means."""
    if code == EXIT_OK:
        return _load_values(results)
    rank = verdict.get("rank")
    reason = str(verdict.get("reason") or "")
    if rank is None and code in ERROR_OF_EXIT_CODE:
        what = reason or _last_message(tail) or f"the job ended with exit code {code}"
        raise ERROR_OF_EXIT_CODE[code](what)
    if not reason:
        last_line = f": {tail[-1]}" if tail and tail[-1] else ""
        reason = f"the job ended with exit code {code}{last_line}"
    failed = next((result for result in results if result.rank == rank and not result.is_ok), None)
    traceback = failed.traceback if failed else str(verdict.get("traceback", ""))
    error = JobFailed(
        reason,
        exit_code=code,
        rank=rank,
        host=str(verdict.get("node", "")),
        traceback=traceback,
    )
    raise error from (failed.load_exception() if failed else None)


def _load_values(results: list[WorkerResult]) -> list[Any]:
    world_size = results[0].world_size if results else 1
    missing = sorted(set(range(world_size)) - {result.rank for result in results if result.is_ok})
    if missing:
        raise JobFailed(
            f"rank {missing[0]} ended without returning from the function (sys.exit or os._exit?)",
            exit_code=EXIT_SOFTWARE,
            rank=missing[0],
        )
    return [result.load_value() for result in results]


def _last_message(tail: deque[str]) -> str:
    """Return the last line that pdrun itself printed."""
    for line in reversed(tail):
        if line.startswith("pdrun: "):
            return line.removeprefix("pdrun: ")
    return ""
