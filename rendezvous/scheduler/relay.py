"""
A relay: accepts the connections of many agents and carries them over one connection.

    agent --CURVE--> relay --CURVE--> scheduler      an agent does not know about the relay

It does what costs most in a large job, and decides nothing: handshakes, limits and heartbeats. It
answers heartbeats itself while the scheduler has answered the relay a moment ago, so every agent
notices a cut or a frozen scheduler as without a relay. All other messages pass unchanged. When the
scheduler is lost, the relay ends its agents' connections; the agents reconnect, to this relay or to
another one. `pdrun.rendezvous.scheduler.relay_main` runs relays.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdrun.clock import Clock, SystemClock
from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol import codec, security
from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.transport.base import FdReady, PeerGone, TransportEvent
from pdrun.rendezvous.transport.relay_frames import (
    CHILD_RELAY_SENDER,
    MAX_FRAME_BYTES,
    STANDALONE_RELAY_SENDER,
    AgentClosed,
    AgentFrame,
    AliveReport,
    RelayItem,
    RelayPulse,
    pack_frames,
    unpack_frame,
)
from pdrun.rendezvous.transport.zmq_server import ZmqServer
from pdrun.rendezvous.transport.zmq_util import NEVER_RECONNECT_MS, open_monitor, read_monitor_event

REPORT_SECONDS = 1.0
"""Time between two reports of agents that are alive."""
SIGN_OF_LIFE = b"\n"
FRESH_SECONDS = 3.0
"""Time after the scheduler's last answer for which the relay answers heartbeats in its place."""

_HEARTBEAT_PATTERN = re.compile(
    rb'\{"sender":"[0-9a-f]{1,64}","incarnation":\d{1,9},"sequence":0,"type":"Heartbeat",'
    rb'"body":\{"number":(\d{1,15}),"echo":(\d{1,15})\}\}'
)
ECHO_TEMPLATE = b'{"sender":"%s","incarnation":0,"sequence":0,"type":"Echo","body":{"number":%%d}}'
"""As the codec writes it. A relay mostly reads heartbeats and writes echoes."""


class RawFrame(NamedTuple):
    """A frame of an agent, as it arrived."""

    peer: Peer
    role: str
    data: bytes


class RelayServer(ZmqServer):
    """The agents' side of a relay: the scheduler's transport, but frames are not parsed."""

    roles = ("agent", "view")

    def _parse_frame(self, peer: Peer, role: str, data: bytes) -> Sequence[TransportEvent]:
        return (RawFrame(peer, role, data),)  # type: ignore[return-value]

    def send_bytes(self, peer: Peer, data: bytes) -> None:
        """
        Send bytes unchanged. A connection that does not read is ended and reported as PeerGone.
        """
        self._send_bytes(peer, data)

    def watch_uplink(self, uplink: RelayUplink) -> None:
        """Make `poll` return also when the scheduler has sent something."""
        for one in (uplink.socket, uplink.monitor):
            self._router.poller.register(one, self._zmq.POLLIN)


class RelayUplink:
    """The relay's connection to the scheduler."""

    def __init__(self, endpoint: Endpoint, secret: Secret | None) -> None:
        import zmq

        self._zmq = zmq
        self.endpoint = endpoint
        self.is_up = False
        self.is_over = False
        self.is_refused = False
        self.context = zmq.Context()
        sock = self.context.socket(zmq.DEALER)
        self.socket = sock
        for option, value in (
            (zmq.RECONNECT_IVL, NEVER_RECONNECT_MS),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
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
            keys = security.derive_key_pair(secret, "relay")
            sock.curve_publickey = keys.public
            sock.curve_secretkey = keys.private
            sock.curve_serverkey = security.derive_key_pair(secret, "server").public
        self.monitor = open_monitor(sock)
        sock.connect(endpoint.zmq_url)

    def send(self, items: Iterable[RelayItem]) -> None:
        """Send items. A connection that has ended loses them."""
        for frame in pack_frames(items):
            try:
                self.socket.send(frame, self._zmq.NOBLOCK)
            except self._zmq.Again:
                self.is_over = True

    def read_items(self) -> list[RelayItem]:
        """Return the scheduler's items, and update ``is_up``, ``is_over`` and ``is_refused``."""
        zmq = self._zmq
        found = []
        while self.monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event, _ = read_monitor_event(self.monitor)
            self.is_up = self.is_up or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.is_refused = self.is_refused or event in (
                zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            )
            self.is_over = (
                self.is_over
                or self.is_refused
                or event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED)
            )
        while True:
            try:
                found += unpack_frame(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return found
            except codec.CodecError:
                self.is_over = True
                return found

    def close(self) -> None:
        """Close immediately."""
        self.socket.monitor(None, 0)
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
        self.context.term()


class Relay:
    """
    Carries items between a `RelayServer` and a `RelayUplink`. Call `run_once` until it returns
    False.
    """

    def __init__(
        self,
        server: RelayServer,
        uplink: RelayUplink,
        clock: Clock | None = None,
        *,
        is_standalone: bool = False,
        ping_fds: tuple[int, int] | None = None,
    ) -> None:
        """
        Args:
            is_standalone: agents know this relay's own address, not the scheduler's.
            ping_fds: pipes from and to the process that started this one. Each byte that arrives
                is answered: this process does not stand still.
        """
        self._server = server
        self._ping_fds = ping_fds
        self._uplink = uplink
        self._echo = (
            ECHO_TEMPLATE
            % (STANDALONE_RELAY_SENDER if is_standalone else CHILD_RELAY_SENDER).encode()
        )
        self._clock = clock or SystemClock()
        self._numbers: dict[Peer, int] = {}
        self._peers: dict[int, Peer] = {}
        self._last_number = 0
        self._pulse = 0
        self._alive_numbers: set[int] = set()
        self._answered_at = self._clock.monotonic()
        self._report_at = self._answered_at
        self.is_concluded = False
        """Whether an agent was sent the verdict: the job ends, and the scheduler with it."""
        server.watch_uplink(uplink)
        if ping_fds is not None:
            server.watch_fd(ping_fds[0])
            self._write_sign_of_life()

    def run_once(self, timeout: float = 0.25) -> bool:
        """
        Wait for at most ``timeout`` seconds and pass on what has arrived; False: the scheduler is
        lost.
        """
        items: list[RelayItem] = []
        now = self._clock.monotonic()
        found = self._server.poll(min(timeout, max(0.0, self._report_at - now)))
        now = self._clock.monotonic()
        for one in found:
            if isinstance(one, RawFrame):
                self._on_agent_frame(one, items, now)
            elif isinstance(one, PeerGone):
                self._on_agent_gone(one.peer, items)
            elif isinstance(one, FdReady):
                self._answer_ping(one.fd)
        if now >= self._report_at:
            self._pulse += 1
            self._report_at = now + REPORT_SECONDS
            items.append(AliveReport(self._pulse, tuple(sorted(self._alive_numbers))))
            self._alive_numbers.clear()
        self._uplink.send(items)
        for item in self._uplink.read_items():
            self._on_scheduler_item(item, now)
        return not self._uplink.is_over

    def _answer_ping(self, fd: int) -> None:
        if os.read(fd, 4096):
            self._write_sign_of_life()
        else:  # the scheduler has ended, and its connection with it
            self._server.unwatch_fd(fd)

    def _write_sign_of_life(self) -> None:
        assert self._ping_fds is not None
        with contextlib.suppress(BrokenPipeError):
            os.write(self._ping_fds[1], SIGN_OF_LIFE)

    def _on_agent_frame(self, raw: RawFrame, items: list[RelayItem], now: float) -> None:
        number = self._numbers.get(raw.peer)
        if number is not None and (beat := _HEARTBEAT_PATTERN.fullmatch(raw.data)):
            self._answer_heartbeat(raw.peer, number, int(beat[1]), int(beat[2]), now)
            return
        if number is None:
            self._last_number += 1
            number = self._last_number
            self._numbers[raw.peer] = number
            self._peers[number] = raw.peer
        items.append(AgentFrame(number, raw.role, raw.data))

    def _answer_heartbeat(self, peer: Peer, number: int, beat: int, echo: int, now: float) -> None:
        """
        Answer a heartbeat for the scheduler. An agent that does not receive the answers is not
        reported as alive.
        """
        if beat - echo <= 2:
            self._alive_numbers.add(number)
        if now - self._answered_at < FRESH_SECONDS:
            self._server.send_bytes(peer, self._echo % beat)

    def _on_scheduler_item(self, item: RelayItem, now: float) -> None:
        match item:
            case AgentFrame(number, _, data) if peer := self._peers.get(number):
                self.is_concluded = self.is_concluded or b'"type":"Verdict"' in data
                self._server.send_bytes(peer, data)
            case AgentClosed(number) if peer := self._peers.get(number):
                self._server.close_peer(peer)
                self._drop_agent(peer, number)
                self._uplink.send((AgentClosed(number),))  # the agent sends nothing more
            case RelayPulse():
                self._answered_at = now
            case _:
                pass

    def _on_agent_gone(self, peer: Peer, items: list[RelayItem]) -> None:
        if (number := self._numbers.get(peer)) is not None:
            self._drop_agent(peer, number)
            items.append(AgentClosed(number))

    def _drop_agent(self, peer: Peer, number: int) -> None:
        del self._numbers[peer], self._peers[number]
        self._alive_numbers.discard(number)
