"""
How messages reach the scheduler: a protocol, and the transport that never leaves the process.

`pdrun.rendezvous.transport.zmq_server` carries the same envelopes over TCP. A transport knows
connections, not nodes: it reports what arrived and what ended, in order for each connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.protocol.messages import Envelope


@dataclass(frozen=True)
class EnvelopeArrived:
    """A whole, well-formed envelope."""

    peer: Peer
    role: str
    """The role that the connection's key proves; empty when nothing was proved (``--insecure``)."""
    envelope: Envelope


@dataclass(frozen=True)
class PeerGone:
    """A connection has ended; nothing more comes from it."""

    peer: Peer
    between: bool = False
    """True: because a relay between has ended."""


@dataclass(frozen=True)
class ProtocolViolation:
    """Something hostile or broken was at the door and was dropped; for the log."""

    text: str


@dataclass(frozen=True)
class FdReady:
    """A watched descriptor is readable."""

    fd: int


@dataclass(frozen=True)
class PeersAlive:
    """
    These connections were heard, and hear what they are answered, since the last time: in place of
    heartbeats.
    """

    peers: tuple[Peer, ...]


TransportEvent = EnvelopeArrived | PeerGone | ProtocolViolation | FdReady | PeersAlive


class ServerTransport(Protocol):
    """The scheduler's side."""

    def poll(self, timeout: float) -> Sequence[TransportEvent]:
        """Wait for at most ``timeout`` seconds and return what came in."""
        ...

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Send without waiting; a connection that cannot take it is ended and reported as Gone."""
        ...

    def close_peer(self, peer: Peer) -> None:
        """
        End a connection after what was sent to it had time to leave; no Gone is reported for it.
        """
        ...

    def close(self, timeout: float) -> None:
        """End everything, giving what was sent at most ``timeout`` seconds to leave."""
        ...


class MemoryHub:
    """A ServerTransport whose clients live in the same process and thread; `poll` never waits."""

    def __init__(self) -> None:
        self._incoming: list[TransportEvent] = []
        self._clients: dict[Peer, MemoryTransport] = {}
        self._count = 0

    def connect(self, role: str = "agent") -> MemoryTransport:
        """Return the client's end of a new connection."""
        self._count += 1
        client = MemoryTransport(self, f"memory-{self._count}", role)
        self._clients[client.peer] = client
        return client

    def poll(self, timeout: float = 0.0) -> Sequence[TransportEvent]:
        """Return what the clients have done since the last call."""
        result = self._incoming
        self._incoming = []
        return result

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Lay a message into the client's box."""
        if client := self._clients.get(peer):
            client.inbox.append(envelope)

    def close_peer(self, peer: Peer) -> None:
        """End a connection; what lies in the client's box stays readable."""
        if client := self._clients.pop(peer, None):
            client.is_closed = True

    def close(self, timeout: float = 0.0) -> None:
        """End every connection."""
        for peer in list(self._clients):
            self.close_peer(peer)

    def deliver_envelope(self, client: MemoryTransport, envelope: Envelope) -> None:
        """Take a message from a client."""
        if client.peer in self._clients:
            self._incoming.append(EnvelopeArrived(client.peer, client.role, envelope))

    def on_client_closed(self, client: MemoryTransport) -> None:
        """Take note that a client has closed its end."""
        if self._clients.pop(client.peer, None):
            self._incoming.append(PeerGone(client.peer))


class MemoryTransport:
    """The client's end of a MemoryHub connection."""

    def __init__(self, hub: MemoryHub, peer: Peer, role: str) -> None:
        self.hub = hub
        self.peer = peer
        self.role = role
        self.inbox: list[Envelope] = []
        self.is_closed = False

    def send(self, envelope: Envelope) -> None:
        """Hand a message to the hub."""
        self.hub.deliver_envelope(self, envelope)

    def take_envelopes(self) -> list[Envelope]:
        """Return what has come since the last call."""
        result = self.inbox
        self.inbox = []
        return result

    def close(self) -> None:
        """End the connection, as a process does that dies."""
        self.is_closed = True
        self.hub.on_client_closed(self)
