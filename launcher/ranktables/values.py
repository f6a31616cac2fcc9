"""
Scalars of a rank table: dialects 1.x write every one as text, 2.0 writes numbers; each complaint
has its path.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any

from pdrun.launcher.ranktables.jsontext import Path
from pdrun.launcher.ranktables.model import Fault

MOST = 65536
"""Ranks of a table, at most, as HCCL has it."""


class Reader:
    """
    Takes values out of objects and notes what is wrong with them; the value returned then is a
    harmless one.
    """

    def __init__(self, *, lenient: bool = False) -> None:
        """``lenient``: numbers where text belongs are a warning."""
        self.lenient = lenient
        self.faults: list[Fault] = []

    def fault(self, path: Path, what: str, hint: str = "", *, mild: bool = False) -> None:
        """Note something that is wrong."""
        if len(self.faults) < 1000:
            self.faults.append(Fault(path, what, hint, mild))

    def objects(
        self, data: Mapping[str, Any], key: str, path: Path
    ) -> list[tuple[Path, dict[str, Any]]]:
        """Return the objects of a list that must be there and not be empty."""
        items = data.get(key)
        if not isinstance(items, list) or not items:
            what = (
                "is missing"
                if key not in data
                else "is no list"
                if not isinstance(items, list)
                else "is empty"
            )
            self.fault((*path, key), what)
            return []
        if len(items) > MOST:
            self.fault((*path, key), f"has {len(items)} entries; HCCL takes {MOST}")
            return []
        found = []
        for index, item in enumerate(items):
            if isinstance(item, dict):
                found.append(((*path, key, index), item))
            else:
                self.fault((*path, key, index), "is no object")
        return found

    def text(
        self,
        data: Mapping[str, Any],
        key: str,
        path: Path,
        *,
        needed: bool = True,
        longest: int = 64,
    ) -> str:
        """Return a text of a dialect 1.x."""
        value = data.get(key)
        if key not in data:
            if needed:
                self.fault((*path, key), "is missing")
            return ""
        if isinstance(value, int) and not isinstance(value, bool):
            self.fault(
                (*path, key),
                f"{value} is a number, and HCCL takes text only",
                f'write "{value}"',
                mild=self.lenient,
            )
            return str(value)
        if not isinstance(value, str):
            self.fault((*path, key), "is no text", 'write it in "..."')
            return ""
        if not value and needed:
            self.fault((*path, key), "is empty")
        if len(value) > longest:
            self.fault((*path, key), f"has {len(value)} characters; HCCL takes {longest}")
        if "*" in value:
            self.fault((*path, key), f"{value!r} holds a *: a sample of a manual, not filled in")
        elif re.fullmatch(r"\{.*\}|\$\{?\w+\}?", value):
            self.fault((*path, key), f"{value!r} is a placeholder, not filled in")
        return value

    def count(
        self,
        data: Mapping[str, Any],
        key: str,
        path: Path,
        *,
        needed: bool = True,
        most: int = MOST,
    ) -> int:
        """Return a number of a dialect 1.x, which stands there as text; -1 where there is none."""
        before = len(self.faults)
        value = self.text(data, key, path, needed=needed)
        if key not in data or any(not fault.mild for fault in self.faults[before:]):
            return -1
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", value):
            self.fault(
                (*path, key), f"{value!r} is not a whole number in text", 'write "0", "1" ...'
            )
            return -1
        if int(value) > most:
            self.fault((*path, key), f"{value} is above {most}")
        return int(value)

    def number(
        self,
        data: Mapping[str, Any],
        key: str,
        path: Path,
        *,
        needed: bool = True,
        most: int = MOST,
    ) -> int:
        """
        Return a number of dialect 2.0, which stands there as a number; -1 where there is none.
        """
        value = data.get(key)
        if key not in data:
            if needed:
                self.fault((*path, key), "is missing")
            return -1
        if isinstance(value, bool) or not isinstance(value, int):
            digits = isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value)
            hint = f"write {value} without quotes" if digits else "write a number"
            self.fault(
                (*path, key),
                f"{str(value)[:40]!r} is no number, and dialect 2.0 takes numbers only",
                hint,
                mild=bool(self.lenient and digits),
            )
            return int(str(value)) if digits else -1
        if not 0 <= value <= most:
            self.fault((*path, key), f"{value} is not between 0 and {most}")
            return -1
        return value

    def addresses(
        self, data: Mapping[str, Any], key: str, path: Path, *, needed: bool
    ) -> tuple[str, ...]:
        """Return the IP addresses of a text with commas."""
        text = self.text(data, key, path, needed=needed, longest=1024)
        if not text or "*" in text:
            return ()
        found = tuple(part.strip() for part in text.split(","))
        for part in found:
            try:
                ipaddress.ip_address(part)
            except ValueError:
                self.fault((*path, key), f"{part[:60]!r} is no IP address")
        return found


def rest(data: Mapping[str, Any], *known: str) -> dict[str, Any]:
    """Return the entries that have no field of their own."""
    return {key: value for key, value in data.items() if key not in known}
