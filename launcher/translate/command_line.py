"""
Recognise a launcher's command line and translate it.

In front of the launcher may be variables (``CUDA_VISIBLE_DEVICES=0 torchrun ...``), ``env``,
``nohup``, and a program that starts it (``srun -N 2 torchrun ...``). A launcher may be called by
its path, or as a module of Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from pdrun.errors import PdrunError, UsageError, did_you_mean
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.common.python_command import read_python_command
from pdrun.launcher.translate.model import Translation
from pdrun.launcher.translate.option_table import UnreadableOptionError

Translator = Callable[[Sequence[str], Mapping[str, str]], Translation]
TranslationCheck = Callable[[Translation], object]
"""Raises a PdrunError if pdrun's own parser refuses the translated line."""

LAUNCHERS = ("torchrun", "msrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "colossalai")
_OTHER_NAMES = {
    "torchrun-script": "torchrun",
    "mpiexec": "mpirun",
    "mpiexec.hydra": "mpirun",
    "mpirun.openmpi": "mpirun",
    "mpiexec.openmpi": "mpirun",
    "mpirun.mpich": "mpirun",
    "mpiexec.mpich": "mpirun",
    "orterun": "mpirun",
    "prterun": "mpirun",
    "ds": "deepspeed",
    "deepspeed.pt": "deepspeed",
    "accelerate-launch": "accelerate launch",
}
_NOT_TRANSLATED = {
    "srun": "a step of Slurm runs one pdrun per node: srun --ntasks-per-node=1 pdrun ...",
    "salloc": "in an allocation, pdrun uses all nodes: salloc -N 2 pdrun ...",
    "sbatch": "see pdrun slurm submit --help",
    "torchx": "see pdrun slurm submit --help and pdrun k8s --help",
    **dict.fromkeys(
        ("bash", "sh"), "translate the line of the launcher in it: pdrun translate -- torchrun ..."
    ),
    **dict.fromkeys(
        ("python", "python3"), "without a launcher it is one process: pdrun --devices 1 SCRIPT"
    ),
}
"""Programs that are often tried, and what to do with them."""
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "torch.distributed.launcher": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "mindspore.parallel.cluster.run": "msrun",
    "horovod.runner.launch": "horovodrun",
}
_SUBCOMMANDS = {"accelerate": "launch", "colossalai": "run"}
_WRAPPERS = frozenset(
    """
    srun numactl taskset nsys ncu singularity apptainer docker podman sudo timeout stdbuf nice
    ionice conda mamba micromamba uv poetry pixi pipenv hatch time perf strace
    """.split()  # noqa: SIM905
)
"""Programs that start a launcher."""
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def is_launcher(word: str) -> bool:
    """Return whether a word is the name of a launcher that can be translated."""
    return _launcher_of(word) != ""


def _launcher_of(word: str) -> str:
    name = word.rpartition("/")[2]
    if name in LAUNCHERS:
        return name
    return _OTHER_NAMES.get(name, "")


def refuse_launcher(
    words: Sequence[str], environ: Mapping[str, str], check: TranslationCheck
) -> None:
    """
    Refuse a program that is a launcher itself: each worker would start a job.

    Args:
        words: the program and its arguments, with ``python -m`` in front of a module.
        environ: the environment.
        check: of the line in the hint.

    Raises:
        UsageError: it is a launcher; the message has pdrun's line.
    """
    name = words[0]
    if not is_launcher(name):
        python = read_python_command(words)
        if python is None or python.kind != "module" or python.target not in _MODULES:
            return
        name = f"python -m {python.target}"
    hint = hint_at_line(words, environ, check)
    raise UsageError(f"{name} is a launcher: each worker would start a job", hint=hint)


def hint_at_line(words: Sequence[str], environ: Mapping[str, str], check: TranslationCheck) -> str:
    """Return a hint with pdrun's line for a launcher's command line, or why pdrun has no line."""
    try:
        found = translate_command_line(words, environ)
        check(found)
    except PdrunError as error:
        return f"pdrun has no line for it: {error}"
    return f"use {found.format_hint()}"


def translate_command_line(words: Sequence[str], environ: Mapping[str, str]) -> Translation:
    """
    Translate a command line of another launcher.

    Args:
        words: the command line, as the shell splits it.
        environ: the environment in which it would run.

    Raises:
        PdrunError: pdrun has no line with the same meaning; the message has what comes closest.
    """
    rest = list(words)
    variables: dict[str, str] = {}
    in_background = False
    while rest:
        if match := _VARIABLE.fullmatch(rest[0]):
            variables[match[1]] = match[2]
        elif rest[0] == "nohup":
            in_background = True
        elif rest[0] not in ("env", "exec"):
            break
        rest = rest[1:]
    if rest and rest[-1] == "&":
        in_background = True
        rest = rest[:-1]
    start = _find_launcher(rest)
    wrapper = rest[:start]
    launcher, rest = _split_launcher(rest[start:])
    result = _translators()[launcher](rest, {**environ, **variables})
    result.environment = {**variables, **result.environment}
    result.wrapper = wrapper
    result.runs_in_background = result.runs_in_background or in_background
    return result


def _find_launcher(words: Sequence[str]) -> int:
    """Return the index of the launcher behind a program that starts it, else 0."""
    if not words or words[0].rpartition("/")[2] not in _WRAPPERS:
        return 0
    for index in range(1, len(words)):
        python = read_python_command(words[index:])
        is_module = python is not None and python.kind == "module" and python.target in _MODULES
        if is_module or is_launcher(words[index]):
            return index
    return 0


def _split_launcher(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the launcher, and the words behind it."""
    if not words:
        raise UsageError("no command line", hint="write pdrun translate -- torchrun ...")
    launcher = _launcher_of(words[0])
    rest = list(words[1:])
    if not launcher:
        python = read_python_command(words)
        if python is not None and python.kind == "module":
            launcher = _MODULES.get(python.target, "")
            rest = list(python.args)
    if not launcher:
        raise _unknown_launcher(words)
    command = _SUBCOMMANDS.get(launcher)
    if command is None:
        return launcher, rest
    if rest[:1] != [command]:
        raise UsageError(
            f"only {launcher} {command} is translated", hint=f"write {launcher} {command} ..."
        )
    return f"{launcher} {command}", rest[1:]


def _unknown_launcher(words: Sequence[str]) -> UsageError:
    """Return an error that says what to write instead of an unknown launcher."""
    name = words[0].rpartition("/")[2]
    python = read_python_command(words)
    if python is not None and python.kind == "module":
        name, hint = f"python -m {python.target}", did_you_mean(python.target, _MODULES)
    elif is_launcher((name.split() or [""])[0]):
        hint = "write the words without quotation marks around the whole line"
    else:
        hint = _NOT_TRANSLATED.get(name) or did_you_mean(name, (*LAUNCHERS, *_OTHER_NAMES))
    return UsageError(
        f"{quote_text(name)} is not a launcher that pdrun translates",
        hint=hint or f"it translates {', '.join(LAUNCHERS)}",
    )


def _translators() -> Mapping[str, Translator]:
    from pdrun.launcher.translate import (
        accelerate,
        deepspeed,
        horovodrun,
        mpi,
        msrun,
        torchrun,
    )

    return {
        "torchrun": torchrun.translate_torchrun,
        "torch.distributed.launch": torchrun.translate_launch,
        "msrun": msrun.translate_msrun,
        "accelerate launch": accelerate.translate_accelerate,
        "deepspeed": deepspeed.translate_deepspeed,
        "mpirun": mpi.translate_mpirun,
        "horovodrun": horovodrun.translate_horovodrun,
        "colossalai run": torchrun.translate_colossalai,
    }


def translate_options(
    words: Sequence[str],
    environ: Mapping[str, str],
    check: TranslationCheck,
    launchers: Sequence[str] = (),
) -> Translation | None:
    """
    Return the translation of options without a launcher's name; None: they fit no launcher.

    Args:
        words: the options, the program and its arguments.
        environ: the environment.
        check: of the translation.
        launchers: which ones to try; empty: those whose options pdrun does not have.

    Raises:
        PdrunError: they fit one, but have no translation.
    """
    failure: PdrunError | None = None
    for launcher, translate in _translators().items():
        is_known = launcher in ("torchrun", "torch.distributed.launch", "msrun")
        if launcher not in launchers and (launchers or is_known):
            continue
        try:
            found = translate(words, environ)
            if found.program[0].endswith(".py") and "--no-python" in found.options:
                found.options.remove("--no-python")  # without mpirun's name: a script of pdrun
            check(found)
        except UnreadableOptionError:
            continue
        except PdrunError as error:
            failure = failure or error
            continue
        return found
    if failure is not None:
        raise failure
    return None
