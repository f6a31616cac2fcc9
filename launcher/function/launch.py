"""
`pdrun.launch(fn, ...)`: run a Python function on several workers and get what each of them
returned.

    losses = pdrun.launch(train, "data/", devices=4)        # a list in rank order; fn may call pdrun.init()

Everything that holds for ``pdrun SCRIPT`` holds here: the same plan, agent, devices, CPU binding
and verdict, run by a child process, so that the caller may be a thread, a notebook or a test, and
keeps its signal handlers.

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
from pdrun.launcher.config.spec import JobSpec, Output, Place, Policy, Program, Resources
from pdrun.launcher.function.transfer import Result, read_results, write_call
from pdrun.launcher.jobs import registry as jobs
from pdrun.names import make_name
from pdrun.worker_env import refuse_reserved

_OURS: Mapping[int, type[PdrunError]] = {
    EXIT_USAGE: UsageError,
    EXIT_CONFIG: ConfigError,
    EXIT_UNAVAILABLE: RendezvousError,
    EXIT_SOFTWARE: PdrunError,
    EXIT_DEADLINE: DeadlineExceeded,
}
_SOURCES = {
    "program.target": "launch(fn)",
    "resources.nodes": "launch(nodes=)",
    "resources.devices": "launch(devices=)",
    "resources.backend": "launch(backend=)",
    "policy.grace": "launch(grace=)",
    "policy.time_limit": "launch(timeout=)",
    "output.log_dir": "launch(log_dir=)",
    "env": "launch(env=)",
}
MARGIN = 10.0
"""Seconds beyond the grace that an interrupted job gets before it is killed."""


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
        fn: what every worker calls; functions of ``__main__``, lambdas and closures are fine.
        args: its positional arguments, the same for all workers.
        nodes: above 1, so many nodes are simulated, all on this machine.
        devices: workers on each node; auto: every visible accelerator, one worker where there is
            none.
        backend: kind of device; auto: what this machine has.
        kwargs: its keyword arguments.
        env: variables for the workers.
        grace: seconds that workers get to end when another failed or the call was interrupted.
        timeout: seconds after which the whole job is stopped.
        log_dir: where the workers' output is kept; default: nowhere.
        quiet: False passes the workers' output on to this process's standard output while they run.

    Raises:
        JobFailed: a worker failed; has its rank, host, exit code and traceback, and the exception
            as ``__cause__``.
        UsageError, ConfigError: the call cannot be started; DeadlineExceeded: ``timeout`` passed.
        KeyboardInterrupt: the job has been stopped.
    """
    _check(nodes, devices, grace, timeout, env)
    folder = Path(tempfile.mkdtemp(prefix="pdrun-launch-"))
    try:
        call = folder / f"{make_name(getattr(fn, '__name__', 'function'))}.call"
        write_call(
            call, fn, args, kwargs or {}, [str(Path(entry).absolute()) for entry in sys.path]
        )
        logs = Path(folder / "logs" if log_dir is None else log_dir)
        spec = JobSpec(
            program=Program("function", str(call), python=sys.executable),
            resources=Resources(nodes=nodes, devices=devices, backend=backend),
            policy=Policy(grace=grace, time_limit=timeout),
            output=Output(log_dir=str(logs.absolute())),
            place=Place(local=True),
            job=f"{call.stem[:40]}-{folder.name.removeprefix('pdrun-launch-')}",
            env=dict(env or {}),
        )
        job = _Job(spec, folder, quiet)
        code = job.wait(grace)
        return _results(read_results(folder), _verdict(logs, spec.job), code, job.tail)
    finally:
        jobs.forget(folder / "logs")
        shutil.rmtree(folder, ignore_errors=True)


def _check(nodes: object, devices: object, grace: object, timeout: object, env: object) -> None:
    """Refuse arguments of other types here, where Python's caller sees which one it was."""
    for name, count in (("nodes", nodes), ("devices", 1 if devices == "auto" else devices)):
        if not isinstance(count, int) or isinstance(count, bool):
            hint = "" if name == "nodes" else "give a whole number or 'auto'"
            raise UsageError(
                f"{count!r} is not a whole number", where=f"launch({name}=)", hint=hint
            )
        if count < 1:
            raise UsageError(f"{count} is below 1", where=f"launch({name}=)")
    for name, time, least in (
        ("grace", grace, True),
        ("timeout", 1.0 if timeout is None else timeout, False),
    ):
        number = isinstance(time, int | float) and not isinstance(time, bool)
        if not number or not (0 < time < math.inf or (least and time == 0)):  # type: ignore[operator]
            raise UsageError(
                f"{time!r} is not a number of seconds",
                where=f"launch({name}=)",
                hint="give 600 for 10m",
            )
    if env is not None and not isinstance(env, Mapping):
        raise UsageError(f"{env!r} is not a mapping of names to texts", where="launch(env=)")
    for name, text in (env or {}).items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise UsageError(f"{name!r}: {text!r} are not two texts", where="launch(env=)")
        refuse_reserved(name, where="launch(env=)")


class _Job:
    """The child process that runs the job, and its output."""

    def __init__(self, spec: JobSpec, folder: Path, quiet: bool) -> None:
        self.tail: deque[str] = deque(maxlen=200)
        self._quiet = quiet
        # Its own session: Ctrl-C on the terminal reaches the caller alone, which then stops the job
        # in order.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdrun.launcher.function.job_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=process_setup.env_without_token(os.environ),
        )
        assert self._process.stdin is not None
        order = {"spec": spec.to_json(), "sources": _SOURCES, "folder": str(folder)}
        with suppress(
            BrokenPipeError
        ):  # it has ended already: its exit code and its own words tell why
            self._process.stdin.write(json.dumps(order).encode("ascii") + b"\n")
            self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True, name="pdrun.launch output")
        self._reader.start()

    def _read(self) -> None:
        """
        Read to the end, whatever becomes of the echo: the workers wait for whoever reads their
        output.
        """
        assert self._process.stdout is not None
        echoes = not self._quiet
        for line in self._process.stdout:
            text = line.decode("utf-8", "replace")
            self.tail.append(text.rstrip("\n"))
            echoes = echoes and _echo(text)

    def wait(self, grace: float) -> int:
        """
        Return the job's exit code; a KeyboardInterrupt stops the job in order, a second one kills
        it.
        """
        try:
            return self._process.wait()
        except BaseException:
            self._stop(grace)
            raise
        finally:
            self._close()

    def _stop(self, grace: float) -> None:
        try:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(grace + MARGIN)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()  # its keeper ends every worker
            self._process.wait()

    def _close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # what is left of an order that it did not read
            self._process.stdin.close()
        self._reader.join(2.0)


def _echo(text: str) -> bool:
    """
    Write to this process's standard output; False when it takes nothing: closed, without a reader,
    or an object.
    """
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError as error:
            sys.stdout.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        sys.stdout.flush()
    except Exception:  # it may be any object, as in a notebook
        return False
    return True


def _verdict(logs: Path, job: str) -> Mapping[str, Any]:
    """Return the data of the job's verdict from its event log; empty when it never came to one."""
    for path in logs.glob("*/events.jsonl"):
        events = list(read_events(path))
        if any(event.data.get("job") == job for event in events):
            return next((event.data for event in reversed(events) if event.kind == "verdict"), {})
    return {}


def _results(
    results: list[Result], verdict: Mapping[str, Any], code: int, tail: deque[str]
) -> list[Any]:
    """Return the values, or raise what the job's end means."""
    if code == EXIT_OK:
        return _values(results)
    rank = verdict.get("rank")
    if rank is None and (ours := _OURS.get(code)) is not None:
        raise ours(
            str(verdict.get("reason") or _last_word(tail) or f"the job ended with exit code {code}")
        )
    failed = next((result for result in results if result.rank == rank and not result.ok), None)
    last = f": {tail[-1]}" if tail and tail[-1] else ""
    what = str(verdict.get("reason") or f"the job ended with exit code {code}{last}")
    error = JobFailed(
        what,
        exit_code=code,
        rank=rank,
        host=str(verdict.get("node", "")),
        traceback=failed.traceback if failed else str(verdict.get("traceback", "")),
    )
    raise error from (failed.exception() if failed else None)


def _values(results: list[Result]) -> list[Any]:
    world = results[0].world if results else 1
    missing = sorted(set(range(world)) - {result.rank for result in results if result.ok})
    if missing:
        raise JobFailed(
            f"rank {missing[0]} ended without returning from the function (sys.exit or os._exit?)",
            exit_code=EXIT_SOFTWARE,
            rank=missing[0],
        )
    return [result.value() for result in results]


def _last_word(tail: deque[str]) -> str:
    """Return the last line that pdrun itself said."""
    ours = [line.removeprefix("pdrun: ") for line in tail if line.startswith("pdrun: ")]
    return ours[-1] if ours else ""
