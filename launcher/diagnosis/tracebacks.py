"""
Python tracebacks as text: which exceptions, where, and the user's frames. Pure.

The text is what `traceback_parser` has found in a worker's stderr: chained or not, with notes and
carets, or the report of a SyntaxError. In other text these functions find nothing, without an
error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pdrun.quick_dataclass import dataclass

HEADER = "Traceback (most recent call last):"
_HEADS = (HEADER, "Exception Group Traceback", "Original Traceback")
MAX_TRACEBACK_BYTES = 64 * 1024
"""A traceback is truncated to this before it is sent; the end is kept."""

_RANK_PREFIX = re.compile(r"^\[(?:default|rank)\d+\]:\s?", re.MULTILINE)
_FRAME = re.compile(r'^\s*(?:\|\s*)*File "(?P<file>[^"]*)", line \d+(?:, in (?P<function>.*))?$')
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?::\s?(?P<text>.*))?$", re.DOTALL)
_SYNTAX = ("SyntaxError", "IndentationError", "TabError")
_PYTHON_STARTERS = re.compile(r"^<frozen (?:runpy|importlib[\w.]*)>$|/lib/python[\d.]+/runpy\.py$")
_LAUNCHER_FOLDER = __file__.rpartition("/diagnosis/")[0] + "/"


@dataclass(frozen=True)
class RaisedException:
    """An exception in a traceback."""

    type: str
    """Type without the module: ``ValueError``, ``DistBackendError``."""
    lines: Sequence[str]
    """Lines of its message."""
    files: tuple[str, ...]
    """Files of its frames, outermost first."""
    functions: tuple[str, ...]
    """Functions of the same frames; ``<module>`` at a file's top level."""

    @property
    def text(self) -> str:
        """Return its message as one string."""
        return "\n".join(self.lines).strip()

    @property
    def summary(self) -> str:
        """Return one line: ``ValueError: boom``."""
        first = self.text.split("\n", 1)[0].strip()
        return (f"{self.type}: {first}" if first else self.type)[:500]


def strip_rank_prefix(text: str) -> str:
    """Return the text without the ``[rank3]: `` that torch puts before each line of a traceback."""
    return _RANK_PREFIX.sub("", text)


def parse_exceptions(traceback: str) -> list[RaisedException]:
    """
    Return the exceptions of a chain in the order printed: the last one is what ended the program.
    """
    found: list[RaisedException] = []
    frames: list[re.Match[str]] = []
    message: list[str] | None = None
    lines = strip_rank_prefix(traceback).rstrip().split("\n")
    for line in lines:
        if line.lstrip(" +|").startswith(_HEADS):
            frames = []
            message = None
        elif frame := _FRAME.match(line):
            frames.append(frame)
        elif message is not None:
            message.append(line)
        elif (match := _RAISED.match(line.strip(" |"))) and (
            not line.startswith("  ") or "|" in line
        ):
            message = [match["text"] or ""]
            found.append(
                RaisedException(
                    match["type"].rpartition(".")[2],
                    message,
                    tuple(frame["file"] for frame in frames),
                    tuple(frame["function"] or "" for frame in frames),
                )
            )
    return found


def is_permanent(error: RaisedException) -> bool:
    """Return whether the program could not be loaded, which no restart can change."""
    if error.type in _SYNTAX:
        return True
    own = [
        function
        for file, function in zip(error.files, error.functions, strict=True)
        if not is_launcher_file(file)
    ]
    return error.type == "ModuleNotFoundError" and all(function == "<module>" for function in own)


def is_launcher_file(file: str) -> bool:
    """Return whether a frame belongs to the start of a worker, not to the user's program."""
    return file.startswith(_LAUNCHER_FOLDER) or bool(_PYTHON_STARTERS.search(file))


def extract_user_frames(traceback: str) -> str:
    """
    Return the traceback without the frames that started the program.

    Truncated to its last MAX_TRACEBACK_BYTES.
    """
    lines = strip_rank_prefix(traceback).rstrip("\n").split("\n")
    kept: list[str] = []
    for block in _group_frames(lines):
        match = _FRAME.match(block[0])
        if match and is_launcher_file(match["file"]) and kept and kept[-1].strip() == HEADER:
            continue
        kept += block
    if _count_frames(lines) and not _count_frames(kept):
        kept = lines
    text = "\n".join(kept)
    if len(text) > MAX_TRACEBACK_BYTES:
        text = "...\n" + text[-MAX_TRACEBACK_BYTES:].partition("\n")[2]
    return text + "\n"


def _count_frames(lines: Sequence[str]) -> int:
    return sum(bool(_FRAME.match(line)) for line in lines)


def _group_frames(lines: Sequence[str]) -> Iterator[list[str]]:
    """Group each File line with the code and carets below it; other lines are groups of one."""
    block: list[str] = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if block and indent >= 4 and not _FRAME.match(line):
            block.append(line)
            continue
        if block:
            yield block
            block = []
        if _FRAME.match(line):
            block = [line]
        else:
            yield [line]
    if block:
        yield block
