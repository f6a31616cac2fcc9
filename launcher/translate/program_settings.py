"""
From the words behind the options to the program's settings: a script, a job file, or
``python [-m] PROGRAM``, because msrun and mpirun start any command.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from pdrun.errors import UsageError
from pdrun.launcher.config.settings import Priority, Setting, Source

if TYPE_CHECKING:
    from pdrun.launcher.translate.command_line import TranslationCheck


def program_settings(
    words: Sequence[str], settings: Iterable[Setting], check: TranslationCheck
) -> list[Setting]:
    """
    Return the settings of the program: a script with its arguments, or the contents of a job file.

    Args:
        words: the script or job file, and its arguments.
        settings: the settings of options and variables.
        check: of a line of pdrun in an error.
    """
    if not words:
        return []
    target, *args = words
    source = Source("command line", Priority.COMMAND, target)
    settings = list(settings)
    has_kind = any(setting.path == "program.kind" for setting in settings)
    if not has_kind and target.endswith((".yaml", ".yml")):
        return _job_file_settings(target, args, source)
    if not target:
        raise UsageError("the script's name is empty")
    paths = {setting.path for setting in settings}
    kinds = {setting.value for setting in settings if setting.path == "program.kind"}
    if "module" in kinds and target.startswith(("torch.distributed.", "accelerate.")):
        from pdrun.launcher.translate.command_line import refuse_launcher

        refuse_launcher(("python", "-m", *words), os.environ, check)
    if not kinds and (found := _read_python_settings(words, paths, source, check)):
        return found
    return [Setting("program.target", target, source), Setting("program.args", tuple(args), source)]


def _job_file_settings(path: str, args: Sequence[str], source: Source) -> list[Setting]:
    """Return the settings of a job file; arguments behind it are appended to the file's own."""
    from pdrun.launcher.config.job_file import load_job_file

    settings = list(load_job_file(path))
    if args:
        own = next((one.value for one in settings if one.path == "program.args"), ())
        settings.append(Setting("program.args", (*own, *args), source))
    return settings


def _read_python_settings(
    words: Sequence[str], paths: Collection[str], source: Source, check: TranslationCheck
) -> list[Setting]:
    """
    Return the settings of a program that is a command of Python; empty: it is not one.

    Args:
        words: the program and its arguments.
        paths: field paths of the options. With msrun's, ``pytest`` is a command, too.
        source: of the settings.
        check: of a line of pdrun in an error.
    """
    name = words[0].rpartition("/")[2]
    is_pytest = name == "pytest" and not {"msrun.workers", "msrun.local_workers"}.isdisjoint(paths)
    if not is_pytest and not name.startswith("python"):
        return []
    if "/" not in words[0] and os.path.lexists(words[0]):
        return []  # a script with that name
    from pdrun.launcher.common.python_command import PythonCommand, read_python_command
    from pdrun.launcher.translate.command_line import refuse_launcher

    refuse_launcher(words, os.environ, check)
    found = read_python_command(words)
    if is_pytest:
        found = PythonCommand("command", words[0], tuple(words[1:]))
    if found is None:
        return []
    settings = [
        Setting("program.target", found.target, source),
        Setting("program.args", found.args, source),
    ]
    if found.kind != "script":
        settings.append(Setting("program.kind", found.kind, source))
    if found.python and "program.python" not in paths:
        settings.append(Setting("program.python", found.python, source))
    return settings
