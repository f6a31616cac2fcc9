"""
Addresses as users write them: ``HOST``, ``HOST:PORT``, ``[IPV6]:PORT``.

They are parsed strictly and never resolved.
"""

from __future__ import annotations

import ipaddress
import re
import zlib
from dataclasses import dataclass

from pdrun.errors import UsageError

SCHEDULER_PORTS = range(20000, 30000)
"""
The port of a scheduler is one of these if the user names none. Linux takes the ports of outgoing
connections from a higher range.
"""
MAX_PORT = 65535
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
"""What inet_aton reads as a part of an IPv4 address."""
_PORT_DISTANCE = 10000
"""Distance between the ports of store and scheduler."""
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
"""Linux limits the name of an interface to 15 characters."""
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


@dataclass(frozen=True, order=True)
class Endpoint:
    """A host and a TCP port. Port 0: the listener chooses one."""

    host: str
    port: int

    def __str__(self) -> str:
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"

    @property
    def zmq_url(self) -> str:
        """The address for ZeroMQ: ``tcp://HOST:PORT``."""
        return f"tcp://{self}"


def parse_port_range(text: str, where: str) -> tuple[int, int]:
    """
    Return the first and the last port of ``20000-20100``.

    Raises:
        UsageError: it is not a range of ports.
    """
    match = re.fullmatch(r"\s*([0-9]{1,5})\s*[-:]\s*([0-9]{1,5})\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MAX_PORT:
        raise UsageError(
            f"{text[:40]!r} is not a range of ports from 1 to {MAX_PORT}, the lower one first",
            where=where,
            hint="use 20000-20100",
        )
    return int(match[1]), int(match[2])


def port_for_job(job: str, ports: tuple[int, int] | None = None) -> int:
    """
    Return the scheduler port of a job: CRC-32 (RFC 1952) of its name, modulo the range.

    Args:
        job: its name.
        ports: first and last port of ``--port-range``; None: SCHEDULER_PORTS.

    Every node of the job computes the same port.
    """
    choice = SCHEDULER_PORTS if ports is None else range(ports[0], ports[1] + 1)
    return choice[zlib.crc32(job.encode("utf-8", "surrogateescape")) % len(choice)]


def port_beside_store(port: int, ports: tuple[int, int] | None = None) -> int:
    """
    Return the scheduler port of a job whose store has a fixed port, from that port.

    Every node of the job computes the same port. Without ``--port-range`` (ports) it is outside of
    the range from which Linux takes the ports of outgoing connections, if the store's port is at
    most 42767.
    """
    if ports is not None:
        return port_for_job(str(port), ports)
    if port < SCHEDULER_PORTS.start:
        return port + _PORT_DISTANCE
    return port - _PORT_DISTANCE


def check_host(host: str, *, where: str) -> str:
    """
    Return ``host`` if it is an IP address or a host name, else raise UsageError.

    Numbers such as ``127.1`` and ``0177.0.0.1`` are refused: resolvers interpret them differently.
    A label of hex digits, as in Docker's host names (``4c01db0b3391``), is no number.
    """
    address, percent, zone = host.partition("%")
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        pass
    else:
        if percent and (found.version == 4 or not _ZONE.fullmatch(zone)):
            raise UsageError(
                f"{zone!r} is not the zone of an IPv6 address",
                where=where,
                hint="a zone is the name or number of a network interface: fe80::1%eth0",
            )
        return f"{found}{percent}{zone}"
    labels = host.rstrip(".").split(".")
    is_numeric = all(_NUMBER.fullmatch(label) for label in labels)
    if (
        host
        and len(host) <= 253
        and all(_LABEL.fullmatch(label) for label in labels)
        and not is_numeric
    ):
        return host
    raise UsageError(f"{host!r} is neither a host name nor an IP address", where=where)


def parse_port(text: str, *, where: str, min_port: int = 1) -> int:
    """Return the TCP port in ``text``: ASCII digits, ``min_port`` to 65535."""
    if re.fullmatch(r"[0-9]{1,5}", text) and min_port <= int(text) <= 65535:
        return int(text)
    raise UsageError(
        f"{text!r} is not a port", where=where, hint=f"a port is a number from {min_port} to 65535"
    )


def parse_endpoint(text: str, *, where: str, default_port: int | None = None) -> Endpoint:
    """
    Parse ``HOST:PORT``, ``[IPV6]:PORT`` or, if there is a default port, ``HOST``.

    Raises:
        UsageError: it is a URL, has no host, or is an IPv6 address with a port and no brackets.
    """
    if "://" in text:
        raise UsageError(f"{text!r} is a URL", where=where, hint="write HOST:PORT")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise UsageError(
                f"{text!r} has no closing bracket", where=where, hint="write [IPV6]:PORT"
            )
        port_text = rest[1:]
    elif text.count(":") > 1:
        host = text
        port_text = ""
        if default_port is None:
            raise UsageError(
                f"{text!r} has several colons", where=where, hint="write IPv6 as [ADDRESS]:PORT"
            )
    else:
        host, _, port_text = text.partition(":")
    if port_text:
        return Endpoint(check_host(host, where=where), parse_port(port_text, where=where))
    if default_port is None or text.endswith(":"):
        raise UsageError(f"{text!r} has no port", where=where, hint="write HOST:PORT")
    return Endpoint(check_host(host, where=where), default_port)
