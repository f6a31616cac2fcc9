"""The scheduler as a library: one node, nothing listens, ZeroMQ is never loaded."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdrun import eventlog
from pdrun.clock import FakeClock
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Cause,
    Finished,
    Join,
    Leave,
    Message,
    Ready,
    Refuse,
    Start,
    StatusQuery,
    StatusReply,
    StopRequest,
    StopWorkers,
    Verdict,
    Welcome,
    WorkerExit,
)
from pdrun.rendezvous.scheduler.local_link import LocalLink
from pdrun.rendezvous.scheduler.service import MAX_STATUS_CHARS, Service
from pdrun.rendezvous.transport.base import MemoryHub
from pdrun.ui.replay import replay_events
from tests.rendezvous.helpers import cause, config

ALONE = """
import sys
from pdrun.rendezvous.scheduler.local_link import LocalLink
from pdrun.rendezvous.protocol.messages import *
from pdrun.rendezvous.membership.machine import SchedulerConfig
link = LocalLink(SchedulerConfig(job="j", run="r", nodes=1), events_path=sys.argv[1])
link.send(Join("n", None, 2, store="127.0.0.1:1"))
link.send(Ready(0))
link.send(WorkerExit(0, 1, Cause("exit", 5)))
link.send(Finished(0))
print([type(message).__name__ for message in link.poll()])
link.close()
print(*sorted({"zmq", "rich", "psutil", "yaml", "asyncio", "json.tool", "torch", "subprocess"} & set(sys.modules)))
"""


def words(link: LocalLink) -> list[type[Message]]:
    return [type(message) for message in link.poll()]


def test_a_job_of_one_node_loads_no_zeromq(tmp_path: Path) -> None:
    events = tmp_path / "run" / "events.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(events)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    said, loaded = done.stdout.splitlines()
    assert said == "['Welcome', 'Assign', 'Start', 'StopWorkers', 'Verdict']"
    assert loaded == ""
    assert replay_events(eventlog.read_events(events)).code == 5


def test_a_whole_conversation() -> None:
    seen: list[str] = []
    link = LocalLink(
        config(nodes=1, max_restarts=1), host="here", record=lambda event: seen.append(event.kind)
    )
    assert link.fileno() == -1
    assert words(link) == [Welcome]
    link.send(Join("n", None, 1, store="127.0.0.1:1"))
    deadline = link.deadline()
    assert deadline is not None and deadline <= time.monotonic(), (
        "an answer lies there, and poll is not due"
    )
    assert words(link) == [Assign]
    link.send(Ready(0))
    link.send(WorkerExit(0, 0, cause()))
    link.send(Finished(0))
    assert words(link) == [Start, StopWorkers, Assign]
    link.send(Ready(1))
    link.send(WorkerExit(1, 0, Cause("ok", 0)))
    link.send(Finished(1))
    assert words(link) == [Start, Verdict]
    link.send(Leave())
    link.close()
    assert seen == [
        "created",
        "joined",
        "assigned",
        "started",
        "exited",
        "restarting",
        "assigned",
        "started",
        "exited",
        "verdict",
        "left",
    ]


def test_limits_hold_without_a_socket() -> None:
    clock = FakeClock()
    link = LocalLink(config(nodes=1, time_limit=60.0), clock=clock)
    link.send(Join("n", None, 1))
    link.send(Ready(0))
    link.poll()
    for _ in range(59):
        clock.advance(1.0)
        assert link.poll() == []
        due = link.deadline()
        assert due is not None and due - clock.monotonic() <= 1.0
    clock.advance(2.0)
    (stop,) = link.poll()
    assert isinstance(stop, StopWorkers) and "time limit" in stop.reason
    link.send(Finished(0))
    (verdict,) = link.poll()
    assert isinstance(verdict, Verdict) and verdict.code == 124


def test_a_stop_and_a_silence_of_any_length() -> None:
    clock = FakeClock()
    link = LocalLink(config(nodes=1), clock=clock)
    link.send(Join("n", None, 1))
    link.send(Ready(0))
    clock.advance(1e6)
    assert words(link) == [Welcome, Assign, Start], "an agent in the same process is never lost"
    link.send(StopRequest(2, "Ctrl-C"))
    link.send(StopRequest(2, "Ctrl-C"))
    stops = [message for message in link.poll() if isinstance(message, StopWorkers)]
    assert [(stop.signal, stop.grace) for stop in stops] == [(2, 2.0), (9, 0.0)]


def test_what_breaks_the_protocol_is_refused() -> None:
    link = LocalLink(config(nodes=1))
    link.send(Ready(0))
    assert words(link) == [Welcome, Refuse]


def test_status_is_cut_to_the_newest_lines() -> None:
    hub = MemoryHub()
    service = Service(config(nodes=1), hub)
    for number in range(3000):
        service._record_events(
            [eventlog.LogEvent("warning", 0.0, {"text": f"{number} " + "x" * 500})]
        )
    link = LocalLink(config(nodes=1))
    link._service, link._connection = service, hub.connect()
    link._sequence = 0
    from pdrun.rendezvous.protocol.messages import PROTOCOL, Hello

    link.send(Hello(PROTOCOL, "agent", "job", link._agent, 0, "h", 1))
    link.send(StatusQuery())
    replies = [message for message in link.poll() if isinstance(message, StatusReply)]
    total = sum(map(len, replies[0].lines))
    assert MAX_STATUS_CHARS / 2 < total <= MAX_STATUS_CHARS and "2999 x" in replies[0].lines[-2]


def test_lost_log_lines_do_not_stop_a_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    link = LocalLink(config(nodes=1), events_path=tmp_path / "file" / "events.jsonl")
    link.send(Join("n", None, 1))
    assert words(link) == [Welcome, Assign]
    link.close()


@pytest.mark.parametrize(
    "module",
    [
        "scheduler.local_link",
        "scheduler.child_main",
        "scheduler.child",
        "clients.dynamic",
        "protocol.security",
        "transport.listen",
        "membership.machine",
        "protocol.codec",
    ],
)
def test_importing_loads_no_zeromq(module: str) -> None:
    code = (
        f"import sys, pdrun.rendezvous.{module}; "
        "print([m for m in ('zmq', 'torch', 'psutil') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "[]"
