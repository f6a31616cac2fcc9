"""
Agents that come to the scheduler through relays: real processes, real sockets, everything as
without them.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdrun.endpoint import Endpoint
from pdrun.errors import AuthenticationError
from pdrun.rendezvous.protocol.messages import Finished, Leave, StopWorkers, Verdict, WorkerExit
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.scheduler import relay_main
from pdrun.rendezvous.scheduler.child import SchedulerChild
from pdrun.rendezvous.scheduler.relay_main import serve_relay, serve_standalone_relay
from pdrun.rendezvous.scheduler.relay_processes import MIN_NODES, choose_relay_count
from pdrun.rendezvous.transport.listen import bind_listener
from tests.lib.tiers import thorough
from tests.rendezvous.helpers import Agent, agents, cause, config, connect, start_all, until

SECRET = Secret.random()


@contextmanager
def scheduler(relays: int = 2, **settings: Any) -> Iterator[SchedulerChild]:
    """A scheduler process with relays in front of it."""
    child = SchedulerChild(
        config(relays=relays, **settings), SECRET, endpoint=Endpoint("127.0.0.1", 0)
    )
    try:
        yield child
    finally:
        child.close(5.0)


def relays_of(child: SchedulerChild) -> list[psutil.Process]:
    return psutil.Process(child.pid).children()


def finish(*those: Agent, code: int = 0) -> None:
    """End every worker well, and leave with the verdict."""
    for agent in those:
        agent.link.send(Finished(0))
    deadline = time.monotonic() + 30.0
    while not all(any(isinstance(message, Verdict) for message in agent.inbox) for agent in those):
        assert time.monotonic() < deadline, "no verdict"
        for agent in those:
            agent.turn(0.02)
    for agent in those:
        assert agent.expect(Verdict).code == code
        agent.link.send(Leave())


def test_a_job_is_the_same_through_relays() -> None:
    with scheduler(nodes=6) as child, agents(child.endpoint, SECRET, *["job"] * 6) as six:
        assert len(relays_of(child)) == 2
        for number, agent in enumerate(six):
            agent.join(f"n{number}")
        assigns = start_all(*six)
        assert [one.node_rank for one in assigns] == list(range(6))
        six[3].link.send(WorkerExit(0, 3, cause("exit", 7)))
        for agent in six:
            assert agent.expect(StopWorkers).generation == 0
        finish(*six, code=7)
        until(lambda: child.returncode == 0, "the scheduler left")


def test_heartbeats_are_answered_and_silence_is_found_out() -> None:
    quick = {"heartbeat": 0.3, "suspect": 0.9, "dead": 3.0}
    with scheduler(relays=1, **quick) as child, agents(child.endpoint, SECRET, "job", "job") as two:
        for number, agent in enumerate(two):
            agent.join(f"n{number}")
        start_all(*two)
        deadline = time.monotonic() + 4.5
        while time.monotonic() < deadline:  # both beat, through the relay only: nobody is lost
            for agent in two:
                agent.turn(0.05)
        assert not two[0].inbox and not two[1].inbox
        assert two[0].link.silent_for() < 3.0
        assert "n1 " in two[0].expect(StopWorkers, 20.0).reason  # now only one of them beats


def test_the_death_of_a_relay_is_mended_by_its_agents() -> None:
    with scheduler(relays=2) as child, agents(child.endpoint, SECRET, "job", "job") as two:
        for number, agent in enumerate(two):
            agent.join(f"n{number}")
        start_all(*two)
        dead = relays_of(child)
        for relay in dead:
            relay.kill()
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            for agent in two:
                agent.turn(0.05)
        until(lambda: len(relays_of(child)) == 2, "relays were started again")
        for number, agent in enumerate(two):
            agent.link.send(WorkerExit(0, number, cause("ok", 0)))
        finish(*two)
        assert not {relay.pid for relay in dead} & {relay.pid for relay in relays_of(child)}


@pytest.mark.parametrize("stopped", [1, thorough(2)])
def test_relays_that_stand_still_are_replaced_and_no_agent_is_lost(stopped: int) -> None:
    """They keep their connections; only that they do not answer tells it."""
    with (
        scheduler(relays=2, nodes=4) as child,
        agents(child.endpoint, SECRET, *["job"] * 4) as four,
    ):
        for number, agent in enumerate(four):
            agent.join(f"n{number}")
        start_all(*four)
        still = relays_of(child)[:stopped]
        for relay in still:
            relay.suspend()

        def replaced() -> bool:
            for agent in four:
                agent.turn(0.02)
            return not any(relay.is_running() for relay in still) and len(relays_of(child)) == 2

        until(replaced, "the relays were killed and started again", 25.0)
        for number, agent in enumerate(four):
            agent.link.send(WorkerExit(0, number, cause("ok", 0)))
        finish(*four)


def test_relays_end_with_their_scheduler() -> None:
    with scheduler() as child:
        relays = relays_of(child)
        os.kill(child.pid, signal.SIGKILL)
        until(
            lambda: not any(one.is_running() and one.status() != "zombie" for one in relays),
            "relays ended",
        )


def test_strangers_at_a_relay_harm_nobody() -> None:
    with scheduler(relays=1) as child, agents(child.endpoint, SECRET, "job", "job") as two:
        strangers = [connect(child.endpoint) for _ in range(20)]
        for index, one in enumerate(strangers):
            one.sendall(
                (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"pdrun relay 1\n", b"")[index % 4]
            )
        with agents(child.endpoint, Secret.random(), "job") as (other,):
            with pytest.raises(AuthenticationError):
                other.expect(Verdict, 15.0)
        for number, agent in enumerate(two):
            agent.join(f"n{number}")
        start_all(*two)
        for one in strangers:
            one.close()


def test_a_relay_of_another_token_is_refused() -> None:
    with scheduler(relays=0) as child, bind_listener(Endpoint("127.0.0.1", 0)) as listener:
        with pytest.raises(AuthenticationError):
            serve_relay(listener.fileno(), child.endpoint, Secret.random())


def test_a_relay_elsewhere_outlives_its_scheduler_and_ends_with_the_job(tmp_path: Path) -> None:
    with bind_listener(Endpoint("127.0.0.1", 0)) as probe:
        listen = Endpoint("127.0.0.1", probe.getsockname()[1])
    child = SchedulerChild(
        config(),
        SECRET,
        endpoint=Endpoint("127.0.0.1", 0),
        journal=tmp_path / "journal",
        events_path=tmp_path / "e",
    )
    ended: list[int] = []
    said: list[str] = []
    relay = threading.Thread(
        target=lambda: ended.append(
            serve_standalone_relay(
                child.endpoint, listen, SECRET, patience=30.0, show_line=said.append
            )
        ),
        daemon=True,
    )
    relay.start()
    until(lambda: said, "the relay listens")
    try:
        with agents(listen, SECRET, "job", "job") as two:
            for number, agent in enumerate(two):
                agent.join(f"n{number}")
            start_all(*two)
            os.kill(child.pid, signal.SIGKILL)
            pid = child.pid
            deadline = time.monotonic() + 20.0
            while child.pid == pid or len(said) < 2:
                child.restart_if_dead()
                for agent in two:
                    agent.turn(0.02)
                assert time.monotonic() < deadline
            for number, agent in enumerate(two):
                agent.link.send(WorkerExit(0, number, cause("ok", 0)))
            finish(*two)
        until(lambda: ended, "the relay ended")
        assert ended == [0] and "was lost" in said[1]
    finally:
        child.close(2.0)


def test_a_lost_relay_is_called_a_relay() -> None:
    """Killed it is named; standing there without a scheduler behind it, that is what is told."""
    code = (
        "import sys; from tests.rendezvous.scheduler.test_relay import alone; alone(*sys.argv[1:])"
    )
    with (
        scheduler(relays=0, heartbeat=0.1) as child,
        bind_listener(Endpoint("127.0.0.1", 0)) as probe,
    ):
        listen = Endpoint("127.0.0.1", probe.getsockname()[1])
        probe.close()
        argv = [
            sys.executable,
            "-c",
            code,
            str(child.endpoint.port),
            str(listen.port),
            SECRET.reveal().hex(),
        ]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert process.stdout is not None
        told: list[str] = []
        try:
            process.stdout.readline()
            with agents(listen, SECRET, "job", on_status=told.append) as (agent,):
                agent.join("n0")
                turn_until(
                    agent,
                    lambda: agent.link._reconnect_policy.is_through_relay,
                    "the relay has answered",
                )
                os.kill(process.pid, signal.SIGSTOP)  # its port stands, and nobody is behind it
                turn_until(agent, lambda: told, "the relay's silence is told")
                assert told.pop().startswith(
                    f"lost the scheduler behind the relay at {listen}, "
                    "its host accepts connections, but no scheduler answers: waiting"
                )
                process.kill()
                turn_until(agent, lambda: told, "the relay's end is told")
                assert told[0].startswith(
                    "lost the relay through which this node reaches the scheduler (pdrun relay)"
                )
        finally:
            process.kill()
            process.wait()


def turn_until(agent: Agent, condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, what
        agent.turn()


def alone(scheduler_port: str, port: str, secret: str) -> None:
    """Be a relay of its own."""
    where, here = (Endpoint("127.0.0.1", int(text)) for text in (scheduler_port, port))
    serve_standalone_relay(
        where,
        here,
        Secret.from_hex(secret),
        patience=30.0,
        show_line=lambda text: print(text, flush=True),
    )


def test_a_relay_says_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdrun.rendezvous.scheduler.relay_main.STATUS_SECONDS", 0.3)
    with bind_listener(Endpoint("127.0.0.1", 0)) as probe:
        nowhere = Endpoint("127.0.0.1", probe.getsockname()[1])
    said: list[str] = []
    assert (
        serve_standalone_relay(
            nowhere, Endpoint("127.0.0.1", 0), SECRET, patience=2.0, show_line=said.append
        )
        == 69
    )
    assert said[0].startswith("relay to ") and said[-1].startswith("error: ")
    waits = [
        re.fullmatch(rf"the scheduler at {nowhere} does not answer; waiting (\d) s more", line)
        for line in said[1:-1]
    ]
    assert 2 <= len(waits) <= 7 and all(waits), said


def test_small_jobs_have_no_relays() -> None:
    assert choose_relay_count(config(nodes=MIN_NODES - 1)) == 0
    assert choose_relay_count(config(nodes=MIN_NODES)) >= 2
    assert choose_relay_count(config(nodes=2, relays=3)) == 3


def test_one_address_is_one_address() -> None:
    with scheduler(relays=1) as child:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((child.endpoint.host, child.endpoint.port))


def test_one_refused_handshake_is_not_the_end_of_a_standalone_relay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler that dies in the middle of it refuses it as well."""
    results: list[bool] = []

    def serve(*_: object, **__: object) -> bool:
        if results.pop(0):
            return True
        raise AuthenticationError("the token differs")

    monkeypatch.setattr(relay_main, "serve_relay", serve)
    monkeypatch.setattr(relay_main, "RETRY_SECONDS", 0.0)
    arguments = (Endpoint("127.0.0.1", 9), Endpoint("127.0.0.1", 0), SECRET)
    results += [False, False, True]
    assert serve_standalone_relay(*arguments, patience=9.0, show_line=lambda line: None) == 0
    results += [False, False, False]
    with pytest.raises(AuthenticationError):
        serve_standalone_relay(*arguments, patience=9.0, show_line=lambda line: None)


def test_a_child_relay_that_is_refused_ends_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(*_: object, **__: object) -> bool:
        raise AuthenticationError("the token differs")

    order = {"listen_fd": 0, "host": "127.0.0.1", "port": 9, "secret": None, "crowd": 2}
    data = io.BytesIO(json.dumps(order).encode() + b"\n")
    monkeypatch.setattr(relay_main, "serve_relay", serve)
    monkeypatch.setattr(relay_main.process_setup, "setup_process", lambda: None)
    monkeypatch.setattr(relay_main.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data))
    assert relay_main.main() == 1
    assert json.loads(capsys.readouterr().err) == {"error": "the token differs"}
