"""
What relays and the scheduler pack into a frame, and the scheduler's view of agents behind a relay.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.rendezvous.protocol.codec import CodecError, encode
from pdrun.rendezvous.protocol.messages import Echo, Envelope, Heartbeat, Ready
from pdrun.rendezvous.transport.base import Alive, Arrived, Complaint, Gone, Incoming
from pdrun.rendezvous.transport.relay_frames import (
    BESIDE,
    FULL,
    LIMIT,
    MAGIC,
    Ended,
    Heard,
    Item,
    Pulse,
    Said,
    pack,
    unpack,
)
from pdrun.rendezvous.transport.relay_table import Relays
from tests.rendezvous.helpers import hello

numbers = st.integers(0, 2**32 - 1)
items: st.SearchStrategy[Item] = st.one_of(
    st.builds(
        Said, numbers, st.sampled_from(("", "agent", "view")), st.binary(min_size=1, max_size=300)
    ),
    st.builds(Ended, numbers),
    st.builds(Heard, numbers, st.lists(numbers, max_size=50).map(tuple)),
    st.builds(Pulse, numbers),
)


@given(st.lists(items, max_size=30))
def test_what_is_packed_is_unpacked(packed: list[Item]) -> None:
    assert [item for frame in pack(packed) for item in unpack(frame)] == packed


def test_frames_stay_below_the_limit_and_above_waste() -> None:
    packed = [
        Said(n, "agent", bytes([n % 256]) * size)
        for n, size in enumerate([Envelope.LIMIT, 10, 10, FULL, 5] * 3)
    ]
    frames = list(pack(packed))
    assert [item for frame in frames for item in unpack(frame)] == packed
    assert max(map(len, frames)) <= LIMIT
    many = list(pack([Said(n, "", b"x" * 100) for n in range(10_000)]))
    assert len(many) <= sum(map(len, many)) // FULL + 2


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda data: MAGIC + data)))
def test_anything_else_is_refused_with_a_place(data: bytes) -> None:
    try:
        found = unpack(data)
    except CodecError as error:
        assert str(error)
    else:
        assert b"".join(pack(found)) in (data, b"")


@given(st.lists(items, min_size=1, max_size=5), st.data())
def test_a_frame_that_was_cut_is_refused(packed: list[Item], data: st.DataObject) -> None:
    (frame,) = pack(packed)
    ends, at = {len(MAGIC)}, len(MAGIC)
    for item in packed:
        (alone,) = pack([item])
        at += len(alone) - len(MAGIC)
        ends.add(at)
    cut = data.draw(st.integers(0, len(frame) - 1))
    if cut in ends:
        assert len(unpack(frame[:cut])) < len(packed)
    else:
        with pytest.raises(CodecError):
            unpack(frame[:cut])


class Seen:
    """A Relays and what it sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Item]] = []
        self.relays = Relays(
            lambda peer, data: self.sent.extend((peer, item) for item in unpack(data))
        )

    def say(self, *said: Item) -> list[Incoming]:
        return [one for frame in pack(said) for one in self.relays.open("r", frame)]


def word(sequence: int = 0, agent: str = "a") -> bytes:
    return encode(Envelope(agent, 0, sequence, hello(agent) if sequence == 0 else Ready(0)))


def test_each_agent_behind_a_relay_is_a_peer() -> None:
    seen = Seen()
    found = seen.say(Said(1, "agent", word()), Said(2, "view", word(agent="b")), Ended(2), Ended(7))
    assert [type(one) for one in found] == [Arrived, Arrived, Gone]
    assert isinstance(found[0], Arrived) and (found[0].peer, found[0].role) == ("r/1", "agent")
    assert found[2] == Gone("r/2")
    assert "r/1" in seen.relays and "r/2" not in seen.relays and "r" not in seen.relays


def test_a_word_that_is_none_ends_that_agent_only() -> None:
    seen = Seen()
    found = seen.say(
        Said(1, "agent", word()),
        Said(1, "agent", b"{}"),
        Said(1, "agent", word(1)),
        Said(2, "agent", word()),
    )
    assert [type(one) for one in found] == [Arrived, Complaint, Gone, Arrived]
    seen.relays.flush()
    assert seen.sent == [("r", Ended(1))]


def test_a_closed_number_is_not_heard_until_the_relay_says_that_it_ended() -> None:
    seen = Seen()
    seen.say(Said(1, "agent", word()))
    seen.relays.close("r/1")
    assert seen.say(Said(1, "agent", word(1)), Ended(1)) == []
    assert "r/1" not in seen.relays


def test_heartbeats_come_as_one_item_and_are_answered_by_one() -> None:
    seen = Seen()
    seen.say(Said(1, "agent", word()), Said(2, "agent", word()))
    assert seen.say(Heard(9, (1, 2, 3))) == [Alive(("r/1", "r/2"))]
    seen.relays.send("r/1", b"x")
    seen.relays.flush()
    assert seen.sent == [("r", Pulse(9)), ("r", Said(1, "", b"x"))]


def test_the_end_of_a_relay_is_the_end_of_all_its_agents() -> None:
    seen = Seen()
    seen.say(Said(1, "agent", word()), Said(2, "agent", word()))
    seen.relays.send("r/1", b"x")
    assert set(seen.relays.ended("r")) == {Gone("r/1", True), Gone("r/2", True), Gone("r")}
    seen.relays.flush()
    assert seen.sent == []


def test_a_relay_cannot_say_a_pulse() -> None:
    with pytest.raises(CodecError):
        Seen().say(Pulse(1))


def test_the_relay_knows_heartbeats_and_echoes_as_the_codec_writes_them() -> None:
    from pdrun.rendezvous.scheduler.relay_main import _HEARTBEAT, ECHO

    assert ECHO % BESIDE.encode() % 12 == encode(Envelope(BESIDE, 0, 0, Echo(12)))
    found = _HEARTBEAT.fullmatch(encode(Envelope("0f" * 16, 3, 0, Heartbeat(12, 11))))
    assert found and (found[1], found[2]) == (b"12", b"11")
