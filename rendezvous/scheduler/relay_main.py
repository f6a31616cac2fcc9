"""
A relay: accepts the connections of many agents and carries them over one connection.

    agent --CURVE--> relay --CURVE--> scheduler      an agent does not know about the relay

It does what costs most in a large job, and decides nothing: handshakes, limits and heartbeats. It
answers heartbeats itself while the scheduler has answered the relay a moment ago, so every agent
notices a cut or a frozen scheduler as without a relay. All other messages pass unchanged. When the
scheduler is lost, the relay ends its agents' connections; the agents reconnect, to this relay or to
another one.

``python -m pdrun.rendezvous.scheduler.relay_main`` is a relay of the scheduler's host, started by
the scheduler. Several of them accept from the job's one listening socket. `pdrun relay` is a relay
on another host.
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

from pdrun import process_setup
from pdrun.clock import Clock, SystemClock
from pdrun.endpoint import Endpoint
from pdrun.errors import AuthenticationError, RendezvousError
from pdrun.rendezvous.protocol import codec, security
from pdrun.rendezvous.protocol.events import Peer
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.transport.base import PeerGone, TransportEvent
from pdrun.rendezvous.transport.listen import bind_listener
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
FRESH_SECONDS = 3.0
"""Time after the scheduler's last answer for which the relay answers heartbeats in its place."""
RETRY_SECONDS = 0.2
CONNECT_SECONDS = 10.0
"""Time for the scheduler to accept the relay."""
STATUS_SECONDS = 5.0
"""Time between two lines about a missing scheduler."""

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
        self.is_up = self.is_over = self.is_refused = False
        self.context = zmq.Context()
        self.socket = sock = self.context.socket(zmq.DEALER)
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
        front: RelayServer,
        uplink: RelayUplink,
        clock: Clock | None = None,
        *,
        is_standalone: bool = False,
    ) -> None:
        """``is_standalone``: agents know this relay's own address, not the scheduler's."""
        self._server = front
        self._uplink = uplink
        self._echo = (
            ECHO_TEMPLATE
            % (STANDALONE_RELAY_SENDER if is_standalone else CHILD_RELAY_SENDER).encode()
        )
        self._clock = clock or SystemClock()
        self._numbers: dict[Peer, int] = {}
        self._peers: dict[int, Peer] = {}
        self._last_number = self._pulse = 0
        self._alive_numbers: set[int] = set()
        self._answered_at = self._clock.monotonic()
        self._report_at = self._answered_at
        self.is_concluded = False
        """Whether an agent was sent the verdict: the job ends, and the scheduler with it."""
        front.watch_uplink(uplink)

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
        if now >= self._report_at:
            self._pulse = self._pulse + 1
            self._report_at = now + REPORT_SECONDS
            items.append(AliveReport(self._pulse, tuple(sorted(self._alive_numbers))))
            self._alive_numbers.clear()
        self._uplink.send(items)
        for item in self._uplink.read_items():
            self._on_scheduler_item(item, now)
        return not self._uplink.is_over

    def _on_agent_frame(self, raw: RawFrame, items: list[RelayItem], now: float) -> None:
        number = self._numbers.get(raw.peer)
        if number is not None and (beat := _HEARTBEAT_PATTERN.fullmatch(raw.data)):
            self._answer_heartbeat(raw.peer, number, int(beat[1]), int(beat[2]), now)
            return
        if number is None:
            self._last_number += 1
            number = self._numbers[raw.peer] = self._last_number
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


def serve_relay(
    listen_fd: int,
    scheduler: Endpoint,
    secret: Secret | None,
    *,
    until: float | None = None,
    crowd: int = 0,
    is_standalone: bool = False,
) -> bool:
    """
    Relay between the agents at ``listen_fd`` and ``scheduler`` until the scheduler is lost.

    Return whether that was the end of the job.

    Args:
        listen_fd: a listening TCP socket; a copy of it is used, and closed.
        crowd: number of agents that may connect at the same time.
        until: monotonic time by which the scheduler must accept the relay; None: CONNECT_SECONDS
            from now.
        is_standalone: whether agents know the relay's own address.

    Raises:
        RendezvousError, AuthenticationError: the scheduler was not reached, or has another token.
    """
    uplink = RelayUplink(scheduler, secret)
    front: RelayServer | None = None
    try:
        _await_uplink(uplink, time.monotonic() + CONNECT_SECONDS if until is None else until)
        front = RelayServer(
            secret, listen_fd=os.dup(listen_fd), insecure=secret is None, crowd=crowd
        )
        relay = Relay(front, uplink, is_standalone=is_standalone)
        while relay.run_once():
            pass
        return relay.is_concluded
    finally:
        if front is not None:
            front.close(0.2)
        uplink.close()


def serve_standalone_relay(
    scheduler: Endpoint,
    listen: Endpoint,
    secret: Secret | None,
    *,
    patience: float,
    show_line: Callable[[str], None],
) -> int:
    """
    Run `pdrun relay` until the job is over (0), or the scheduler was gone for ``patience`` seconds
    (69).

    Raises:
        ConfigError: ``listen`` cannot be listened on.
        AuthenticationError: the scheduler has another token.
    """
    listener = bind_listener(listen, backlog=1024)
    here = Endpoint(*listener.getsockname()[:2])
    show_line(f"relay to {scheduler} on {here}: start the nodes with --scheduler {here} --no-serve")
    lost_at = time.monotonic()
    shown_at = lost_at
    with listener:
        while True:
            try:
                until = max(lost_at + patience, time.monotonic() + RETRY_SECONDS)
                if serve_relay(
                    listener.fileno(),
                    scheduler,
                    secret,
                    until=min(until, shown_at + STATUS_SECONDS),
                    is_standalone=True,
                ):
                    return 0
                lost_at = time.monotonic()
                shown_at = lost_at
                show_line(
                    f"the scheduler at {scheduler} was lost; waiting for it for {patience:g} s"
                )
            except AuthenticationError:
                raise
            except RendezvousError as error:
                now = time.monotonic()
                if now - lost_at > patience:
                    show_line(f"error: {error}")
                    return error.exit_code
                if now >= shown_at + STATUS_SECONDS:
                    shown_at = now
                    left = patience - (now - lost_at)
                    show_line(
                        f"the scheduler at {scheduler} does not answer; waiting {left:.0f} s more"
                    )
                time.sleep(RETRY_SECONDS)


def _await_uplink(uplink: RelayUplink, until: float) -> None:
    import select

    from zmq import FD

    poll = select.poll()
    poll.register(int(uplink.monitor.getsockopt(FD)), select.POLLIN)
    while not uplink.is_up:
        uplink.read_items()
        if uplink.is_refused:
            raise AuthenticationError(
                "the token differs, or this is not a pdrun scheduler", where=str(uplink.endpoint)
            )
        if uplink.is_over or time.monotonic() >= until:
            raise RendezvousError("the scheduler was not reached", where=str(uplink.endpoint))
        if not uplink.is_up:
            poll.poll(50)


def main() -> int:
    """
    Relay as the scheduler's child.

    stdin: one JSON line {listen_fd, host, port, secret, crowd}. The relay ends with its connection
    to the scheduler.
    """
    process_setup.setup_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = codec.load_json(sys.stdin.buffer.readline(), limit=1 << 16)
    secret = Secret.from_hex(order["secret"]) if order["secret"] else None
    scheduler = Endpoint(order["host"], order["port"])
    try:
        serve_relay(order["listen_fd"], scheduler, secret, crowd=order["crowd"])
    except RendezvousError as error:
        print(json.dumps({"error": str(error)}), file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
