"""A finding: what is wrong, where, and what to do; and how findings are printed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pdrun.errors import EXIT_CONFIG, EXIT_OK
from pdrun.quick_dataclass import dataclass
from pdrun.text import escape_text, plural

Level = Literal["ok", "warn", "fail"]
LEVELS = ("fail", "warn", "ok")
"""The most important ones first."""


@dataclass(frozen=True)
class Finding:
    """What a check has found."""

    check: str
    """Name of the check, for ``--only``: ``disk``."""
    level: Level
    """ok, warn (a job may be slow, or fail later) or fail (a job will fail)."""
    what: str
    where: str = ""
    """Host, device, file or variable."""
    hint: str = ""
    """What to do; empty only if all is well."""
    node: str = ""
    """Host that was checked; empty: this one."""


def order_findings(found: Iterable[Finding]) -> list[Finding]:
    """Return findings, the most important ones first."""
    return sorted(found, key=lambda one: (LEVELS.index(one.level), one.node, one.check))


def format_findings(found: Sequence[Finding], seconds: float) -> list[str]:
    """Return the lines of a report."""
    lines = []
    for one in order_findings(found):
        places = [place for place in (one.node, one.where) if place]
        where = f" {': '.join(places)}:" if places else ""
        lines.append(f"{one.level:<5} {one.check:<10}{escape_text(f'{where} {one.what}')}")
        if one.hint and one.level != "ok":
            lines.append(f"{'':<17}-> {escape_text(one.hint)}")
    failures, warnings = (sum(one.level == level for one in found) for level in LEVELS[:2])
    counts = f"{plural(failures, 'failure')}, {plural(warnings, 'warning')}"
    lines.append(f"{plural(len(found), 'finding')} in {seconds:.1f} s: {counts}")
    return lines


def encode_findings(found: Sequence[Finding], seconds: float) -> str:
    """Return a report as one JSON object."""
    data = [vars_of(one) for one in order_findings(found)]
    return json.dumps({"seconds": round(seconds, 3), "findings": data})


def vars_of(one: Finding) -> dict[str, Any]:
    """Return a finding as plain data."""
    names = ("check", "level", "what", "where", "hint", "node")
    return {name: getattr(one, name) for name in names}


def choose_exit_code(found: Iterable[Finding], *, is_strict: bool) -> int:
    """Return 78 after a failure, 1 after a warning if they count, else 0."""
    levels = {one.level for one in found}
    if "fail" in levels:
        return EXIT_CONFIG
    return 1 if is_strict and "warn" in levels else EXIT_OK
