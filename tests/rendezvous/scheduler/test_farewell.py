"""
A scheduler that is given up: the other agents hear it within a second, and the event log has the
end. Where nobody can tell them, refused connections do.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pdrun.endpoint import Endpoint
from pdrun.errors import RendezvousError
from pdrun.eventlog import read_events
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.messages import Refuse, Verdict, Waiting, Welcome
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.scheduler import farewell as farewells
from pdrun.rendezvous.scheduler.child import SchedulerChild
from pdrun.rendezvous.scheduler.farewell import Farewell
from pdrun.rendezvous.transport import reconnect
from pdrun.rendezvous.transport.dns import refuses_connections
from pdrun.rendezvous.transport.listen import bind_listener
from pdrun.ui.replay import replay_events
from tests.rendezvous.conftest import Scheduler
from tests.rendezvous.helpers import agents, connect, until

from .test_recovery import kill, revived

Start_ = Callable[..., Scheduler]


def give_up(child: SchedulerChild) -> str:
    """Look after a scheduler that is dead until it is given up; return why."""
    with pytest.raises(RendezvousError) as caught:
        revived(child)
    return str(caught.value.what)


@pytest.mark.parametrize("journal", ["missing", "empty", "damaged", "none"])
def test_the_others_are_told_and_the_event_log_has_a_verdict(
    scheduler: Start_, secret: Secret, tmp_path: Path, journal: str
) -> None:
    path = tmp_path / "j"
    child = scheduler(nodes=4, journal=None if journal == "none" else path)
    with agents(child.endpoint, secret, "job", "job", "job", patience=60.0) as three:
        for number, agent in enumerate(three):
            agent.join(f"n{number}")
        for agent in three:
            agent.expect(Waiting)
        kill(child)
        until(lambda: child.returncode is not None, "it is dead")
        if journal == "missing":
            path.unlink()
        elif journal == "empty":
            path.write_bytes(b"")
        elif journal == "damaged":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            path.write_bytes(data)
        why = give_up(child)
        begin = time.monotonic()
        verdicts = [agent.expect(Verdict, 5.0) for agent in three]
        assert time.monotonic() - begin < 5.0
        assert {verdict.code for verdict in verdicts} == {69}
        assert {verdict.reason for verdict in verdicts} == {why.replace("this node", "head")}
        child.close()
    status = replay_events(child.events())
    assert status.state == "done" and status.code == 69
    assert len(child.events("verdict")) == 1


def test_it_ends_at_once_when_all_have_heard_it(secret: Secret, tmp_path: Path) -> None:
    with farewell_of(secret, nodes=2) as (farewell, endpoint):
        with agents(endpoint, secret, "job") as (agent,):
            assert agent.expect(Verdict).reason == "it is over"
            begin = time.monotonic()
            farewell.close(10.0)
            assert time.monotonic() - begin < farewells.MIN_SECONDS
        with pytest.raises(ConnectionRefusedError):
            connect(endpoint)


def test_it_ends_after_a_moment_when_nobody_comes(
    secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farewells, "MIN_SECONDS", 0.3)
    monkeypatch.setattr(farewells, "QUIET_SECONDS", 0.2)
    with farewell_of(secret, nodes=5) as (farewell, endpoint):
        farewell.close(10.0)
        with pytest.raises(ConnectionRefusedError):
            connect(endpoint)


def test_another_job_and_a_viewer_are_refused(secret: Secret) -> None:
    with (
        farewell_of(secret, nodes=2) as (_, endpoint),
        agents(endpoint, secret, "another") as (stranger,),
        agents(endpoint, secret, "job", role="view") as (viewer,),
    ):
        for one in (stranger, viewer):
            refuse = one.expect(Refuse)
            assert (refuse.code, refuse.reason) == (69, "job 'job' (run r) is over: it is over")


def test_an_event_log_that_has_a_verdict_keeps_it(secret: Secret, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text('{"kind": "verdict", "time": 1, "code": 3, "reason": "x"}\n')
    with farewell_of(secret, nodes=2, events=events) as (farewell, _):
        assert farewell._record.wait(10)
    assert [event.data["code"] for event in read_events(events)] == [3]


class farewell_of:
    """A farewell of a job on a new port."""

    def __init__(self, secret: Secret, *, nodes: int, events: Path | None = None) -> None:
        listener = bind_listener(Endpoint("127.0.0.1", 0))
        self.endpoint = Endpoint(*listener.getsockname()[:2])
        config = SchedulerConfig("job", "r", nodes)
        verdict = Verdict(69, "it is over")
        self.farewell = Farewell(
            config, secret, listener.detach(), verdict, events, is_insecure=False
        )

    def __enter__(self) -> tuple[Farewell, Endpoint]:
        return self.farewell, self.endpoint

    def __exit__(self, *raised: object) -> None:
        self.farewell.close(0.0)


def test_without_a_descriptor_the_port_refuses(secret: Secret) -> None:
    listener = bind_listener(Endpoint("127.0.0.1", 0))
    endpoint = Endpoint(*listener.getsockname()[:2])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Farewell(
                SchedulerConfig("job", "r", 2),
                secret,
                listener.detach(),
                Verdict(69, "x"),
                None,
                is_insecure=False,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(ConnectionRefusedError):
        connect(endpoint)


def test_who_is_refused_for_a_while_leaves(
    scheduler: Start_, secret: Secret, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnect, "REFUSED_SECONDS", 0.7)
    child = scheduler(nodes=2, journal=tmp_path / "j")
    with agents(child.endpoint, secret, "job", patience=60.0) as (agent,):
        agent.join("n0")
        agent.expect(Waiting)
        child._close_listener()  # as if its agent had died with it
        kill(child)
        begin = time.monotonic()
        with pytest.raises(RendezvousError, match="refused connections for 0"):
            while time.monotonic() < begin + 20:
                agent.turn()
        assert time.monotonic() - begin >= 0.7


def test_a_scheduler_that_somebody_else_restarts_may_be_refused_for_long() -> None:
    """`pdrun scheduler --journal`: its port is closed until it is started again."""
    policy = reconnect.ReconnectPolicy(Endpoint("h", 1), 600.0, None, 0.0)
    welcome = Welcome("job", "r", "", "s", 1.0, 10.0, patience=60.0)
    policy.on_disconnect(10.0)
    for tenth in range(100, 650):
        policy.on_turn(tenth / 10)
        policy.on_no_listener(tenth / 10, reconnect.REFUSED_TEXT)
        policy.check_lost(welcome, tenth / 10)


def test_a_closed_port_and_a_silent_host_are_told_apart() -> None:
    listener = bind_listener(Endpoint("127.0.0.1", 0))
    endpoint = Endpoint(*listener.getsockname()[:2])
    assert not refuses_connections(endpoint)
    listener.close()
    assert refuses_connections(endpoint)
    assert not refuses_connections(Endpoint("no-such-host.invalid", 1))
