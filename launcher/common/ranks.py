"""Sets of ranks as users write them: ``all``, ``none``, ``0,7-9``."""

from __future__ import annotations

from collections.abc import Collection

from pdrun.errors import UsageError


class RankSet:
    """``all``, ``none`` or ``0,7-9``: the ranks that are shown."""

    def __init__(self, text: str, *, where: str = "--show-ranks") -> None:
        """
        Parse a set of ranks.

        Raises:
            UsageError: it is none of the three forms.
        """
        self.text = text
        self._ranges: list[tuple[int, float]] = []
        if text == "all":
            self._ranges = [(0, float("inf"))]
        elif text != "none":
            self._ranges = [_parse_range(part.strip(), text, where) for part in text.split(",")]

    def unmatched_parts(self, known: Collection[int]) -> str:
        """
        Return the parts of the list that hold none of the known ranks, as written; empty when each
        holds one.
        """
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
    for number in (low, high) if dash else (low,):
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise UsageError(
                f"{whole!r} is no set of ranks",
                where=where,
                hint="use all, none, or numbers like 0,7-9",
            )
    if dash and int(high) < int(low):
        raise UsageError(f"{part} runs backwards", where=where)
    return int(low), int(high or low)
