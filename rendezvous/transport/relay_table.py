"""
The scheduler's view of its relays. Each agent behind one is a peer named ``RELAY/NUMBER``.

Messages for agents behind a relay are collected and sent in few frames by `flush`, at the latest
before the next wait. When a relay's connection ends, so do those of all its agents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdrun.rendezvous.protocol.codec import CodecError, decode
from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.transport.base import (
    EnvelopeArrived,
    PeerGone,
    PeersAlive,
    ProtocolViolation,
    TransportEvent,
)
from pdrun.rendezvous.transport.relay_frames import (
    FULL_FRAME_BYTES,
    AgentClosed,
    AgentFrame,
    AliveReport,
    RelayItem,
    RelayPulse,
    pack_frames,
    unpack_frame,
)


class RelayTable:
    """All relays of one transport. ``put`` sends a frame to a relay's connection."""

    def __init__(self, put: Callable[[Peer, bytes], None]) -> None:
        self._send_bytes = put
        self._agents: dict[Peer, set[Peer]] = {}
        """relay -> the known agents behind it."""
        self._closed: dict[Peer, set[int]] = {}
        """
        relay -> connections that are being ended, until the relay reports their end. Their messages
        are ignored.
        """
        self._outbox: dict[Peer, list[RelayItem]] = {}
        self._queued_bytes: dict[Peer, int] = {}
        """relay -> bytes in its outbox."""

    def __contains__(self, peer: Peer) -> bool:
        relay, slash, _ = peer.partition("/")
        return bool(slash) and peer in self._agents.get(relay, ())

    def read_frame(self, relay: Peer, frame: bytes) -> Sequence[TransportEvent]:
        """
        Return the events of a relay's frame.

        Raises:
            CodecError: it is not a frame. An invalid envelope in it ends that agent's connection
                only.
        """
        agents = self._agents.setdefault(relay, set())
        closed = self._closed.setdefault(relay, set())
        found: list[TransportEvent] = []
        for item in unpack_frame(frame):
            match item:
                case AgentFrame(number) if number in closed:
                    pass
                case AgentFrame(number, role, data):
                    found += self._read_envelope(relay, f"{relay}/{number}", role, data, agents)
                case AgentClosed(number):
                    closed.discard(number)
                    if (peer := f"{relay}/{number}") in agents:
                        agents.discard(peer)
                        found.append(PeerGone(peer))
                case AliveReport(pulse, numbers):
                    found.append(
                        PeersAlive(
                            tuple(peer for n in numbers if (peer := f"{relay}/{n}") in agents)
                        )
                    )
                    self._queue_item(relay, RelayPulse(pulse), 16)
                case RelayPulse():
                    raise CodecError("only the scheduler sends a pulse")
        return found

    def _read_envelope(
        self, relay: Peer, peer: Peer, role: str, data: bytes, agents: set[Peer]
    ) -> Sequence[TransportEvent]:
        new = peer not in agents
        try:
            envelope = decode(data)
        except CodecError as error:
            agents.add(peer)
            self.close_agent(peer)
            return (
                ProtocolViolation(f"an agent behind a relay was cut off: {error}"),
                *(() if new else (PeerGone(peer),)),
            )
        agents.add(peer)
        return (EnvelopeArrived(peer, role, envelope),)

    def send(self, peer: Peer, data: bytes) -> None:
        """Queue an envelope for an agent behind a relay."""
        relay, _, number = peer.partition("/")
        self._queue_item(relay, AgentFrame(int(number), "", data), len(data))

    def close_agent(self, peer: Peer) -> None:
        """
        Make a relay end one connection, after what was sent to it; no PeerGone is reported for it.
        """
        relay, _, number = peer.partition("/")
        self._agents[relay].discard(peer)
        self._closed[relay].add(int(number))
        self._queue_item(relay, AgentClosed(int(number)), 16)

    def on_peer_ended(self, peer: Peer) -> Sequence[TransportEvent]:
        """A connection, perhaps of a relay, has ended: return the events."""
        self._outbox.pop(peer, None)
        self._queued_bytes.pop(peer, None)
        self._closed.pop(peer, None)
        return (
            *(PeerGone(agent, between=True) for agent in sorted(self._agents.pop(peer, ()))),
            PeerGone(peer),
        )

    def flush(self) -> None:
        """Send what is queued."""
        boxes = self._outbox
        self._outbox = {}
        self._queued_bytes.clear()
        for relay, items in boxes.items():
            for frame in pack_frames(items):
                self._send_bytes(relay, frame)

    def _queue_item(self, relay: Peer, item: RelayItem, size: int) -> None:
        self._outbox.setdefault(relay, []).append(item)
        self._queued_bytes[relay] = self._queued_bytes.get(relay, 0) + size
        if self._queued_bytes[relay] >= FULL_FRAME_BYTES:
            items = self._outbox.pop(relay)
            del self._queued_bytes[relay]
            for frame in pack_frames(items):
                self._send_bytes(relay, frame)
