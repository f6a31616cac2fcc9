"""
What a rank table says, whatever its dialect: servers with devices, each with a rank; and its
faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pdrun.launcher.ranktables.jsontext import Path

Dialect = Literal["1.0", "1.1", "1.2", "2.0", "group", "lab"]
"""
1.0, 1.2: server_list (1.2 with super pods). 1.1: heterogeneous, node_list. 2.0: a flat rank_list. group: the template
of the first hccl-controller, in which the order gives the rank. lab: its older form, one instance a device.
"""
DIALECTS: tuple[Dialect, ...] = ("1.0", "1.1", "1.2", "2.0", "group", "lab")
WRITTEN: tuple[Dialect, ...] = ("1.0", "1.2", "2.0", "group", "lab")
"""Dialects that can be written."""


@dataclass(frozen=True)
class Device:
    """One device of a server."""

    rank: int
    device_id: int
    """Physical: N of /dev/davinciN."""
    ips: tuple[str, ...] = ()
    """Of its network card; several in a fixed order; none where one server needs none."""
    super_device_id: str = ""
    """Its id in a super pod (SDID); dialect 1.2."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else stands there, kept as it is: ports, backup addresses, the levels of 2.0."""
    path: Path = ()


@dataclass(frozen=True)
class Server:
    """One host and its devices, in rank order."""

    id: str
    """An identity, not necessarily an address; empty in dialect 2.0, which names no hosts."""
    devices: tuple[Device, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)
    path: Path = ()

    def named(self, *keys: str) -> str:
        """
        Return the first of these entries that is there as a text that is not empty; ``server_id``
        is the id.
        """
        values = (self.id if key == "server_id" else self.extra.get(key) for key in keys)
        return next((value for value in values if isinstance(value, str) and value), "")

    @property
    def names(self) -> tuple[str, ...]:
        """Every name or address by which this host may be known."""
        keys = ("server_id", "host_ip", "server_ip", "pod_ip", "container_ip", "pod_name")
        return tuple(dict.fromkeys(filter(None, (self.named(key) for key in keys))))


@dataclass(frozen=True)
class SuperPod:
    """Servers of one super pod; dialect 1.2."""

    id: str
    servers: tuple[str, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankTable:
    """
    A whole table; servers in the order of their ranks once it has passed
    `pdrun.launcher.ranktables.check`.
    """

    dialect: Dialect
    status: str
    servers: tuple[Server, ...]
    super_pods: tuple[SuperPod, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device, in rank order."""
        return tuple(
            sorted(
                (one for server in self.servers for one in server.devices), key=lambda one: one.rank
            )
        )

    @property
    def ordered(self) -> tuple[Server, ...]:
        """The servers in the order of their ranks."""
        return tuple(
            sorted(self.servers, key=lambda server: min(one.rank for one in server.devices))
        )


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, where, and what would be right."""

    path: Path
    what: str
    hint: str = ""
    mild: bool = False
    """A warning: the table can be used."""
