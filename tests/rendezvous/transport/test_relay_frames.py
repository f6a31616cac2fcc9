"""
What relays and the scheduler pack into a frame, and the scheduler's view of agents behind a relay.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.rendezvous.protocol.codec import CodecError, encode
from pdrun.rendezvous.protocol.messages import Echo, Envelope, Heartbeat, Ready
from pdrun.rendezvous.transport.base import (
    EnvelopeArrived,
    PeerGone,
    PeersAlive,
    ProtocolViolation,
    TransportEvent,
)
from pdrun.rendezvous.transport.relay_frames import (
    CHILD_RELAY_SENDER,
    FULL_FRAME_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    AgentClosed,
    AgentFrame,
    AliveReport,
    RelayItem,
    RelayPulse,
    pack_frames,
    unpack_frame,
)
from pdrun.rendezvous.transport.relay_table import RelayTable
from tests.rendezvous.helpers import hello

numbers = st.integers(0, 2**32 - 1)
items: st.SearchStrategy[RelayItem] = st.one_of(
    st.builds(
        AgentFrame,
        numbers,
        st.sampled_from(("", "agent", "view")),
        st.binary(min_size=1, max_size=300),
    ),
    st.builds(AgentClosed, numbers),
    st.builds(AliveReport, numbers, st.lists(numbers, max_size=50).map(tuple)),
    st.builds(RelayPulse, numbers),
)


@given(st.lists(items, max_size=30))
def test_what_is_packed_is_unpacked(packed: list[RelayItem]) -> None:
    assert [item for frame in pack_frames(packed) for item in unpack_frame(frame)] == packed


def test_frames_stay_below_the_limit_and_above_waste() -> None:
    packed = [
        AgentFrame(n, "agent", bytes([n % 256]) * size)
        for n, size in enumerate([Envelope.LIMIT, 10, 10, FULL_FRAME_BYTES, 5] * 3)
    ]
    frames = list(pack_frames(packed))
    assert [item for frame in frames for item in unpack_frame(frame)] == packed
    assert max(map(len, frames)) <= MAX_FRAME_BYTES
    many = list(pack_frames([AgentFrame(n, "", b"x" * 100) for n in range(10_000)]))
    assert len(many) <= sum(map(len, many)) // FULL_FRAME_BYTES + 2


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda data: MAGIC + data)))
def test_anything_else_is_refused_with_a_place(data: bytes) -> None:
    try:
        found = unpack_frame(data)
    except CodecError as error:
        assert str(error)
    else:
        assert b"".join(pack_frames(found)) in (data, b"")


@given(st.lists(items, min_size=1, max_size=5), st.data())
def test_a_frame_that_was_cut_is_refused(packed: list[RelayItem], data: st.DataObject) -> None:
    (frame,) = pack_frames(packed)
    ends, at = {len(MAGIC)}, len(MAGIC)
    for item in packed:
        (alone,) = pack_frames([item])
        at += len(alone) - len(MAGIC)
        ends.add(at)
    cut = data.draw(st.integers(0, len(frame) - 1))
    if cut in ends:
        assert len(unpack_frame(frame[:cut])) < len(packed)
    else:
        with pytest.raises(CodecError):
            unpack_frame(frame[:cut])


class Seen:
    """A Relays and what it sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, RelayItem]] = []
        self.relays = RelayTable(
            lambda peer, data: self.sent.extend((peer, item) for item in unpack_frame(data))
        )

    def say(self, *said: RelayItem) -> list[TransportEvent]:
        return [one for frame in pack_frames(said) for one in self.relays.read_frame("r", frame)]


def word(sequence: int = 0, agent: str = "a") -> bytes:
    return encode(Envelope(agent, 0, sequence, hello(agent) if sequence == 0 else Ready(0)))


def test_each_agent_behind_a_relay_is_a_peer() -> None:
    seen = Seen()
    found = seen.say(
        AgentFrame(1, "agent", word()),
        AgentFrame(2, "view", word(agent="b")),
        AgentClosed(2),
        AgentClosed(7),
    )
    assert [type(one) for one in found] == [EnvelopeArrived, EnvelopeArrived, PeerGone]
    assert isinstance(found[0], EnvelopeArrived) and (found[0].peer, found[0].role) == (
        "r/1",
        "agent",
    )
    assert found[2] == PeerGone("r/2")
    assert "r/1" in seen.relays and "r/2" not in seen.relays and "r" not in seen.relays


def test_a_word_that_is_none_ends_that_agent_only() -> None:
    seen = Seen()
    found = seen.say(
        AgentFrame(1, "agent", word()),
        AgentFrame(1, "agent", b"{}"),
        AgentFrame(1, "agent", word(1)),
        AgentFrame(2, "agent", word()),
    )
    assert [type(one) for one in found] == [
        EnvelopeArrived,
        ProtocolViolation,
        PeerGone,
        EnvelopeArrived,
    ]
    seen.relays.flush()
    assert seen.sent == [("r", AgentClosed(1))]


def test_a_closed_number_is_not_heard_until_the_relay_says_that_it_ended() -> None:
    seen = Seen()
    seen.say(AgentFrame(1, "agent", word()))
    seen.relays.close_agent("r/1")
    assert seen.say(AgentFrame(1, "agent", word(1)), AgentClosed(1)) == []
    assert "r/1" not in seen.relays


def test_heartbeats_come_as_one_item_and_are_answered_by_one() -> None:
    seen = Seen()
    seen.say(AgentFrame(1, "agent", word()), AgentFrame(2, "agent", word()))
    assert seen.say(AliveReport(9, (1, 2, 3))) == [PeersAlive(("r/1", "r/2"))]
    seen.relays.send("r/1", b"x")
    seen.relays.flush()
    assert seen.sent == [("r", RelayPulse(9)), ("r", AgentFrame(1, "", b"x"))]


def test_the_end_of_a_relay_is_the_end_of_all_its_agents() -> None:
    seen = Seen()
    seen.say(AgentFrame(1, "agent", word()), AgentFrame(2, "agent", word()))
    seen.relays.send("r/1", b"x")
    assert set(seen.relays.on_peer_ended("r")) == {
        PeerGone("r/1", True),
        PeerGone("r/2", True),
        PeerGone("r"),
    }
    seen.relays.flush()
    assert seen.sent == []


def test_a_relay_cannot_say_a_pulse() -> None:
    with pytest.raises(CodecError):
        Seen().say(RelayPulse(1))


def test_the_relay_knows_heartbeats_and_echoes_as_the_codec_writes_them() -> None:
    from pdrun.rendezvous.scheduler.relay import _HEARTBEAT_PATTERN, ECHO_TEMPLATE

    assert ECHO_TEMPLATE % CHILD_RELAY_SENDER.encode() % 12 == encode(
        Envelope(CHILD_RELAY_SENDER, 0, 0, Echo(12))
    )
    found = _HEARTBEAT_PATTERN.fullmatch(encode(Envelope("0f" * 16, 3, 0, Heartbeat(12, 11))))
    assert found and (found[1], found[2]) == (b"12", b"11")
