"""
`status` and `stop` with --scheduler, and output through every process there is: the real ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pdrun.endpoint import Endpoint
from pdrun.errors import AuthenticationError, UsageError
from pdrun.launcher.jobs.remote_scheduler import RemoteScheduler
from pdrun.launcher.jobs.status import show_status
from pdrun.launcher.jobs.stop import stop_job
from pdrun.rendezvous.clients.viewer import Viewer
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.messages import Finished, Leave, StopWorkers, Verdict
from pdrun.rendezvous.protocol.security import Secret, format_token, load_cookie
from pdrun.rendezvous.scheduler.child import SchedulerChild
from pdrun.ui import live
from pdrun.ui.job_status import JobStatus
from tests.rendezvous.helpers import Agent, agents, start_all, until


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteScheduler]:
    """A scheduler that waits for two nodes, with this user's cookie."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("PDRUN_TOKEN_FILE", raising=False)
    secret = load_cookie(tmp_path / "pdrun" / "cookie")
    child = SchedulerChild(
        SchedulerConfig("demo", "demo-1", 2), secret, endpoint=Endpoint("127.0.0.1", 0)
    )
    yield RemoteScheduler(child.endpoint)
    child.close()


def test_status_of_a_scheduler(
    scheduler: RemoteScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_status(scheduler=scheduler, as_json=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["job"], data["run"], data["state"], data["expected"]) == (
        "demo",
        "demo-1",
        "gathering",
        2,
    )


def test_stop_through_a_scheduler(
    scheduler: RemoteScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stop_job(scheduler=scheduler, timeout=20) == 0
    assert "has stopped" in capsys.readouterr().err


def test_a_wrong_token_is_told(
    tmp_path: Path, scheduler: RemoteScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    assert load_cookie(tmp_path / "other" / "pdrun" / "cookie") != Secret(b"0" * 32)
    with pytest.raises(AuthenticationError):
        show_status(scheduler=scheduler)


@pytest.fixture
def running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SchedulerChild, Agent]]:
    """
    A scheduler, and the one node of its job, whose workers run; the token is in PDRUN_TOKEN alone.
    """
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("PDRUN_TOKEN_FILE", raising=False)
    secret = Secret.random()
    monkeypatch.setenv("PDRUN_TOKEN", format_token(secret))
    child = SchedulerChild(
        SchedulerConfig("demo", "demo-1", 1), secret, endpoint=Endpoint("127.0.0.1", 0)
    )
    try:
        with agents(child.endpoint, secret, "demo") as (node,):
            node.join("n0")
            start_all(node)
            yield child, node
    finally:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGCONT)
        child.close()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a viewer has had an answer: the scheduler has its request."""
    event, asked = threading.Event(), Viewer.fetch_lines

    def lines(viewer: Viewer, timeout: float = 5.0) -> list[str] | None:
        found = asked(viewer, timeout)
        if found is not None:
            event.set()
        return found

    monkeypatch.setattr(Viewer, "fetch_lines", lines)
    return event


class Stopping(threading.Thread):
    """`pdrun stop --scheduler`, and what it returned."""

    def __init__(self, child: SchedulerChild, timeout: float) -> None:
        super().__init__(daemon=True)
        self.code: int | None = None
        self._scheduler, self._timeout = RemoteScheduler(child.endpoint), timeout
        self.start()

    def run(self) -> None:
        self.code = stop_job(scheduler=self._scheduler, timeout=self._timeout)


def over(node: Agent, stop: StopWorkers) -> None:
    """The workers of the node have ended."""
    node.link.send(Finished(stop.generation))
    node.expect(Verdict)
    node.link.send(Leave())


def test_stop_waits_for_the_end_whatever_it_takes(
    running: tuple[SchedulerChild, Agent], capsys: pytest.CaptureFixture[str]
) -> None:
    child, node = running
    stopping = Stopping(child, 60.0)
    stop = node.expect(StopWorkers)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:  # several of its looks
        node.turn()
    assert stopping.is_alive(), "the workers still run"
    over(node, stop)
    stopping.join(20)
    assert stopping.code == 0
    assert (
        "job demo (run demo-1) has stopped: exit code 143, stopped by pdrun stop on "
        in capsys.readouterr().err
    )


def test_a_scheduler_that_stands_still_has_not_stopped(
    running: tuple[SchedulerChild, Agent],
    heard: threading.Event,
    capsys: pytest.CaptureFixture[str],
) -> None:
    child, node = running
    stopping = Stopping(child, 4.0)
    node.expect(StopWorkers)
    assert heard.wait(20)
    os.kill(child.pid, signal.SIGSTOP)
    stopping.join(30)
    assert stopping.code == 69
    err = capsys.readouterr().err
    assert "is still ending after 4 s" in err and "has stopped" not in err
    assert f"the scheduler at {child.endpoint} does not answer any more" in err


def test_a_scheduler_that_has_gone_after_the_request_has_stopped(
    running: tuple[SchedulerChild, Agent],
    heard: threading.Event,
    capsys: pytest.CaptureFixture[str],
) -> None:
    child, node = running
    stopping = Stopping(child, 60.0)
    node.expect(StopWorkers)
    assert heard.wait(20)
    os.kill(child.pid, signal.SIGKILL)
    child.close()
    stopping.join(20)
    assert stopping.code == 0
    assert "its scheduler exited while ending it" in capsys.readouterr().err


def test_follow_outlasts_a_scheduler_that_stands_still(
    running: tuple[SchedulerChild, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    child, node = running
    seen: list[JobStatus] = []

    def watch(look: Callable[[], list[JobStatus]]) -> int:
        seen.extend(look())
        os.kill(child.pid, signal.SIGSTOP)
        seen.extend(look())
        os.kill(child.pid, signal.SIGCONT)
        seen.extend(look())
        assert stop_job(scheduler=RemoteScheduler(child.endpoint), timeout=0.5) == 69
        over(node, node.expect(StopWorkers))
        until(lambda: child.returncode is not None, "the scheduler leaves")
        seen.extend(look())
        return 0

    monkeypatch.setattr(live, "follow_status", watch)
    assert show_status(scheduler=RemoteScheduler(child.endpoint), follow=True) == 0
    assert [one.state for one in seen] == ["running", "running", "running", "done"]
    assert [len(one.warnings) for one in seen] == [0, 1, 0, 0] and "no answer" in seen[1].warnings[
        0
    ]


def test_a_name_is_held_against_the_schedulers_job(
    scheduler: RemoteScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("demo", "demo-1", "dem"):
        assert show_status(name, scheduler=scheduler, as_json=True) == 0
        assert json.loads(capsys.readouterr().out)["run"] == "demo-1"
    for call in (show_status, stop_job):
        with pytest.raises(
            UsageError, match=r"no job here is called 'other': .* job 'demo' \(run demo-1\)"
        ):
            call("other", scheduler=scheduler)
    assert show_status(scheduler=scheduler, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "gathering", (
        "the job of another name was stopped"
    )


FLOOD = "import os\nfor i in range(400): os.write(1, (b'%d ' % i).ljust(12_499, b'x') + b'\\n')\n"


def test_a_reader_that_stalls_loses_nothing_through_front_and_agents(tmp_path: Path) -> None:
    (tmp_path / "flood.py").write_text(FLOOD)
    env = {**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    job = subprocess.Popen(
        [sys.executable, "-m", "pdrun", "--nodes", "2", "--devices", "2", "--local", "flood.py"],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert job.stdout is not None and job.stderr is not None
    try:
        first = job.stdout.readline()
        time.sleep(4.0)  # the workers have ended; longer than anybody waits for a reader of its own
        got = Counter(line[:8] for line in (first + job.stdout.read()).splitlines())
        assert job.wait(60) == 0, job.stderr.read().decode()
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGKILL)
            job.wait(10)
    errors = job.stderr.read().decode()
    assert got == {b"node0:0|": 400, b"node0:1|": 400, b"node1:2|": 400, b"node1:3|": 400}
    assert "not shown" not in errors and "stopping" not in errors
    job.stdout.close()
    job.stderr.close()
