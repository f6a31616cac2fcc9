"""
A connection between a worker and a server: a unix socket on one host, TCP with TLS between hosts.

    worker                                     server
    32 random bytes                     ->
                                        <-     32 random bytes, certificate, HMAC of all of it
    (TCP: TLS 1.3 with that certificate only)
    HMAC of the random bytes and the certificate, inside TLS  ->
                                        <-     one byte

Both sides so prove that they have the job's key, and a process between them can neither read nor
take over the connection. Every wait of the worker has a limit.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import ssl
import struct
from typing import Any

import torch

from pdrun.endpoint import Endpoint, parse_endpoint
from pdrun.errors import AuthenticationError, DeadlineExceeded, PeerLost
from pdrun.parallel.checkpoint.storage import byte_view
from pdrun.parallel.servers import certificate
from pdrun.parallel.servers.frames import (
    HEADER_BYTES,
    Frame,
    FrameError,
    Op,
    peek_push,
    unpack_header,
)

NONCE_BYTES = 32
MAC_BYTES = 32
MAX_CERTIFICATE_BYTES = 4096
HANDSHAKE_SECONDS = 20.0
BUFFER_BYTES = 256 << 10
"""Of a unix socket: what is between the processes stays in the processor's cache."""
READ_AHEAD_BYTES = 8 << 10
"""A small frame is read by one system call."""
SMALL_BYTES = 16 << 10
"""A frame of this size is sent as one record of TLS."""
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
_LENGTH = struct.Struct("<H")


class ServerIdentity:
    """The certificate of a server that listens on TCP; empty for one with a unix socket only."""

    def __init__(self, *, with_tls: bool) -> None:
        self.certificate = b""
        self._context: ssl.SSLContext | None = None
        if with_tls:
            key, self.certificate = certificate.make_certificate()
            self._context = certificate.make_server_context(key, self.certificate)

    def wrap_socket(self, plain: socket.socket) -> socket.socket:
        """Return the connection with TLS."""
        assert self._context is not None
        return self._context.wrap_socket(plain, server_side=True)


class Channel:
    """An authenticated connection; one thread reads, and one writes."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._is_tls = isinstance(connection, ssl.SSLSocket)
        self._poll = select.poll()
        self._poll.register(connection, 0)
        self._flags = 0 if self._is_tls else socket.MSG_WAITALL
        self._ahead = memoryview(bytearray(READ_AHEAD_BYTES))
        self._start = self._end = 0
        """The part of it that was received and not used yet."""
        self._held = b""
        """Frames that go out with the next one."""

    def send_frame(self, frame: Frame, *parts: Any, holds: bool = False) -> None:
        """
        Send a header and the buffers after it.

        Args:
            holds: another frame follows at once, so a header alone is sent together with it.
        """
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        frame.length = sum(map(len, views))
        header = self._held + frame.pack()
        self._held = header if holds and not views else b""
        if self._held:
            return
        if self._is_tls and frame.length < SMALL_BYTES:
            self._socket.sendall(b"".join((header, *views)))
            return
        if self._is_tls:
            self._socket.sendall(header)
            for view in views:
                self._socket.sendall(view)
            return
        sent = self._socket.sendmsg([header, *views])
        if sent < len(header) + frame.length:
            for view in (memoryview(header), *views):
                if sent < len(view):
                    self._socket.sendall(view[sent:])
                sent = max(0, sent - len(view))

    @property
    def is_local(self) -> bool:
        """Whether the other side is on this host, and descriptors can be sent."""
        return self._socket.family == socket.AF_UNIX

    def has_ended(self) -> bool:
        """Return whether the other side has closed the connection; costs a system call."""
        return bool(self._poll.poll(0))

    def send_descriptor(self, frame: Frame, fd: int) -> None:
        """Send a header with a descriptor."""
        socket.send_fds(self._socket, [frame.pack()], [fd])

    def receive_descriptor(self) -> tuple[Frame, int]:
        """
        Return the next header, and the descriptor with it or -1; no other reply may be open.

        Raises:
            FrameError: it is not a header, or has several descriptors.
        """
        assert self._start == self._end
        data, fds, _, _ = socket.recv_fds(self._socket, HEADER_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        try:
            if len(fds) > 1:
                raise FrameError("several descriptors are in one frame")
            while 0 < len(data) < HEADER_BYTES:
                more = self._socket.recv(HEADER_BYTES - len(data))
                data += more
                if not more:
                    break
            if len(data) < HEADER_BYTES:
                raise FrameError("the connection ended inside a frame")
            return unpack_header(data), fds.pop() if fds else -1
        finally:
            for fd in fds:
                os.close(fd)

    def send_held(self) -> None:
        """Send the frames that were held: the other side may wait for them."""
        if self._held:
            self._socket.sendall(self._held)
            self._held = b""

    def has_clock_ahead(self) -> bool:
        """
        Return whether the end of a step has arrived, after nothing but pushes in shared memory.
        """
        for first in range(self._start, self._end - HEADER_BYTES + 1, HEADER_BYTES):
            op = peek_push(self._ahead[first : first + HEADER_BYTES])
            if op != Op.PUSH:
                return op == Op.CLOCK
        return False

    def receive_header(self) -> Frame | None:
        """
        Return the next header; None at the end of the connection.

        Raises:
            FrameError: it is not a header.
        """
        ahead = self._ahead
        have = self._end - self._start
        if have < HEADER_BYTES:
            ahead[:have] = bytes(ahead[self._start : self._end])
            self._start, self._end = 0, have
            self.send_held()
            while self._end < HEADER_BYTES:
                got = self._socket.recv_into(ahead[self._end :])
                if not got and not self._end:
                    return None
                if not got:
                    raise FrameError("the connection ended inside a frame")
                self._end += got
        first = self._start
        self._start += HEADER_BYTES
        return unpack_header(ahead[first : self._start])

    def receive_into(self, buffer: Any) -> None:
        """Fill a buffer."""
        view = memoryview(buffer).cast("B")
        got = min(len(view), self._end - self._start)
        if got:
            view[:got] = self._ahead[self._start : self._start + got]
            self._start += got
        while got < len(view):
            count = self._socket.recv_into(view[got:], 0, self._flags)
            if not count:
                raise FrameError("the connection ended inside a frame")
            got += count

    def receive_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a contiguous tensor on the host, and return it."""
        self.receive_into(byte_view(tensor))
        return tensor

    def set_timeout(self, seconds: float) -> None:
        """Limit each wait; without a system call for every read as Python's own limit has."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def shut_down(self) -> None:
        """End the connection; a thread that reads from it returns."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _mac(key: bytes, who: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"pdrun servers 1 " + who + b"".join(parts), "sha256")


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise FrameError("the connection ended inside the handshake")
        data += more
    return data


def _prepare_socket(connection: socket.socket) -> None:
    if connection.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def accept_channel(connection: socket.socket, key: bytes, identity: ServerIdentity) -> Channel:
    """
    Make a channel of a connection that a server has accepted.

    Raises:
        AuthenticationError: the other side has another key.
        FrameError, OSError: it is not a worker.
    """
    connection.settimeout(HANDSHAKE_SECONDS)
    _prepare_socket(connection)
    is_local = connection.family == socket.AF_UNIX
    if is_local:
        _check_peer(connection)
    shown = b"" if is_local else identity.certificate
    nonces = _receive_exactly(connection, NONCE_BYTES) + secrets.token_bytes(NONCE_BYTES)
    proof = _mac(key, b"server", nonces, shown)
    connection.sendall(nonces[NONCE_BYTES:] + _LENGTH.pack(len(shown)) + shown + proof)
    if not is_local:
        connection = identity.wrap_socket(connection)
    answer = _receive_exactly(connection, MAC_BYTES)
    if not hmac.compare_digest(answer, _mac(key, b"worker", nonces, shown)):
        raise AuthenticationError("a process with another key tried to connect")
    connection.sendall(b"k")
    connection.settimeout(None)
    return Channel(connection)


def _check_peer(connection: socket.socket) -> None:
    """Refuse other users: the folder's mode keeps them out, and so does this."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    if uid not in (os.getuid(), 0):
        raise AuthenticationError(f"a process of user {uid} tried to connect")


def open_channel(address: str, key: bytes, seconds: float) -> Channel:
    """
    Connect to a server.

    Args:
        address: the path of a unix socket, or ``HOST:PORT``.
        seconds: limit of each later wait.

    Raises:
        AuthenticationError: the server has another key.
        PeerLost: it does not answer.
    """
    is_local = address.startswith("/")
    try:
        connection = _connect_socket(address, is_local)
        try:
            return _prove_key(connection, address, key, seconds, is_local=is_local)
        except BaseException:
            connection.close()
            raise
    except (OSError, FrameError) as error:
        raise PeerLost(f"the parameter server does not answer: {error}", where=address) from None


def _connect_socket(address: str, is_local: bool) -> socket.socket:
    if not is_local:
        place: Endpoint = parse_endpoint(address, where="a parameter server's address")
        return socket.create_connection((place.host, place.port), HANDSHAKE_SECONDS)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(HANDSHAKE_SECONDS)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _prove_key(
    connection: socket.socket, address: str, key: bytes, seconds: float, *, is_local: bool
) -> Channel:
    _prepare_socket(connection)
    mine = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(mine)
    nonces = mine + _receive_exactly(connection, NONCE_BYTES)
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if size > MAX_CERTIFICATE_BYTES or bool(size) == is_local:
        raise FrameError("it is not a parameter server of pdrun")
    shown = _receive_exactly(connection, size)
    proof = _receive_exactly(connection, MAC_BYTES)
    if not hmac.compare_digest(proof, _mac(key, b"server", nonces, shown)):
        raise AuthenticationError(
            "the parameter server has another key",
            where=address,
            hint="start workers and servers with one token",
        )
    if not is_local:
        context = certificate.make_client_context(shown)
        connection = context.wrap_socket(connection)
    connection.sendall(_mac(key, b"worker", nonces, shown))
    _receive_exactly(connection, 1)
    channel = Channel(connection)
    channel.set_timeout(seconds)
    return channel


def deadline_error(what: str, seconds: float) -> DeadlineExceeded:
    """Return the error for a reply that did not arrive in time."""
    return DeadlineExceeded(f"{what}: no answer within {seconds:g} s")
