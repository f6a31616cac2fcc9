"""
``pdrun warm start``, ``status`` and ``stop``: processes that keep torch imported between jobs
(`warm`).
"""

from __future__ import annotations

import json as json_module
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.common.places import warm_folder
from pdrun.launcher.plan.environment import scrub
from pdrun.launcher.plan.facts import torch_version
from pdrun.launcher.plan.render import seconds
from pdrun.launcher.plan.start_method import unfit
from pdrun.launcher.stdlib_only import import_env
from pdrun.launcher.supervisor import warm_client
from pdrun.launcher.supervisor.events import Warm

NONE = "there is no warm process of yours on this node"


def start(python: str, idle: float) -> int:
    """Have a warm process for this interpreter and environment; return 0 once there is one."""
    python = _interpreter(python)
    environ, _ = scrub(os.environ)
    why = import_env.needs_exec(environ)
    if why:
        raise ConfigError(f"workers cannot be forked here: {why}", where="environment")
    folder = _folder()
    path = folder / f"{warm_client.key(python, environ)}.sock"
    with warm_client.changing(folder, _say) as number:
        look = warm_client.Look()
        found = next((found for found in look.found() if found.socket == str(path)), None)
        if found is not None and not (why := _unfit(found, python, environ)):
            _say(f"is warm already: {_line(found)}")
            return 0
        if found is not None:
            _say(f"replacing the warm process {found.pid}: {why}")
            warm_client.stop(found)
        warm_client.replace_silent(look, path.name, _say)
        _say(f"importing {', '.join(warm_client.MODULES)} with {python}")
        warm_client.launch(number, path, python, environ, idle)
        made = next(
            (found for found in warm_client.Look().found() if found.socket == str(path)), None
        )
    if made is None:
        raise ConfigError("the warm process does not answer", where=str(path))
    _say(f"is warm: {_line(made)}")
    if made.unfit:
        _say(f"but jobs from here will not use it: {made.unfit}")
    return 0


def status(*, json: bool) -> int:
    """Print the warm processes of this user on this node."""
    look = warm_client.Look()
    environ, _ = scrub(os.environ)
    there = look.found()
    for found in there:
        why = _unfit(found, found.python, environ)
        if json:
            print(json_module.dumps(_data(found, why)))
        else:
            used = (
                f"not used by a job from here: {why}"
                if why
                else "used by the next job of this interpreter"
            )
            print(
                f"{_line(found)}\n  up {_age(time.time() - found.started)}, unused for {_age(found.unused)}, "
                f"{found.served} job(s) served, {found.running} running\n  {used}"
            )
    for name, why in look.faults.items():
        _say(f"{name}: {why}")
    if not there and not look.faults and not json:
        _say(f"{NONE}; pdrun warm start begins one")
    return 0


def stop(pids: Sequence[int]) -> int:
    """End the warm processes with these pids, or all; return 1 where one did not end."""
    look = warm_client.Look()
    found = {each.pid: each for each in look.found()}
    cleared = warm_client.clear(look, _say)
    unknown = [pid for pid in pids if pid not in found]
    if unknown:
        name = next(
            (name for name, pid in look.pids.items() if pid == unknown[0] and name in look.faults),
            "",
        )
        if name:
            raise ConfigError(look.faults[name])
        raise UsageError(
            f"{unknown[0]} is no warm process of yours on this node", hint="see pdrun warm status"
        )
    code = 0
    for pid in pids or found:
        ended = warm_client.stop(found[pid])
        running = found[pid].running
        _say(
            f"{'ended' if ended else 'could not end'} the warm process {pid}"
            + (f"; {running} job(s) go on" if running and ended else "")
        )
        code = code if ended else 1
    for name, why in look.faults.items():
        _say(
            f"{name}: was left by a dead process, and is removed"
            if name in cleared
            else f"{name}: {why}"
        )
        code = code if name in cleared else 1
    if not found and not look.faults:
        _say(NONE)
    return code


def _interpreter(python: str) -> str:
    """
    Return the absolute path of an interpreter, links as they are: a virtual environment is found by
    its own path.
    """
    if not python:
        return sys.executable
    path = shutil.which(python)
    if path is None:
        raise UsageError(f"is no program: {python!r}", where="--python")
    return str(Path(path).absolute())


def _folder() -> Path:
    try:
        return warm_folder()
    except OSError as error:
        raise ConfigError(
            f"there is no place for sockets: {error.strerror}", hint="set XDG_RUNTIME_DIR"
        ) from None


def _unfit(found: Warm, python: str, environ: Mapping[str, str]) -> str:
    """Why a job from here would not use a warm process; its own script and options left aside."""
    version = torch_version() if python == sys.executable else ""
    return unfit(found, (python, "script.py"), (), version, environ)


def _line(found: Warm) -> str:
    memory = f"{found.memory / 1e6:.0f} MB" if found.memory else "memory unknown"
    left = found.idle - found.unused
    ends = "a job runs" if found.running else f"ends in {_age(left)} without a job"
    return f"pid {found.pid}: torch {found.torch_version} of {found.python}, {memory}, {ends}"


def _data(found: Warm, why: str) -> dict[str, object]:
    return {
        "pid": found.pid,
        "python": found.python,
        "torch": found.torch_version,
        "modules": list(found.modules),
        "memory_bytes": found.memory,
        "age_seconds": round(time.time() - found.started, 3),
        "unused_seconds": round(found.unused, 3),
        "idle_seconds": found.idle,
        "running": found.running,
        "served": found.served,
        "socket": found.socket,
        "unfit": why,
    }


def _age(value: float) -> str:
    for size in (3600, 60):
        if value >= 2 * size:
            return seconds(float(int(value) // size * size))
    return seconds(float(max(0, round(value))))


def _say(text: str) -> None:
    print(f"pdrun: {text}", file=sys.stderr, flush=True)
