"""
Reads the scalars of a rank table. Dialects 1.x write them as text, dialect 2.0 writes numbers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any

from pdrun.launcher.ranktables.jsontext import JsonPath
from pdrun.launcher.ranktables.model import Fault

MAX_RANKS = 65536
"""HCCL's limit."""
MAX_FAULTS = 1000
MAX_TEXT_CHARACTERS = 64
MAX_ADDRESSES_CHARACTERS = 1024


class ValueReader:
    """
    Reads values and records their faults.

    A method returns a harmless value in the place of a faulty one.

    Args:
        lenient: numbers in the place of text, and text in the place of numbers, are warnings.
    """

    def __init__(self, *, lenient: bool = False) -> None:
        self.lenient = lenient
        self.faults: list[Fault] = []

    def add_fault(
        self, path: JsonPath, what: str, hint: str = "", *, is_warning: bool = False
    ) -> None:
        """Record a fault."""
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(Fault(path, what, hint, is_warning))

    def read_objects(
        self, data: Mapping[str, Any], key: str, path: JsonPath
    ) -> list[tuple[JsonPath, dict[str, Any]]]:
        """Return (path, object) of a list that is required and not empty."""
        items = data.get(key)
        if key not in data:
            self.add_fault((*path, key), "is missing")
            return []
        if not isinstance(items, list):
            self.add_fault((*path, key), "must be a list")
            return []
        if not items:
            self.add_fault((*path, key), "is empty")
            return []
        if len(items) > MAX_RANKS:
            what = f"has {len(items)} entries; HCCL supports {MAX_RANKS}"
            self.add_fault((*path, key), what)
            return []
        objects: list[tuple[JsonPath, dict[str, Any]]] = []
        for index, item in enumerate(items):
            if isinstance(item, dict):
                objects.append(((*path, key, index), item))
            else:
                self.add_fault((*path, key, index), "must be an object")
        return objects

    def read_text(
        self,
        data: Mapping[str, Any],
        key: str,
        path: JsonPath,
        *,
        required: bool = True,
        max_characters: int = MAX_TEXT_CHARACTERS,
    ) -> str:
        """Return a text."""
        if key not in data:
            if required:
                self.add_fault((*path, key), "is missing")
            return ""
        value: object = data[key]
        if isinstance(value, int) and not isinstance(value, bool):
            self.add_fault(
                (*path, key),
                f"must be text, got the number {value}",
                f'write "{value}"',
                is_warning=self.lenient,
            )
            return str(value)
        if not isinstance(value, str):
            self.add_fault((*path, key), "must be text", 'write it in "..."')
            return ""
        if not value and required:
            self.add_fault((*path, key), "is empty")
        if len(value) > max_characters:
            what = f"has {len(value)} characters; HCCL supports {max_characters}"
            self.add_fault((*path, key), what)
        if "*" in value:
            what = f"{value!r} contains a *: a sample value that was not filled in"
            self.add_fault((*path, key), what)
        elif re.fullmatch(r"\{.*\}|\$\{?\w+\}?|<.*>|[xX]{1,3}(?:\.[xX]{1,3}){3}", value):
            self.add_fault((*path, key), f"{value!r} is a placeholder that was not filled in")
        return value

    def read_count(
        self,
        data: Mapping[str, Any],
        key: str,
        path: JsonPath,
        *,
        required: bool = True,
        maximum: int = MAX_RANKS,
    ) -> int:
        """Return a number that a dialect 1.x writes as text; -1 if it is missing."""
        earlier_faults = len(self.faults)
        value = self.read_text(data, key, path, required=required)
        is_faulty = any(not fault.is_warning for fault in self.faults[earlier_faults:])
        if key not in data or is_faulty:
            return -1
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", value):
            what = f"must be a whole number as text, got {value!r}"
            self.add_fault((*path, key), what, 'write "0", "1" ...')
            return -1
        if int(value) > maximum:
            self.add_fault((*path, key), f"must be at most {maximum}, got {value}")
        return int(value)

    def read_number(
        self,
        data: Mapping[str, Any],
        key: str,
        path: JsonPath,
        *,
        required: bool = True,
        maximum: int = MAX_RANKS,
    ) -> int:
        """Return a number of dialect 2.0; -1 if it is missing."""
        if key not in data:
            if required:
                self.add_fault((*path, key), "is missing")
            return -1
        value = data[key]
        if isinstance(value, bool) or not isinstance(value, int):
            return self._read_number_of_text(value, (*path, key))
        if not 0 <= value <= maximum:
            self.add_fault((*path, key), f"must be between 0 and {maximum}, got {value}")
            return -1
        return value

    def _read_number_of_text(self, value: object, path: JsonPath) -> int:
        """Return the number that a text contains; -1 if it contains no number."""
        is_digits = isinstance(value, str) and bool(re.fullmatch("[0-9]{1,9}", value))
        self.add_fault(
            path,
            f"must be a number in dialect 2.0, got {str(value)[:40]!r}",
            f"write {value} without quotes" if is_digits else "write a number",
            is_warning=self.lenient and is_digits,
        )
        return int(str(value)) if is_digits else -1

    def read_addresses(
        self, data: Mapping[str, Any], key: str, path: JsonPath, *, required: bool
    ) -> tuple[str, ...]:
        """Return the IP addresses of a comma-separated text."""
        text = self.read_text(
            data, key, path, required=required, max_characters=MAX_ADDRESSES_CHARACTERS
        )
        if not text or "*" in text:
            return ()
        addresses = tuple(part.strip() for part in text.split(","))
        for address in addresses:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                self.add_fault((*path, key), f"{address[:60]!r} is not an IP address")
        return addresses


def without_keys(data: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return the entries with other keys than these."""
    return {key: value for key, value in data.items() if key not in keys}
