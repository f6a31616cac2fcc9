"""
Slurm's compressed lists of host names, ``node[01-03,07],login``: parse and write them.

The grammar: names separated by commas or blanks. Brackets may be anywhere in a name, and more than
once (Slurm itself allows no text after the last bracket). They contain numbers and ranges
``LOW-HIGH``, zero-padded to the width of LOW. Order and repetitions are kept. What ``scontrol show
hostnames`` would misread is refused: an open bracket, a blank in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdrun.errors import UsageError
from pdrun.launcher.common.parsers import quote_text

MAX_HOSTS = 1 << 16
"""``n[1-999999999]`` must not use up the memory."""
MAX_LIST_CHARACTERS = 1 << 20
_RANGE_PATTERN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand_nodelist(text: str, where: str, max_names: int = MAX_HOSTS) -> tuple[str, ...]:
    """
    Return the names of a compressed list, in order.

    Args:
        text: the list.
        where: its source, for errors.
        max_names: maximum number of names.

    Raises:
        UsageError: the list is malformed or too long; the message has the character (from 1).
    """
    if len(text) > MAX_LIST_CHARACTERS:
        raise UsageError(
            f"a list of {len(text)} characters is too long",
            where=where,
            hint=f"at most {MAX_LIST_CHARACTERS}",
        )
    names: list[str] = []
    for word, at in split_items(text, where):
        names += _expand_item(word, at, text, where, max_names - len(names))
    return tuple(names)


def split_items(text: str, where: str) -> Iterator[tuple[str, int]]:
    """Yield the items of a list with their offsets; in brackets, commas do not separate."""
    begin = 0
    inside = False
    for at, char in enumerate(text):
        if char == "[":
            if inside:
                raise _list_error("a bracket inside brackets", text, at, where)
            inside = True
        elif char == "]":
            if not inside:
                raise _list_error("a closing bracket without an opening one", text, at, where)
            inside = False
        elif char in ", \t\r\n" and not inside:
            if at > begin:
                yield text[begin:at], begin
            begin = at + 1
    if inside:
        raise _list_error("the bracket is not closed", text, text.rindex("["), where)
    if begin < len(text):
        yield text[begin:], begin


def _expand_item(word: str, at: int, text: str, where: str, max_names: int) -> list[str]:
    """Return the names of one item: the product of its brackets, the last one varies fastest."""
    names = [""]
    for part in re.finditer(r"\[([^]]*)\]|[^\[]+", word):
        if not part[0].startswith("["):
            names = [name + part[0] for name in names]
            continue
        runs = list(_parse_ranges(part[1], at + part.start() + 1, text, where))
        count = sum(high - low + 1 for low, high, _ in runs)
        if count * len(names) > max_names:
            raise _list_error(f"more than {MAX_HOSTS} hosts", text, at, where)
        numbers = [
            f"{number:0{width}d}" for low, high, width in runs for number in range(low, high + 1)
        ]
        names = [name + number for name in names for number in numbers]
    if len(names) > max_names:
        raise _list_error(f"more than {MAX_HOSTS} hosts", text, at, where)
    return names


def _parse_ranges(inner: str, at: int, text: str, where: str) -> Iterator[tuple[int, int, int]]:
    """Yield (low, high, width) of ``01-03,07``; ``at`` is its offset."""
    for part in inner.split(","):
        match = _RANGE_PATTERN.fullmatch(part)
        if match is None:
            got = quote_text(part) if part else "nothing"
            raise _list_error(f"expected a number or LOW-HIGH, got {got}", text, at, where)
        low = int(match[1])
        high = int(match[2] or match[1])
        if high < low:
            raise _list_error(f"the range {part} runs backwards", text, at, where)
        yield low, high, len(match[1])
        at += len(part) + 1


def _list_error(what: str, text: str, at: int, where: str) -> UsageError:
    return UsageError(f"{quote_text(text)}: {what} (character {at + 1})", where=where)


def compress_names(names: list[str] | tuple[str, ...]) -> str:
    """
    Return a list that `expand_nodelist` turns into exactly these names, in this order.

    Neighbours with the same text before and after their last number share brackets, as with
    ``scontrol show hostlist``: ``node[3,1-2]``.
    """
    parts: list[str] = []
    group: list[tuple[int, str]] = []
    key: tuple[str, str] | None = None
    for name in names:
        match = re.fullmatch(r"(.*?)([0-9]{1,18})([^0-9]*)", name, re.DOTALL)
        found = (match[1], match[3]) if match else None
        if found is None or found != key:
            parts += _format_group(key, group)
            group = []
            key = found
        if match is None:
            parts.append(name)
        else:
            group.append((int(match[2]), match[2]))
    return ",".join([*parts, *_format_group(key, group)])


def _format_group(key: tuple[str, str] | None, group: list[tuple[int, str]]) -> list[str]:
    if key is None or not group:
        return []
    if len(group) == 1:
        return [key[0] + group[0][1] + key[1]]
    runs: list[tuple[str, str]] = []
    for number, digits in group:
        if runs and number == int(runs[-1][1]) + 1 and digits == f"{number:0{len(runs[-1][0])}d}":
            runs[-1] = (runs[-1][0], digits)
        else:
            runs.append((digits, digits))
    inner = ",".join(low if low == high else f"{low}-{high}" for low, high in runs)
    return [f"{key[0]}[{inner}]{key[1]}"]
