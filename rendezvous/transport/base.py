"""
The interface of transports, and the transport within one process.

`pdrun.rendezvous.transport.zmq_server` carries the same envelopes over TCP. A transport knows
connections, not nodes: it reports what has arrived and ended, in order for each connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdrun.quick_dataclass import dataclass
from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.protocol.messages import Envelope


@dataclass(frozen=True)
class EnvelopeArrived:
    """A complete, well-formed envelope."""

    peer: Peer
    role: str
    """The role that the connection's key proves; empty with ``--insecure``."""
    envelope: Envelope


@dataclass(frozen=True)
class PeerGone:
    """A connection has ended; nothing more arrives from it."""

    peer: Peer
    between: bool = False
    """True: because a relay in between has ended."""


@dataclass(frozen=True)
class ProtocolViolation:
    """A hostile or broken message was dropped; for the log."""

    text: str


@dataclass(frozen=True)
class FdReady:
    """A watched descriptor is readable."""

    fd: int


@dataclass(frozen=True)
class PeersAlive:
    """
    Connections that have sent heartbeats and received the answers since the last report of their
    relay.
    """

    peers: tuple[Peer, ...]


TransportEvent = EnvelopeArrived | PeerGone | ProtocolViolation | FdReady | PeersAlive


class ServerTransport(Protocol):
    """The scheduler's side of a transport."""

    def poll(self, timeout: float) -> Sequence[TransportEvent]:
        """Wait for at most ``timeout`` seconds and return what has happened."""
        ...

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """
        Send without waiting. A connection that does not read is ended and reported as PeerGone.
        """
        ...

    def close_peer(self, peer: Peer) -> None:
        """End a connection after a moment for queued messages; no PeerGone is reported for it."""
        ...

    def close(self, timeout: float) -> None:
        """End all connections, after at most ``timeout`` seconds for queued messages."""
        ...


class MemoryHub:
    """A ServerTransport whose clients are in the same process and thread; `poll` never waits."""

    def __init__(self) -> None:
        self._incoming: list[TransportEvent] = []
        self._clients: dict[Peer, MemoryTransport] = {}
        self._count = 0

    def connect(self, role: str = "agent") -> MemoryTransport:
        """Return the client's side of a new connection."""
        self._count += 1
        client = MemoryTransport(self, f"memory-{self._count}", role)
        self._clients[client.peer] = client
        return client

    def poll(self, timeout: float = 0.0) -> Sequence[TransportEvent]:
        """Return what the clients have sent since the last call."""
        result = self._incoming
        self._incoming = []
        return result

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Add a message to the client's inbox."""
        if client := self._clients.get(peer):
            client.inbox.append(envelope)

    def close_peer(self, peer: Peer) -> None:
        """End a connection; the client's inbox stays readable."""
        if client := self._clients.pop(peer, None):
            client.is_closed = True

    def close(self, timeout: float = 0.0) -> None:
        """End every connection."""
        for peer in list(self._clients):
            self.close_peer(peer)

    def deliver_envelope(self, client: MemoryTransport, envelope: Envelope) -> None:
        """Take a message of a client."""
        if client.peer in self._clients:
            self._incoming.append(EnvelopeArrived(client.peer, client.role, envelope))

    def on_client_closed(self, client: MemoryTransport) -> None:
        """A client has closed its side."""
        if self._clients.pop(client.peer, None):
            self._incoming.append(PeerGone(client.peer))


class MemoryTransport:
    """The client's side of a MemoryHub connection."""

    def __init__(self, hub: MemoryHub, peer: Peer, role: str) -> None:
        self.hub = hub
        self.peer = peer
        self.role = role
        self.inbox: list[Envelope] = []
        self.is_closed = False

    def send(self, envelope: Envelope) -> None:
        """Send a message to the hub."""
        self.hub.deliver_envelope(self, envelope)

    def take_envelopes(self) -> list[Envelope]:
        """Return the messages since the last call."""
        result = self.inbox
        self.inbox = []
        return result

    def close(self) -> None:
        """Close the connection without a message, as a process that dies does."""
        self.is_closed = True
        self.hub.on_client_closed(self)
