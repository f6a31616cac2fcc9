"""
Strict JSON with positions.

Duplicate keys, NaN, very long numbers and deep nesting are refused. The line of any value can be
found. The standard library's scanner parses the text; a position is computed only for an error.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pdrun.errors import ConfigError

JsonPath = tuple[str | int, ...]
"""Keys and indices from the top to a value."""
MAX_DIGITS = 18
"""Of a number."""
PLACEHOLDER_WINDOW = 60
"""Characters around a syntax error in which a placeholder is looked for."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)
_PLACEHOLDER = re.compile(r"\{\{?\s*[A-Za-z_][A-Za-z0-9_.]*\s*\}?\}|\$\{[A-Za-z_][A-Za-z0-9_]*\}")


class _RefusedValueError(ValueError):
    """
    A value that Python's parser accepts and no rank table contains.

    Args: the message, and optionally the text by which its position is found.
    """


def parse_json(text: str, name: str) -> Any:
    """
    Return the data of a JSON text.

    Args:
        text: the text.
        name: of the file, for errors.

    Raises:
        ConfigError: it is not strict JSON. Names ``file:line`` and what to do.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_parse_object,
            parse_constant=_refuse_constant,
            parse_int=_parse_int,
            parse_float=_refuse_float,
        )
    except json.JSONDecodeError as error:
        raise _explain_syntax_error(text, error, name) from None
    except _RefusedValueError as error:
        where = _position_of_refused(error, text, name)
        raise ConfigError(str(error.args[0]), where=where) from None
    except RecursionError:
        raise ConfigError("is nested too deeply", where=name) from None


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _RefusedValueError(f"the key {key[:60]!r} is twice in an object", f'"{key}"')
        for text in (key, value):
            if isinstance(text, str) and any("\ud800" <= char <= "\udfff" for char in text):
                raise _RefusedValueError(
                    f"the text of {key[:60]!a} is not valid Unicode (half of a surrogate pair)"
                )
        result[key] = value
    return result


def _refuse_constant(text: str) -> None:
    raise _RefusedValueError(f"{text} is not a number of JSON", text)


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _RefusedValueError(
            f"numbers must have at most {MAX_DIGITS} digits, got {len(text)}", text
        )
    return int(text)


def _refuse_float(text: str) -> float:
    raise _RefusedValueError(f"numbers must be whole numbers, got {text[:40]}", text)


def _position_of_refused(error: _RefusedValueError, text: str, name: str) -> str:
    needle = error.args[1] if len(error.args) > 1 else ""
    offset = text.rfind(needle) if needle else -1
    return f"{name}:{line_of_offset(text, offset)}" if offset >= 0 else name


def _explain_syntax_error(text: str, error: json.JSONDecodeError, name: str) -> ConfigError:
    """Return an error with the usual cause of such a syntax error."""
    where = f"{name}:{error.lineno}:{error.colno}"
    if not text.strip():
        return ConfigError("is empty", where=name)
    before = text[: error.pos].rstrip()
    after = text[error.pos : error.pos + 200].lstrip()
    placeholder = _find_placeholder(text, error.pos)
    if placeholder:
        what = f"{placeholder} is not filled in: this is a template, not a rank table"
        return ConfigError(what, where=where, hint="fill it in, or use pdrun rank-table make")
    if after.startswith(("//", "/*", "#")):
        return ConfigError("JSON has no comments", where=where, hint="remove the comment")
    if before.endswith(",") and after[:1] in ("}", "]"):
        what = f"there is a comma before {after[0]}"
        return ConfigError(what, where=where, hint="remove the comma")
    if after[:1] == "'":
        return ConfigError("JSON has no single quotes", where=where, hint='write "..."')
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
        hint = "the file was cut off, or is still being written"
        return ConfigError("ends in the middle", where=where, hint=hint)
    return ConfigError(f"is not JSON: {error.msg}", where=where)


def _find_placeholder(text: str, offset: int) -> str:
    """Return the placeholder that is nearest to an offset; empty: no placeholder."""
    start = max(0, offset - PLACEHOLDER_WINDOW)
    matches = list(_PLACEHOLDER.finditer(text, start, offset + PLACEHOLDER_WINDOW))
    if not matches:
        return ""
    return min(matches, key=lambda match: abs(match.start() - offset))[0]


def line_of_offset(text: str, offset: int) -> int:
    """Return the line of an offset, from 1."""
    return text.count("\n", 0, offset) + 1


def find_offset(text: str, path: JsonPath) -> int:
    """
    Return the offset at which a value starts; 0 if there is no such value.

    Args:
        text: a text that `parse_json` accepts.
        path: the value's path.
    """
    stack: list[str | int] = []
    """Key or index of the current value in each open object or list."""
    is_object: list[bool] = []
    is_key_next = False
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in "]}":
            stack.pop()
            is_object.pop()
            is_key_next = False
        elif token == ",":
            is_key_next = is_object[-1]
            if not is_object[-1]:
                stack[-1] = int(stack[-1]) + 1
        elif token == ":":
            is_key_next = False
        elif is_key_next:
            stack[-1] = json.loads(token)
        elif tuple(stack) == path:
            return match.start()
        elif token in "[{":
            is_key_next = token == "{"
            stack.append("" if is_key_next else 0)
            is_object.append(is_key_next)
    return 0


def format_path(path: JsonPath) -> str:
    """Return a path as text: ``server_list[0].device[3].device_ip``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
