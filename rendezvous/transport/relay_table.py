"""
The scheduler's view of its relays: each agent behind one is a peer of its own, named
``RELAY/NUMBER``.

What is said to agents behind a relay is collected and goes out in few frames (`flush`, at the
latest before the next wait). When a relay's connection ends, so do those of all its agents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdrun.rendezvous.protocol.codec import CodecError, decode
from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.transport.base import Alive, Arrived, Complaint, Gone, Incoming
from pdrun.rendezvous.transport.relay_frames import (
    FULL,
    Ended,
    Heard,
    Item,
    Pulse,
    Said,
    pack,
    unpack,
)


class Relays:
    """All relays of one transport. ``put`` sends a frame to a relay's connection."""

    def __init__(self, put: Callable[[Peer, bytes], None]) -> None:
        self._put = put
        self._agents: dict[Peer, set[Peer]] = {}
        """relay -> the agents behind it that are known and not ended"""
        self._closed: dict[Peer, set[int]] = {}
        """
        relay -> connections that were told to end, and whose end the relay has not reported: they
        are not heard
        """
        self._outbox: dict[Peer, list[Item]] = {}
        self._waiting: dict[Peer, int] = {}
        """relay -> bytes in its outbox"""

    def __contains__(self, peer: Peer) -> bool:
        relay, slash, _ = peer.partition("/")
        return bool(slash) and peer in self._agents.get(relay, ())

    def open(self, relay: Peer, frame: bytes) -> Sequence[Incoming]:
        """
        Return what a frame of a relay means.

        Raises:
            CodecError: it is no frame. An agent's word that is no message ends that agent's
                connection only.
        """
        agents = self._agents.setdefault(relay, set())
        closed = self._closed.setdefault(relay, set())
        found: list[Incoming] = []
        for item in unpack(frame):
            match item:
                case Said(number) if number in closed:
                    pass
                case Said(number, role, data):
                    found += self._said(relay, f"{relay}/{number}", role, data, agents)
                case Ended(number):
                    closed.discard(number)
                    if (peer := f"{relay}/{number}") in agents:
                        agents.discard(peer)
                        found.append(Gone(peer))
                case Heard(pulse, numbers):
                    found.append(
                        Alive(tuple(peer for n in numbers if (peer := f"{relay}/{n}") in agents))
                    )
                    self._queue(relay, Pulse(pulse), 16)
                case Pulse():
                    raise CodecError("a pulse goes to a relay, not from it")
        return found

    def _said(
        self, relay: Peer, peer: Peer, role: str, data: bytes, agents: set[Peer]
    ) -> Sequence[Incoming]:
        new = peer not in agents
        try:
            envelope = decode(data)
        except CodecError as error:
            agents.add(peer)
            self.close(peer)
            return (
                Complaint(f"an agent behind a relay was cut off: {error}"),
                *(() if new else (Gone(peer),)),
            )
        agents.add(peer)
        return (Arrived(peer, role, envelope),)

    def send(self, peer: Peer, data: bytes) -> None:
        """Queue an envelope for an agent behind a relay."""
        relay, _, number = peer.partition("/")
        self._queue(relay, Said(int(number), "", data), len(data))

    def close(self, peer: Peer) -> None:
        """
        Have a relay end one connection, after what was sent to it; no Gone is reported for it.
        """
        relay, _, number = peer.partition("/")
        self._agents[relay].discard(peer)
        self._closed[relay].add(int(number))
        self._queue(relay, Ended(int(number)), 16)

    def ended(self, peer: Peer) -> Sequence[Incoming]:
        """A connection, a relay's perhaps, is over: return what that means."""
        self._outbox.pop(peer, None)
        self._waiting.pop(peer, None)
        self._closed.pop(peer, None)
        return (
            *(Gone(agent, between=True) for agent in sorted(self._agents.pop(peer, ()))),
            Gone(peer),
        )

    def flush(self) -> None:
        """Send what is queued."""
        boxes = self._outbox
        self._outbox = {}
        self._waiting.clear()
        for relay, items in boxes.items():
            for frame in pack(items):
                self._put(relay, frame)

    def _queue(self, relay: Peer, item: Item, size: int) -> None:
        self._outbox.setdefault(relay, []).append(item)
        self._waiting[relay] = self._waiting.get(relay, 0) + size
        if self._waiting[relay] >= FULL:
            items = self._outbox.pop(relay)
            del self._waiting[relay]
            for frame in pack(items):
                self._put(relay, frame)
