"""
Addresses as users write them: ``HOST``, ``HOST:PORT``, ``[IPV6]:PORT``; parsed strictly, looked up
nowhere.
"""

from __future__ import annotations

import ipaddress
import re
import zlib
from dataclasses import dataclass

from pdrun.errors import UsageError

SCHEDULER_PORTS = range(20000, 30000)
"""
From which a scheduler's port is derived where nobody names one: below what systems give to outgoing
connections.
"""
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


@dataclass(frozen=True, order=True)
class Endpoint:
    """A host and a TCP port. ``port`` 0 means: the listener chooses."""

    host: str
    port: int

    def __str__(self) -> str:
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"

    @property
    def zmq_url(self) -> str:
        """The ZeroMQ spelling, ``tcp://HOST:PORT``."""
        return f"tcp://{self}"


def port_for_job(job: str) -> int:
    """
    Return the port that every node of a job derives from its name: crc32, as RFC 1952 has it,
    modulo the range.
    """
    return SCHEDULER_PORTS.start + zlib.crc32(job.encode("utf-8", "surrogateescape")) % len(
        SCHEDULER_PORTS
    )


def check_host(host: str, *, where: str) -> str:
    """
    Return ``host`` when it is an IP literal or a host name, else raise UsageError.

    Numbers that only look like addresses (``127.1``, ``0177.0.0.1``) are refused: resolvers
    disagree about them.
    """
    try:
        return str(ipaddress.ip_address(host.partition("%")[0])) + (
            host[host.index("%") :] if "%" in host else ""
        )
    except ValueError:
        pass
    labels = host.rstrip(".").split(".")
    looks_numeric = (
        bool(re.fullmatch(r"[0-9.xXa-fA-F]*[0-9]", host)) and labels[-1][:1] in "0123456789"
    )
    if (
        host
        and len(host) <= 253
        and all(_LABEL.fullmatch(label) for label in labels)
        and not looks_numeric
    ):
        return host
    raise UsageError(f"{host!r} is neither a host name nor an IP address", where=where)


def parse_port(text: str, *, where: str, min_port: int = 1) -> int:
    """Return the TCP port that ``text`` writes in plain ASCII digits, ``lowest`` to 65535."""
    if re.fullmatch(r"[0-9]{1,5}", text) and min_port <= int(text) <= 65535:
        return int(text)
    raise UsageError(
        f"{text!r} is not a port", where=where, hint=f"a port is a number from {min_port} to 65535"
    )


def parse_endpoint(text: str, *, where: str, default_port: int | None = None) -> Endpoint:
    """
    Parse ``HOST:PORT``, ``[IPV6]:PORT`` or, when there is a default port, ``HOST``.

    A URL, a port without host and an IPv6 address without brackets but with a port are refused with
    the reason.
    """
    if "://" in text:
        raise UsageError(f"{text!r} is a URL", where=where, hint="write HOST:PORT")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise UsageError(
                f"{text!r} has no closing bracket", where=where, hint="write [IPV6]:PORT"
            )
        port_text = rest[1:] if rest else ""
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
