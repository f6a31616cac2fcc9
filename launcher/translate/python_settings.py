"""The program of ``pdrun ... python [-m] PROGRAM``: msrun and mpirun start any command."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from pdrun.launcher.config.settings import Setting, Source


def read_python_settings(
    words: Sequence[str], paths: Collection[str], source: Source
) -> list[Setting]:
    """
    Return the settings of a program that is a command of Python; empty: it is not one.

    Args:
        words: the program and its arguments.
        paths: field paths of the options. With msrun's, ``pytest`` is a command, too.
        source: of the settings.
    """
    name = words[0].rpartition("/")[2]
    is_pytest = name == "pytest" and not {"msrun.workers", "msrun.local_workers"}.isdisjoint(paths)
    if not is_pytest and not name.startswith("python"):
        return []
    if "/" not in words[0] and os.path.lexists(words[0]):
        return []  # a script with that name
    from pdrun.launcher.common.python_command import PythonCommand, read_python_command
    from pdrun.launcher.translate.command_line import refuse_launcher

    refuse_launcher(words, os.environ)
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
