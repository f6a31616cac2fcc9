"""
A scheduler that is killed comes back, over real sockets and processes: at every commit, in every
state.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pdrun.endpoint import Endpoint
from pdrun.errors import RendezvousError
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Cause,
    Finished,
    Join,
    Leave,
    Message,
    Ready,
    Refuse,
    Standby,
    Start,
    StopWorkers,
    Verdict,
    Waiting,
    Welcome,
    WorkerExit,
)
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.scheduler import child as children
from pdrun.rendezvous.scheduler import relay_processes as relaychild
from pdrun.rendezvous.scheduler.child import SchedulerChild
from pdrun.rendezvous.scheduler.local_link import LocalLink, ZmqLink
from pdrun.rendezvous.transport.listen import bind_listener
from pdrun.rendezvous.transport.zmq_util import wait_readable
from pdrun.ui.replay import replay_events
from tests.lib.tiers import by_tier, thorough
from tests.rendezvous.conftest import Scheduler
from tests.rendezvous.helpers import Agent, agents, config, start_all, until

Start_ = Callable[..., Scheduler]
M = TypeVar("M", bound=Message)


def tend(child: SchedulerChild) -> str:
    """One look at the child, as an agent's loop does."""
    due = child.deadline()
    told = child.fileno() >= 0 and wait_readable(child.fileno(), wait=0)
    if told or (due is not None and time.monotonic() >= due):
        return child.restart_if_dead()
    return ""


def kill(child: SchedulerChild) -> None:
    os.kill(child.pid, signal.SIGKILL)


def revived(child: SchedulerChild, *others: Agent, timeout: float = 60.0) -> str:
    """Serve the child and the agents until it is back; return what it says."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        said = tend(child)
        for agent in others:
            agent.turn(0.005)
        if "is back" in said:
            return said
        time.sleep(0.002)
    raise AssertionError("the scheduler did not come back")


def expect(kind: type[M], agent: Agent, *others: Agent, timeout: float = 60.0) -> M:
    """Wait for a message to one agent while all are served, as processes of their own would be."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for each in (agent, *others):
            each.turn(0.005)
        while agent.inbox:
            message = agent.inbox.pop(0)
            if isinstance(message, kind):
                return message
    raise AssertionError(f"no {kind.__name__} within {timeout} s")


class Player:
    """
    An agent whose workers do what a script says: ``{generation: codes}``; everything else as a real
    one does.
    """

    def __init__(self, agent: Agent, name: str, plays: dict[int, list[int]]) -> None:
        self.agent, self.name, self.plays = agent, name, plays
        self.assign: Assign | None = None
        self.started = self.ended = -1
        self.verdict: Verdict | None = None
        self.heard: list[Message] = []

    def turn(self) -> None:
        self.agent.turn(0.01)
        inbox, self.agent.inbox = self.agent.inbox, []
        for message in inbox:
            self.heard.append(message)
            self.hear(message)

    def hear(self, message: Message) -> None:
        send = self.agent.link.send
        match message:
            case Welcome():
                send(Join(self.name, None, 2, store=f"{self.name}:1"))
            case Assign(generation=generation):
                assert self.assign is None or generation == self.assign.generation + 1, (
                    "a generation twice, or none"
                )
                self.assign = message
                send(Ready(generation))
            case Start(generation):
                assert self.started == generation - 1, "started twice"
                self.started = generation
                if codes := self.plays.get(generation):
                    self.end(codes)
            case StopWorkers(generation):
                if self.ended < generation:
                    self.end([143, 143])
            case Verdict():
                assert self.verdict is None, "two verdicts"
                self.verdict = message
                send(Leave())
            case Refuse(reason=reason):
                raise AssertionError(f"{self.name} was refused: {reason}")
            case _:
                pass

    def end(self, codes: list[int]) -> None:
        assert self.assign is not None
        self.ended = self.assign.generation
        for number, code in enumerate(codes):
            kind: Any = "ok" if not code else "stopped" if code == 143 else "exit"
            self.agent.link.send(
                WorkerExit(self.ended, self.assign.first_rank + number, Cause(kind, code))
            )
        self.agent.link.send(Finished(self.ended, f"{self.name}:{self.ended + 2}"))


def play(child: SchedulerChild, players: list[Player], timeout: float = 30.0) -> list[str]:
    """Let a job live to its verdict; return what was said about the scheduler."""
    deadline, said = time.monotonic() + timeout, list[str]()
    while any(player.verdict is None for player in players):
        assert time.monotonic() < deadline, (
            f"no verdict: {[player.heard[-3:] for player in players]}"
        )
        if child.returncode != 0:
            said.append(tend(child))
        for player in players:
            player.turn()
    return [line for line in said if line]


def dying(monkeypatch: pytest.MonkeyPatch, moment: str, number: int, marker: Path) -> None:
    server = str(Path(__file__).with_name("dying_server.py"))
    monkeypatch.setattr(
        SchedulerChild, "COMMAND", (sys.executable, "-P", server, moment, str(number), str(marker))
    )


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["torn", thorough("written")])
def test_killed_at_every_commit_of_a_job_with_a_restart(
    scheduler: Start_, secret: Secret, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """
    From the first Hello to the last Leave: the same generations, one restart, the same verdict.

    The default run has every other commit.
    """
    for number in range(2, 60, by_tier(2, 1)):
        marker = tmp_path / f"killed-{number}"
        dying(monkeypatch, moment, number, marker)
        child = scheduler(max_restarts=1, backoff=0.0, journal=tmp_path / f"journal-{number}")
        with agents(child.endpoint, secret, "job", "job") as pair:
            players = [
                Player(pair[0], "n0", {1: [0, 0]}),
                Player(pair[1], "n1", {0: [0, 7], 1: [0, 3]}),
            ]
            said = play(child, players)
            verdicts = [player.verdict for player in players]
            assert [verdict.code for verdict in verdicts if verdict] == [3, 3], number
            assert (
                verdicts[0] == verdicts[1]
                and verdicts[0]
                and verdicts[0].first
                and verdicts[0].first.rank == 3
            )
            assert "after 1 restart" in verdicts[0].reason
            assert [player.started for player in players] == [1, 1]
            until(partial(gone, child), "it leaves when all have left", 15.0)
        status = replay_events(child.events())
        kinds = [event.kind for event in child.events()]
        assert (status.state, status.code, status.generation, status.restarts) == (
            "done",
            3,
            1,
            1,
        ), number
        assert [kinds.count(kind) for kind in ("joined", "started", "verdict")] == [2, 2, 1], (
            number,
            kinds,
        )
        assert not (tmp_path / f"journal-{number}").exists(), "its job is over"
        if not marker.exists():
            assert number > 8, "that many commits a job has at least"
            assert kinds.count("resumed") == 0 and not said
            return
        if not kinds.count("resumed"):  # two agents leave in one commit, or in two
            assert marker.read_bytes().count(b'"Leave"') == 2, (
                "only after the last Leave is there nothing to resume"
            )
        assert kinds.count("resumed") <= 1
    raise AssertionError("the job never ended without a kill")


def gone(child: SchedulerChild) -> bool:
    """Tend the child until its end in good order, which after the verdict is no loss."""
    if child.returncode not in (None, 0) or child.is_restarting():
        tend(child)
    return child.returncode == 0


def test_killed_while_gathering_and_a_node_joins_afterwards(
    scheduler: Start_, secret: Secret, tmp_path: Path
) -> None:
    child = scheduler(journal=tmp_path / "j")
    with agents(child.endpoint, secret, "job", "job") as (first, late):
        first.join("n0")
        first.expect(Waiting)
        kill(child)
        revived(child, first, late)
        late.join("n1")
        assert [expect(Assign, one, first, late).node_rank for one in (first, late)] == [0, 1]
        assert child.events("resumed") and len(child.events("joined")) == 2


def test_killed_while_workers_stop_and_while_a_verdict_is_out(
    scheduler: Start_, secret: Secret, tmp_path: Path
) -> None:
    child = scheduler(journal=tmp_path / "j")
    with agents(child.endpoint, secret, "job", "job") as pair:
        for number, agent in enumerate(pair):
            agent.join(f"n{number}")
        start_all(*pair)
        pair[0].link.send(WorkerExit(0, 0, Cause("exit", 42)))
        assert "rank 0 on n0" in pair[1].expect(StopWorkers).reason
        kill(child)
        for agent in pair:
            agent.link.send(Finished(0))  # said while nobody listens
        revived(child, *pair)
        assert expect(Verdict, pair[1], *pair).code == 42
        kill(child)  # the other one may not have heard it
        revived(child, *pair)
        assert expect(Verdict, pair[0], *pair).code == 42
        assert all(not isinstance(message, StopWorkers | Verdict) for message in pair[1].inbox), (
            "told twice"
        )


def test_a_worker_fails_while_the_scheduler_is_dead(
    scheduler: Start_, secret: Secret, tmp_path: Path
) -> None:
    child = scheduler(journal=tmp_path / "j")
    with agents(child.endpoint, secret, "job", "job") as pair:
        for number, agent in enumerate(pair):
            agent.join(f"n{number}")
        start_all(*pair)
        kill(child)
        until(lambda: child.returncode is not None, "it is dead")
        pair[1].link.send(WorkerExit(0, 1, Cause("exit", 9)))
        pair[1].link.send(Finished(0))
        revived(child, *pair)
        assert "rank 1 on n1" in expect(StopWorkers, pair[0], *pair).reason
        pair[0].link.send(Finished(0))
        assert [expect(Verdict, agent, *pair).code for agent in pair] == [9, 9]


def test_a_node_that_dies_with_the_scheduler_is_lost(
    scheduler: Start_, secret: Secret, tmp_path: Path
) -> None:
    child = scheduler(journal=tmp_path / "j", dead=2.0, suspect=1.0, heartbeat=0.25)
    with agents(child.endpoint, secret, "job", "job") as pair:
        for number, agent in enumerate(pair):
            agent.join(f"n{number}")
        start_all(*pair)
        kill(child)
        pair[1].link.close(0.0)
        revived(child, pair[0])
        assert "n1" in pair[0].expect(StopWorkers).reason
        pair[0].link.send(Finished(0))
        assert pair[0].expect(Verdict).code == 69


# The end of patience
# -------------------


def test_a_damaged_journal_ends_the_waiting_with_its_place(
    scheduler: Start_, secret: Secret, tmp_path: Path
) -> None:
    child = scheduler(journal=tmp_path / "j")
    with agents(child.endpoint, secret, "job") as (agent,):
        agent.join("n0")
        agent.expect(Waiting)
        kill(child)
        until(lambda: child.returncode is not None, "it is dead")
        data = bytearray((tmp_path / "j").read_bytes())
        data[len(data) // 2] ^= 4
        (tmp_path / "j").write_bytes(data)
        with pytest.raises(RendezvousError, match=r"j: .*damaged at byte \d+") as caught:
            revived(child, agent)
        assert caught.value.exit_code == 69
        assert child.deadline() is None and child.fileno() == -1
        verdict = agent.expect(Verdict)
        assert verdict.code == 69 and "damaged at byte" in verdict.reason
        child.close()
        with pytest.raises(ConnectionRefusedError):  # nobody is to wait in its queue
            connect(child.endpoint)


@pytest.mark.parametrize("first", [0, 1])
def test_a_journal_that_has_lost_its_end_ends_the_job(
    scheduler: Start_, secret: Secret, tmp_path: Path, first: int
) -> None:
    """
    An older copy, or one that a full disk has cut, knows less than the nodes, whoever comes first:
    the one that it does not know would otherwise join and make the lost generation again.
    """
    child = scheduler(journal=tmp_path / "j")
    with agents(child.endpoint, secret, "job", "job") as pair:
        pair[0].join("n0")
        pair[0].expect(Waiting)
        older = (tmp_path / "j").read_bytes()
        pair[1].join("n1")
        start_all(*pair)
        kill(child)
        until(lambda: child.returncode is not None, "it is dead")
        (tmp_path / "j").write_bytes(older)
        revived(child, pair[first])
        for agent in (pair[first], pair[1 - first]):
            refusal = expect(Refuse, agent, agent)
            assert refusal.code == 69
            assert "the scheduler's journal has lost its end" in refusal.reason


def test_a_scheduler_that_dies_after_the_verdict_leaves_nobody_without_it(
    scheduler: Start_, secret: Secret, tmp_path: Path
) -> None:
    """The agent of its node is about to end, and starts no successor: it tells the others."""
    child = scheduler(journal=tmp_path / "j")
    with agents(child.endpoint, secret, "job", "job") as (here, there):
        for number, agent in enumerate((here, there)):
            agent.join(f"n{number}")
        start_all(here, there)
        os.kill(child.pid, signal.SIGKILL)
        child.keep_verdict(Verdict(0, "2 workers succeeded"))
        closing = threading.Thread(target=child.close)
        closing.start()
        verdict = expect(Verdict, there, there)
        closing.join(30)
    assert (verdict.code, verdict.reason) == (0, "2 workers succeeded")
    assert not closing.is_alive()


def connect(endpoint: Endpoint) -> None:
    import socket

    socket.create_connection((endpoint.host, endpoint.port), timeout=5).close()


def test_a_journal_that_is_gone_ends_the_waiting(scheduler: Start_, tmp_path: Path) -> None:
    child = scheduler(journal=tmp_path / "j")
    (tmp_path / "j").unlink()
    kill(child)
    with pytest.raises(
        RendezvousError, match=r"killed by SIGKILL\), and its journal .*j is missing or empty"
    ):
        revived(child)


def killing(monkeypatch: pytest.MonkeyPatch, marker: Path, times: int) -> None:
    """Have the first processes be killed before they have read their order."""
    code = (
        "import os, pathlib, signal, sys; path = pathlib.Path(sys.argv[1]); "
        "done = len(path.read_text()) if path.exists() else 0; "
        "done < int(sys.argv[2]) and (path.write_text('x' * (done + 1)), os.kill(os.getpid(), signal.SIGKILL)); "
        "from pdrun.rendezvous.scheduler import child_main; sys.exit(child_main.main())"
    )
    monkeypatch.setattr(
        SchedulerChild, "COMMAND", (sys.executable, "-P", "-c", code, str(marker), str(times))
    )


def test_one_that_is_killed_before_it_listens_is_started_again(
    scheduler: Start_, secret: Secret, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killing(monkeypatch, tmp_path / "deaths", 1)
    child = scheduler(journal=tmp_path / "j")
    with agents(child.endpoint, secret, "job") as (agent,):
        agent.join("n0")
        agent.expect(Waiting)
    assert (tmp_path / "deaths").read_text() == "x"
    killing(monkeypatch, tmp_path / "more", 2)
    with pytest.raises(RendezvousError, match=r"ended immediately, twice \(killed by SIGKILL\)"):
        scheduler(journal=tmp_path / "other")


@pytest.mark.parametrize(
    "printed", ["a banner\n", "half a line", '{"a": "number", "or": []}\n[]\n']
)
def test_what_a_sitecustomize_prints_is_no_word_of_the_process(
    scheduler: Start_, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str
) -> None:
    """
    It had ended every job of several nodes where output is not buffered, and cost the journal where
    it is.
    """
    (tmp_path / "sitecustomize.py").write_text(f"print({printed!r}, end='', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = scheduler(journal=tmp_path / "j")
    with agents(child.endpoint, child.secret, "job") as (agent,):
        agent.join("n0")
        agent.expect(Waiting)
        kill(child)
        assert "back after" in revived(child, agent)


def test_a_scheduler_that_has_given_its_journal_up_has_no_successor(
    scheduler: Start_, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there is old: it may not be gone on from, though the file could not be removed."""
    server = str(Path(__file__).with_name("dying_server.py"))
    monkeypatch.setattr(
        SchedulerChild, "COMMAND", (sys.executable, "-P", server, "lost", "2", str(tmp_path / "m"))
    )
    child = scheduler(journal=tmp_path / "j")
    with agents(child.endpoint, child.secret, "job") as (agent,):
        agent.join("n0")
        agent.expect(Waiting)
        until(lambda: (tend(child), child._journal)[1] is None, "it tells")
        assert (tmp_path / "j").exists()
        kill(child)
        with pytest.raises(RendezvousError, match=r"has died \(killed by SIGKILL\)$"):
            revived(child)


def test_it_is_given_up_when_it_dies_again_and_again(
    scheduler: Start_, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "BACKOFF_SECONDS", (0.0, 0.05, 0.3))
    child = scheduler(journal=tmp_path / "j")
    began = list[int]()
    child.on_start = began.append
    for _ in range(children.MAX_RESTARTS):
        kill(child)
        assert "is back" in revived(child)
    assert len(began) == children.MAX_RESTARTS and began[-1] == child.pid
    kill(child)
    with pytest.raises(RendezvousError, match="after 3 restarts in 60 s"):
        revived(child)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def told(child: SchedulerChild) -> str:
    """Tend the child until it has something to say."""
    lines = list[str]()
    until(lambda: lines.append(tend(child)) or lines[-1], "a word")
    return lines[-1]


def test_a_successor_that_cannot_be_started_is_tried_again(
    scheduler: Start_, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An agent imports it only now, which takes a descriptor.
    monkeypatch.delitem(sys.modules, "pdrun.rendezvous.scheduler.farewell", raising=False)
    child = scheduler(journal=tmp_path / "j")
    kill(child)
    assert "has died (killed by SIGKILL): restarting it" in told(child)
    with no_descriptors():
        assert "cannot be started again (Too many open files): restarting it" in told(child)
    assert "is back" in revived(child)
    kill(child)
    assert "has died" in told(child)
    with (
        no_descriptors(),
        pytest.raises(RendezvousError, match=r"\(Too many open files\), after 3 restarts in 60 s"),
    ):
        told(child)
    with pytest.raises(ConnectionRefusedError):
        connect(child.endpoint)


def test_a_relay_that_cannot_be_started_is_tried_again(
    secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaychild, "RESTART_SECONDS", 0.0)
    listener = bind_listener(Endpoint("127.0.0.1", 0))
    relays = relaychild.RelayProcesses(1, listener.detach(), Endpoint("127.0.0.1", 9), secret, 1)
    try:
        process = relays._relays[0].process
        process.kill()
        process.wait(10)
        with no_descriptors():
            assert relays.replace_failed() == ""
        assert relays.replace_failed() == "1 of 1 relays had died and were started again"
    finally:
        relays.close(0.0)


def test_an_order_is_given_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little of it each write takes, as where a signal comes or the pipe is full."""
    read, write = os.pipe()
    real = os.write
    monkeypatch.setattr(children.os, "write", lambda number, data: real(number, data[:7]))
    children.write_order(write, b"0123456789" * 10)
    os.close(write)
    with open(read, "rb") as file:
        assert file.read() == b"0123456789" * 10
    read, write = os.pipe()
    os.close(read)
    children.write_order(write, b"nobody reads")
    os.close(write)


@pytest.mark.parametrize(("patience", "least", "most"), [(2.0, 2.0, 6.0), (0.0, 0.5, 4.0)])
def test_without_a_successor_patience_ends(
    scheduler: Start_, secret: Secret, patience: float, least: float, most: float
) -> None:
    child = scheduler(patience=patience)
    with agents(child.endpoint, secret, "job") as (agent,):
        agent.join("n0")
        agent.expect(Waiting)
        killed = time.monotonic()
        kill(child)  # its agent stands still: it neither starts a successor nor tells the end
        with pytest.raises(RendezvousError, match="lost the scheduler") as caught:
            agent.expect(Verdict)
        assert least <= time.monotonic() - killed < most and caught.value.exit_code == 69


def test_somebody_elses_scheduler_at_the_same_address_is_not_the_successor(
    secret: Secret, tmp_path: Path
) -> None:
    listener = bind_listener(Endpoint("127.0.0.1", 0))
    first = SchedulerChild(config(), secret, listen_fd=listener.fileno())
    with contextlib.closing(first), agents(first.endpoint, secret, "job") as (agent,):
        agent.join("n0")
        agent.expect(Waiting)
        kill(first)
        second = SchedulerChild(config(run="run-2"), secret, listen_fd=listener.fileno())
        with contextlib.closing(second):
            assert "another one now" in agent.expect(Refuse).reason
    listener.close()


# The link
# --------


def test_a_renewed_link_is_a_new_agent(scheduler: Start_, secret: Secret) -> None:
    child = scheduler(min_nodes=1, gather=0.2, dead=1.0, suspect=0.6, heartbeat=0.2, max_restarts=1)
    with agents(child.endpoint, secret, "job", "job") as (stays, cut):
        for name, agent in (("n0", stays), ("n1", cut)):
            agent.join(name)
        start_all(stays, cut)
        stays.expect(StopWorkers)  # meanwhile nobody serves the other one: it falls silent
        stays.link.send(Finished(0, "h:2"))
        assert expect(Assign, stays).nodes == 1
        assert expect(Refuse, cut, stays).rejoin
        agent_before = cut.link._agent
        cut.link.renew()
        assert expect(Welcome, cut, stays).run == "run-1" and cut.link._agent != agent_before
        cut.link.send(Join("n1", None, 1, store="h:1"))
        assert expect(Standby, cut, stays)
        assert not any(isinstance(message, Assign | Start) for message in cut.inbox), (
            "the old life is forgotten"
        )


def test_silence_is_counted_without_ones_own_sleep(scheduler: Start_, secret: Secret) -> None:
    child = scheduler(journal=None, heartbeat=0.2)
    with agents(child.endpoint, secret, "job") as (agent,):
        agent.join("n0")
        agent.expect(Waiting)
        until(lambda: agent.turn() or agent.link.silent_for() < 0.2, "it is heard")
        os.kill(child.pid, signal.SIGSTOP)
        begin = time.monotonic()
        until(lambda: agent.turn() or agent.link.silent_for() > 1.0, "its silence grows")
        assert time.monotonic() - begin > 0.7
        silent = agent.link.silent_for()
        time.sleep(3.0)  # this process sleeps: that is not the scheduler's silence
        assert agent.link.silent_for() < silent + 2.0
        os.kill(child.pid, signal.SIGCONT)
        until(lambda: agent.turn() or agent.link.silent_for() < 0.5, "it is heard again", 15.0)
    assert LocalLink(config(nodes=1)).silent_for() == 0.0


def test_a_local_link_can_begin_again() -> None:
    link = LocalLink(config(nodes=1))
    assert [type(message) for message in link.poll()] == [Welcome]
    link.renew()
    assert [type(message) for message in link.poll()] == [Welcome]
    link.send(Join("n", None, 1, store="h:1"))
    assert [type(message) for message in link.poll()] == [Assign]
    link.close()


# Frozen
# ------


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5.0, thorough(20.0)])
def test_a_frozen_scheduler_kills_nobody(
    scheduler: Start_, secret: Secret, tmp_path: Path, seconds: float
) -> None:
    """
    Longer than either side bears silence: it was the scheduler that stood still, so nobody is lost.
    """
    child = scheduler(journal=tmp_path / "j", nodes=4)
    with agents(child.endpoint, secret, *["job"] * 4) as found:
        for number, agent in enumerate(found):
            agent.join(f"n{number}")
        start_all(*found)
        os.kill(child.pid, signal.SIGSTOP)
        thaw = time.monotonic() + seconds
        until(
            lambda: [agent.turn(0.02) for agent in found] and time.monotonic() > thaw,
            "time passes",
            seconds + 10,
        )
        os.kill(child.pid, signal.SIGCONT)
        end = time.monotonic() + 6.0
        until(
            lambda: [agent.turn(0.02) for agent in found] and time.monotonic() > end,
            "time passes",
            16,
        )
        assert all(agent.link.silent_for() < 3.0 for agent in found)
        assert not child.events("lost") and not child.events("verdict")
        assert not any(
            isinstance(message, StopWorkers | Verdict) for agent in found for message in agent.inbox
        )
        for agent in found:
            agent.link.send(Finished(0))
        assert [agent.expect(Verdict).code for agent in found] == [0] * 4


# A scheduler that stands by itself
# ---------------------------------

MEMBER = """
import sys, time
from pathlib import Path
from pdrun.endpoint import Endpoint
from pdrun.rendezvous.clients.member import join_scheduler
from pdrun.rendezvous.protocol.security import Secret
member = join_scheduler(Endpoint("127.0.0.1", int(sys.argv[1])), Secret.from_hex(sys.argv[2]), job="job",
                        name=sys.argv[3], timeout=30)
print("rank", member.rank, flush=True)
while not Path(sys.argv[4]).exists():
    time.sleep(0.02)
"""
STANDALONE = """
import os, sys
from pdrun.rendezvous.clients.dynamic import from_environ, run_scheduler
from pdrun.rendezvous.protocol.security import Secret
spec = from_environ({"PDRUN_ROLE": "scheduler", "PDRUN_SCHEDULER": "127.0.0.1:" + sys.argv[1], "PDRUN_WORKERS": "2",
                     "PDRUN_JOB": "job", "PDRUN_JOURNAL": sys.argv[3]})
sys.exit(run_scheduler(spec, secret=Secret.from_hex(sys.argv[2])))
"""


@contextlib.contextmanager
def process(code: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    made = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield made
    finally:
        made.kill()
        made.communicate()


def test_workers_of_a_dynamic_cluster_survive_their_scheduler(
    secret: Secret, tmp_path: Path
) -> None:
    with bind_listener(Endpoint("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    go, key, journal = tmp_path / "go", secret.reveal().hex(), tmp_path / "j"
    with (
        process(STANDALONE, port, key, journal) as first,
        process(MEMBER, port, key, "w0", go) as zero,
        process(MEMBER, port, key, "w1", go) as one,
    ):
        for member in (zero, one):
            assert member.stdout is not None
            assert member.stdout.readline().startswith("rank")
        first.send_signal(signal.SIGKILL)
        first.wait(10)
        assert journal.stat().st_mode & 0o777 == 0o600
        with process(STANDALONE, port, key, journal) as second:
            go.touch()
            assert [member.wait(30) for member in (zero, one)] == [0, 0]
            assert second.wait(30) == 0
            assert second.stderr is not None
            said = second.stderr.read()
        assert f"resuming from {journal}" in said
        assert not journal.exists()


def test_zmq_link_is_a_link(secret: Secret) -> None:
    from pdrun.launcher.agent.interfaces import Link

    for name in ("fileno", "send", "poll", "deadline", "silent_for", "renew", "close"):
        assert (
            callable(getattr(Link, name))
            and callable(getattr(ZmqLink, name))
            and callable(getattr(LocalLink, name))
        )
