"""
Workers that do nothing for ever: found, shown with everybody's stacks, ended; and those that only
seem to.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.e2e.conftest import Shell, gone_within, until
from tests.lib.tiers import thorough

GLOO = """
import os, sys, threading, time
import torch, torch.distributed as dist
import pdrun

how, reports = sys.argv[1], "progress" in sys.argv
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
lock = threading.Lock()

def stuck():
    lock.acquire()
    lock.acquire()

def reduce():
    dist.all_reduce(torch.ones(4))

for step in range(40):
    if how == "lock" and (rank, step, attempt) == (1, 3, "0"):
        stuck()
    if how == "stop" and step == 3:
        open(f"up-{attempt}-{rank}", "w").write(f"{os.getpid()}\\n")
    reduce()
    time.sleep(0.05)
    if reports:
        pdrun.progress(step)
print("rank", rank, "done", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def torch_here() -> None:
    pytest.importorskip("torch", reason="torch is not installed")


pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.usefixtures("torch_here")]


@pytest.mark.parametrize(
    ("start", "reports"),
    [
        ("fork", "progress"),
        thorough("exec", "silent"),
        thorough("fork", "silent"),
        thorough("exec", "progress"),
    ],
)
def test_the_rank_that_is_elsewhere_is_named_with_all_stacks(
    shell: Shell, reports: str, start: str
) -> None:
    script = shell.script(GLOO)
    options = ("--devices", "3", "--start", start, "--hang-timeout", "4", "--grace", "2")
    code, out, err = shell.run(*options, script, "lock", reports, timeout=150)
    assert code == 124, err
    assert "done" not in out
    why = "no progress for" if reports == "progress" else "no output and no CPU time for"
    # both are true at the same moment; on a busy machine the worker is silent first
    assert f"hangs: {why}" in err or "hangs: no output and no CPU time for" in err
    if (
        start == "fork" or reports == "progress"
    ):  # who is executed offers its stacks with its first word to pdrun
        assert "rank 1 on " in err[: err.index(" hangs: ")][-30:]
        picture = err[err.index(" hangs: ") :]
        assert "ranks 0, 2 are here" in picture and "in reduce" in picture
        elsewhere = picture[picture.index("rank 1 is elsewhere") :]
        assert "in stuck" in elsewhere and "fork_server" not in picture


def test_a_stopped_rank_is_the_one(shell: Shell) -> None:
    script = shell.script(GLOO)
    job = shell.start(
        "--devices", "3", "--hang-timeout", "5", "--grace", "3", script, "stop", "progress"
    )
    until(lambda: all(shell.pids(f"up-0-{rank}") for rank in range(3)), "three workers", 90)
    os.kill(shell.pids("up-0-2")[0], signal.SIGSTOP)
    assert job.wait(90) == 124
    assert "rank 2 on" in job.err and "stopped by a signal" in job.err
    assert "ranks 0-1 are here" in job.err and "rank 2 is elsewhere" in job.err
    gone_within(shell.pids("up-0-2"), 3.0)


def test_the_restart_policy_applies(shell: Shell) -> None:
    script = shell.script(GLOO)
    code, out, err = shell.run(
        "--devices",
        "3",
        "--hang-timeout",
        "4",
        "--max-restarts",
        "1",
        "--grace",
        "2",
        script,
        "lock",
        "progress",
        timeout=180,
    )
    assert code == 0, err
    assert out.count("done") == 3
    assert "restart 1 of 1" in err and "hung: no progress" in err


WAITING = """
import os, sys, time
rank = int(os.environ["RANK"])
print("up", flush=True)
if rank == 0:
    end = time.process_time() + 3.5
    while time.process_time() < end: pass
    open("ready", "w").close()
while not os.path.exists("ready"): time.sleep(0.5)
"""


@pytest.mark.parametrize(
    "layout",
    [
        thorough(("--devices", "3"), id="one node"),
        pytest.param(("--local", "--nodes", "3"), id="three nodes"),
    ],
)
def test_who_waits_for_a_rank_at_work_does_not_hang(shell: Shell, layout: tuple[str, ...]) -> None:
    code, _, err = shell.run(*layout, "--hang-timeout", "2", shell.script(WAITING), timeout=150)
    assert (code, "hang" in err) == (0, False), err


def test_output_is_a_sign_of_life(shell: Shell) -> None:
    script = shell.script(
        "import time\nfor number in range(8):\n    print(number, flush=True)\n    time.sleep(1)\n"
    )
    assert shell.run("--hang-timeout", "3", script, timeout=60)[0] == 0


def test_any_program_is_watched_and_described_from_outside(shell: Shell) -> None:
    begin = time.monotonic()
    code, _, err = shell.run(
        "--no-python", "--hang-timeout", "2", "--grace", "2", "sleep", "300", timeout=60
    )
    assert code == 124, err
    assert "no output and no CPU time for" in err and "state S (waiting)" in err
    assert time.monotonic() - begin < 45
