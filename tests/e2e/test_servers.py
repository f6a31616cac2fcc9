"""Parameter servers as processes: they are found, fail with the job, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdrun.rendezvous.protocol.security import Secret, format_token
from tests.e2e.conftest import Shell, alive, free_port, until
from tests.lib.server_scripts import FIND_SERVERS

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

TRAIN = (
    FIND_SERVERS
    + """
import os, signal
import torch, pdrun
client = pdrun.servers.connect("sync", timeout=120)
client.add_dense("w", pdrun.servers.dense(lr=1.0), torch.zeros(10))
rank = int(os.environ["RANK"])
for step in range(3):
    client.push("w", torch.full((10,), rank + 1.0))
    client.clock()
    if step == 1 and rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        for pid in find_servers():
            open("pids", "a").write(f"{pid}\\n")
            if "kill" in os.environ.get("EXTRA", ""):
                os.kill(pid, signal.SIGKILL)
                break
print("weight", client.pull("w")[0].item(), "servers", client.servers, flush=True)
"""
)


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


ALONE = (
    FIND_SERVERS
    + """
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
        for pid in find_servers():
            os.kill(pid, signal.SIGKILL)
print("weight", client.pull("w")[0].item(), flush=True)
"""
)


def test_a_killed_server_continues_alone_from_its_last_checkpoint(shell: Shell) -> None:
    shell.script(ALONE, "train.py")
    job = shell.start(*("--devices", "1", "--servers", "1", "--start", "exec", "train.py"))
    assert job.wait(120) == 0, job.err
    assert "server 0 was killed by SIGKILL; it starts again alone" in job.err
    assert "server 0: went back to version" in job.err
    assert "s of updates are lost" in job.err
    assert job.out.count("weight -3.0") == 1  # two steps are saved, one is lost, one comes after


CLUSTER = """
import os, time
import torch, pdrun
context = pdrun.init()
client = pdrun.servers.connect("sync", timeout=100)
client.add_dense("w", pdrun.servers.dense(lr=1.0), torch.zeros(10))
for step in range(2):
    client.push("w", torch.full((10,), context.rank + 1.0))
    client.clock()
print("rank", context.rank, "weight", client.pull("w")[0].item(), client.servers, flush=True)
if os.environ.get("TEST_WAIT"):
    open("waits", "w").close()
    time.sleep(100)
"""


def start_cluster(folder: Path, roles: list[dict[str, str]]) -> list[subprocess.Popen[str]]:
    """Start a scheduler and processes of the roles, as another tool does."""
    (folder / "train.py").write_text(CLUSTER)
    port = free_port()
    base = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PDRUN_")},
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(port),
        "MS_WORKER_NUM": "2",
        "MS_SERVER_NUM": "2",
        "PDRUN_TOKEN": format_token(Secret.random()),
    }
    return [
        subprocess.Popen(
            [sys.executable, "train.py"],
            env=base | role,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for role in ({"MS_ROLE": "MS_SCHED"}, *roles)
    ]


def test_a_dynamic_cluster_has_servers(tmp_path: Path) -> None:
    worker = {"MS_ROLE": "MS_WORKER"}
    server = {"MS_ROLE": "MS_PSERVER"}
    jobs = start_cluster(tmp_path, [server, worker, worker, {**server, "MS_NODE_ID": "0"}])
    texts = [job.communicate(timeout=150)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 5, texts
    assert all("weight -6.0 2" in text for text in (texts[2], texts[3]))
    assert "weight" not in texts[1] + texts[4]


@pytest.mark.thorough
def test_a_lost_server_of_a_dynamic_cluster_ends_the_job(tmp_path: Path) -> None:
    worker = {"MS_ROLE": "MS_WORKER", "TEST_WAIT": "1"}
    server = {"MS_ROLE": "MS_PSERVER"}
    named = {**server, "MS_NODE_ID": "1"}
    jobs = start_cluster(tmp_path, [worker, worker, server, named])
    until(lambda: (tmp_path / "waits").exists(), "the workers wait", 120)
    jobs[4].send_signal(signal.SIGKILL)
    texts = [job.communicate(timeout=60)[0] for job in jobs]
    assert all(job.returncode for job in jobs)
    assert "server-1" in texts[0] and "lost" in texts[0], texts
