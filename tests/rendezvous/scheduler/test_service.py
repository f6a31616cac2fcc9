"""The scheduler's loop over connections in memory: what one may send, and what is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pdrun.clock import FakeClock
from pdrun.eventlog import LogEvent
from pdrun.rendezvous.protocol.messages import (
    Envelope,
    Heartbeat,
    Join,
    Message,
    Refuse,
    StopRequest,
    Welcome,
)
from pdrun.rendezvous.scheduler.service import MAX_REFUSALS, Service
from pdrun.rendezvous.transport.base import MemoryHub, MemoryTransport
from tests.rendezvous.helpers import config, hello

JOIN = Join("a", None, 1, store="h:1")


class ServedJob:
    """A service, its connections and its events."""

    def __init__(self) -> None:
        self.events: list[LogEvent] = []
        self.hub = MemoryHub()
        self.service = Service(
            config(nodes=2), self.hub, clock=FakeClock(), record=self.events.extend
        )

    def say(self, end: MemoryTransport, *envelopes: Envelope) -> list[Message]:
        """Send envelopes that arrive together; return the answers."""
        for envelope in envelopes:
            end.send(envelope)
        self.service.poll_once(0.0)
        return [envelope.body for envelope in end.take_envelopes()]


def envelope(number: int, body: Message, **changes: Any) -> Envelope:
    return Envelope(
        **{"sender": "a", "incarnation": 0, "sequence": number, "body": body, **changes}
    )


def is_refused(answers: Sequence[Message]) -> bool:
    return any(isinstance(answer, Refuse) and answer.code == 70 for answer in answers)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (envelope(5, JOIN), "message 5 where 1 was due"),
        (envelope(0, JOIN), "message 0 where 1 was due"),
        (envelope(1, Heartbeat(1, 0)), "message 1 where 0 was due"),
        (envelope(1, JOIN, sender="b"), "not the one of its Hello"),
        (envelope(1, JOIN, incarnation=1), "not the one of its Hello"),
        (envelope(1, hello("a")), "has sent it before"),
    ],
)
def test_a_connection_keeps_to_its_order(bad: Envelope, why: str) -> None:
    job = ServedJob()
    end = job.hub.connect()
    assert [type(answer) for answer in job.say(end, envelope(0, hello("a")))] == [Welcome]
    (refuse,) = job.say(end, bad)
    assert isinstance(refuse, Refuse) and why in refuse.reason
    assert end.is_closed and not job.service.machine.roster.members


def test_the_first_message_is_hello() -> None:
    job = ServedJob()
    end = job.hub.connect()
    (refuse,) = job.say(end, envelope(0, JOIN))
    assert isinstance(refuse, Refuse) and "the first message must be Hello" in refuse.reason


def test_a_key_of_one_role_makes_no_connection_of_another() -> None:
    job = ServedJob()
    assert is_refused(job.say(job.hub.connect(role="view"), envelope(0, hello("a"))))
    assert is_refused(job.say(job.hub.connect(), envelope(0, hello("a", role="view"))))
    answers = job.say(job.hub.connect(role=""), envelope(0, hello("a")))
    assert [type(answer) for answer in answers] == [Welcome], "without keys the word counts"


def test_who_was_refused_is_not_heard_any_more() -> None:
    """Also not what arrived together with the message that was refused."""
    job = ServedJob()
    end = job.hub.connect()
    bad = envelope(5, StopRequest(15, "me"))
    answers = job.say(end, envelope(0, hello("a")), bad, envelope(1, hello("a")))
    assert is_refused(answers)
    assert not job.service.machine.roster.sessions


def test_a_stream_of_refusals_does_not_fill_the_event_log() -> None:
    job = ServedJob()
    job.say(job.hub.connect(), envelope(0, hello("a")))
    for number in range(2 * MAX_REFUSALS):
        name = f"stranger{number}"
        end = job.hub.connect()
        job.say(end, envelope(0, hello(name, job="another"), sender=name))
    assert sum(event.kind == "refused" for event in job.events) == MAX_REFUSALS
