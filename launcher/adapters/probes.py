"""
The probes of `pdrun.launcher.adapters.model.Probes` for this machine: /proc, descriptors, files.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pdrun.launcher.adapters.model import Probes

MAX_FILE_BYTES = 8 << 20
"""Size limit of a file that a launcher names."""
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of /proc/PID/ns/pid outside of any container (PROC_PID_INIT_INO of the kernel)."""
_MAX_ANCESTORS = 128
"""Largest number of ancestors that are examined."""


def make_probes(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> Probes:
    """Return the probes of this machine; ``root`` is where /proc is."""
    return Probes(
        hostname=os.uname().nodename,
        is_here=_is_here,
        address_for=_address_for,
        is_ancestor=lambda pid: _is_ancestor(pid, root),
        is_under=lambda commands: _is_under(commands, root),
        is_open=_is_open,
        accepts_connections=_accepts_connections,
        option_above=lambda commands, option: _option_above(commands, option, root),
        peer_above=lambda commands, descriptor: _peer_above(commands, descriptor, root),
        read_file=_read_file,
    )


def _is_here(host: str) -> bool:
    from pdrun.launcher.common import network

    return network.is_this_machine(host, os.uname().nodename, network.list_addresses())


def _address_for(host: str) -> str:
    # a machine's own name often resolves to loopback on that machine
    from pdrun.launcher.common import network

    own = {address.partition("%")[0] for _, address in network.list_addresses()}
    for address in network.resolve_host(host):
        if address.partition("%")[0] in own and not network.is_loopback(address):
            return address
    return network.find_local_address(None) or host


def _iter_ancestors(root: Path) -> Iterator[tuple[int, str]]:
    """Yield (pid, command name) of this process and its ancestors."""
    pid = os.getpid()
    for _ in range(_MAX_ANCESTORS):
        if pid <= 0:
            return
        try:
            text = (root / f"proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        yield pid, name
        pid = int(fields[1]) if len(fields) > 1 else 0


def _sees_all_processes(root: Path) -> bool:
    """
    Whether all ancestors are visible, which is not the case in a separate PID namespace.
    """
    try:
        return (root / "proc/self/ns/pid").stat().st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _is_ancestor(pid: int, root: Path) -> bool | None:
    if any(pid == above for above, _ in _iter_ancestors(root)):
        return True
    if _sees_all_processes(root):
        return False
    return None


def _is_under(commands: tuple[str, ...], root: Path) -> bool | None:
    if any(name in commands for _, name in _iter_ancestors(root)):
        return True
    if _sees_all_processes(root):
        return False
    return None


def _option_above(commands: tuple[str, ...], option: str, root: Path) -> str:
    for pid, name in _iter_ancestors(root):
        if name in commands:
            try:
                data = (root / f"proc/{pid}/cmdline").read_bytes()
            except OSError:
                return ""
            argv = data.decode("utf-8", "replace").split("\0")
            if option in argv[:-1]:
                return argv[argv.index(option) + 1]
            return ""
    return ""


def _peer_above(commands: tuple[str, ...], descriptor: int, root: Path) -> str:
    for pid, name in _iter_ancestors(root):
        if name in commands:
            process = root / f"proc/{pid}"
            try:
                link = str((process / f"fd/{descriptor}").readlink())
                peer = _find_peer(process / "net/tcp", link)
                return peer or _find_peer(process / "net/tcp6", link)
            except (OSError, ValueError, LookupError):
                return ""
    return ""


def _find_peer(table: Path, link: str) -> str:
    """
    Return the remote address of the socket ``link`` (``socket:[INODE]``) from one of the kernel's
    tables, or an empty string.
    """
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()
        if link == f"socket:[{fields[9]}]":
            # 32-bit words, each in the byte order of this machine
            words = bytes.fromhex(fields[2].partition(":")[0])
            packed = b"".join(
                int.from_bytes(words[at : at + 4], "big").to_bytes(4, sys.byteorder)
                for at in range(0, len(words), 4)
            )
            address = ipaddress.ip_address(packed)
            return str(getattr(address, "ipv4_mapped", None) or address)
    return ""


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except (OSError, OverflowError):
        return False
    return True


def _accepts_connections(host: str, port: int) -> bool:
    import socket

    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def _read_file(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("is not a regular file")
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"is larger than {MAX_FILE_BYTES} bytes")
    return data.decode("utf-8")
