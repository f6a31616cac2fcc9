"""What a node decides by itself: a table of moments."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from pdrun.launcher.agent.shutdown import (
    MARGIN,
    STOP_ANSWER,
    STOP_ANSWER_WAITING,
    Leaving,
    answer_time,
)
from pdrun.rendezvous.protocol.messages import Welcome

WELCOME = Welcome("demo", "run", "", "s" * 32, 1.0, 10.0, lease=6.5)


def test_the_lease_and_the_time_after_it_fit_into_the_silence_that_the_others_wait_for():
    leave = Leaving()
    leave.welcomed(WELCOME, serves=False)
    assert [leave.expired(silent) for silent in (0.0, 6.5, 6.6)] == [False, False, True]
    assert leave.lease + leave.last_grace == WELCOME.dead - MARGIN
    leave.returning = True
    assert not leave.expired(100.0)


@pytest.mark.parametrize("how", ["no lease", "scheduler here"])
def test_who_has_no_lease_waits(how):
    leave = Leaving()
    leave.welcomed(
        WELCOME if how == "scheduler here" else replace(WELCOME, lease=0.0),
        serves=how == "scheduler here",
    )
    assert not leave.expired(1e9)


def test_only_a_first_sigterm_means_this_node():
    leave = Leaving(may_depart=True)
    assert (
        leave.departs(signal.SIGTERM)
        and not leave.departs(signal.SIGINT)
        and not leave.departs(signal.SIGHUP)
    )
    assert not Leaving(may_depart=False).departs(signal.SIGTERM)
    assert not Leaving(stops=1).departs(signal.SIGTERM) and not Leaving(code=69).departs(
        signal.SIGTERM
    )


def test_how_long_an_answer_may_take():
    assert answer_time(started=False, running=False, again=False, grace=30) == STOP_ANSWER_WAITING
    assert answer_time(started=True, running=True, again=False, grace=30) == STOP_ANSWER
    assert answer_time(started=True, running=False, again=True, grace=30) == STOP_ANSWER
    assert answer_time(started=True, running=False, again=False, grace=30) > 30
