"""A conversation over several connections: what is repeated, what is news, what may be stale."""

from __future__ import annotations

from dataclasses import replace

from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Echo,
    Join,
    Ready,
    Refuse,
    Start,
    StopWorkers,
    Welcome,
)
from pdrun.rendezvous.transport.resend import Conversation

WELCOME = Welcome("job", "run", "spec", "s" * 32, 1.0, 10.0, 6.0, 20.0)
ASSIGN = Assign(0, 0, 1, 0, 1, 0, "h:1", 0, 1)


def begin() -> Conversation:
    conversation = Conversation(Endpoint("10.0.0.1", 1), False)
    conversation.take_message(WELCOME)
    assert conversation.take_inbox() == [WELCOME]
    return conversation


def test_what_the_scheduler_repeats_is_no_news() -> None:
    conversation = begin()
    for _ in range(2):
        for message in (WELCOME, ASSIGN, Start(0), StopWorkers(0, 15, 2.0, "why")):
            conversation.take_message(message)
    assert conversation.take_inbox() == [ASSIGN, Start(0), StopWorkers(0, 15, 2.0, "why")]


def test_messages_of_an_older_generation_are_not_repeated() -> None:
    conversation = begin()
    join = Join("n", None, 1)
    for message in (join, Ready(0)):
        conversation.resend_buffer.add_message(message)
    assert conversation.resend_buffer.messages_to_repeat() == (join, Ready(0))
    conversation.take_message(replace(ASSIGN, generation=1))
    conversation.resend_buffer.add_message(Ready(1))
    assert conversation.resend_buffer.messages_to_repeat() == (join, Ready(1))


def test_what_may_be_stale_is_held_until_a_new_heartbeat_is_answered() -> None:
    conversation = begin()
    old = conversation.next_heartbeat()
    conversation.hold_until_next_heartbeat()
    new = conversation.next_heartbeat()
    conversation.take_message(ASSIGN)
    assert conversation.take_inbox() == []
    conversation.take_message(Echo(old.number))
    assert conversation.take_inbox() == [], "the answer may be as old as what is held"
    conversation.take_message(Echo(new.number))
    assert conversation.take_inbox() == [ASSIGN]


def test_a_scheduler_of_another_run_ends_the_conversation() -> None:
    for other in (replace(WELCOME, run="run-2"), replace(WELCOME, job="other")):
        conversation = begin()
        conversation.take_message(other)
        (refuse,) = conversation.take_inbox()
        assert isinstance(refuse, Refuse) and "another one now" in refuse.reason
        assert conversation.is_over and conversation.is_replaced
