"""`status` and `stop` with --scheduler, and output through every process there is: the real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdrun.errors import AuthenticationError
from pdrun.launcher import control
from pdrun.launcher.control import Remote
from pdrun.net import Endpoint
from pdrun.rendezvous.child import SchedulerChild
from pdrun.rendezvous.events import SchedulerConfig
from pdrun.rendezvous.security import Secret, load_cookie


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    """A scheduler that waits for two nodes, with this user's cookie."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("PDRUN_TOKEN_FILE", raising=False)
    secret = load_cookie(tmp_path / "pdrun" / "cookie")
    child = SchedulerChild(SchedulerConfig("demo", "demo-1", 2), secret, endpoint=Endpoint("127.0.0.1", 0))
    yield Remote(child.endpoint)
    child.close()


def test_status_of_a_scheduler(scheduler: Remote, capsys: pytest.CaptureFixture[str]) -> None:
    assert control.status(scheduler=scheduler, json=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["job"], data["run"], data["state"], data["expected"]) == ("demo", "demo-1", "gathering", 2)


def test_stop_through_a_scheduler(scheduler: Remote, capsys: pytest.CaptureFixture[str]) -> None:
    assert control.stop(scheduler=scheduler, timeout=20) == 0
    assert "has stopped" in capsys.readouterr().err


def test_a_wrong_token_is_told(tmp_path: Path, scheduler: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    assert load_cookie(tmp_path / "other" / "pdrun" / "cookie") != Secret(b"0" * 32)
    with pytest.raises(AuthenticationError):
        control.status(scheduler=scheduler)


FLOOD = "import os\nfor i in range(400): os.write(1, (b'%d ' % i).ljust(12_499, b'x') + b'\\n')\n"


def test_a_reader_that_stalls_loses_nothing_through_front_and_agents(tmp_path: Path) -> None:
    (tmp_path / "flood.py").write_text(FLOOD)
    env = {**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    job = subprocess.Popen(
        [sys.executable, "-m", "pdrun", "--nodes", "2", "--devices", "2", "--local", "flood.py"],
        cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
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
