"""
Bytes to messages: everything that is a message comes back, everything else is a CodecError that
names the place.
"""

from __future__ import annotations

import json
import pickle
import time
from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.rendezvous.protocol.codec import MAX_TEXT_CHARS, CodecError, decode, encode
from pdrun.rendezvous.protocol.messages import (
    Cause,
    Envelope,
    Failure,
    Heartbeat,
    Join,
    Message,
    StatusReply,
    Verdict,
    Welcome,
)

text = st.text(st.characters(codec="utf-8"), max_size=20)
st.register_type_strategy(str, text)
st.register_type_strategy(int, st.integers(-(1 << 63), (1 << 63) - 1))
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
messages = st.one_of([st.from_type(kind) for kind in get_args(Message)])
envelopes = st.builds(
    Envelope, sender=text, incarnation=st.integers(0, 9), sequence=st.integers(0, 9), body=messages
)

FAILURE = Failure(
    3,
    "node1",
    Cause("signal", 139, 11, 1.5, "killed by SIGSEGV", "Traceback", ("a", "b"), "/l", False),
)
SAMPLE = encode(Envelope("a" * 32, 1, 7, Verdict(139, "why", FAILURE, (FAILURE, FAILURE), 4)))


def changed(**body: Any) -> bytes:
    """A Join with some fields replaced or, where the value is ..., left out."""
    plain = json.loads(encode(Envelope("a", 0, 0, Join("n", None, 2, {"k": "v"}))))
    plain["body"] = {
        key: value for key, value in {**plain["body"], **body}.items() if value is not ...
    }
    return json.dumps(plain).encode()


def refusal(data: bytes) -> str:
    started = time.monotonic()
    with pytest.raises(CodecError) as caught:
        decode(data)
    assert time.monotonic() - started < 2
    return str(caught.value)


@given(envelopes)
def test_every_message_comes_back(envelope: Envelope) -> None:
    assert decode(encode(envelope)) == envelope


@pytest.mark.parametrize("kind", get_args(Message))
@given(data=st.data())
def test_each_type_comes_back(kind: type[Any], data: st.DataObject) -> None:
    body = data.draw(st.from_type(kind))
    found = decode(encode(Envelope("a", 0, 0, body))).body
    assert type(found) is kind and found == body


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    refusal(data)


@given(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255))
def test_a_changed_byte_gives_a_message_or_a_codec_error(place: int, value: int) -> None:
    data = SAMPLE[:place] + bytes([value]) + SAMPLE[place + 1 :]
    try:
        found = decode(data)
    except CodecError:
        return
    assert isinstance(found, Envelope)


def test_every_truncation_is_refused() -> None:
    for length in range(len(SAMPLE)):
        refusal(SAMPLE[:length])


def test_pickles_are_inert() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("a pickle was loaded",))

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        refusal(pickle.dumps(Bomb(), protocol))


@pytest.mark.parametrize(
    "bomb",
    [
        b"[" * 1_000_000,
        b'{"a":' * 150_000,
        b'[{"a":' * 150_000,
        b'"\\' * 500_000,
        b'["' * 500_000,
        b'"' * 1_000_001,
        b"[" + b"0," * 500_000 + b"0]",
        b"{" + b",".join(b'"%d":0' % i for i in range(90_000)) + b"}",
        b"1" * 1_000_000,
        b" " * 1_000_000,
        b"-" * 1_000_000,
        b"9e" + b"9" * 900_000,
    ],
    ids=lambda bomb: bomb[:6].decode(),
)
def test_bombs_are_refused_quickly(bomb: bytes) -> None:
    refusal(bomb)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (changed(workers=True), "Join.workers: expected a whole number, got a truth value"),
        (changed(workers=2.0), "Join.workers: expected a whole number"),
        (changed(workers="2"), "Join.workers: expected a whole number, got text"),
        (changed(workers=None), "Join.workers: expected a whole number, got null"),
        (changed(workers=1 << 63), "Join.workers: a number beyond 64 bits"),
        (changed(workers=...), "Join.workers: missing"),
        (changed(more=1), "Join.'more': unknown field"),
        (changed(node=1), "Join.node: expected text"),
        (changed(node="x" * (MAX_TEXT_CHARS + 1)), "Join.node: 65537 characters"),
        (changed(node="\ud800"), "Join.node: a lone surrogate"),
        (changed(facts={"k": 1}), "Join.facts.'k': expected text"),
        (changed(facts=[]), "Join.facts: expected an object, got a list"),
        (changed(node_rank="0"), "Join.node_rank: expected a whole number"),
        (changed(node=[[[[[[[[[[[[[[[[[[0]]]]]]]]]]]]]]]]]]), "nested deeper than 16"),
        (b'{"a":1,"a":2}', "'a' appears twice"),
        (b"[NaN]", "NaN is not a number"),
        (b"[Infinity]", "Infinity is not a number"),
        (SAMPLE.replace(b"1.5", b"1e999"), "Verdict.first.cause.at: a number that is not finite"),
        (
            SAMPLE.replace(b'"signal"', b'"sign"', 1),
            "Verdict.first.cause.kind: must be one of ok",
        ),
        (SAMPLE.replace(b'"Verdict"', b'"Welcom"'), "type: 'Welcom' is not a message"),
        (SAMPLE.replace(b'"Verdict"', b'["Verdict"]'), "type:"),
        (SAMPLE.replace(b'"sequence":7', b'"sequence":false'), "sequence: expected a whole number"),
        (SAMPLE.replace(b"why", b"\xff\xfe"), "not JSON"),
        (b"null", "a message has the fields"),
        (b"", "not JSON"),
        (SAMPLE + b"{}", "not JSON"),
        (b" " * ((1 << 20) + 1), "bytes are more than"),
    ],
)
def test_the_place_is_named(data: bytes, place: str) -> None:
    assert place in refusal(data)


def test_long_text_passes_only_where_it_belongs() -> None:
    long = "x" * (MAX_TEXT_CHARS + 1)
    for body in (Welcome("j", "r", long, "s", 1.0, 1.0), StatusReply((long,))):
        assert decode(encode(Envelope("a", 0, 0, body))).body == body


def test_what_is_too_long_is_not_sent() -> None:
    with pytest.raises(CodecError, match=r"StatusReply: .* bytes are more than"):
        encode(Envelope("a", 0, 0, StatusReply(("x" * Envelope.LIMIT,))))


def test_infinite_numbers_are_not_sent() -> None:
    with pytest.raises(CodecError):
        encode(Envelope("a", 0, 0, Welcome("j", "r", "", "s", float("inf"), 1.0)))


def test_broken_text_of_a_worker_does_not_break_its_agent() -> None:
    found = decode(encode(Envelope("a", 0, 0, StatusReply(("ab\udcff",)))))
    assert found.body == StatusReply(("ab\ufffd",))


def test_a_whole_number_may_stand_for_a_float() -> None:
    plain = json.loads(encode(Envelope("a", 0, 0, Welcome("j", "r", "", "s", 1.0, 2.0))))
    plain["body"]["dead"] = 3
    body = decode(json.dumps(plain).encode()).body
    assert isinstance(body, Welcome) and body.dead == 3.0 and isinstance(body.dead, float)


@given(st.lists(messages, min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=8))
def test_what_was_written_before_changes_nothing(bodies: list[Any], order: list[int]) -> None:
    """The last body is remembered, for messages to all."""
    for number in order:
        envelope = Envelope("a", 0, number, bodies[number % len(bodies)])
        assert decode(encode(envelope)) == envelope


def test_a_heartbeat_is_small() -> None:
    assert len(encode(Envelope("a" * 32, 0, 0, Heartbeat(1, 1)))) < 200
    assert [item.name for item in fields(Heartbeat)] == ["number", "echo"]
