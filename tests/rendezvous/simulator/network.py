"""
Connections as TCP with ZeroMQ's heartbeats makes them: in order and whole while they live; cut
without a word, one-way or both ways; found dead by either side after SILENCE; reset at once when a
process at the other end dies.

What was on the way when a connection ends is lost. What was sent into a cut waits, and arrives when
the cut is healed and the connection still lives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.protocol.messages import Envelope
from pdrun.rendezvous.transport.base import EnvelopeArrived, PeerGone, TransportEvent

from .world import World

SILENCE = 4.0
"""
Seconds of silence after which ZeroMQ's heartbeats (every 1 s, 3 s of patience) end a connection.
"""


class Client(Protocol):
    """What the network needs to know of an agent."""

    node: str
    frozen: bool
    frozen_at: float
    dead: bool

    def arrived(self, connection: Connection, envelope: Envelope) -> None: ...
    def disconnected(self, connection: Connection) -> None: ...


@dataclass
class Way:
    """What is between a node and the scheduler."""

    up: bool = True
    down: bool = True
    down_since: float = 0.0
    """While not both ways are open: since when."""
    delay: float = 0.002
    stall: float = 0.0
    """Loss: each message is late by up to so much, as retransmission makes it."""


@dataclass(eq=False)
class Connection:
    """One connection of one agent."""

    peer: Peer
    client: Client
    role: str
    here: bool = True
    """Whether the client's side lives."""
    there: bool = True
    """Whether the scheduler's side lives."""
    up_at: float = 0.0
    down_at: float = 0.0
    up_held: list[Envelope] = field(default_factory=list)
    down_held: list[Envelope] = field(default_factory=list)


class Network:
    """
    Implements `pdrun.rendezvous.transport.base.ServerTransport`; ``wake`` is called when something
    lies in the box.
    """

    def __init__(self, world: World, wake: Callable[[], None]) -> None:
        self.world = world
        self.wake = wake
        self.listening = False
        self.ways: dict[str, Way] = {}
        self.connections: dict[Peer, Connection] = {}
        self.sends_left: int | None = None
        """
        After so many sends the scheduler process dies in the middle of its work; None: it does not.
        """
        self._box: list[TransportEvent] = []
        self._made = 0

    @property
    def waiting(self) -> Sequence[TransportEvent]:
        """What the next poll will return."""
        return self._box

    # The agents' side
    # ----------------

    def way(self, node: str) -> Way:
        """Return what is between ``node`` and the scheduler."""
        return self.ways.setdefault(node, Way())

    def connect(self, client: Client, role: str = "agent") -> Connection | None:
        """Return a new connection; None when nobody answers."""
        way = self.way(client.node)
        if not (self.listening and way.up and way.down):
            return None
        self._made += 1
        connection = Connection(f"c{self._made}", client, role)
        self.connections[connection.peer] = connection
        return connection

    def client_send(self, connection: Connection, envelope: Envelope) -> None:
        """Send towards the scheduler."""
        if connection.here:
            connection.up_at = self._arrival(connection, connection.up_at)
            self.world.after(
                connection.up_at - self.world.now, self._at_server, connection, envelope
            )

    def client_gone(self, connection: Connection, *, silently: bool = False) -> None:
        """
        The client's side ends: by its process's death, or ``silently`` with its machine's power.
        """
        if not connection.here:
            return
        connection.here = False
        if silently or not self.way(connection.client.node).up:
            self.world.after(SILENCE, self._server_gives_up, connection)
        else:
            arrival = self._arrival(connection, connection.up_at)
            self.world.after(arrival - self.world.now, self._gone, connection)

    # Faults
    # ------

    def cut(self, node: str, *, up: bool, down: bool) -> None:
        """Let nothing through in the directions that are True."""
        way = self.way(node)
        if way.up and way.down:
            way.down_since = self.world.now
        way.up, way.down = way.up and not up, way.down and not down
        self.watch(node)

    def heal(self, node: str) -> None:
        """Let everything through again, with what waited first."""
        way = self.way(node)
        way.up = way.down = True
        for connection in list(self.connections.values()):
            if connection.client.node == node:
                held, connection.up_held = connection.up_held, []
                for envelope in held:
                    self._at_server(connection, envelope)
                held, connection.down_held = connection.down_held, []
                for envelope in held:
                    self._at_client(connection, envelope)

    def watch(self, node: str) -> None:
        """
        Something is wrong with a node: see in SILENCE whether its connections must be found dead.
        """
        for connection in self.connections.values():
            if connection.client.node == node:
                self.world.after(SILENCE, self._judge, connection)

    def _judge(self, connection: Connection) -> None:
        way, client = self.way(connection.client.node), connection.client
        cut = not (way.up and way.down) and self.world.now - way.down_since >= SILENCE - 0.01
        frozen = client.frozen and self.world.now - client.frozen_at >= SILENCE - 0.01
        if cut or frozen or client.dead or not connection.here:  # a heartbeat needs both ways
            self._server_gives_up(connection)
            self._client_gives_up(connection)

    def _server_gives_up(self, connection: Connection) -> None:
        self._gone(connection)

    def _client_gives_up(self, connection: Connection) -> None:
        if connection.here and not connection.client.frozen and not connection.client.dead:
            connection.here = False
            connection.client.disconnected(connection)

    # On the way
    # ----------

    def _arrival(self, connection: Connection, last: float) -> float:
        way = self.way(connection.client.node)
        late = self.world.random.random() * way.stall if way.stall else 0.0
        return max(last, self.world.now + way.delay * (0.5 + self.world.random.random()) + late)

    def _at_server(self, connection: Connection, envelope: Envelope) -> None:
        if not self.way(connection.client.node).up:
            connection.up_held.append(envelope)
        elif connection.there:
            self._box.append(EnvelopeArrived(connection.peer, connection.role, envelope))
            self.wake()

    def _at_client(self, connection: Connection, envelope: Envelope) -> None:
        if not self.way(connection.client.node).down:
            connection.down_held.append(envelope)
        elif connection.here:
            connection.client.arrived(connection, envelope)

    def _gone(self, connection: Connection) -> None:
        if connection.there:
            connection.there = False
            self.connections.pop(connection.peer, None)
            self._box.append(PeerGone(connection.peer))
            self.wake()

    def _reset(self, connection: Connection) -> None:
        if connection.here and self.way(connection.client.node).down:
            self._client_gives_up(connection)
        elif connection.here:
            self.world.after(SILENCE, self._client_gives_up, connection)

    # The scheduler's side
    # --------------------

    def process_died(self) -> None:
        """
        The scheduler's process ended: its kernel resets every connection, and what lay unread is
        lost.
        """
        self.listening = False
        self._box.clear()
        for connection in list(self.connections.values()):
            connection.there = False
            self._reset(connection)
        self.connections.clear()

    def poll(self, timeout: float) -> Sequence[TransportEvent]:
        """Return what has come in."""
        box, self._box = self._box, []
        return box

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Send towards an agent."""
        if self.sends_left is not None:
            self.sends_left -= 1
            if self.sends_left < 0:
                raise SchedulerDied
        connection = self.connections.get(peer)
        if connection and connection.there:
            connection.down_at = self._arrival(connection, connection.down_at)
            self.world.after(
                connection.down_at - self.world.now, self._at_client, connection, envelope
            )

    def close_peer(self, peer: Peer) -> None:
        """End a connection after what was sent to it."""
        connection = self.connections.pop(peer, None)
        if connection:
            connection.there = False
            arrival = self._arrival(connection, connection.down_at)
            self.world.after(arrival - self.world.now, self._reset, connection)

    def close(self, timeout: float) -> None:
        """Nothing to do: the process ends."""


class SchedulerDied(BaseException):
    """The scheduler's process was killed in the middle of what it did."""
