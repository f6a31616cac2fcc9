"""Text of names and messages: names that are allowed in paths, natural order, plurals."""

from __future__ import annotations

import re

from pdrun.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:%-]{0,252}")
_DIGITS = re.compile(r"([0-9]+)")
CLEAN_EXIT_TEXT = "had ended before, without an error"
"""Of the ranks whose absence made another rank fail: in the scheduler's reason, and its readers."""


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 node``, ``2 nodes``, ``0 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def escape_text(text: str) -> str:
    """Return a text with control characters escaped, for a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def quote_command(*words: object) -> str:
    """Return a command line, for a message, as a shell takes it: words are quoted if needed."""
    import shlex  # only messages need it

    return shlex.join([escape_text(str(word)) for word in words])


def check_name(name: str, *, where: str) -> str:
    """
    Return ``name`` if it may be a part of a path, else raise UsageError.

    Allowed: 1 to 63 of the characters ``A-Z a-z 0-9 . _ -``; the first is a letter or digit.
    """
    if _NAME.fullmatch(name):
        return name
    raise UsageError(
        f"{name!r} is not a name",
        where=where,
        hint="use 1 to 63 of A-Z a-z 0-9 . _ -, the first a letter or digit",
    )


def is_node_name(name: str) -> bool:
    """
    Return whether a node may have this name: as `check_name`, or a host name, or an address.

    Such a name leads to no other folder, and has no character that controls a terminal.
    """
    return _NODE_NAME.fullmatch(name) is not None


def make_name(text: str) -> str:
    """Return the nearest allowed name to a text, such as a script's file name; never fails."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:63]
    return cleaned or "job"


def natural_key(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """
    Return a sort key that puts ``node2`` before ``node10``.

    Names that differ only in leading zeros are sorted by their text.
    """
    parts: list[tuple[int, int, str]] = []
    for part in _DIGITS.split(name):
        if part and part[0] in "0123456789":
            parts.append((0, int(part), ""))
        elif part:
            parts.append((1, 0, part))
    return tuple(parts), name
