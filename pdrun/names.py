"""Names: which ones are allowed in paths and messages, and in which order nodes stand."""

from __future__ import annotations

import re

from pdrun.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DIGITS = re.compile(r"([0-9]+)")


def check_name(name: str, *, where: str) -> str:
    """
    Return ``name`` when it may become part of a path, else raise UsageError.

    Allowed: 1 to 63 characters of ``A-Z a-z 0-9 . _ -``, the first a letter or digit.
    """
    if _NAME.fullmatch(name):
        return name
    raise UsageError(
        f"{name!r} is not a name",
        where=where,
        hint="use 1 to 63 of A-Z a-z 0-9 . _ -, the first a letter or digit",
    )


def make_name(text: str) -> str:
    """Return the nearest allowed name to ``text`` (a script's file name, say); never fails."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:63]
    return cleaned or "job"


def natural_key(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """
    Sort key by which ``node2`` stands before ``node10``; names that differ in leading zeros only,
    by their text.
    """
    parts = [part for part in _DIGITS.split(name) if part]
    return tuple(
        (0, int(part), "") if part[0] in "0123456789" else (1, 0, part) for part in parts
    ), name
