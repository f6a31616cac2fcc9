"""What a node decides by itself: a table of moments."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from pdrun.launcher.agent.shutdown import (
    FORMING_ANSWER_SECONDS,
    LEASE_MARGIN_SECONDS,
    STOP_ANSWER_SECONDS,
    ShutdownState,
    answer_seconds,
)
from pdrun.rendezvous.protocol.messages import Welcome

WELCOME = Welcome("demo", "run", "", "s" * 32, 1.0, 10.0, lease=6.5)


def test_the_lease_and_the_time_after_it_fit_into_the_silence_that_the_others_wait_for():
    state = ShutdownState()
    state.set_lease(WELCOME, is_scheduler_node=False)
    assert [state.is_lease_over(silent) for silent in (0.0, 6.5, 6.6)] == [False, False, True]
    assert state.lease + state.grace_after_lease == WELCOME.dead - LEASE_MARGIN_SECONDS
    state.is_rejoining = True
    assert not state.is_lease_over(100.0)


@pytest.mark.parametrize("how", ["no lease", "scheduler here"])
def test_who_has_no_lease_waits(how):
    state = ShutdownState()
    state.set_lease(
        WELCOME if how == "scheduler here" else replace(WELCOME, lease=0.0),
        is_scheduler_node=how == "scheduler here",
    )
    assert not state.is_lease_over(1e9)


def test_only_a_first_sigterm_means_this_node():
    state = ShutdownState(may_depart=True)
    assert (
        state.should_depart(signal.SIGTERM)
        and not state.should_depart(signal.SIGINT)
        and not state.should_depart(signal.SIGHUP)
    )
    assert not ShutdownState(may_depart=False).should_depart(signal.SIGTERM)
    assert not ShutdownState(stop_count=1).should_depart(signal.SIGTERM) and not ShutdownState(
        exit_code=69
    ).should_depart(signal.SIGTERM)


def test_how_long_an_answer_may_take():
    assert (
        answer_seconds(has_started=False, is_running=False, is_repeated=False, grace=30)
        == FORMING_ANSWER_SECONDS
    )
    assert (
        answer_seconds(has_started=True, is_running=True, is_repeated=False, grace=30)
        == STOP_ANSWER_SECONDS
    )
    assert (
        answer_seconds(has_started=True, is_running=False, is_repeated=True, grace=30)
        == STOP_ANSWER_SECONDS
    )
    assert answer_seconds(has_started=True, is_running=False, is_repeated=False, grace=30) > 30
