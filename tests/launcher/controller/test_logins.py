"""Logins to many hosts behind one sshd that drops some of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdrun.errors import RendezvousError
from pdrun.launcher.config.spec import ClusterOptions, JobSpec, Program, RemoteOptions
from pdrun.launcher.controller import host_connector
from pdrun.launcher.controller.host_connector import HostConnector, disconnect
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.plan.hosts import MAX_PARALLEL_CONNECTIONS, plan_hosts
from pdrun.launcher.plan.model import Facts
from pdrun.topology import CpuSet

FAKE_SSH = """
import fcntl, os, subprocess, sys, time
folder, limit = sys.argv[1], int(sys.argv[2])
words = sys.argv[3:]
if "-G" in words:
    print("hostname x\\nproxyjump bastion.example")
    sys.exit()
with open(f"{folder}/count", "a+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.seek(0)
    now = file.read().count("+")
    if now < limit:
        file.write("+")
with open(f"{folder}/log", "a") as log:
    log.write(f"{now}\\n")
if now >= limit:
    print("kex_exchange_identification: Connection closed by remote host", file=sys.stderr)
    print("Connection closed by UNKNOWN port 65535", file=sys.stderr)
    sys.exit(255)
time.sleep(0.3)
with open(f"{folder}/count", "a+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.seek(0)
    text = file.read()
    file.truncate(0)
    file.write("+" * (text.count("+") - 1))
os.execvp("sh", ["sh", "-c", words[-1]])
"""


def connector_through(tmp_path: Path, limit: int, count: int, window: int = 0) -> HostConnector:
    """A connector to ``count`` hosts behind a jump host that drops logins above ``limit``."""
    (tmp_path / "fake.py").write_text(FAKE_SSH)
    fake = tmp_path / "ssh"
    fake.write_text(
        f'#!/bin/sh\nexec {sys.executable} -S {tmp_path}/fake.py {tmp_path} {limit} "$@"\n'
    )
    fake.chmod(0o755)
    hosts = tuple(Host(f"n{number}") for number in range(count))
    spec = JobSpec(
        Program("script", "x.py"),
        place=ClusterOptions(hosts=hosts),
        reach=RemoteOptions(ssh=str(fake), ssh_window=window),
    )
    facts = Facts(
        "here", {}, str(tmp_path), sys.executable, "3.11", "", "0", CpuSet((0,)), (), (), 0
    )
    return HostConnector(plan_hosts(spec, facts, {}, "job", ()))


def test_logins_that_a_jump_host_drops_are_repeated(tmp_path: Path) -> None:
    """As by MaxStartups of its sshd: the window becomes smaller, and every host is reached."""
    connector = connector_through(tmp_path, limit=3, count=8)
    agents = connector.connect_all()
    disconnect(agents)
    assert len(agents) == 8
    assert connector.max_parallel < MAX_PARALLEL_CONNECTIONS
    assert any(int(number) >= 3 for number in (tmp_path / "log").read_text().split())


def test_a_small_window_needs_no_repetition(tmp_path: Path) -> None:
    disconnect(connector_through(tmp_path, limit=2, count=4, window=2).connect_all())
    assert max(map(int, (tmp_path / "log").read_text().split())) < 2


def test_a_jump_host_that_drops_every_login_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_connector, "FIRST_PAUSE_SECONDS", 0.01)
    with pytest.raises(RendezvousError, match=r"2 of 2 host\(s\) cannot serve"):
        connector_through(tmp_path, limit=0, count=2).connect_all()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2  # one per host
    for line in lines:
        assert "its jump host, bastion.example, or the host closed the connection 5 times" in line
        assert "smaller --ssh-window" in line
