"""Listening sockets: bound once, on one address, and passed on. An error names the port's owner."""

from __future__ import annotations

import errno
import ipaddress
import socket

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError

MAX_SEGMENT_BYTES = 1220
"""
Payload of a TCP packet in both directions, for an MTU of 1280, the minimum of IPv6. A path (tunnel,
overlay) that drops larger packets silently lets the handshake through and then hangs.
"""


def bind_listener(endpoint: Endpoint, *, backlog: int = 128) -> socket.socket:
    """
    Return a listening TCP socket on exactly ``endpoint``; port 0 lets the system choose.

    Raises:
        ConfigError: the address means all interfaces, is not this machine's, or its port is in use
            (names the process that uses it, if that can be seen).
    """
    where = str(endpoint)
    family, address = _resolve_endpoint(endpoint)
    if ipaddress.ip_address(address[0].partition("%")[0]).is_unspecified:
        raise ConfigError(
            "would listen on every interface",
            where=where,
            hint="name one address, such as 127.0.0.1",
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, MAX_SEGMENT_BYTES)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise _listen_error(endpoint, error) from None
    return listener


def _resolve_endpoint(endpoint: Endpoint) -> tuple[int, tuple[str, int]]:
    host = endpoint.host
    try:
        found = socket.getaddrinfo(host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{host} cannot be resolved: {reason}", where=str(endpoint)) from None
    family, _, _, _, address = found[0]
    return family, address  # type: ignore[return-value]


def _listen_error(endpoint: Endpoint, error: OSError) -> ConfigError:
    where = str(endpoint)
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {endpoint.port} is in use{describe_port_holder(endpoint.port)}",
            where=where,
            hint="end that process, or choose another port with --scheduler HOST:PORT",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{endpoint.host} is not an address of this machine", where=where)
    if error.errno == errno.EACCES:
        return ConfigError(
            f"port {endpoint.port} needs root", where=where, hint="use a port above 1023"
        )
    return ConfigError(f"cannot listen: {error.strerror}", where=where)


def describe_port_holder(port: int) -> str:
    """Return `` by pid N (command)`` for the process that listens on a port; empty: unknown."""
    try:
        import psutil

        for connection in psutil.net_connections("tcp"):
            listens = (
                connection.laddr and connection.laddr.port == port and connection.status == "LISTEN"
            )
            if listens and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())[:120]
                return f" by pid {connection.pid} ({command})"
    except (ImportError, OSError, RuntimeError):
        pass
    except psutil.Error:
        pass
    return ""
