"""What a relay answers by itself, and what it reports: with a scheduler and agents made by hand."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

from pdrun.clock import FakeClock
from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol.codec import encode
from pdrun.rendezvous.protocol.messages import Envelope, Heartbeat
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.scheduler.relay import (
    FRESH_SECONDS,
    REPORT_SECONDS,
    RawFrame,
    Relay,
    RelayServer,
    RelayUplink,
)
from pdrun.rendezvous.transport.base import PeerGone
from pdrun.rendezvous.transport.relay_frames import (
    AgentClosed,
    AgentFrame,
    AliveReport,
    RelayItem,
    RelayPulse,
)


class AgentsByHand:
    """The agents' side: frames that come, and what was sent."""

    def __init__(self) -> None:
        self.coming: list[Any] = []
        self.sent: list[bytes] = []

    def poll(self, timeout: float) -> Sequence[Any]:
        found = self.coming
        self.coming = []
        return found

    def send_bytes(self, peer: str, data: bytes) -> None:
        self.sent.append(data)

    def watch_uplink(self, uplink: object) -> None:
        """Nothing to watch."""


class SchedulerByHand:
    """The scheduler's side: items that come, and what was sent."""

    def __init__(self) -> None:
        self.coming: list[RelayItem] = []
        self.sent: list[RelayItem] = []
        self.is_over = False

    def send(self, items: Iterable[RelayItem]) -> None:
        self.sent += items

    def read_items(self) -> list[RelayItem]:
        found = self.coming
        self.coming = []
        return found


class RelayByHand:
    """A relay with one agent, whose Hello has passed."""

    def __init__(self) -> None:
        self.agents, self.scheduler, self.clock = AgentsByHand(), SchedulerByHand(), FakeClock()
        self.relay = Relay(
            cast(RelayServer, self.agents), cast(RelayUplink, self.scheduler), self.clock
        )
        self.agents.coming = [RawFrame("p", "agent", b"hello")]
        self.relay.run_once()
        assert self.scheduler.sent[0] == AgentFrame(1, "agent", b"hello")
        self.scheduler.sent.clear()

    def beat(self, number: int, echo: int) -> None:
        """Have the agent send a heartbeat."""
        data = encode(Envelope("a", 0, 0, Heartbeat(number, echo)))
        self.agents.coming.append(RawFrame("p", "agent", data))
        self.relay.run_once()

    def reported(self) -> list[tuple[int, ...]]:
        """Return the agents of each report of those that are alive."""
        self.clock.advance(REPORT_SECONDS)
        self.relay.run_once()
        return [item.numbers for item in self.scheduler.sent if isinstance(item, AliveReport)]


def test_heartbeats_are_answered_as_long_as_the_scheduler_answers() -> None:
    made = RelayByHand()
    made.beat(1, 0)
    assert len(made.agents.sent) == 1 and b'"type":"Echo"' in made.agents.sent[0]
    made.clock.advance(FRESH_SECONDS)
    made.beat(2, 1)
    assert len(made.agents.sent) == 1, "the scheduler is silent, and so is its relay"
    made.scheduler.coming = [RelayPulse(1)]
    made.relay.run_once()
    made.beat(3, 1)
    assert len(made.agents.sent) == 2


def test_agents_that_receive_nothing_are_not_reported_as_alive() -> None:
    made = RelayByHand()
    made.beat(9, 8)
    assert made.reported() == [(1,)]
    made.beat(12, 8)
    assert made.reported() == [(1,), ()]


def test_the_end_of_an_agent_is_told() -> None:
    made = RelayByHand()
    made.agents.coming = [PeerGone("p")]
    made.relay.run_once()
    assert AgentClosed(1) in made.scheduler.sent


def test_a_relay_takes_no_relays() -> None:
    secret = Secret.random()
    server = RelayServer(secret, endpoint=Endpoint("127.0.0.1", 0))
    uplink = RelayUplink(server.endpoint, secret)
    try:
        deadline = time.monotonic() + 10.0
        while not (uplink.is_over or uplink.is_up) and time.monotonic() < deadline:
            server.poll(0.05)
            uplink.read_items()
        assert uplink.is_refused and not uplink.is_up
    finally:
        uplink.close()
        server.close(0.0)
