"""What a node decides by itself: a table of moments."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from pdrun.launcher.agent.shutdown import (
    FORMING_ANSWER_SECONDS,
    STOP_ANSWER_SECONDS,
    ShutdownState,
    answer_seconds,
)
from pdrun.rendezvous.protocol.messages import Welcome

WELCOME = Welcome("demo", "run", "", "s" * 32, 1.0, 10.0, lease=6.5)


def test_the_lease_is_over_once():
    state = ShutdownState()
    state.set_lease(WELCOME, is_scheduler_node=False)
    assert [state.is_lease_over(silent) for silent in (0.0, 6.5, 6.6)] == [False, False, True]
    state.is_rejoining = True
    assert not state.is_lease_over(100.0)


def test_the_fence_is_the_links_with_a_lease_and_this_process_alone_without():
    state = ShutdownState()
    assert state.fence_at(50.0, 40.0) is None, "no heartbeats, nothing to fence"
    state.set_lease(WELCOME, is_scheduler_node=False)
    assert state.fence_at(50.0, 40.0) == 50.0
    state.has_verdict = True  # no other generation starts any more: the grace counts
    assert state.fence_at(50.0, 45.0) == 45.0 + 10.0 - 2.0 - 1.0
    first = ShutdownState()
    first.set_lease(WELCOME, is_scheduler_node=True)
    assert first.fence_at(0.0, 40.0) == 47.0


def test_a_stop_waits_for_a_scheduler_that_stands_still_and_for_no_other():
    state = ShutdownState()
    state.record_stop(signal.SIGINT, 100.0)
    assert state.may_be_answered(2.0, 0.0, 102.0)
    assert not state.may_be_answered(0.1, 0.1, 102.0), "it lives, and does not answer"
    assert not state.may_be_answered(6.0, 6.0, 102.0), "it is cut off"
    assert not state.may_be_answered(9.0, 1.0, 110.0), "ten seconds are enough"
    state.record_stop(signal.SIGINT, 103.0)
    assert not state.may_be_answered(2.0, 0.0, 103.0), "a second signal does not wait"


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
