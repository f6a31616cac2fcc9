"""Read ``python [-u] [-m] PROGRAM ARGS``: commands of launchers that start any program."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_PYTHON_NAME = re.compile(r"python(?:[0-9](?:\.[0-9]{1,2})?)?")


@dataclass(frozen=True)
class PythonCommand:
    """What a command line of Python runs."""

    kind: Literal["script", "module", "command"]
    """command: it has options of the interpreter that pdrun does not have."""
    target: str
    args: tuple[str, ...]
    python: str = ""
    """The interpreter; empty: the one that runs pdrun."""


def is_python_name(word: str) -> bool:
    """Return whether a word is the name or path of a Python interpreter."""
    return _PYTHON_NAME.fullmatch(word.rpartition("/")[2]) is not None


def read_python_command(words: Sequence[str]) -> PythonCommand | None:
    """
    Return what a command of Python runs; None: it is not a command of Python.

    ``-u`` is left out: output of pdrun's workers is not buffered.
    """
    if not words or not is_python_name(words[0]):
        return None
    rest = list(words[1:])
    while rest[:1] == ["-u"]:
        rest = rest[1:]
    python = _find_other_python(words[0])
    if rest[:1] == ["-um"]:
        rest[:1] = ["-m"]
    if len(rest) > 1 and rest[0] == "-m":
        return PythonCommand("module", rest[1], tuple(rest[2:]), python)
    if rest and not rest[0].startswith("-"):
        return PythonCommand("script", rest[0], tuple(rest[1:]), python)
    return PythonCommand("command", words[0], tuple(words[1:]))


def _find_other_python(name: str) -> str:
    """Return the path of an interpreter, or nothing if it is the one that runs pdrun."""
    path = name if "/" in name else shutil.which(name)
    if path is None:
        return ""
    folder = Path(path).parent
    # An environment's interpreter is a link to another one's: only its folder tells them apart.
    if folder == Path(sys.executable).parent or folder == Path(sys.prefix, "bin"):
        return ""
    return os.path.normpath(path)
