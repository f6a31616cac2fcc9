"""
Listening sockets: bound once, on one address, and passed on. An error names the port's owner.

`PendingHandshakes` bounds the connections that no handshake has proven yet: a process that opens
connections and sends nothing takes descriptors of the server, but cannot take all of them.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import socket
from collections.abc import Mapping
from typing import Any

from pdrun.endpoint import Endpoint, parse_port_range
from pdrun.errors import ConfigError

MAX_PENDING_HANDSHAKES = 256
"""Connections per address without a handshake, in addition to those of the job."""
MAX_SEGMENT_BYTES = 1220
"""
Payload of a TCP packet in both directions, for an MTU of 1280, the minimum of IPv6. A path (tunnel,
overlay) that drops larger packets silently lets the handshake through and then hangs.
"""


_port_range: tuple[int, int] | None = None


def use_port_range(ports: tuple[int, int] | None) -> None:
    """
    Bind further sockets without a fixed port in this range (``--port-range``); None: on any port.

    It applies to this process and to sockets that other machines reach.
    """
    global _port_range
    _port_range = ports


def use_port_range_of(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Use the range of PDRUN_PORT_RANGE, if it is set, and return it."""
    text = environ.get("PDRUN_PORT_RANGE", "")
    ports = parse_port_range(text, "PDRUN_PORT_RANGE") if text else None
    use_port_range(ports)
    return ports


def bind_listener(endpoint: Endpoint, *, backlog: int = 128) -> socket.socket:
    """
    Return a listening TCP socket on exactly ``endpoint``.

    Port 0: a free port of `use_port_range`, or one that the system chooses.

    Raises:
        ConfigError: the address means all interfaces, is not this machine's, or its port is in use
            (names the process that uses it, if that can be seen).
    """
    where = str(endpoint)
    family, address = _resolve_endpoint(endpoint)
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    if endpoint.port == 0 and _port_range is not None and not ip.is_loopback:
        return _bind_in_range(endpoint, _port_range, backlog)
    if ip.is_unspecified:
        raise ConfigError(
            "would listen on every interface",
            where=where,
            hint="name one address, such as 127.0.0.1",
        )
    try:
        return _bind(family, address, backlog)
    except OSError as error:
        raise _listen_error(endpoint, error) from None


def _bind(family: int, address: tuple[str, int], backlog: int) -> socket.socket:
    """Return a listening socket; raise OSError if there can be none."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, MAX_SEGMENT_BYTES)
        listener.bind(address)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def _bind_in_range(endpoint: Endpoint, ports: tuple[int, int], backlog: int) -> socket.socket:
    """Return a socket on the first free port of a range; who has the others is not looked up."""
    first, last = ports
    family, address = _resolve_endpoint(endpoint)
    for port in range(first, last + 1):
        try:
            return _bind(family, (address[0], port, *address[2:]), backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _listen_error(Endpoint(endpoint.host, port), error) from None
    raise ConfigError(
        f"no port of {first}-{last} is free on {endpoint.host}",
        where="--port-range",
        hint="end other jobs there, or use a larger range: three ports per job and node",
    )


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


# Connections that were accepted
# --------------------------------------------------------------------------------------------------


class PendingHandshakes:
    """
    The accepted connections that have sent no message, for which a handshake is needed.

    They are at most a number per remote address, and in all at most half of the descriptors, or one
    address's number if that is more. Above it the
    oldest one of that address is shut down: a handshake takes milliseconds, or a few
    round trips. The handshake limit of the server bounds them in time.
    """

    def __init__(self, crowd: int) -> None:
        """``crowd``: connections that may be opened at the same time, even from one address."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptors < 0:  # no limit
            descriptors = 1 << 20
        self._limit = crowd + min(MAX_PENDING_HANDSHAKES, descriptors // 8)
        self._total_limit = max(self._limit, descriptors // 2)
        self._hosts: dict[int, str] = {}
        """Descriptor -> remote address."""
        self._proven: dict[int, int] = {}
        """Descriptor -> inode of the others."""
        self._pending: dict[str, dict[int, int]] = {}
        """Remote address -> descriptor -> inode, oldest first."""

    def __len__(self) -> int:
        return len(self._hosts)

    def prove_connection(self, fd: int, inode: int) -> None:
        """A connection has sent its first message."""
        self.remove_connection(fd)
        self._proven[fd] = inode

    def add_connection(self, fd: int) -> None:
        """Add an accepted connection, and shut down the oldest one if there are too many."""
        if self._proven.get(fd) == socket_inode(fd):  # its message was read before this event
            return
        self.remove_connection(fd)  # the end of an earlier one of this number was not reported
        address = remote_address(fd)
        if address is None:  # it has ended already
            return
        host = str(address[0])
        here = self._pending.setdefault(host, {})
        here[fd] = socket_inode(fd)
        self._hosts[fd] = host
        if len(here) > self._limit:
            self._shut_oldest(here)
        elif len(self._hosts) > self._total_limit:
            self._shut_oldest(max(self._pending.values(), key=len))

    def _shut_oldest(self, pending: dict[int, int]) -> None:
        oldest, inode = next(iter(pending.items()))
        shut_down_socket(oldest, inode)
        self.remove_connection(oldest)

    def remove_connection(self, fd: int) -> None:
        """
        Forget a connection that has ended.

        A newer one of the same number may have been proven already: its messages can be read
        before the end of the old one is reported.
        """
        if self._proven.get(fd) != (socket_inode(fd) or -1):
            self._proven.pop(fd, None)
        host = self._hosts.pop(fd, None)
        if host is None:
            return
        here = self._pending[host]
        here.pop(fd, None)
        if not here:
            del self._pending[host]


def socket_inode(fd: int) -> int:
    """Return the inode of a descriptor's socket, unique at a time; 0 if it is closed."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return 0


def remote_address(fd: int) -> Any:
    """Return the remote address of a descriptor, or None if it is not a connected socket."""
    try:
        copy = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    try:
        return copy.getpeername()
    except OSError:
        return None
    finally:
        copy.close()


def shut_down_socket(fd: int, inode: int) -> None:
    """Shut a connection down, unless its number belongs to another one, of another inode, now."""
    if not inode or socket_inode(fd) != inode:
        return
    try:
        copy = socket.socket(fileno=os.dup(fd))
    except OSError:
        return
    try:
        copy.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        copy.close()
