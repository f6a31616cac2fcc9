"""
Topology: how fast the devices compute, and how fast the links between them are.

    {"format": 1, "name": "h100x8", "guess": true,
     "device": {"memory": "80GiB", "usable": 0.92, "bandwidth": 2.5e12, "launch": 3e-6,
                "kinds": {"bf16": {"peak": 9.89e14, "products": [[256, 0.18], [4096, 0.66]]}}},
     "levels": [{"name": "node", "devices": 8, "latency": 2e-5, "bandwidth": 3.3e11},
                {"name": "network", "latency": 4e-5, "bandwidth": 4e10}],
     "overlap": 0.9}

Plain data: no torch. Built-in tables are from data sheets and marked as guesses. ``pdrun doctor
--calibrate`` measures a true one.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORMAT_VERSION = 1
UNITS_BYTES = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class ComputeRate:
    """
    How fast matrix products of one number type are.

    Attributes:
        peak: FLOP per second of the data sheet.
        products: (size, share of the peak that is attained), by size: the geometric mean of M, N
            and K. Between two sizes the share is interpolated in the logarithm of the size.
    """

    peak: float
    products: tuple[tuple[float, float], ...]

    def attained(self, size: float) -> float:
        """Return the FLOP per second of a product of this size."""
        sizes = [known for known, _ in self.products]
        index = bisect_left(sizes, size)
        if index == 0:
            return self.peak * self.products[0][1]
        if index == len(sizes):
            return self.peak * self.products[-1][1]
        (low, before), (high, after) = self.products[index - 1 : index + 1]
        position = math.log(size / low) / math.log(high / low)
        return self.peak * (before + (after - before) * position)


@dataclass(frozen=True)
class DeviceRates:
    """
    One device.

    Attributes:
        memory: bytes.
        usable: share of the memory that a program can use.
        bandwidth: bytes per second of its memory, as attained.
        launch: seconds that the host needs to start one operator.
        kinds: rates of matrix products by number type: "fp32", "bf16", "fp16".
    """

    memory: int
    usable: float
    bandwidth: float
    launch: float
    kinds: Mapping[str, ComputeRate]

    def rate_of(self, kind: str) -> ComputeRate:
        """Return the rate of a number type; of the first in the table if that one is missing."""
        return self.kinds.get(kind) or next(iter(self.kinds.values()))


@dataclass(frozen=True)
class LinkLevel:
    """
    Links between devices: inside of a node, or between nodes.

    Attributes:
        latency: seconds of one collective.
        bandwidth: bytes per second that one device sends.
        devices: devices that these links connect; None: any number.
    """

    name: str
    latency: float
    bandwidth: float
    devices: int | None = None


@dataclass(frozen=True)
class Topology:
    """
    Devices and links.

    Attributes:
        levels: links, innermost first.
        overlap: share of a collective of the data axes that runs beside computation.
        is_guess: whether it is from a data sheet.
        made: how it was made.
    """

    name: str
    device: DeviceRates
    levels: tuple[LinkLevel, ...]
    overlap: float = 0.9
    is_guess: bool = False
    made: str = ""

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device that a program can use."""
        return int(self.device.memory * self.device.usable)

    def link_seconds(self, stride: int, parts: int, nbytes: float) -> float:
        """
        Return the seconds of a collective of ``parts`` devices whose ranks differ by ``stride``.

        Devices on several levels send hierarchically: the ring of the inner level, then of the
        outer one with the share that is left.

        Args:
            nbytes: bytes that a device sends with a ring algorithm.
        """
        if parts < 2:
            return 0.0
        seconds = 0.0
        inside = 1  # devices of this group that the levels so far connect
        for position, level in enumerate(self.levels):
            is_last = position == len(self.levels) - 1
            reach = parts
            if level.devices is not None and not is_last:
                reach = min(parts, max(1, level.devices // stride))
            if reach <= inside or parts % reach or reach % inside:
                continue
            share = (1 / inside - 1 / reach) / (1 - 1 / parts)
            seconds += level.latency + nbytes * share / level.bandwidth
            inside = reach
        return seconds

    def slowest_level(self, stride: int, parts: int) -> LinkLevel:
        """Return the outermost level that a group of devices uses."""
        for level in self.levels:
            if level.devices is None or stride * parts <= level.devices:
                return level
        return self.levels[-1]

    # ---- files --------------------------------------------------------------

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON object."""
        levels = []
        for level in self.levels:
            plain: dict[str, Any] = {"name": level.name}
            if level.devices is not None:
                plain["devices"] = level.devices
            levels.append({**plain, "latency": level.latency, "bandwidth": level.bandwidth})
        kinds = {
            name: {"peak": rate.peak, "products": [list(pair) for pair in rate.products]}
            for name, rate in self.device.kinds.items()
        }
        device = {
            "memory": format_size(self.device.memory),
            "usable": self.device.usable,
            "bandwidth": self.device.bandwidth,
            "launch": self.device.launch,
            "kinds": kinds,
        }
        return {
            "format": FORMAT_VERSION,
            "name": self.name,
            "made": self.made,
            "guess": self.is_guess,
            "device": device,
            "levels": levels,
            "overlap": self.overlap,
        }

    def to_json(self) -> str:
        """Return indented JSON."""
        return json.dumps(self.to_plain(), indent=2) + "\n"

    def digest(self) -> str:
        """Return a short digest of everything that prices depend on."""
        plain = {key: value for key, value in self.to_plain().items() if key != "made"}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def format_size(nbytes: int) -> str:
    """Return a number of bytes in the largest unit that keeps it a whole number."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes % UNITS_BYTES[unit] == 0:
            return f"{nbytes // UNITS_BYTES[unit]}{unit}"
    return f"{nbytes}B"
