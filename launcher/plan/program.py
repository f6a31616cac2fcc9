"""
Check the program before anything starts, so that a typing error is reported immediately.

The program is not imported or run. The exit codes are those of a shell: 2 for a missing script or
module, 127 for a missing command, 126 for a command that is not executable. Limit: a module that
only a custom import hook of the workers finds is not visible. If the workers may find other modules
(another interpreter, PYTHONPATH set for them), no error is reported.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from importlib import machinery
from pathlib import Path
from typing import Literal

from pdrun.errors import did_you_mean
from pdrun.launcher.common import files
from pdrun.launcher.common.parsers import hint_at_dash, quote_text
from pdrun.launcher.config.spec import Program
from pdrun.launcher.plan.script_scan import MAX_READ_BYTES, ScriptInfo, scan_script
from pdrun.quick_dataclass import dataclass

PROBER_FILE = (
    f"{os.path.realpath(__file__).rpartition('/plan/')[0]}/stdlib_only/serving/server_prober.py"
)
_TORCH_MENTIONS = (b"torch", b"lightning", b"transformers", b"accelerate", b"deepspeed", b"pdrun")


@dataclass(frozen=True)
class ProgramCheck:
    """Result of the check of a program on this node."""

    error: str = ""
    """Why the program cannot be started, or empty."""
    exit_code: int = 0
    file: str = ""
    """The program's Python file, or empty."""
    mentions_torch: bool = False
    """Whether the text mentions torch."""
    script: ScriptInfo = field(default_factory=ScriptInfo)
    exec_reason: str = ""
    """Why the program cannot be forked, or empty."""


def program_argv(
    program: Program, python: str, local_rank: int | Literal["N"] = "N", devices: int = 1
) -> tuple[str, ...]:
    """
    Return a worker's command line: the interpreter, then exactly what the user typed.

    Args:
        program: what the user typed. A server is started by its prober.
        python: the interpreter, unless the user named one.
        local_rank: for ``--local-rank-arg``. N: of any worker, to print it.
        devices: of a server.
    """
    if program.prober:
        settings = json.dumps({**json.loads(program.prober), "devices": devices})
        command = program_argv(replace(program, prober=""), python, local_rank)
        return (python, "-I", "-S", PROBER_FILE, settings, *command)
    python = program.python or python
    args = program.args
    if program.local_rank_arg:
        args = (f"{program.local_rank_arg}={local_rank}", *args)
    if program.kind == "command":
        return (program.target, *args)
    if program.kind == "module":
        return (python, "-m", program.target, *args)
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
    return (python, target, *args)


def check_program(program: Program, cwd: str, environ: Mapping[str, str]) -> ProgramCheck:
    """
    Check the program as started in ``cwd`` with the workers' environment.
    """
    checks = {
        "script": _check_script,
        "function": _check_script,
        "module": _check_module,
        "command": _check_command,
    }
    check = checks[program.kind](program, cwd, environ)
    if check.error or program.kind == "command" or not program.python:
        return check
    error, exit_code = _check_executable(program.python, cwd, environ)
    if error:
        return ProgramCheck(f"--python: {error}", exit_code)
    return check


def _check_script(program: Program, cwd: str, environ: Mapping[str, str]) -> ProgramCheck:
    target = program.target
    if target == "-":
        return ProgramCheck(
            "a program on standard input is not supported: every worker must read the program", 2
        )
    path = Path(cwd, target)
    exec_reason = ""
    error = _why_unreadable(path)
    if error == "no such file":
        hint = _append_hint(_suggest_name(target, cwd, environ))
        return ProgramCheck(f"no such file {quote_text(target)}{hint}", 2)
    if error == "is a directory":
        path = path / "__main__.py"
        error = ""
        exec_reason = "a folder is run by a new interpreter"
        if _why_unreadable(path):
            return ProgramCheck(f"{quote_text(target)} is a directory without a __main__.py", 2)
    if error:
        return ProgramCheck(f"{quote_text(target)} {error}", 2)
    text = _read_beginning(path)
    if text.startswith(b"\x7fELF"):
        return ProgramCheck(
            f"{quote_text(target)} is a compiled program, not a Python script; add --no-python", 2
        )
    first_line = text.partition(b"\n")[0]
    interpreter = first_line.rpartition(b"/")[2].split(b" ")[-1]
    is_python = b"python" in first_line
    if first_line.startswith(b"#!") and not is_python and interpreter in _SHELLS:
        return ProgramCheck(
            f"{quote_text(target)} is a shell script, not a Python script; add --no-python", 2
        )
    if path.suffix == ".pyc" or text.startswith(b"PK"):
        exec_reason = "an archive or compiled file is run by a new interpreter"
    mentions = any(word in text for word in _TORCH_MENTIONS)
    if program.kind == "function":
        script = ScriptInfo(b"torch" in text, uses_optimizer=True)
    else:
        script = scan_script(path, text)
    return ProgramCheck(
        file=str(path),
        mentions_torch=mentions or script.imports_torch,
        script=script,
        exec_reason=exec_reason,
    )


_SHELLS = (b"sh", b"bash", b"dash", b"zsh", b"ksh", b"csh", b"tcsh", b"fish")


def _why_unreadable(path: Path) -> str:
    """
    Return why a file cannot be read as a regular file, or the empty string. It opens no FIFO or
    device.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if files.is_link(path):
            return "is a broken link"
        return "no such file"
    except OSError as error:
        return f"cannot be read: {os.strerror(error.errno or errno.EIO)}"
    except ValueError:
        return "is not a file name"
    if stat.S_ISDIR(mode):
        return "is a directory"
    if not stat.S_ISREG(mode):
        return "is not a regular file"
    if not os.access(path, os.R_OK):
        return "cannot be read: Permission denied"
    return ""


def _suggest_name(target: str, cwd: str, environ: Mapping[str, str]) -> str:
    """Return a hint about what the user probably meant by a missing script."""
    folder, name = os.path.split(target)
    if hint := hint_at_dash(target):
        return hint
    if target == "help":
        return "for help use pdrun --help, or pdrun COMMAND --help"
    from pdrun.launcher.translate.command_line import is_launcher

    if not folder and is_launcher(name):
        return f"for pdrun's own line use pdrun translate -- {name} ..."
    if not folder and _is_on_path(name, environ):
        return f"for the command {name} add --no-python"
    try:
        with os.scandir(Path(cwd, folder)) as entries:
            names = [entry.name for entry, _ in zip(entries, range(5000), strict=False)]
    except (OSError, ValueError):
        return ""
    hint = did_you_mean(name, names)
    if hint and folder:
        return hint.replace("'", f"'{folder}/", 1)
    return hint


def _append_hint(text: str) -> str:
    if not text:
        return ""
    return f"; {text}"


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
    """Return why a command cannot be executed and the shell's exit code, or ("", 0)."""
    if "/" not in target:
        if _is_on_path(target, environ):
            return "", 0
        hint = ""
        if files.is_file(Path(cwd, target)):
            hint = f"did you mean './{target}'?"
        elif len(target.split()) > 1:
            hint = "write arguments separately, in a job file as args:"
        return f"command not found: {quote_text(target)}{_append_hint(hint)}", 127
    path = Path(cwd, target)
    if why := files.why_inaccessible(path):
        return f"{quote_text(target)} cannot be accessed: {why}", 126
    if not files.path_exists(path):
        hint = _append_hint(_suggest_name(target, cwd, environ))
        return f"no such file {quote_text(target)}{hint}", 127
    if files.is_folder(path):
        return f"{quote_text(target)} is a directory", 126
    if not os.access(path, os.X_OK):
        return f"{quote_text(target)} is not executable; chmod +x it", 126
    return "", 0


def _is_on_path(name: str, environ: Mapping[str, str]) -> bool:
    if not name:
        return False
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        path = Path(folder, name)
        if files.is_file(path) and os.access(path, os.X_OK):
            return True
    return False


def _check_module(program: Program, cwd: str, environ: Mapping[str, str]) -> ProgramCheck:
    """Find a module with the interpreter's finders, without importing it or its packages."""
    has_other_path = environ.get("PYTHONPATH", "") != os.environ.get("PYTHONPATH", "")
    if program.python or "PYTHONHOME" in environ or has_other_path:
        return ProgramCheck(mentions_torch=True)
    if not all(part.isidentifier() for part in program.target.split(".")):
        return ProgramCheck(f"{quote_text(program.target)} is not a module name", 2)
    spec = None
    path = [cwd, *sys.path]
    parts = program.target.split(".")
    for number in range(len(parts)):
        name = ".".join(parts[: number + 1])
        spec = _find_module_spec(name, path)
        if spec is None:
            return ProgramCheck(f"no module named {quote_text(name)}", 2)
        path = list(spec.submodule_search_locations or ())
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_module_spec(f"{program.target}.__main__", path)
        if spec is None:
            return ProgramCheck(f"{program.target} is a package without a __main__ module", 2)
    if spec is None or spec.origin is None or not files.is_file(spec.origin):
        return ProgramCheck(mentions_torch=True)
    text = _read_beginning(Path(spec.origin))
    script = scan_script(Path(spec.origin), text)
    mentions = any(word in text for word in _TORCH_MENTIONS)
    return ProgramCheck(
        file=spec.origin, mentions_torch=mentions or script.imports_torch, script=script
    )


def _find_module_spec(name: str, path: Sequence[str]) -> machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None:
            continue
        search_path = None  # the finder's own path for a top-level module
        if finder is machinery.PathFinder or "." in name:
            search_path = path
        spec = find_spec(name, search_path)
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None
