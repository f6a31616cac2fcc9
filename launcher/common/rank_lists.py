"""
Lists of ranks as users write them: ``all``, ``none``, ``0,7-9``.

Here are parsers for options (see `parsers`), their inverse, and a set that tests membership.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from pdrun.errors import UsageError, did_you_mean
from pdrun.launcher.common.parsers import MAX_COUNT, quote_text


def parse_ranks(text: str, where: str) -> str:
    """Return ``all``, ``none`` or a list of ranks in normal form: ``7-9,0`` becomes ``0,7-9``."""
    if text in ("all", "none"):
        return text
    return format_ranks(parse_rank_list(text, where))


def parse_rank_list(text: str, where: str) -> tuple[int, ...]:
    """Return the distinct ranks of ``0,7-9``, ascending."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", part)
        if match is None:
            raise UsageError(
                f"{quote_text(part)} is not a rank",
                where=where,
                hint="write all, none or a list as 0,7-9",
            )
        low = int(match[1])
        high = int(match[2] or match[1])
        if high < low or high > MAX_COUNT:
            raise UsageError(
                f"{quote_text(part)} is not a range of ranks",
                where=where,
                hint="write the lower rank first",
            )
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def format_ranks(numbers: tuple[int, ...]) -> str:
    """Return the inverse of `parse_rank_list`; no ranks become ``none``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "none"


_CPU_RANGE = r"[0-9]{1,5}(?:-[0-9]{1,5})?"
_CPU_LISTS = re.compile(rf"{_CPU_RANGE}(?:[,/]{_CPU_RANGE})*")
BINDINGS = ("auto", "cores", "numa", "none")
"""How pdrun distributes CPUs itself."""


def parse_binding(text: str, where: str) -> str:
    """
    Return one of BINDINGS, or lists of CPUs in normal form, one per local rank: ``0-3,8/4-7``.

    Raises:
        UsageError: it is neither, or two workers would share a CPU.
    """
    if text in BINDINGS:
        return text
    if not _CPU_LISTS.fullmatch(text):
        raise UsageError(
            f"must be one of {', '.join(BINDINGS)}, or lists of CPUs, got {quote_text(text)}",
            where=where,
            hint=did_you_mean(text, BINDINGS) or "example of lists for two workers: 0-3/4-7",
        )
    try:
        lists = parse_cpu_lists(text)
    except UsageError:
        raise UsageError(
            f"{quote_text(text)} has a range of CPUs that ends below its start", where=where
        ) from None
    seen: set[int] = set()
    for cpus in lists:
        if shared := seen.intersection(cpus):
            raise UsageError(f"CPU {min(shared)} is given to two workers", where=where)
        seen.update(cpus)
    return "/".join(map(format_ranks, lists))


def parse_cpu_lists(text: str) -> tuple[tuple[int, ...], ...]:
    """Return the CPUs of each local rank in ``--bind``; empty: pdrun distributes the CPUs."""
    if text in BINDINGS:
        return ()
    return tuple(parse_rank_list(part, "--bind") for part in text.split("/"))


def describe_ranks(world_size: int) -> str:
    """Return which ranks a job has, for a message."""
    return "the only rank is 0" if world_size == 1 else f"the ranks are 0-{world_size - 1}"


class RankSet:
    """The ranks of ``all``, ``none`` or ``0,7-9``, for ``in``."""

    def __init__(self, text: str, *, where: str = "--show-ranks") -> None:
        """
        Parse a set of ranks.

        Raises:
            UsageError: it has none of the three forms.
        """
        self.text = text
        self._ranges: list[tuple[int, float]] = []
        if text == "all":
            self._ranges = [(0, float("inf"))]
        elif text != "none":
            self._ranges = [_parse_range(part.strip(), text, where) for part in text.split(",")]

    def unmatched_parts(self, known: Collection[int]) -> str:
        """Return the parts of the list, as written, that contain none of the known ranks."""
        if self.text in ("all", "none"):
            return ""
        parts = zip(self.text.split(","), self._ranges, strict=True)
        return ",".join(
            part.strip()
            for part, (low, high) in parts
            if not any(low <= rank <= high for rank in known)
        )

    def __contains__(self, rank: int) -> bool:
        return any(low <= rank <= high for low, high in self._ranges)


def _parse_range(part: str, whole: str, where: str) -> tuple[int, float]:
    low, dash, high = part.partition("-")
    numbers = [low]
    if dash:
        numbers.append(high)
    for number in numbers:
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise UsageError(
                f"{whole!r} is not a set of ranks",
                where=where,
                hint="use all, none, or numbers like 0,7-9",
            )
    if dash and int(high) < int(low):
        raise UsageError(
            f"{part} is not a range of ranks", hint="write the lower rank first", where=where
        )
    return int(low), int(high or low)
