"""
One line per job about variables that forked workers set too late.

Workers report them one by one, see `pdrun.launcher.stdlib_only.late_variables`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdrun.text import plural

COLLECT_SECONDS = 1.0
"""Wait for the reports of other ranks."""


class LateVariableCounter:
    """Counts the ranks that report a variable."""

    def __init__(self) -> None:
        self._ranks: dict[str, set[int]] = {}
        self._printed: set[str] = set()
        self.print_at: float | None = None
        """Monotonic time at which `take_line` is due; None: nothing to print."""

    def add_report(self, rank: int, names: Iterable[str], now: float, workers: int) -> None:
        """Count a report of one of ``workers`` workers. A variable is printed once."""
        new = [name for name in names if name not in self._printed]
        for name in new:
            self._ranks.setdefault(name, set()).add(rank)
        if not new:
            return
        if self.print_at is None:
            self.print_at = now + COLLECT_SECONDS
        if all(len(ranks) == workers for ranks in self._ranks.values()):
            self.print_at = now

    def take_line(self) -> str:
        """Return the line about the variables that were reported since the last call."""
        self.print_at = None
        most = max((len(ranks) for ranks in self._ranks.values()), default=0)
        names = ", ".join(sorted(self._ranks))
        self._printed |= self._ranks.keys()
        self._ranks.clear()
        if not names:
            return ""
        return (
            f"{names} has no effect: set by {plural(most, 'rank')} before the import of the library"
            " that reads it, which was imported already; use --start exec"
        )
