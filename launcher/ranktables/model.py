"""
A rank table, independent of its dialect: servers with devices, each with a rank. And its faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pdrun.launcher.ranktables.jsontext import JsonPath

Dialect = Literal["1.0", "1.1", "1.2", "2.0", "group", "lab"]
"""
1.0, 1.2: server_list (1.2 with super pods).
1.1: heterogeneous, node_list.
2.0: a flat rank_list.
group: template of the first hccl-controller; the order gives the ranks.
lab: its older form, one instance per device.
"""
DIALECTS: tuple[Dialect, ...] = ("1.0", "1.1", "1.2", "2.0", "group", "lab")
WRITABLE_DIALECTS: tuple[Dialect, ...] = ("1.0", "1.2", "2.0", "group", "lab")


MEETING_KEYS = ("container_ip", "pod_ip", "host_ip", "server_ip")
"""Entries of a server with the address at which the others reach it. The first one counts."""


@dataclass(frozen=True)
class TableDevice:
    """One device of a server."""

    rank: int
    device_id: int
    """Physical: N of /dev/davinciN."""
    ips: tuple[str, ...] = ()
    """Addresses of its network card, in a fixed order; may be empty in a table of one server."""
    super_device_id: str = ""
    """Its id in a super pod (SDID); dialect 1.2."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """All other entries, unchanged: ports, backup addresses, the levels of 2.0."""
    path: JsonPath = ()


@dataclass(frozen=True)
class Server:
    """One host and its devices, in rank order."""

    id: str
    """An identity, not necessarily an address; empty in dialect 2.0, which has no host names."""
    devices: tuple[TableDevice, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)
    path: JsonPath = ()

    def first_text(self, *keys: str) -> str:
        """Return the first of these entries that is non-empty text; ``server_id`` is the id."""
        for key in keys:
            value = self.id if key == "server_id" else self.extra.get(key)
            if isinstance(value, str) and value:
                return value
        return ""

    @property
    def meeting_address(self) -> str:
        """Address at which the other servers reach this one; empty: the table has none."""
        return self.first_text(*MEETING_KEYS)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name or address of this host."""
        keys = ("server_id", "host_ip", "server_ip", "pod_ip", "container_ip", "pod_name")
        return tuple(dict.fromkeys(filter(None, (self.first_text(key) for key in keys))))


@dataclass(frozen=True)
class SuperPod:
    """Servers of one super pod; dialect 1.2."""

    id: str
    servers: tuple[str, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankTable:
    """A complete table. `pdrun.launcher.ranktables.check` checks it."""

    dialect: Dialect
    status: str
    servers: tuple[Server, ...]
    super_pods: tuple[SuperPod, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[TableDevice, ...]:
        """Every device, in rank order."""
        devices = [device for server in self.servers for device in server.devices]
        return tuple(sorted(devices, key=lambda device: device.rank))

    @property
    def servers_by_rank(self) -> tuple[Server, ...]:
        """The servers in the order of their ranks."""
        return tuple(sorted(self.servers, key=_first_rank))


def _first_rank(server: Server) -> int:
    return min(device.rank for device in server.devices)


@dataclass(frozen=True)
class Fault:
    """One fault of a table: where it is, what is wrong and what to do."""

    path: JsonPath
    what: str
    hint: str = ""
    is_warning: bool = False
    """The table can be used."""
