"""Reads a topology from JSON; errors name the file and the key."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from pdrun.errors import ConfigError, did_you_mean
from pdrun.parallel.auto.builtin_topologies import BUILTIN_TOPOLOGIES
from pdrun.parallel.auto.topology import (
    FORMAT_VERSION,
    UNITS_BYTES,
    ComputeRate,
    DeviceRates,
    LinkLevel,
    Topology,
)


def load_topology(name: str) -> Topology:
    """
    Return a topology by its built-in name, or from a file.

    Raises:
        ConfigError: there is no such name or file, or the file is no topology.
    """
    if name in BUILTIN_TOPOLOGIES:
        return BUILTIN_TOPOLOGIES[name]
    path = Path(name)
    known = ", ".join(BUILTIN_TOPOLOGIES)
    if not path.exists():
        hint = did_you_mean(name, BUILTIN_TOPOLOGIES)
        hint = hint or f"built in are {known}; pdrun doctor --calibrate --save FILE measures one"
        raise ConfigError("is neither a file nor a built-in topology", where=name, hint=hint)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read as JSON: {error}", where=name) from None
    return parse_topology(value, name)


def parse_topology(value: Any, where: str = "topology") -> Topology:
    """
    Return the topology of a JSON object.

    Raises:
        ConfigError: a key is unknown or missing, or a value is out of range.
    """
    reader = _PlainReader(where)
    top = reader.read_object(
        value,
        "topology",
        {"format", "name", "device", "levels"},
        {"made", "guess", "overlap"},
    )
    if top["format"] != FORMAT_VERSION:
        what = f"format must be {FORMAT_VERSION}, got {top['format']!r}"
        raise ConfigError(what, where=where, hint="write it with this version's pdrun doctor")
    device = reader.read_device(top["device"])
    if not isinstance(top["levels"], list) or not top["levels"]:
        raise ConfigError("levels must be a list with an entry per level", where=where)
    levels = tuple(reader.read_level(level) for level in top["levels"])
    overlap = reader.read_number(top.get("overlap", 0.9), "overlap", 0, 1)
    guess = top.get("guess", False)
    if not isinstance(guess, bool):
        raise ConfigError(f"guess must be true or false, got {guess!r}", where=where)
    return Topology(str(top["name"]), device, levels, overlap, guess, str(top.get("made", "")))


class _PlainReader:
    """Reads the parts of a topology's JSON object; errors name the file and the key."""

    def __init__(self, where: str) -> None:
        self.where = where

    def read_object(
        self, value: Any, name: str, required: set[str], optional: set[str]
    ) -> dict[str, Any]:
        """Return an object that has all required keys and no unknown ones."""
        if not isinstance(value, dict):
            raise ConfigError(f"{name} must be an object, got {value!r}", where=self.where)
        known = sorted(required | optional)
        for key in value:
            if key not in known:
                hint = did_you_mean(key, known) or f"the keys are {', '.join(known)}"
                raise ConfigError(
                    f"{name} has the unknown key {key!r}", where=self.where, hint=hint
                )
        missing = sorted(required - set(value))
        if missing:
            raise ConfigError(f"{name} lacks {', '.join(missing)}", where=self.where)
        return value

    def read_number(self, value: Any, name: str, low: float, high: float = math.inf) -> float:
        """Return a number between two limits; the lower one is excluded unless it is also 0."""
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not (low <= value <= high and math.isfinite(value))
        ):
            limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise ConfigError(f"{name} must be a number {limits}, got {value!r}", where=self.where)
        return float(value)

    def read_rate(self, value: Any, name: str) -> float:
        """Return a number above 0."""
        number = self.read_number(value, name, 0)
        if number == 0:
            raise ConfigError(f"{name} must be above 0", where=self.where)
        return number

    def read_device(self, value: Any) -> DeviceRates:
        """Return the rates of a device."""
        plain = self.read_object(
            value, "device", {"memory", "bandwidth", "launch", "kinds"}, {"usable"}
        )
        kinds = {}
        if not isinstance(plain["kinds"], dict) or not plain["kinds"]:
            raise ConfigError("kinds must have an entry per number type", where=self.where)
        for name, entry in plain["kinds"].items():
            rate = self.read_object(entry, name, {"peak", "products"}, set())
            if not isinstance(rate["products"], list) or not rate["products"]:
                raise ConfigError(f"{name}: products must be a list of pairs", where=self.where)
            pairs = []
            for pair in rate["products"]:
                if not isinstance(pair, list) or len(pair) != 2:
                    what = f"{name}: products must be pairs of size and share, got {pair!r}"
                    raise ConfigError(what, where=self.where)
                pairs.append(
                    (self.read_rate(pair[0], "a size"), self.read_rate(pair[1], "a share"))
                )
            if len({size for size, _ in pairs}) != len(pairs):
                raise ConfigError(f"{name}: products has a size twice", where=self.where)
            kinds[name] = ComputeRate(
                self.read_rate(rate["peak"], f"{name}: peak"), tuple(sorted(pairs))
            )
        return DeviceRates(
            parse_size(plain["memory"], "memory", self.where),
            self.read_rate(plain.get("usable", 1.0), "usable"),
            self.read_rate(plain["bandwidth"], "bandwidth"),
            self.read_number(plain["launch"], "launch", 0),
            kinds,
        )

    def read_level(self, value: Any) -> LinkLevel:
        """Return one level of links."""
        plain = self.read_object(value, "level", {"name", "latency", "bandwidth"}, {"devices"})
        devices = plain.get("devices")
        if devices is not None and (
            isinstance(devices, bool) or not isinstance(devices, int) or devices < 1
        ):
            raise ConfigError(f"devices must be a count, got {devices!r}", where=self.where)
        return LinkLevel(
            str(plain["name"]),
            self.read_number(plain["latency"], "latency", 0),
            self.read_rate(plain["bandwidth"], "bandwidth"),
            devices,
        )


def parse_size(value: Any, name: str, where: str) -> int:
    """
    Return the bytes of ``80GiB``, ``512MiB`` or a number.

    Raises:
        ConfigError: it is neither, or not above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([KMGT]iB|B)?\s*", str(value))
    nbytes = 0
    if match and not isinstance(value, bool):
        nbytes = int(float(match[1]) * UNITS_BYTES[match[2] or ""])
    if nbytes < 1:
        what = f"{name} must be a size such as 80GiB, got {value!r}"
        raise ConfigError(what, where=where, hint="the units are B, KiB, MiB, GiB and TiB")
    return nbytes
