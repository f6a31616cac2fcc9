"""Agents and a scheduler process over real sockets on loopback."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdrun import eventlog
from pdrun.endpoint import Endpoint
from pdrun.errors import AuthenticationError, ConfigError, RendezvousError
from pdrun.rendezvous.clients.viewer import Viewer, query_status
from pdrun.rendezvous.protocol.messages import (
    Cause,
    Finished,
    Join,
    Leave,
    Refuse,
    StackGroup,
    Stacks,
    StopRequest,
    StopWorkers,
    Verdict,
    Waiting,
    Welcome,
    WorkerExit,
)
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.scheduler.child import SchedulerChild
from pdrun.rendezvous.scheduler.local_link import ZmqLink
from pdrun.rendezvous.transport import zmq_server
from pdrun.rendezvous.transport.base import TransportEvent
from pdrun.rendezvous.transport.listen import bind_listener
from pdrun.rendezvous.transport.zmq_util import wait_readable
from pdrun.ui.replay import replay_events
from tests.rendezvous.conftest import Scheduler
from tests.rendezvous.helpers import Agent, agents, config, start_all, until

Start = Callable[..., Scheduler]


def test_three_uneven_nodes_in_natural_order(scheduler: Start, secret: Secret) -> None:
    child = scheduler(nodes=3)
    with agents(child.endpoint, secret, "job", "job", "job") as (ten, two, other):
        ten.join("node10", 1, store="127.0.0.1:10")
        assert ten.expect(Waiting).missing == ("2 more nodes",)
        other.join("other", 1, store="127.0.0.1:11")
        two.join("node2", 2, store="127.0.0.1:2")
        assigns = start_all(two, ten, other)
        assert [(a.node_rank, a.first_rank, a.world_size) for a in assigns] == [
            (0, 0, 4),
            (1, 2, 4),
            (2, 3, 4),
        ]
        assert {a.master for a in assigns} == {"127.0.0.1:2"}
        for agent in (ten, two, other):
            agent.link.send(Finished(0))
        assert {agent.expect(Verdict).code for agent in (ten, two, other)} == {0}
        started = time.monotonic()
        for agent in (ten, two, other):
            agent.link.send(Leave())
            agent.link.close()
    until(lambda: child.returncode is not None, "the scheduler leaves when all have left", 2.5)
    assert child.returncode == 0 and time.monotonic() - started < 2.5
    status = replay_events(child.events())
    assert (status.state, status.code, status.expected, len(status.ranks)) == ("done", 0, 3, 4)


def test_with_many_connections_the_server_rests_before_it_looks(
    secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Each waking costs more than a word: of many connections words are collected for a moment, of few
    they are not.
    """
    rests: list[float] = []
    monkeypatch.setattr(
        zmq_server, "time", SimpleNamespace(monotonic=time.monotonic, sleep=rests.append)
    )
    server = zmq_server.ZmqServer(secret, endpoint=Endpoint("127.0.0.1", 0))
    links = [ZmqLink(server.endpoint, secret, job="job") for _ in range(2)]
    try:
        heard: list[TransportEvent] = []

        def both() -> bool:
            heard.extend(server.poll(0.02))
            return [bool(link.poll()) for link in links] == [False, False] and len(heard) == 2

        until(both, "both have said Hello", 10)
        assert rests == []
        monkeypatch.setattr(zmq_server, "MAX_CONNECTIONS_WITHOUT_REST", 1)
        assert (
            server._rest_briefly(5.0) == 2 * zmq_server.REST_SECONDS_PER_CONNECTION
            and server._rest_briefly(1e-6) == 1e-6
        )
        assert server._rest_briefly(0.0) == 0.0, "who does not wait does not rest either"
        monkeypatch.setattr(zmq_server, "REST_SECONDS_PER_CONNECTION", 1.0)
        assert server._rest_briefly(5.0) == zmq_server.MAX_REST_SECONDS
        assert rests == [2 * 2e-6, 1e-6, zmq_server.MAX_REST_SECONDS]
        server.poll(0.1)
        assert len(rests) == 4
    finally:
        for link in links:
            link.close(0.0)
        server.close(0.0)


def test_a_failure_and_a_restart(scheduler: Start, secret: Secret) -> None:
    child = scheduler(max_restarts=1)
    with agents(child.endpoint, secret, "job", "job") as pair:
        for i, agent in enumerate(pair):
            agent.join(f"n{i}")
        for generation in range(2):
            assert [a.generation for a in start_all(*pair)] == [generation] * 2
            told = time.monotonic()
            pair[1].link.send(WorkerExit(generation, 1, Cause("exit", 42)))
            assert "rank 1 on n1" in pair[0].expect(StopWorkers).reason
            assert time.monotonic() - told < 4, "a second on a quiet machine"
            for agent in pair:
                agent.link.send(Finished(generation, f"127.0.0.1:{generation + 7}"))
        assert [agent.expect(Verdict).code for agent in pair] == [42, 42]


def test_two_jobs_at_one_address(scheduler: Start, secret: Secret) -> None:
    child = scheduler(job="first")
    with agents(child.endpoint, secret, "first", "second") as (mine, foreign):
        mine.join("a")
        refuse = foreign.expect(Refuse)
        assert refuse.code == 69 and "job 'first' (run run-1, started on head)" in refuse.reason
        assert "not job 'second' on host1" in refuse.reason
        assert "second" in [event.data["job"] for event in child.events("refused")]
        assert mine.expect(Waiting)


@pytest.mark.parametrize("side", ["agent", "scheduler"])
def test_a_wrong_token_is_told_on_both_sides(scheduler: Start, secret: Secret, side: str) -> None:
    other = Secret.random()
    child = scheduler(secret=other if side == "scheduler" else secret)
    started = time.monotonic()
    with agents(child.endpoint, other if side == "agent" else secret, "job") as (agent,):
        with pytest.raises(
            AuthenticationError, match=r"the token differs or .* is not a pdrun scheduler"
        ) as caught:
            agent.expect(Welcome)
        assert time.monotonic() - started < 5 and caught.value.exit_code == 77
    until(lambda: child.events("warning"), "the scheduler warns")
    assert "another token" in child.events("warning")[0].data["text"]


def test_insecure_must_be_said_on_both_sides(scheduler: Start, secret: Secret) -> None:
    child = scheduler(secret=None, insecure=True)
    with agents(child.endpoint, None, "job", insecure=True) as (agent,):
        assert agent.expect(Welcome)
    for one, options in ((secret, {}),):
        with agents(child.endpoint, one, "job", **options) as (agent,):
            with pytest.raises(AuthenticationError, match="--insecure"):
                agent.expect(Welcome)
    for wrong in ({"insecure": True}, {"secret": None}):
        with pytest.raises(ConfigError):
            scheduler(**wrong)


def test_agents_may_come_before_their_scheduler(secret: Secret, scheduler: Start) -> None:
    with bind_listener(Endpoint("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    heard: list[str] = []
    with agents(Endpoint("127.0.0.1", port), secret, "job", on_status=heard.append) as (agent,):
        until(lambda: agent.turn() or heard, "a line about who is missing")
        assert "no process listens there yet" in heard[0]
        scheduler(endpoint=Endpoint("127.0.0.1", port))
        assert agent.expect(Welcome)


def test_nobody_there_is_69_after_the_start_timeout(secret: Secret) -> None:
    with bind_listener(Endpoint("127.0.0.1", 0)) as free:
        endpoint = Endpoint("127.0.0.1", free.getsockname()[1])
    with agents(endpoint, secret, "job", start_timeout=0.7) as (agent,):
        with pytest.raises(RendezvousError, match=r"no scheduler there within 0\.7 s") as caught:
            agent.expect(Welcome)
        assert caught.value.exit_code == 69
        assert "127.0.0.1 is this machine" in str(caught.value)


AGENT = """
import sys, time, select
from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.protocol.messages import Join, Assign, Ready, Start
sys.path.insert(0, sys.argv[3])
from tests.rendezvous.helpers import *
secret = Secret.from_hex(sys.stdin.readline().strip())
agent = Agent(ZmqLink(Endpoint("127.0.0.1", int(sys.argv[1])), secret, job="job"))
agent.join(sys.argv[2])
start_all(agent)
print("started", flush=True)
while True:
    agent.turn()
"""


@pytest.fixture
def process(secret: Secret) -> object:
    """Start an agent in a process of its own: ``process(scheduler, "name")``."""
    started: list[subprocess.Popen[bytes]] = []
    root = str(Path(__file__).parents[3])

    def start(child: SchedulerChild, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", AGENT, str(child.endpoint.port), name, root]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert started[-1].stdin is not None
        started[-1].stdin.write(secret.reveal().hex().encode() + b"\n")
        started[-1].stdin.flush()
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


def test_a_killed_agent_is_told_within_a_second(
    scheduler: Start, secret: Secret, process: Callable[..., object]
) -> None:
    child = scheduler(grace=1.0)
    with agents(child.endpoint, secret, "job") as (agent,):
        victim = process(child, "victim")
        agent.join("n")
        start_all(agent)
        assert victim.stdout.readline() == b"started\n"  # type: ignore[attr-defined]
        killed = time.monotonic()
        victim.kill()  # type: ignore[attr-defined]
        stop = agent.expect(StopWorkers)
        assert "node victim" in stop.reason
        assert time.monotonic() - killed < 5, "a second on a quiet machine; its silence takes ten"
        agent.link.send(Finished(0))
        assert agent.expect(Verdict).code == 69


def test_a_frozen_agent_is_suspected_and_comes_back(
    scheduler: Start, secret: Secret, process: Callable[..., object]
) -> None:
    child = scheduler(heartbeat=0.2, suspect=0.6, dead=60.0)
    with agents(child.endpoint, secret, "job") as (agent,):
        frozen = process(child, "frozen")
        agent.join("n")
        start_all(agent)
        assert frozen.stdout.readline() == b"started\n"  # type: ignore[attr-defined]
        os.kill(frozen.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
        until(lambda: agent.turn() or child.events("suspect"), "it is suspected")
        os.kill(frozen.pid, signal.SIGCONT)  # type: ignore[attr-defined]
        until(lambda: agent.turn() or child.events("recovered"), "it recovers")
        assert not child.events("lost") and not child.events("stopping")


def test_a_cut_connection_is_resumed_without_the_agent_noticing(
    scheduler: Start, secret: Secret
) -> None:
    child = scheduler()
    with agents(child.endpoint, secret, "job", "job") as pair:
        for i, agent in enumerate(pair):
            agent.join(f"n{i}")
        start_all(*pair)
        for _ in range(3):
            cut(pair[0].link)
            pair[0].turn()
            pair[1].turn()
        pair[0].link.send(WorkerExit(0, 0, Cause("exit", 9)))
        heard_by_all(pair, StopWorkers)
        for agent in pair:
            agent.link.send(Finished(0))
        heard_by_all(pair, Verdict)
        for agent in pair:
            assert [type(message) for message in agent.inbox] == [StopWorkers, Verdict]
            assert agent.link._connector.incarnation >= 2
        assert not child.events("lost")


def test_what_is_confirmed_has_been_read_although_the_connection_was_cut(
    scheduler: Start, secret: Secret
) -> None:
    child = scheduler()
    with agents(child.endpoint, secret, "job", "job") as (first, second):
        for name, agent in (("a", first), ("b", second)):
            agent.join(name)
        start_all(first, second)
        assert first.link.is_confirmed, "nothing was asked for"
        cut(first.link)
        first.turn()
        first.link.send(WorkerExit(0, 0, Cause("ok", 0)))
        first.link.send(Finished(0))
        first.link.request_confirmation()
        assert not first.link.is_confirmed
        until(lambda: first.turn() or first.link.is_confirmed, "the scheduler confirms")
        first.link.close(0.0)
        second.link.send(WorkerExit(0, 1, Cause("ok", 0)))
        second.link.send(Finished(0))
        assert second.expect(Verdict).code == 0
        assert not child.events("lost")


def test_a_name_that_is_not_known_is_called_that(secret: Secret) -> None:
    endpoint, heard = Endpoint("no-such-host.invalid", 1), list[str]()
    with agents(endpoint, secret, "job", start_timeout=3.0, on_status=heard.append) as (agent,):
        with pytest.raises(
            RendezvousError, match=r"the name 'no-such-host.invalid' is not known here: \w+"
        ):
            agent.expect(Welcome)
    assert "not known here" in heard[-1]
    with pytest.raises(RendezvousError, match="not known here"):
        query_status(endpoint, secret, timeout=1.0)


def test_a_joiner_waits_until_somebody_says_what_the_job_runs(
    scheduler: Start, secret: Secret
) -> None:
    child = scheduler(job="", spec="")
    heard: list[str] = []
    with agents(child.endpoint, secret, "", "job", needs_spec=True, on_status=heard.append) as (
        joiner,
        first,
    ):
        until(lambda: joiner.turn() or heard, "a line about what it waits for")
        assert "does not know the job's command yet" in heard[0] and not joiner.inbox
        first.link._conversation.needs_spec = False
        first.join("a", spec="{}")
        assert joiner.expect(Welcome).spec == "{}"
        joiner.link.send(Join("b", None, 1))
        start_all(first, joiner)


def test_a_joiner_does_not_wait_for_ever(scheduler: Start, secret: Secret) -> None:
    child = scheduler(job="", spec="")
    with agents(child.endpoint, secret, "", needs_spec=True, start_timeout=1.0) as (joiner,):
        with pytest.raises(RendezvousError, match="no node brought the job's command within 1 s"):
            joiner.expect(Welcome)


def heard_by_all(found: list[Agent], kind: type) -> None:
    """Serve all agents by turns until each has a message of a kind."""
    deadline = time.monotonic() + 10
    while not all(any(isinstance(message, kind) for message in agent.inbox) for agent in found):
        assert time.monotonic() < deadline, f"no {kind.__name__} for all"
        for agent in found:
            agent.turn()


def cut(link: ZmqLink) -> None:
    """Shut down the link's TCP connection from outside, as a middlebox that resets does."""
    port = link.endpoint.port
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                if copy.family == socket.AF_INET and copy.getpeername()[1] == port:
                    copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def test_a_killed_scheduler_is_noticed(scheduler: Start, secret: Secret) -> None:
    child = scheduler(patience=2.0)
    with agents(child.endpoint, secret, "job") as (agent,):
        agent.join("n")
        agent.expect(Waiting)
        os.kill(child.pid, signal.SIGKILL)
        assert wait_readable(child.fileno(), wait=1.0), "the child's descriptor tells"
        until(lambda: child.returncode is not None, "it is reaped", 1.0)
        assert child.returncode == -signal.SIGKILL
        with pytest.raises(RendezvousError, match="lost the scheduler"):
            agent.expect(Verdict, timeout=8.0)


def test_the_scheduler_does_not_outlive_its_agent(scheduler: Start, secret: Secret) -> None:
    child = scheduler()
    with agents(child.endpoint, secret, "job", "job") as pair:
        for i, agent in enumerate(pair):
            agent.join(f"n{i}")
        start_all(*pair)
        died = time.monotonic()
        assert child._process.stdin is not None
        child._process.stdin.close()
        verdict = pair[0].expect(Verdict)
        assert (
            verdict.code == 69
            and "agent of the scheduler's node (head) has ended" in verdict.reason
        )
        assert pair[1].expect(Verdict) == verdict
        until(lambda: child.returncode is not None, "the scheduler leaves", 2.0)
        assert time.monotonic() - died < 2.0


def test_the_terminals_ctrl_c_does_not_reach_the_scheduler(scheduler: Start) -> None:
    child = scheduler()
    assert os.getsid(child.pid) == child.pid
    os.kill(child.pid, signal.SIGINT)
    assert not wait_readable(child.fileno(), wait=0.3)


def test_an_inherited_socket_is_adopted(secret: Secret) -> None:
    listener = bind_listener(Endpoint("127.0.0.1", 0))
    endpoint = Endpoint(*listener.getsockname())
    with agents(endpoint, secret, "job") as (early,):
        early.turn(0.2)
        child = SchedulerChild(config(), secret, listen_fd=listener.fileno())
        listener.close()
        try:
            assert child.endpoint == endpoint and early.expect(Welcome)
        finally:
            child.close(0.2)


def listening(pid: int) -> set[tuple[str, int]]:
    """Every (address, port) on which a process listens, from /proc."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                raw, port = words[1].split(":")
                packed = b"".join(
                    bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)
                )
                found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def test_it_listens_on_its_one_address_only(scheduler: Start, secret: Secret) -> None:
    child = scheduler()
    assert listening(child.pid) == {("127.0.0.1", child.endpoint.port)}
    before = listening(os.getpid())
    with agents(child.endpoint, secret, "job") as (agent,):
        agent.expect(Welcome)
        assert listening(os.getpid()) == before, "an agent listens nowhere"


def test_ipv6(scheduler: Start, secret: Secret) -> None:
    try:
        bind_listener(Endpoint("::1", 0)).close()
    except ConfigError:
        pytest.skip("no IPv6 on this machine")
    child = scheduler(endpoint=Endpoint("::1", 0))
    assert listening(child.pid) == {("::1", child.endpoint.port)}
    with agents(child.endpoint, secret, "job") as (agent,):
        assert agent.expect(Welcome)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_interfaces_are_refused(secret: Secret, host: str) -> None:
    with pytest.raises(ConfigError, match="every interface"):
        SchedulerChild(config(), secret, endpoint=Endpoint(host, 0))


def test_a_port_in_use_names_its_holder(secret: Secret, scheduler: Start) -> None:
    """Both have the socket, the process and who started it; the one with the higher pid is told."""
    child = scheduler()
    holder = rf"({child.pid} .*scheduler\.child_main|{os.getpid()} )"
    words = rf"port {child.endpoint.port} is in use by pid {holder}"
    with pytest.raises(ConfigError, match=words):
        SchedulerChild(config(), secret, endpoint=child.endpoint)


def test_an_address_of_another_machine(secret: Secret) -> None:
    with pytest.raises(ConfigError, match="not an address of this machine"):
        SchedulerChild(config(), secret, endpoint=Endpoint("192.0.2.1", 0))
    with pytest.raises(ConfigError, match="cannot be resolved"):
        SchedulerChild(config(), secret, endpoint=Endpoint("no-such-host.invalid", 0))


def test_status_and_stop_from_outside(scheduler: Start, secret: Secret) -> None:
    child = scheduler(nodes=1)
    with agents(child.endpoint, secret, "job") as (agent,):
        agent.join("n")
        start_all(agent)
        lines = query_status(child.endpoint, secret)
        assert [event.kind for event in eventlog.parse_events(lines)] == [
            "created",
            "joined",
            "assigned",
            "started",
        ]
        with (
            Viewer(child.endpoint, secret, stops=True) as viewer,
            Viewer(child.endpoint, secret) as other,
        ):
            assert (viewer.job, viewer.run, viewer.is_gone) == ("job", "run-1", False)
            assert "started" in _kinds(other)
            viewer.request_stop(signal.SIGTERM, "a test")
            assert _kinds(viewer)[-1] == "stopping"
            stop = agent.expect(StopWorkers)
            assert (stop.signal, stop.reason) == (15, "stopped by a test")
            agent.link.send(Finished(stop.generation))
            agent.expect(Verdict)
            agent.link.send(Leave())
            until(lambda: agent.turn(0.0) or child.returncode is not None, "the scheduler leaves")
            assert "verdict" in _kinds(other) and "verdict" in _kinds(viewer), (
                "the last word comes unasked"
            )
            child.close()
            assert viewer.fetch_lines(0.5) is None and viewer.is_gone
    with pytest.raises(RendezvousError, match=r"(no answer|no scheduler there) within 0\.5 s"):
        query_status(child.endpoint, secret, timeout=0.5)


def _kinds(viewer: Viewer) -> list[str]:
    lines = viewer.fetch_lines()
    assert lines is not None
    return [event.kind for event in eventlog.parse_events(lines)]


def test_a_viewer_with_another_token_is_told(scheduler: Start) -> None:
    with pytest.raises(AuthenticationError):
        query_status(scheduler().endpoint, Secret.random())


def test_a_message_that_is_too_long_ends_no_scheduler_and_no_agent(
    scheduler: Start, secret: Secret
) -> None:
    child = scheduler(spec='"' * 600_000)  # each takes two bytes in a message
    with agents(child.endpoint, secret, "job", "job") as (first, second):
        for agent in (first, second):
            refuse = agent.expect(Refuse)
            assert refuse.code == 70 and re.search(
                r"Welcome: 120\d{4} bytes are more than 1048576", refuse.reason
            )
        with pytest.raises(
            RendezvousError, match="Welcome: 120"
        ):  # it is still there, for viewers too
            query_status(child.endpoint, secret, timeout=5.0)
        assert child.events("warning") and child.returncode is None
    child = scheduler(nodes=1)
    with agents(child.endpoint, secret, "job") as (agent,):
        agent.join("n0")
        (assign,) = start_all(agent)
        agent.link.send(Stacks(assign.generation, (StackGroup((0,), "x" * (1 << 20)),)))
        agent.link.send(WorkerExit(assign.generation, 0, Cause("exit", 7)))
        agent.link.send(Finished(assign.generation))
        assert agent.expect(Verdict).code == 7, "pictures of a hang may be missing, the job goes on"
    with agents(scheduler().endpoint, secret, "job") as (agent,):
        agent.join("n0", spec='"' * 600_000)
        refuse = agent.expect(Refuse)
        assert refuse.code == 70 and "Join: 1200" in refuse.reason


def test_a_viewer_cannot_stop(scheduler: Start, secret: Secret) -> None:
    child = scheduler()
    with agents(child.endpoint, secret, "job", role="view") as (viewer,):
        viewer.expect(Welcome)
        viewer.link.send(StopRequest(15, "a viewer"))
        assert viewer.expect(Refuse).code == 77
    assert not child.events("verdict")


def test_the_key_decides_the_role_not_the_word(
    scheduler: Start, secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdrun.rendezvous.protocol import security
    from pdrun.rendezvous.transport import zmq_connection

    child = scheduler()
    view = security.derive_key_pair(secret, "view")
    real = security.derive_key_pair
    monkeypatch.setattr(
        zmq_connection.security,
        "derive_key_pair",
        lambda one, who: view if who == "agent" else real(one, who),
    )
    with agents(child.endpoint, secret, "job") as (liar,):
        assert "a view's key does not make a connection of role agent" in liar.expect(Refuse).reason


def test_a_link_that_was_refused_does_not_come_back(scheduler: Start, secret: Secret) -> None:
    child = scheduler(nodes=1)
    with agents(child.endpoint, secret, "job", "job") as (first, second):
        first.join("a")
        start_all(first)
        second.expect(Welcome)
        second.link.send(Join("b", None, 1))
        assert second.expect(Refuse).code == 69
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            second.turn()
        assert len(child.events("refused")) == 1 and isinstance(second, Agent)
