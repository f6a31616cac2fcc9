"""Processes of a job with servers are killed at each operation: codes and causes of the job."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Shell
from tests.lib.server_scripts import FIND_SERVERS
from tests.lib.tiers import thorough

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

TRAIN = (
    FIND_SERVERS
    + """
import os, signal, time
import torch, pdrun
from pdrun.parallel.servers import channel
from pdrun.parallel.servers.frames import Op

role, op, mode = os.environ["EXTRA"].split(",")
rank = int(os.environ["RANK"])
step = 0

send = channel.Channel.send_frame
killed = []
def send_frame(self, frame, *parts):
    send(self, frame, *parts)
    is_time = step == 1 or op in ("HELLO", "BYE")
    if rank == 1 and frame.op == Op[op] and is_time and not killed:
        killed.append(True)
        os.kill(os.getpid() if role == "worker" else find_servers()[0], signal.SIGKILL)
channel.Channel.send_frame = send_frame

client = pdrun.servers.connect(mode, timeout=60)
client.add_dense("w", pdrun.servers.dense(lr=1.0), torch.zeros(10))
client.add_rows("t", pdrun.rows("adagrad", lr=1.0), dim=4)
ids = torch.arange(100)
for step in range(3):
    client.rows("t", ids)
    client.push_rows("t", ids, torch.ones(100, 4))
    client.push("w", torch.ones(10))
    client.clock()
    client.pull("w")
    if rank == 1:
        client.save(os.path.abspath("saved"))
client.clock()
client.close()
print("done", rank, flush=True)
time.sleep(1.0)
"""
)
OPERATIONS = ("HELLO", "ROWS", "PUSH_ROWS", "PUSH", "CLOCK", "PULL", "SNAPSHOT", "BYE")
CASES = [
    thorough(*case)
    for mode in ("sync", "async")
    for role in ("worker", "server")
    for case in ((role, op, mode) for op in OPERATIONS)
]


@pytest.mark.parametrize(("role", "op", "mode"), CASES)
def test_the_job_ends_or_goes_on_as_the_docs_say(shell: Shell, role, op, mode) -> None:
    shell.script(TRAIN, "train.py")
    job = shell.start(
        *("--devices", "2", "--servers", "1", "--grace", "2", "--start", "exec"),
        *("--env", f"EXTRA={role},{op},{mode}", "train.py"),
    )
    code = job.wait(150)
    if role == "worker":
        assert code == 137, job.err
        assert "rank 1" in job.err and "SIGKILL" in job.err
    elif mode == "async" and op != "HELLO":
        # the first checkpoint is of step 0, so the server continues alone
        assert code == 0, job.err
        assert "server 0 was killed by SIGKILL; it starts again alone" in job.err
        assert job.out.count("done") == 2
    else:
        assert code == 1, job.err
        assert "failed: parameter server 0 was killed by SIGKILL" in job.err
