"""
A relay: takes in the connections of many agents and carries them over one connection to the
scheduler.

    agent --CURVE--> relay --CURVE--> scheduler            an agent does not know whether it speaks to a relay

It does what costs most in a large job, and decides nothing: handshakes, limits, and the heartbeats,
which it answers itself as long as the scheduler has answered it a moment ago (so a cut or a frozen
scheduler is felt by every agent as without a relay). Everything else passes as it came. When the
scheduler is lost the relay ends its agents' connections; they come back by themselves, here or
elsewhere, and resume.

``python -m pdrun.rendezvous.scheduler.relay_main`` is one beside the scheduler, started by it:
several of them accept from the one listening socket of the job, which they all hold. `pdrun relay`
is one on another host.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pdrun import process_setup as early
from pdrun.clock import Clock, SystemClock
from pdrun.endpoint import Endpoint
from pdrun.errors import AuthenticationError, RendezvousError
from pdrun.rendezvous.protocol import codec, security
from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.transport import relay_frames as relayed
from pdrun.rendezvous.transport.base import Gone, Incoming
from pdrun.rendezvous.transport.listen import bind_listener
from pdrun.rendezvous.transport.relay_frames import ALONE, BESIDE, Ended, Heard, Item, Pulse, Said
from pdrun.rendezvous.transport.zmq_server import ZmqServer
from pdrun.rendezvous.transport.zmq_util import FAR_AWAY, monitor, monitor_event

BEAT = 1.0
"""Seconds between two reports of who was heard."""
FRESH = 3.0
"""Seconds after the scheduler's last answer for which the relay answers heartbeats in its place."""
RETRY = 0.2
CONNECT = 10.0
"""Seconds that the scheduler has to let the relay in."""
STATUS_EVERY = 5.0
"""Seconds between two lines about a scheduler that is not there."""

_HEARTBEAT = re.compile(
    rb'\{"sender":"[0-9a-f]{1,64}","incarnation":\d{1,9},"sequence":0,"type":"Heartbeat",'
    rb'"body":\{"number":(\d{1,15}),"echo":(\d{1,15})\}\}'
)
ECHO = b'{"sender":"%s","incarnation":0,"sequence":0,"type":"Echo","body":{"number":%%d}}'
"""As the codec writes it; these two are most of what a relay reads and says."""


class Raw(NamedTuple):
    """A frame of an agent, as it came."""

    peer: Peer
    role: str
    data: bytes


class Front(ZmqServer):
    """
    The agents' side of a relay: the scheduler's own transport, which reads nothing of what it
    takes.
    """

    roles = ("agent", "view")

    def _open(self, peer: Peer, role: str, data: bytes) -> Sequence[Incoming]:
        return (Raw(peer, role, data),)  # type: ignore[return-value]

    def put(self, peer: Peer, data: bytes) -> None:
        """
        Send bytes as they are; a connection that does not take them is ended and reported as Gone.
        """
        self._put(peer, data)

    def wake_for(self, uplink: Uplink) -> None:
        """Have `poll` return when the scheduler has said something, too."""
        for one in (uplink.socket, uplink.monitor):
            self._poller.register(one, self._zmq.POLLIN)


class Uplink:
    """The relay's connection to the scheduler."""

    def __init__(self, endpoint: Endpoint, secret: Secret | None) -> None:
        import zmq

        self._zmq = zmq
        self.endpoint = endpoint
        self.up = self.over = self.refused = False
        self.context = zmq.Context()
        self.socket = sock = self.context.socket(zmq.DEALER)
        for option, value in (
            (zmq.RECONNECT_IVL, FAR_AWAY),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, relayed.LIMIT),
            (zmq.SNDHWM, 0),
            (zmq.HANDSHAKE_IVL, 3000),
            (zmq.CONNECT_TIMEOUT, 3000),
            (zmq.HEARTBEAT_IVL, 1000),
            (zmq.HEARTBEAT_TIMEOUT, 3000),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.IPV6, int(":" in endpoint.host)),
        ):
            sock.setsockopt(option, value)
        if secret:
            keys = security.key_pair(secret, "relay")
            sock.curve_publickey = keys.public
            sock.curve_secretkey = keys.private
            sock.curve_serverkey = security.key_pair(secret, "server").public
        self.monitor = monitor(sock)
        sock.connect(endpoint.zmq)

    def send(self, items: Iterable[Item]) -> None:
        """Send items; what a connection that is over does not take is lost with it."""
        for frame in relayed.pack(items):
            try:
                self.socket.send(frame, self._zmq.NOBLOCK)
            except self._zmq.Again:
                self.over = True

    def read(self) -> list[Item]:
        """
        Return what the scheduler says; notes its coming and going in ``up``, ``over`` and
        ``refused``.
        """
        zmq = self._zmq
        found = []
        while self.monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event, _ = monitor_event(self.monitor)
            self.up = self.up or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.refused = self.refused or event in (
                zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            )
            self.over = (
                self.over
                or self.refused
                or event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED)
            )
        while True:
            try:
                found += relayed.unpack(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return found
            except codec.CodecError:
                self.over = True
                return found

    def close(self) -> None:
        """End it at once."""
        self.socket.monitor(None, 0)
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
        self.context.term()


class Relay:
    """Carries between a `Front` and an `Uplink`. Call `turn` until it returns False."""

    def __init__(
        self, front: Front, uplink: Uplink, clock: Clock | None = None, *, alone: bool = False
    ) -> None:
        """``alone``: agents know this relay's own address, not the scheduler's."""
        self._front = front
        self._uplink = uplink
        self._echo = ECHO % (ALONE if alone else BESIDE).encode()
        self._clock = clock or SystemClock()
        self._numbers: dict[Peer, int] = {}
        self._peers: dict[int, Peer] = {}
        self._made = self._pulse = 0
        self._heard: set[int] = set()
        self._answered = self._clock.monotonic()
        self._beat_at = self._answered
        self.judged = False
        """Whether an agent was told the verdict: the job ends, and the scheduler with it."""
        front.wake_for(uplink)

    def turn(self, timeout: float = 0.25) -> bool:
        """
        Wait for something, for at most ``timeout`` seconds, and pass it on; False when the
        scheduler is lost.
        """
        items: list[Item] = []
        now = self._clock.monotonic()
        found = self._front.poll(min(timeout, max(0.0, self._beat_at - now)))
        now = self._clock.monotonic()
        for one in found:
            if isinstance(one, Raw):
                self._said(one, items, now)
            elif isinstance(one, Gone):
                self._forget(one.peer, items)
        if now >= self._beat_at:
            self._pulse = self._pulse + 1
            self._beat_at = now + BEAT
            items.append(Heard(self._pulse, tuple(sorted(self._heard))))
            self._heard.clear()
        self._uplink.send(items)
        for item in self._uplink.read():
            self._told(item, now)
        return not self._uplink.over

    def _said(self, raw: Raw, items: list[Item], now: float) -> None:
        number = self._numbers.get(raw.peer)
        if number is not None and (beat := _HEARTBEAT.fullmatch(raw.data)):
            self._beaten(raw.peer, number, int(beat[1]), int(beat[2]), now)
            return
        if number is None:
            self._made += 1
            number = self._numbers[raw.peer] = self._made
            self._peers[number] = raw.peer
        items.append(Said(number, raw.role, raw.data))

    def _beaten(self, peer: Peer, number: int, beat: int, echo: int, now: float) -> None:
        """
        Answer a heartbeat in the scheduler's place; who does not hear the answers is not called
        heard.
        """
        if beat - echo <= 2:
            self._heard.add(number)
        if now - self._answered < FRESH:
            self._front.put(peer, self._echo % beat)

    def _told(self, item: Item, now: float) -> None:
        match item:
            case Said(number, _, data) if peer := self._peers.get(number):
                self.judged = self.judged or b'"type":"Verdict"' in data
                self._front.put(peer, data)
            case Ended(number) if peer := self._peers.get(number):
                self._front.close_peer(peer)
                self._drop(peer, number)
                self._uplink.send((Ended(number),))  # nothing more comes from it
            case Pulse():
                self._answered = now
            case _:
                pass

    def _forget(self, peer: Peer, items: list[Item]) -> None:
        if (number := self._numbers.get(peer)) is not None:
            self._drop(peer, number)
            items.append(Ended(number))

    def _drop(self, peer: Peer, number: int) -> None:
        del self._numbers[peer], self._peers[number]
        self._heard.discard(number)


def serve(
    listen_fd: int,
    scheduler: Endpoint,
    secret: Secret | None,
    *,
    until: float | None = None,
    crowd: int = 0,
    alone: bool = False,
) -> bool:
    """
    Relay between the agents that come to ``listen_fd`` and ``scheduler`` until the scheduler is
    lost.

    Return whether that was the end of the job.

    Args:
        listen_fd: a listening TCP socket; a copy of it is used, and closed.
        crowd: agents that may come at once.
        until: monotonic seconds by which the scheduler must have let the relay in; None: CONNECT
            from now.
        alone: whether it is a relay of its own, of which the agents are to hear.

    Raises:
        RendezvousError, AuthenticationError: the scheduler was not reached, or holds another token.
    """
    uplink = Uplink(scheduler, secret)
    front: Front | None = None
    try:
        _await(uplink, time.monotonic() + CONNECT if until is None else until)
        front = Front(secret, listen_fd=os.dup(listen_fd), insecure=secret is None, crowd=crowd)
        relay = Relay(front, uplink, alone=alone)
        while relay.turn():
            pass
        return relay.judged
    finally:
        if front is not None:
            front.close(0.2)
        uplink.close()


def serve_alone(
    scheduler: Endpoint,
    listen: Endpoint,
    secret: Secret | None,
    *,
    patience: float,
    say: Callable[[str], None],
) -> int:
    """
    Be a relay of its own until the job is over (0), or no scheduler was there for ``patience``
    seconds (69).

    Raises:
        ConfigError: ``listen`` cannot be listened on. AuthenticationError: the scheduler holds
            another token.
    """
    listener = bind_listener(listen, backlog=1024)
    here = Endpoint(*listener.getsockname()[:2])
    say(f"relay to {scheduler} on {here}: start the nodes with --scheduler {here} --no-serve")
    lost_at = said_at = time.monotonic()
    with listener:
        while True:
            try:
                until = max(lost_at + patience, time.monotonic() + RETRY)
                if serve(
                    listener.fileno(),
                    scheduler,
                    secret,
                    until=min(until, said_at + STATUS_EVERY),
                    alone=True,
                ):
                    return 0
                lost_at = said_at = time.monotonic()
                say(f"the scheduler at {scheduler} was lost; waiting for it for {patience:g} s")
            except AuthenticationError:
                raise
            except RendezvousError as error:
                now = time.monotonic()
                if now - lost_at > patience:
                    say(f"error: {error}")
                    return error.exit_code
                if now >= said_at + STATUS_EVERY:
                    said_at = now
                    left = patience - (now - lost_at)
                    say(
                        f"the scheduler at {scheduler} does not answer; waiting for it for {left:.0f} s more"
                    )
                time.sleep(RETRY)


def _await(uplink: Uplink, until: float) -> None:
    import select

    from zmq import FD

    poll = select.poll()
    poll.register(int(uplink.monitor.getsockopt(FD)), select.POLLIN)
    while not uplink.up:
        uplink.read()
        if uplink.refused:
            raise AuthenticationError(
                "the token differs, or that is no scheduler", where=str(uplink.endpoint)
            )
        if uplink.over or time.monotonic() >= until:
            raise RendezvousError("the scheduler was not reached", where=str(uplink.endpoint))
        if not uplink.up:
            poll.poll(50)


def main() -> int:
    """
    Relay as the scheduler's child.

    stdin: one JSON line {listen_fd, host, port, secret, crowd}. It ends with its connection to the
    scheduler.
    """
    early.begin()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = codec.load_json(sys.stdin.buffer.readline(), limit=1 << 16)
    secret = Secret.from_hex(order["secret"]) if order["secret"] else None
    scheduler = Endpoint(order["host"], order["port"])
    try:
        serve(order["listen_fd"], scheduler, secret, crowd=order["crowd"])
    except RendezvousError as error:
        print(json.dumps({"error": str(error)}), file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
