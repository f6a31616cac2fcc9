"""
Strict JSON with places: duplicate keys, NaN, endless digits and nesting are refused, and any
value's line can be found.

The standard library's scanner reads; the place of a value is looked for only when there is
something to say about it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pdrun.errors import ConfigError

Path = tuple[str | int, ...]
"""Keys and indices from the top to a value."""
DIGITS = 18
"""Digits of a number, at most."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)
_PLACEHOLDER = re.compile(r"\{\{?\s*[A-Za-z_][A-Za-z0-9_.]*\s*\}?\}|\$\{[A-Za-z_][A-Za-z0-9_]*\}")


class _Refused(ValueError):
    """Something that JSON allows, or that Python would take, and that no rank table has."""


def parse(text: str, name: str) -> Any:
    """
    Return what a text says.

    Raises:
        ConfigError: it is no JSON, or not of the strict kind; names ``file:line`` and what would be
            right.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_pairs,
            parse_constant=_constant,
            parse_int=_int,
            parse_float=_float,
        )
    except json.JSONDecodeError as error:
        raise _broken(text, error, name) from None
    except _Refused as error:
        raise ConfigError(str(error.args[0]), where=_where_of(error, text, name)) from None
    except RecursionError:
        raise ConfigError("is nested too deeply", where=name) from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Refused(f"the key {key[:60]!r} stands twice in an object", f'"{key}"')
        for text in (key, value):
            if isinstance(text, str) and any("\ud800" <= char <= "\udfff" for char in text):
                raise _Refused(
                    f"the text of {key[:60]!a} is no valid Unicode (half of a surrogate pair)"
                )
        found[key] = value
    return found


def _constant(text: str) -> None:
    raise _Refused(f"{text} is no number of JSON", text)


def _int(text: str) -> int:
    if len(text) > DIGITS:
        raise _Refused(f"a number of {len(text)} digits", text)
    return int(text)


def _float(text: str) -> float:
    raise _Refused(f"{text[:40]} is not a whole number, and a rank table has no others", text)


def _where_of(error: _Refused, text: str, name: str) -> str:
    needle = error.args[1] if len(error.args) > 1 else ""
    at = text.rfind(needle) if needle else -1
    return f"{name}:{line_of(text, at)}" if at >= 0 else name


def _broken(text: str, error: json.JSONDecodeError, name: str) -> ConfigError:
    """Say what is usually wrong at such a place."""
    where = f"{name}:{error.lineno}:{error.colno}"
    if not text.strip():
        return ConfigError("is empty", where=name)
    before = text[: error.pos].rstrip()
    at = text[error.pos : error.pos + 200].lstrip()
    near = _PLACEHOLDER.finditer(text, max(0, error.pos - 60), error.pos + 60)
    if placeholder := min(near, key=lambda match: abs(match.start() - error.pos), default=None):
        what = f"{placeholder[0]} is not filled in: this is a template, no rank table"
        return ConfigError(what, where=where, hint="fill it in, or use pdrun rank-table make")
    if at.startswith(("//", "/*", "#")):
        return ConfigError("a comment, which JSON does not have", where=where, hint="take it out")
    if before.endswith(",") and at[:1] in ("}", "]"):
        return ConfigError(f"a comma stands before {at[0]}", where=where, hint="take the comma out")
    if at[:1] == "'":
        return ConfigError(
            "single quotes, which JSON does not have", where=where, hint='write "..."'
        )
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
        return ConfigError(
            "ends in the middle",
            where=where,
            hint="the file was cut off, or is still being written",
        )
    return ConfigError(f"is not JSON: {error.msg}", where=where)


def line_of(text: str, offset: int) -> int:
    """Return the line of an offset, from 1."""
    return text.count("\n", 0, offset) + 1


def locate(text: str, path: Path) -> int:
    """
    Return the offset at which the value of a path begins, in a text that `parse` takes; 0 where
    there is none.
    """
    stack: list[list[str | int]] = []
    objects: list[bool] = []
    key_next = False
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in "]}":
            stack.pop()
            objects.pop()
            key_next = False
        elif token == ",":
            key_next = objects[-1]
            if not objects[-1]:
                stack[-1][0] = int(stack[-1][0]) + 1
        elif token == ":":
            key_next = False
        elif key_next:
            stack[-1][0] = json.loads(token)
        else:
            if len(stack) == len(path) and all(
                frame[0] == part for frame, part in zip(stack, path, strict=True)
            ):
                return match.start()
            if token in "[{":
                stack.append([0 if token == "[" else ""])
                objects.append(token == "{")
                key_next = token == "{"
    return 0


def path_text(path: Path) -> str:
    """Return a path as one writes it: ``server_list[0].device[3].device_ip``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
