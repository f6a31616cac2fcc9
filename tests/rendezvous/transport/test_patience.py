"""How long a link waits, and for what: a wrong token, no listener, a lost scheduler."""

from __future__ import annotations

import pytest

from pdrun.endpoint import Endpoint
from pdrun.errors import AuthenticationError, RendezvousError
from pdrun.rendezvous.protocol.messages import Welcome
from pdrun.rendezvous.transport.reconnect import (
    MAX_REFUSALS,
    MAX_SILENCE_SECONDS,
    REFUSED_SHARE,
    STALL_SECONDS,
    ReconnectPolicy,
)

WELCOME = Welcome("job", "run", "spec", "s" * 32, 1.0, 10.0, 6.0, 20.0)
"""Patience: 20 s."""


def make_policy(start_timeout: float = 60.0) -> ReconnectPolicy:
    return ReconnectPolicy(Endpoint("10.0.0.1", 1), start_timeout, None, 100.0)


def turn(policy: ReconnectPolicy, begin: float, end: float) -> None:
    """Let time pass as a live loop does."""
    while begin < end:
        begin += 0.5
        policy.on_turn(begin)


def test_the_own_sleep_is_no_silence_of_the_scheduler() -> None:
    policy = make_policy()
    policy.on_turn(130.0)
    assert policy.silent_for(130.0) == STALL_SECONDS
    turn(policy, 130.0, 133.0)
    assert policy.silent_for(133.0) == 3.0 + STALL_SECONDS


def test_the_own_sleep_uses_up_no_patience() -> None:
    policy = make_policy()
    policy.on_welcome(100.0)
    policy.on_disconnect(100.0)
    policy.on_turn(160.0)
    policy.check_lost(WELCOME, 160.0)
    turn(policy, 160.0, 181.0)
    with pytest.raises(RendezvousError, match="lost the scheduler"):
        policy.check_lost(WELCOME, 181.0)


def test_a_lost_scheduler_is_waited_for_as_long_as_it_said() -> None:
    policy = make_policy()
    policy.on_welcome(100.0)
    policy.on_disconnect(100.0)
    turn(policy, 100.0, 120.0)
    policy.check_lost(WELCOME, 120.0)
    turn(policy, 120.0, 121.0)
    with pytest.raises(RendezvousError, match="lost the scheduler"):
        policy.check_lost(WELCOME, 121.0)
    policy.on_welcome(121.0)
    policy.check_lost(WELCOME, 121.0)


def test_some_quick_refusals_are_a_wrong_token() -> None:
    policy = make_policy()
    for number in range(MAX_REFUSALS):
        policy.check_start("", 100.0 + number)
        assert not policy.on_handshake_failed(100.1 + number, 100.0 + number, 3.0)
    with pytest.raises(AuthenticationError, match="the token differs"):
        policy.check_start("", 103.0)
    policy.on_no_listener(103.0)
    policy.check_start("", 103.0)


def test_a_refusal_is_told_from_no_answer_in_slow_networks_and_crowds() -> None:
    policy = make_policy()
    assert not policy.on_handshake_failed(103.0, 100.0, 7.0), "refused, in a slow network"
    assert policy.on_handshake_failed(110.0, 100.0, 60.0), "in a crowd"


def test_a_listener_that_says_nothing_is_no_scheduler() -> None:
    policy = make_policy()
    assert policy.on_handshake_failed(100.1 + REFUSED_SHARE * 3.0, 100.0, 3.0)
    policy.check_start("", 100.0 + MAX_SILENCE_SECONDS)
    with pytest.raises(AuthenticationError, match="sends nothing"):
        policy.check_start("", 100.1 + MAX_SILENCE_SECONDS)


def test_a_scheduler_that_never_comes_is_waited_for_until_the_start_timeout() -> None:
    policy = make_policy(start_timeout=60.0)
    policy.check_start("", 160.0)
    with pytest.raises(RendezvousError, match="no scheduler there within 60 s"):
        policy.check_start("", 160.1)
