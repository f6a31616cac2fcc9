"""Cut off, or only without a scheduler: what a node's lease counts."""

from __future__ import annotations

import pytest

from pdrun.endpoint import Endpoint
from pdrun.errors import AuthenticationError, RendezvousError
from pdrun.rendezvous.protocol.messages import Welcome
from pdrun.rendezvous.transport.dns import REFUSED_TEXT, name_fault
from pdrun.rendezvous.transport.reconnect import RECHECK_SECONDS, ReconnectPolicy


def turned(patience: ReconnectPolicy, begin: float, end: float) -> float:
    """Call as a loop would, each half second; return ``end``."""
    now = begin
    while now < end:
        now += 0.5
        patience.on_turn(now)
    return now


def test_a_machine_that_takes_connections_is_not_cut_off() -> None:
    patience = ReconnectPolicy(Endpoint("10.0.0.1", 1), 60.0, None, 100.0)
    now = turned(patience, 100.0, 105.0)
    assert (patience.silent_for(now), patience.cut_off_for(now)) == (5.0, 5.0)
    patience.on_connected(now)
    now = turned(patience, now, 108.0)
    assert (patience.silent_for(now), patience.cut_off_for(now)) == (8.0, 3.0)
    patience.on_no_listener(now)  # refused, or no route: that tells nothing
    assert patience.cut_off_for(now) == 3.0
    patience.on_message(now)
    assert (patience.silent_for(now), patience.cut_off_for(now)) == (0.0, 0.0)


def test_a_relay_that_takes_connections_proves_no_scheduler() -> None:
    patience = ReconnectPolicy(Endpoint("10.0.0.1", 1), 60.0, None, 100.0)
    patience.is_through_relay = True
    now = turned(patience, 100.0, 105.0)
    patience.on_connected(now)
    now = turned(patience, now, 108.0)
    assert patience.cut_off_for(now) == 8.0


def test_who_has_just_woken_is_given_a_moment_to_ask_and_no_more() -> None:
    """The others do not wait for a process that stood still: its lease has run on."""
    patience = ReconnectPolicy(Endpoint("10.0.0.1", 1), 60.0, None, 100.0)
    assert patience.cut_off_for(130.0) == 0.0
    patience.on_turn(130.0)
    assert patience.cut_off_for(130.0) == 0.0
    now = turned(patience, 130.0, 130.0 + RECHECK_SECONDS + 0.5)
    assert patience.cut_off_for(now) == now - 100.0
    patience.on_message(now)
    assert patience.cut_off_for(now) == 0.0


def test_what_lay_there_for_longer_than_the_lease_is_stale() -> None:
    patience = ReconnectPolicy(Endpoint("10.0.0.1", 1), 60.0, None, 100.0)
    assert not patience.is_stale(6.0, 106.0)
    assert patience.is_stale(6.0, 107.0)
    assert not patience.is_stale(0.0, 1000.0)
    patience.on_message(107.0, is_certain=False)
    assert patience.silent_for(107.0) == 0.0 and patience.cut_off_for(107.0) == 0.0, "it may ask"
    assert patience.is_stale(6.0, 107.0), "what lay there does not renew a lease"
    patience.on_turn(107.0)
    for moment in range(108, 111):
        patience.on_turn(float(moment))
    assert patience.cut_off_for(110.0) == 10.0
    patience.on_message(107.0)
    assert not patience.is_stale(6.0, 108.0)


@pytest.mark.parametrize(
    ("is_refused", "connected", "seen"),
    [
        (True, False, ", its host refuses connections"),
        (False, False, ", its host does not answer"),
        (False, True, ", its host accepts connections, but no scheduler answers"),
    ],
)
def test_the_reason_of_a_loss_is_what_the_attempts_have_met(
    is_refused: bool, connected: bool, seen: str
) -> None:
    lines: list[str] = []
    policy = ReconnectPolicy(Endpoint("10.0.0.1", 1), 60.0, lines.append, 100.0)
    welcome = Welcome("job", "r", "", "s", 1.0, 10.0, patience=20.0)
    policy.on_disconnect(100.0)
    with pytest.raises(RendezvousError) as caught:
        for second in range(101, 130):
            policy.on_turn(float(second))
            policy.on_no_listener(float(second), REFUSED_TEXT if is_refused else "")
            if connected:
                policy.on_connected(float(second))
            policy.check_lost(welcome, float(second))
    assert caught.value.what == f"lost the scheduler: no message for 21.0 s{seen}"
    assert lines[0] == (
        f"lost the scheduler at 10.0.0.1:1{seen}: waiting 15 s more for its return;"
        " the workers continue"
    )


@pytest.mark.parametrize(
    ("failure", "hint", "text"),
    [
        (REFUSED_TEXT, "", "no process listens there yet"),
        (REFUSED_TEXT, "the scheduler listens there", "connections are refused; the scheduler"),
        ("it does not answer", "a firewall", "it does not answer; a firewall"),
        ("no route to host", "", "no route to host"),
        ("", "", "it is not reached yet"),
    ],
)
def test_while_no_scheduler_is_reached_the_line_says_what_was_seen(
    failure: str, hint: str, text: str
) -> None:
    lines: list[str] = []
    policy = ReconnectPolicy(Endpoint("h1", 29400), 10.0, lines.append, 0.0, hint)
    policy.on_no_listener(1.0, failure)
    policy.check_start("", 2.0)
    assert lines == [line for line in lines if f"at h1:29400: {text}" in line] != []
    with pytest.raises(RendezvousError) as caught:
        policy.check_start("", 10.5)
    assert (f"within 10 s: {failure}" in str(caught.value)) == bool(failure)


@pytest.mark.parametrize(
    ("host", "text"),
    [
        (
            "fe80::1%nowhere9",
            "'nowhere9', the zone of fe80::1%nowhere9, is not a network interface",
        ),
        ("2001:db8::1%lo", "2001:db8::1%lo: this address has no zone; remove %lo"),
        ("fe80::1%lo", ""),
        ("::1", ""),
    ],
)
def test_a_zone_that_is_none_is_named(host: str, text: str) -> None:
    assert name_fault(host).startswith(text) and bool(name_fault(host)) == bool(text)


def test_a_listener_that_was_out_of_reach_meanwhile_is_not_taken_for_another_program() -> None:
    """Found by the soak: a link that was cut twice while its scheduler stood still twice."""
    policy = ReconnectPolicy(Endpoint("h1", 7), 600.0, None, 0.0)
    assert policy.on_handshake_failed(5.0, 1.0, 3.0)
    policy.on_no_listener(8.0, "it is not reached yet")
    policy.on_connected(17.0)
    assert policy.on_handshake_failed(24.0, 20.0, 3.0)
    policy.check_start("", 25.0)
    policy.on_handshake_failed(40.0, 36.0, 3.0)
    with pytest.raises(AuthenticationError, match="accepts connections but sends nothing"):
        policy.check_start("", 41.0)


def test_the_stall_of_this_process_is_not_the_silence_of_a_listener() -> None:
    policy = ReconnectPolicy(Endpoint("h1", 7), 600.0, None, 0.0)
    assert policy.on_handshake_failed(5.0, 1.0, 3.0)
    policy.on_turn(5.0)
    policy.on_turn(35.0)
    policy.check_start("", 36.0)


def test_a_handshake_that_met_the_death_of_a_scheduler_is_no_other_token() -> None:
    """Found by the soak: its successor took more than 4.5 s to start, on a machine at load 60."""
    policy = ReconnectPolicy(Endpoint("h1", 7), 600.0, None, 0.0)
    assert not policy.on_handshake_failed(1.0, 0.5, 3.0)
    policy.check_start("", 9.0)
    assert policy.on_handshake_failed(12.0, 9.0, 3.0), "the successor does not answer yet"
    for refused_at in (13.0, 14.0):
        assert not policy.on_handshake_failed(refused_at, refused_at - 0.5, 3.0)
        policy.check_start("", refused_at)
    assert not policy.on_handshake_failed(15.0, 14.5, 3.0)
    with pytest.raises(AuthenticationError, match="the token differs"):
        policy.check_start("", 15.0)
