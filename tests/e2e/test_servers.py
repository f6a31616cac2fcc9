"""Parameter servers started by pdrun: they are found, fail with the job, and end with it."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Shell, alive, until

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

TRAIN = """
import os, signal
import torch, pdrun
client = pdrun.servers.connect("sync", timeout=120)
client.add_dense("w", pdrun.servers.dense(lr=1.0), torch.zeros(10))
rank = int(os.environ["RANK"])
for step in range(3):
    client.push("w", torch.full((10,), rank + 1.0))
    client.clock()
    if step == 1 and rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                environ = open(f"/proc/{pid}/environ", "rb").read()
                command = open(f"/proc/{pid}/cmdline", "rb").read()
            except OSError:
                continue
            mine = f"PDRUN_SERVER_KEY={os.environ['PDRUN_SERVER_KEY']}".encode() in environ
            if mine and b"servers.main" in command:
                open("pids", "a").write(pid + "\\n")
                if "kill" in os.environ.get("EXTRA", ""):
                    os.kill(int(pid), signal.SIGKILL)
                    break
print("weight", client.pull("w")[0].item(), "servers", client.servers, flush=True)
"""


def test_servers_of_two_nodes_end_with_the_workers(shell: Shell) -> None:
    shell.script(TRAIN, "train.py")
    job = shell.start(
        *("--local", "--nodes", "2", "--servers", "1/node", "--start", "exec", "train.py")
    )
    assert job.wait(120) == 0, job.err
    assert job.out.count("weight -9.0 servers 2") == 2
    pids = shell.pids("pids")
    assert len(pids) == 2
    until(lambda: not any(map(alive, pids)), "the servers have ended")


def test_a_lost_server_is_the_cause_and_the_job_starts_again(shell: Shell) -> None:
    shell.script(TRAIN, "train.py")
    job = shell.start(
        *("--devices", "2", "--servers", "1", "--max-restarts", "1", "--start", "exec"),
        *("--env", "EXTRA=kill", "train.py"),
    )
    assert job.wait(120) == 0, job.err
    assert "failed: parameter server 0 was killed by SIGKILL" in job.err
    assert job.out.count("weight -9.0 servers 1") == 2


ALONE = """
import os, signal
import torch, pdrun
client = pdrun.servers.connect("async", timeout=120)
client.add_dense("w", pdrun.servers.dense(lr=1.0), torch.zeros(10))
for step in range(4):
    client.push("w", torch.ones(10))
    client.clock()
    if step == 1:
        client.save(os.path.abspath("saved"))
    if step == 2:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                environ = open(f"/proc/{pid}/environ", "rb").read()
                command = open(f"/proc/{pid}/cmdline", "rb").read()
            except OSError:
                continue
            mine = f"PDRUN_SERVER_KEY={os.environ['PDRUN_SERVER_KEY']}".encode() in environ
            if mine and b"servers.main" in command:
                os.kill(int(pid), signal.SIGKILL)
print("weight", client.pull("w")[0].item(), flush=True)
"""


def test_a_killed_server_continues_alone_from_its_last_checkpoint(shell: Shell) -> None:
    shell.script(ALONE, "train.py")
    job = shell.start(*("--devices", "1", "--servers", "1", "--start", "exec", "train.py"))
    assert job.wait(120) == 0, job.err
    assert "server 0 was killed by SIGKILL; it starts again alone" in job.err
    assert "server 0: went back to version" in job.err
    assert "s of updates are lost" in job.err
    assert job.out.count("weight -3.0") == 1  # two steps are saved, one is lost, one comes after
