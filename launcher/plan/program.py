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
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.config.spec import Program
from pdrun.launcher.plan.script_scan import MAX_READ_BYTES, ScriptInfo, scan_script

_TORCH_MENTIONS = (b"torch", b"lightning", b"transformers", b"accelerate", b"deepspeed", b"pdrun")


@dataclass(frozen=True)
class ProgramCheck:
    """What there is to know about a program on this node."""

    error: str = ""
    """Why it cannot be started, or empty."""
    exit_code: int = 0
    file: str = ""
    """The file that holds it, where it is a Python file."""
    mentions_torch: bool = False
    """Whether its text mentions torch."""
    script: ScriptInfo = field(default_factory=ScriptInfo)
    exec_reason: str = ""
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


def check_program(program: Program, cwd: str, environ: Mapping[str, str]) -> ProgramCheck:
    """
    Return what is found of the program when it is started in ``cwd`` with the workers' environment.
    """
    found = {
        "script": _check_script,
        "function": _check_script,
        "module": _check_module,
        "command": _check_command,
    }[program.kind](program, cwd, environ)
    if found.error or program.kind == "command" or not program.python:
        return found
    error, code = _check_executable(program.python, cwd, environ)
    return ProgramCheck(f"--python: {error}", code) if error else found


def _check_script(program: Program, cwd: str, environ: Mapping[str, str]) -> ProgramCheck:
    target = program.target
    if target == "-":
        return ProgramCheck(
            "a program on standard input is not supported: every worker needs to read it", 2
        )
    path = Path(cwd, target)
    alone = ""
    error = _why_unreadable(path)
    if error == "no such file":
        return ProgramCheck(
            f"no such file {quote_text(target)}{_append_hint(_suggest_name(target, cwd, environ))}",
            2,
        )
    if error == "is a directory":
        path = path / "__main__.py"
        error = ""
        alone = "a folder is run by the interpreter itself"
        if _why_unreadable(path):
            return ProgramCheck(f"{quote_text(target)} is a directory without a __main__.py", 2)
    if error:
        return ProgramCheck(f"{quote_text(target)} {error}", 2)
    text = _read_beginning(path)
    if text.startswith(b"\x7fELF"):
        return ProgramCheck(
            f"{quote_text(target)} is a compiled program, not a Python script; add --no-python", 2
        )
    first = text.partition(b"\n")[0]
    if (
        first.startswith(b"#!")
        and b"python" not in first
        and first.rpartition(b"/")[2].split(b" ")[-1] in _SHELLS
    ):
        return ProgramCheck(
            f"{quote_text(target)} is a shell script, not a Python script; add --no-python", 2
        )
    if path.suffix == ".pyc" or text.startswith(b"PK"):
        alone = "an archive or compiled file is run by the interpreter itself"
    mentions = any(word in text for word in _TORCH_MENTIONS)
    found = (
        ScriptInfo(b"torch" in text, uses_optimizer=True)
        if program.kind == "function"
        else scan_script(path, text)
    )
    return ProgramCheck(
        file=str(path),
        mentions_torch=mentions or found.imports_torch,
        script=found,
        exec_reason=alone,
    )


_SHELLS = (b"sh", b"bash", b"dash", b"zsh", b"ksh", b"csh", b"tcsh", b"fish")


def _why_unreadable(path: Path) -> str:
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


def _suggest_name(target: str, cwd: str, environ: Mapping[str, str]) -> str:
    """Return what was probably meant by a script that is not there."""
    folder, name = os.path.split(target)
    if target == "help":
        return "for help write pdrun --help, or pdrun COMMAND --help"
    if not folder and _is_on_path(name, environ):
        return f"for the command {name} add --no-python"
    try:
        with os.scandir(Path(cwd, folder)) as entries:
            names = [entry.name for entry, _ in zip(entries, range(5000), strict=False)]
    except (OSError, ValueError):
        return ""
    near = did_you_mean(name, names)
    return near.replace("'", f"'{folder}/", 1) if near and folder else near


def _append_hint(text: str) -> str:
    return f"; {text}" if text else ""


def _read_beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_READ_BYTES)
    except OSError:
        return b""


def _check_command(program: Program, cwd: str, environ: Mapping[str, str]) -> ProgramCheck:
    error, code = _check_executable(program.target, cwd, environ)
    return ProgramCheck(error, code)


def _check_executable(target: str, cwd: str, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return why a command cannot be executed and the shell's code for it, or ("", 0)."""
    if "/" not in target:
        if _is_on_path(target, environ):
            return "", 0
        beside = files.is_file(Path(cwd, target))
        hint = f"did you mean './{target}'?" if beside else ""
        if not hint and len(target.split()) > 1:
            hint = "arguments are words of their own, in a job file under args:"
        return f"command not found: {quote_text(target)}{_append_hint(hint)}", 127
    path = Path(cwd, target)
    if why := files.why_inaccessible(path):
        return f"{quote_text(target)} cannot be reached: {why}", 126
    if not files.path_exists(path):
        return (
            f"no such file {quote_text(target)}{_append_hint(_suggest_name(target, cwd, environ))}",
            127,
        )
    if files.is_folder(path):
        return f"{quote_text(target)} is a directory", 126
    if not os.access(path, os.X_OK):
        return f"{quote_text(target)} is not executable; chmod +x it", 126
    return "", 0


def _is_on_path(name: str, environ: Mapping[str, str]) -> bool:
    places = (Path(folder, name) for folder in environ.get("PATH", os.defpath).split(os.pathsep))
    return bool(name) and any(
        files.is_file(place) and os.access(place, os.X_OK) for place in places
    )


def _check_module(program: Program, cwd: str, environ: Mapping[str, str]) -> ProgramCheck:
    """Find a module by the interpreter's own finders, without importing it or its packages."""
    if (
        program.python
        or "PYTHONHOME" in environ
        or environ.get("PYTHONPATH", "") != os.environ.get("PYTHONPATH", "")
    ):
        return ProgramCheck(mentions_torch=True)
    if not all(part.isidentifier() for part in program.target.split(".")):
        return ProgramCheck(f"{quote_text(program.target)} is not a module's name", 2)
    spec = None
    path = [cwd, *sys.path]
    parts = program.target.split(".")
    for number in range(len(parts)):
        spec = _find_module_spec(".".join(parts[: number + 1]), path)
        if spec is None:
            return ProgramCheck(f"no module named {quote_text('.'.join(parts[: number + 1]))}", 2)
        path = list(spec.submodule_search_locations or ())
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_module_spec(f"{program.target}.__main__", path)
        if spec is None:
            return ProgramCheck(
                f"{program.target} is a package without a __main__ module, so it cannot be run", 2
            )
    origin = spec.origin if spec is not None else None
    if origin is None or not files.is_file(origin):
        return ProgramCheck(mentions_torch=True)
    text = _read_beginning(Path(origin))
    found = scan_script(Path(origin), text)
    mentions = any(word in text for word in _TORCH_MENTIONS)
    return ProgramCheck(file=origin, mentions_torch=mentions or found.imports_torch, script=found)


def _find_module_spec(name: str, path: Sequence[str]) -> machinery.ModuleSpec | None:
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
