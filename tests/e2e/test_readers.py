"""
Who reads pdrun's own lines decides nothing: a reader that goes away, or takes nothing, ends and
stalls nobody.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.conftest import Shell, free_port
from tests.lib.tiers import thorough

HELLO = "print('hello')\n"
WORKER = "import sys\nsys.modules['torch'] = None\nimport pdrun\npdrun.init(group=False)\n"
"""As where torch is not installed: its import takes longer than all the rest."""


@contextmanager
def reader(kind: str) -> Iterator[int]:
    """
    The write end of a pipe: nobody has the other end (``gone``), or nobody reads what fills it
    (``full``).
    """
    read, write = os.pipe()
    if kind == "gone":
        os.close(read)
    else:
        os.set_blocking(write, False)
        try:
            while True:
                os.write(write, b"." * 4096)
        except BlockingIOError:
            os.set_blocking(write, True)
    try:
        yield write
    finally:
        os.close(write)
        if kind == "full":
            os.close(read)


@contextmanager
def started(shell: Shell, err: int, *command: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with this stderr; ended at last."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=shell.folder,
        env={**shell.env, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=err,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(20)


def listens(port: int, process: subprocess.Popen[bytes]) -> None:
    """
    Wait until somebody listens; looks at the kernel's list, for a connection would be a stranger's.
    """
    deadline = time.monotonic() + 30
    while not any(
        words[1].endswith(f":{port:04X}") and words[3] == "0A"
        for words in map(str.split, open("/proc/net/tcp").read().splitlines()[1:])  # noqa: SIM115
    ):
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["gone", "full"])
def test_a_scheduler_and_a_relay(shell: Shell, kind: str) -> None:
    port, door, script = free_port(), free_port(), shell.script(HELLO)
    with reader(kind) as err:
        words = ("-m", "pdrun", "scheduler", "--nodes", "2", "--listen", f"127.0.0.1:{port}")
        with started(shell, err, *words) as scheduler:
            listens(port, scheduler)
            with started(
                shell,
                err,
                "-m",
                "pdrun",
                "relay",
                "--scheduler",
                f"127.0.0.1:{port}",
                "--listen",
                f"127.0.0.1:{door}",
            ) as relay:
                listens(door, relay)
                jobs = [
                    shell.start(
                        "--nodes",
                        "2",
                        "--devices",
                        "1",
                        "--scheduler",
                        f"127.0.0.1:{where}",
                        "--no-serve",
                        "--node-name",
                        f"n{where}",
                        script,
                    )
                    for where in (port, door)
                ]
                assert [job.wait(60) for job in jobs] == [0, 0], "".join(job.err for job in jobs)
                assert scheduler.wait(30) == 0
                assert relay.wait(30) == 0


@pytest.mark.parametrize("kind", ["gone", "full"])
def test_an_agent_that_waits_for_its_scheduler(shell: Shell, kind: str) -> None:
    port, script = free_port(), shell.script(HELLO)
    words = ("--nodes", "2", "--devices", "1", "--scheduler", f"127.0.0.1:{port}")
    with reader(kind) as err:
        with started(
            shell,
            err,
            "-m",
            "pdrun",
            *words,
            "--no-serve",
            "--node-name",
            "b",
            "--prefix",
            "none",
            script,
        ) as second:
            until = time.monotonic() + 5.0  # it says after 1 s that nobody listens there
            while second.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            assert second.returncode is None
            first = shell.start(*words, "--node-name", "a", script)
            assert first.wait(60) == 0, first.err
            assert second.wait(30) == 0


@pytest.mark.parametrize("kind", ["gone", thorough("full")])
def test_members_of_a_dynamic_cluster(shell: Shell, kind: str) -> None:
    where, script = f"127.0.0.1:{free_port()}", shell.script(WORKER)
    env = {"PDRUN_SCHEDULER": where, "PDRUN_WORKERS": "2"}
    with reader(kind) as err:
        with started(shell, err, script, PDRUN_ROLE="scheduler", **env) as scheduler:
            with started(shell, err, script, PDRUN_ROLE="worker", **env) as first:
                until = (
                    time.monotonic() + 5.0
                )  # the scheduler, and the worker, say that one is missing
                while first.poll() is None and time.monotonic() < until:
                    time.sleep(0.05)
                assert first.returncode is None
                with started(shell, err, script, PDRUN_ROLE="worker", **env) as second:
                    assert [one.wait(60) for one in (first, second, scheduler)] == [0, 0, 0]
