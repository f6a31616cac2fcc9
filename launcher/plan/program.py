"""
Is the program there? Looked at before anything starts, so that a typing slip costs milliseconds and
one clear line.

The program is never imported or run here. Exit codes are a shell's: 2 for a script or module that
is not there, 127 for a command that is not found, 126 for one that is not executable. Limit: a
module that only a custom import hook of the workers would find cannot be seen; where that is
possible (another interpreter, PYTHONPATH set for the workers) nothing is claimed.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import machinery
from pathlib import Path

from pdrun.errors import did_you_mean
from pdrun.launcher.common import files
from pdrun.launcher.common.parsers import quoted
from pdrun.launcher.config.spec import Program
from pdrun.launcher.plan.script_scan import LOOK, Told, told

_MENTIONS = (b"torch", b"lightning", b"transformers", b"accelerate", b"deepspeed", b"pdrun")


@dataclass(frozen=True)
class Found:
    """What there is to know about a program on this node."""

    error: str = ""
    """Why it cannot be started, or empty."""
    code: int = 0
    file: str = ""
    """The file that holds it, where it is a Python file."""
    imports_torch: bool = False
    """Whether its text mentions torch."""
    told: Told = field(default_factory=Told)
    unforkable: str = ""
    """Why it needs an interpreter of its own, or empty."""


def program_argv(program: Program, python: str) -> tuple[str, ...]:
    """Return a worker's command line, byte for byte what the user typed behind the interpreter."""
    python = program.python or python
    if program.kind == "command":
        return (program.target, *program.args)
    if program.kind == "module":
        return (python, "-m", program.target, *program.args)
    if program.kind == "function":
        return (
            python,
            "-P",
            "-m",
            "pdrun.launcher.function.worker_main",
            program.target,
            *program.args,
        )
    target = f"./{program.target}" if program.target.startswith("-") else program.target
    return (python, target, *program.args)


def look(program: Program, cwd: str, environ: Mapping[str, str]) -> Found:
    """
    Return what is found of the program when it is started in ``cwd`` with the workers' environment.
    """
    found = {"script": _script, "function": _script, "module": _module, "command": _command}[
        program.kind
    ](program, cwd, environ)
    if found.error or program.kind == "command" or not program.python:
        return found
    error, code = _executable(program.python, cwd, environ)
    return Found(f"--python: {error}", code) if error else found


def _script(program: Program, cwd: str, environ: Mapping[str, str]) -> Found:
    target = program.target
    if target == "-":
        return Found(
            "a program on standard input is not supported: every worker needs to read it", 2
        )
    path = Path(cwd, target)
    alone = ""
    error = _unreadable(path)
    if error == "no such file":
        return Found(f"no such file {quoted(target)}{_hint(_nearby(target, cwd, environ))}", 2)
    if error == "is a directory":
        path = path / "__main__.py"
        error = ""
        alone = "a folder is run by the interpreter itself"
        if _unreadable(path):
            return Found(f"{quoted(target)} is a directory without a __main__.py", 2)
    if error:
        return Found(f"{quoted(target)} {error}", 2)
    text = _beginning(path)
    if text.startswith(b"\x7fELF"):
        return Found(
            f"{quoted(target)} is a compiled program, not a Python script; add --no-python", 2
        )
    first = text.partition(b"\n")[0]
    if (
        first.startswith(b"#!")
        and b"python" not in first
        and first.rpartition(b"/")[2].split(b" ")[-1] in _SHELLS
    ):
        return Found(f"{quoted(target)} is a shell script, not a Python script; add --no-python", 2)
    if path.suffix == ".pyc" or text.startswith(b"PK"):
        alone = "an archive or compiled file is run by the interpreter itself"
    mentions = any(word in text for word in _MENTIONS)
    found = (
        Told(b"torch" in text, optimizes=True) if program.kind == "function" else told(path, text)
    )
    return Found(
        file=str(path), imports_torch=mentions or found.torch, told=found, unforkable=alone
    )


_SHELLS = (b"sh", b"bash", b"dash", b"zsh", b"ksh", b"csh", b"tcsh", b"fish")


def _unreadable(path: Path) -> str:
    """
    Return why a regular file cannot be read, or the empty string. A FIFO or device is never opened.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "is a link to nothing" if files.is_link(path) else "no such file"
    except OSError as error:
        return f"cannot be read: {os.strerror(error.errno or errno.EIO)}"
    except ValueError:
        return "is not a file name"
    if stat.S_ISDIR(mode):
        return "is a directory"
    if not stat.S_ISREG(mode):
        return "is not a regular file"
    return "" if os.access(path, os.R_OK) else "cannot be read: Permission denied"


def _nearby(target: str, cwd: str, environ: Mapping[str, str]) -> str:
    """Return what was probably meant by a script that is not there."""
    folder, name = os.path.split(target)
    if target == "help":
        return "for help write pdrun --help, or pdrun COMMAND --help"
    if not folder and _on_path(name, environ):
        return f"for the command {name} add --no-python"
    try:
        with os.scandir(Path(cwd, folder)) as entries:
            names = [entry.name for entry, _ in zip(entries, range(5000), strict=False)]
    except (OSError, ValueError):
        return ""
    near = did_you_mean(name, names)
    return near.replace("'", f"'{folder}/", 1) if near and folder else near


def _hint(text: str) -> str:
    return f"; {text}" if text else ""


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(LOOK)
    except OSError:
        return b""


def _command(program: Program, cwd: str, environ: Mapping[str, str]) -> Found:
    error, code = _executable(program.target, cwd, environ)
    return Found(error, code)


def _executable(target: str, cwd: str, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return why a command cannot be executed and the shell's code for it, or ("", 0)."""
    if "/" not in target:
        if _on_path(target, environ):
            return "", 0
        beside = files.is_file(Path(cwd, target))
        hint = f"did you mean './{target}'?" if beside else ""
        if not hint and len(target.split()) > 1:
            hint = "arguments are words of their own, in a job file under args:"
        return f"command not found: {quoted(target)}{_hint(hint)}", 127
    path = Path(cwd, target)
    if why := files.refused(path):
        return f"{quoted(target)} cannot be reached: {why}", 126
    if not files.exists(path):
        return f"no such file {quoted(target)}{_hint(_nearby(target, cwd, environ))}", 127
    if files.is_folder(path):
        return f"{quoted(target)} is a directory", 126
    if not os.access(path, os.X_OK):
        return f"{quoted(target)} is not executable; chmod +x it", 126
    return "", 0


def _on_path(name: str, environ: Mapping[str, str]) -> bool:
    places = (Path(folder, name) for folder in environ.get("PATH", os.defpath).split(os.pathsep))
    return bool(name) and any(
        files.is_file(place) and os.access(place, os.X_OK) for place in places
    )


def _module(program: Program, cwd: str, environ: Mapping[str, str]) -> Found:
    """Find a module by the interpreter's own finders, without importing it or its packages."""
    if (
        program.python
        or "PYTHONHOME" in environ
        or environ.get("PYTHONPATH", "") != os.environ.get("PYTHONPATH", "")
    ):
        return Found(imports_torch=True)
    if not all(part.isidentifier() for part in program.target.split(".")):
        return Found(f"{quoted(program.target)} is not a module's name", 2)
    spec = None
    path = [cwd, *sys.path]
    parts = program.target.split(".")
    for number in range(len(parts)):
        spec = _find(".".join(parts[: number + 1]), path)
        if spec is None:
            return Found(f"no module named {quoted('.'.join(parts[: number + 1]))}", 2)
        path = list(spec.submodule_search_locations or ())
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{program.target}.__main__", path)
        if spec is None:
            return Found(
                f"{program.target} is a package without a __main__ module, so it cannot be run", 2
            )
    origin = spec.origin if spec is not None else None
    if origin is None or not files.is_file(origin):
        return Found(imports_torch=True)
    text = _beginning(Path(origin))
    found = told(Path(origin), text)
    mentions = any(word in text for word in _MENTIONS)
    return Found(file=origin, imports_torch=mentions or found.torch, told=found)


def _find(name: str, path: Sequence[str]) -> machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = (
            find(name, path if finder is machinery.PathFinder or "." in name else None)
            if find
            else None
        )
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None
