"""Signals: once is graceful, twice is now, and a signal that means something else is passed on."""

from __future__ import annotations

import signal
import time

import pytest

from tests.e2e.conftest import Shell, gone_within, until

STUBBORN = """
import os, signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, f: print("ignored", n, flush=True))
open("pids", "a").write(f"{os.getpid()}\\n")
print("up", flush=True)
while True: time.sleep(0.05)
"""
SAVING = """
import os, signal, sys, time
def stop(number, frame):
    print("saved on", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, lambda n, f: print("notice", n, flush=True))
open("pids", "a").write(f"{os.getpid()}\\n")
print("up", flush=True)
while True: time.sleep(0.05)
"""


@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_once_is_graceful(shell: Shell, nodes: str, number: int, code: int) -> None:
    job = shell.start("--nodes", nodes, "--devices", "2", "--local", shell.script(SAVING))
    job.expect(r"up$", count=2 * int(nodes))
    job.signal(number)
    assert job.wait(20) == code
    assert job.out.count("saved on") == 2 * int(nodes)
    gone_within(shell.pids("pids"), 3.0)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_twice_is_now_and_leaves_nothing(shell: Shell, nodes: str) -> None:
    job = shell.start(
        "--nodes", nodes, "--devices", "2", "--local", "--grace", "60", shell.script(STUBBORN)
    )
    job.expect(r"up$", count=2 * int(nodes))
    job.signal(signal.SIGINT)
    job.expect("ignored", count=2 * int(nodes))
    second = job.signal(signal.SIGINT)
    assert job.wait(20) == 130
    assert time.monotonic() - second < 10, "a second on a quiet machine; the grace is a minute"
    gone_within(shell.pids("pids"), 3.0)


def test_workers_that_ignore_sigterm_are_killed_at_grace(shell: Shell) -> None:
    job = shell.start("--devices", "2", "--grace", "1", shell.script(STUBBORN))
    job.expect(r"up$", count=2)
    sent = job.signal(signal.SIGTERM)
    assert job.wait(20) == 143
    assert 0.9 < time.monotonic() - sent < 8, "a second of grace, and a moment"
    gone_within(shell.pids("pids"), 3.0)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_sigusr1_is_passed_on_and_the_job_goes_on(shell: Shell, nodes: str) -> None:
    job = shell.start("--nodes", nodes, "--devices", "2", "--local", shell.script(SAVING))
    job.expect(r"up$", count=2 * int(nodes))
    job.signal(signal.SIGUSR1)
    job.expect(f"notice {signal.SIGUSR1}", count=2 * int(nodes))
    assert job.process.poll() is None
    job.signal(signal.SIGTERM)
    assert job.wait(20) == 143


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_nohup_survives_sighup(shell: Shell, nodes: str) -> None:
    job = shell.start(
        "--nodes", nodes, "--devices", "2", "--local", shell.script(SAVING), prefix=("nohup",)
    )
    until(lambda: len(shell.pids("pids")) == 2 * int(nodes), "workers up")
    job.signal(signal.SIGHUP)
    job.signal(signal.SIGUSR1)
    job.expect(f"notice {signal.SIGUSR1}", count=2 * int(nodes))
    assert job.process.poll() is None
    job.signal(signal.SIGTERM)
    assert job.wait(20) == 143
