"""
``pdrun warm start``, ``status`` and ``stop``: processes that keep torch imported between jobs.
"""

from __future__ import annotations

import json as json_module
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.cli.options import CONTEXT_SETTINGS
from pdrun.launcher.common import parsers
from pdrun.launcher.common.files import warm_folder
from pdrun.launcher.plan.environment import remove_launcher_variables
from pdrun.launcher.plan.facts import read_torch_version
from pdrun.launcher.plan.render import format_duration
from pdrun.launcher.plan.start_method import why_unusable
from pdrun.launcher.stdlib_only import import_env
from pdrun.launcher.supervisor import warm_client, warm_start
from pdrun.launcher.supervisor.events import WarmProcess

NO_PROCESS = "no warm process of this user runs on this node"


def warm_group() -> click.Group:
    """Return ``pdrun warm``."""

    def start(python: str, idle: str) -> int:
        return start_warm_process(python, parsers.parse_duration(idle, "--idle"))

    def status(json: bool) -> int:
        return show_warm_processes(as_json=json)

    def stop(pids: tuple[str, ...]) -> int:
        return stop_warm_processes([int(parsers.int_parser(1)(pid, "warm stop")) for pid in pids])

    group = click.Group(
        "warm",
        help="Keep torch imported between the jobs of this node, so that they start faster.",
        context_settings=dict(CONTEXT_SETTINGS),
    )
    python = click.Option(
        ["--python"],
        metavar="PATH",
        default="",
        help="Interpreter of the workers (default: the interpreter of pdrun).",
    )
    idle = click.Option(
        ["--idle"],
        metavar="TIME",
        default="30m",
        show_default=True,
        help="Exit after this time without a job.",
    )
    commands: tuple[tuple[str, Callable[..., int], str, list[click.Parameter]], ...] = (
        (
            "start",
            start,
            "Start a process that imports torch and stays; no effect if one runs already.",
            [python, idle],
        ),
        (
            "status",
            status,
            "Show this user's warm processes on this node, and whether a job uses them.",
            [click.Option(["--json"], is_flag=True, help="One JSON object per process.")],
        ),
        (
            "stop",
            stop,
            "Stop all warm processes, or those with these pids; running jobs continue.",
            [click.Argument(["pids"], nargs=-1, metavar="[PID]...")],
        ),
    )
    for name, callback, text, params in commands:
        settings = dict(CONTEXT_SETTINGS)
        group.add_command(
            click.Command(
                name, callback=callback, help=text, params=params, context_settings=settings
            )
        )
    return group


def start_warm_process(python: str, idle: float) -> int:
    """
    Start a warm process for this interpreter and environment, if none runs; return 0.

    Raises:
        ConfigError: workers cannot be forked here, or the new process does not answer.
    """
    python = _interpreter_path(python)
    environ, _ = remove_launcher_variables(os.environ)
    why = import_env.why_exec_needed(environ)
    if why:
        raise ConfigError(f"workers cannot be forked here: {why}", where="environment")
    folder = _socket_folder()
    path = folder / f"{warm_start.warm_key(python, environ)}.sock"
    with warm_start.locked_dir(folder, _print_line) as number:
        scan = warm_client.WarmScan()
        found = _find_process(scan, path)
        if found is not None and not (why := _why_not_used(found, python, environ)):
            _print_line(f"is warm already: {_describe(found)}")
            return 0
        if found is not None:
            _print_line(f"replacing the warm process {found.pid}: {why}")
            warm_start.stop_warm(found)
        warm_start.replace_silent(scan, path.name, _print_line)
        _print_line(f"importing {', '.join(warm_start.WARM_MODULES)} with {python}")
        warm_start.start_warm(number, path, python, environ, idle)
        started = _find_process(warm_client.WarmScan(), path)
    if started is None:
        raise ConfigError("the warm process does not answer", where=str(path))
    _print_line(f"is warm: {_describe(started)}")
    if started.unfit:
        _print_line(f"but jobs of this environment do not use it: {started.unfit}")
    return 0


def _find_process(scan: warm_client.WarmScan, path: Path) -> WarmProcess | None:
    return next((found for found in scan.collect_answers() if found.socket == str(path)), None)


def show_warm_processes(*, as_json: bool) -> int:
    """Print the warm processes of this user on this node."""
    scan = warm_client.WarmScan()
    environ, _ = remove_launcher_variables(os.environ)
    processes = scan.collect_answers()
    for found in processes:
        why = _why_not_used(found, found.python, environ)
        if as_json:
            print(json_module.dumps(_status_data(found, why)))
        else:
            print(_status_text(found, why))
    for name, why in scan.faults.items():
        _print_line(f"{name}: {why}")
    if not processes and not scan.faults and not as_json:
        _print_line(f"{NO_PROCESS}; start one: pdrun warm start")
    return 0


def _status_text(found: WarmProcess, why: str) -> str:
    use = "used by the next job of this interpreter"
    if why:
        use = f"not used by a job of this environment: {why}"
    age = _format_age(time.time() - found.started_at)
    return (
        f"{_describe(found)}\n"
        f"  up {age}, unused for {_format_age(found.unused_seconds)}, "
        f"{found.served_jobs} job(s) served, {found.running_jobs} running\n"
        f"  {use}"
    )


def stop_warm_processes(pids: Sequence[int]) -> int:
    """Stop the warm processes with these pids, or all; return 1 if one did not stop."""
    scan = warm_client.WarmScan()
    found = {process.pid: process for process in scan.collect_answers()}
    removed = warm_start.remove_dead(scan, _print_line)
    for pid in pids:
        if pid not in found:
            raise _unknown_pid(scan, pid)
    code = 0
    for pid in pids or found:
        if not warm_start.stop_warm(found[pid]):
            _print_line(f"could not stop the warm process {pid}")
            code = 1
            continue
        running = found[pid].running_jobs
        jobs = f"; {running} running job(s) continue" if running else ""
        _print_line(f"stopped the warm process {pid}{jobs}")
    for name, why in scan.faults.items():
        if name in removed:
            _print_line(f"{name}: its process has exited; removed")
        else:
            _print_line(f"{name}: {why}")
            code = 1
    if not found and not scan.faults:
        _print_line(NO_PROCESS)
    return code


def _unknown_pid(scan: warm_client.WarmScan, pid: int) -> ConfigError | UsageError:
    """Return the error for a pid that no warm process of this user answers to."""
    for name, owner in scan.pids.items():
        if owner == pid and name in scan.faults:
            return ConfigError(scan.faults[name])
    return UsageError(
        f"{pid} is not a warm process of this user on this node", hint="see pdrun warm status"
    )


def _interpreter_path(python: str) -> str:
    """
    Return the absolute path of an interpreter.

    Links are not resolved: Python finds its virtual environment by the path it was started with.
    """
    if not python:
        return sys.executable
    path = shutil.which(python)
    if path is None:
        raise UsageError(f"must be a program, got {python!r}", where="--python")
    return str(Path(path).absolute())


def _socket_folder() -> Path:
    try:
        return warm_folder()
    except OSError as error:
        raise ConfigError(
            f"no folder for the sockets: {error.strerror}", hint="set XDG_RUNTIME_DIR"
        ) from None


def _why_not_used(found: WarmProcess, python: str, environ: Mapping[str, str]) -> str:
    """Return why a job of this environment would not use a warm process; empty: it would."""
    version = read_torch_version() if python == sys.executable else ""
    return why_unusable(found, (python, "script.py"), (), version, environ)


def _describe(found: WarmProcess) -> str:
    memory = f"{found.memory_bytes / 1e6:.0f} MB" if found.memory_bytes else "memory unknown"
    state = "a job runs"
    if not found.running_jobs:
        state = f"exits in {_format_age(found.idle_seconds - found.unused_seconds)} without a job"
    return f"pid {found.pid}: torch {found.torch_version} of {found.python}, {memory}, {state}"


def _status_data(found: WarmProcess, why: str) -> dict[str, object]:
    return {
        "pid": found.pid,
        "python": found.python,
        "torch": found.torch_version,
        "modules": list(found.modules),
        "memory_bytes": found.memory_bytes,
        "age_seconds": round(time.time() - found.started_at, 3),
        "unused_seconds": round(found.unused_seconds, 3),
        "idle_seconds": found.idle_seconds,
        "running": found.running_jobs,
        "served": found.served_jobs,
        "socket": found.socket,
        "unfit": why,
    }


def _format_age(value: float) -> str:
    for size in (3600, 60):
        if value >= 2 * size:
            return format_duration(float(int(value) // size * size))
    return format_duration(float(max(0, round(value))))


def _print_line(text: str) -> None:
    print(f"pdrun: {text}", file=sys.stderr, flush=True)
