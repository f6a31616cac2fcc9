"""
What somebody who knows torchrun only finds by pdrun's screens, without reading logs of workers.

`pdrun doctor` about two torch versions is in tests/launcher/doctor/test_node_checks.py, about files
that differ in clusters/test_doctor.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Shell, free_port
from tests.lib.netns_hosts import run

SICK = """
import os, time
import pdrun
rank = int(os.environ["RANK"])
for step in range(400):
    loss = float("nan") if step >= (5 if rank == 1 else 6) else 2.5  # with the next gradients
    pdrun.progress(step, busy=0.9 if rank == 2 else 0.1, total=400, loss=loss)
    time.sleep(0.3)
    if os.path.exists("stop"):
        break
"""


def ask(shell: Shell, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdrun", *words],
        cwd=shell.folder,
        env={**shell.env, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_nan_and_a_slow_rank(shell: Shell) -> None:
    (shell.folder / "sick.py").write_text(SICK)
    command = [sys.executable, "-m", "pdrun", "--devices", "3", "--start", "exec", "sick.py"]
    job = subprocess.Popen(
        command,
        cwd=shell.folder,
        env=shell.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    text = ""
    while not ("not finite on rank 1 since step 5" in text and "rank 2 on" in text):
        assert time.monotonic() < deadline, text
        assert job.poll() is None
        time.sleep(1.0)
        text = ask(shell, "status", "sick").stdout
    assert "needs 0.9 s per step, the others 0.1 s" in text
    (shell.folder / "stop").touch()
    assert job.wait(60) == 0
    page = ask(shell, "report", "sick", "-o", "-").stdout
    assert "loss was not finite on rank 1" in page and "at step 5<" in page
    assert "rank 2 on" in page


BUSY = """
import time, torch, pdrun
context = pdrun.init()
end = time.monotonic() + 15
for step in range(100_000):
    until = time.thread_time() + (0.06 if context.rank == 1 else 0.002)
    while time.thread_time() < until:
        pass
    is_over = torch.tensor(float(time.monotonic() > end))
    torch.distributed.all_reduce(is_over)
    pdrun.progress(step)
    if is_over:
        break
"""


@pytest.mark.torch
@pytest.mark.thorough  # tests/pdrun/test_elastic.py and the scheduler's tests have the parts
def test_a_slow_rank_of_a_script_that_measures_nothing(shell: Shell) -> None:
    (shell.folder / "busy.py").write_text(BUSY)
    done = ask(shell, "--local", "--nodes", "3", "--devices", "1", "busy.py")
    assert done.returncode == 0, done.stderr
    (line,) = {line.partition(" needs ")[0] for line in done.stderr.splitlines() if "needs" in line}
    assert line.endswith("rank 1 on node1")


LEFT = """
import torch, pdrun
context = pdrun.init()
if context.rank == 1:
    raise SystemExit(0)  # forgets the last step
torch.distributed.all_reduce(torch.ones(1))
"""


@pytest.mark.torch
def test_a_rank_that_left(shell: Shell) -> None:
    (shell.folder / "left.py").write_text(LEFT)
    done = ask(shell, "--devices", "2", "left.py")
    assert done.returncode not in (0, 124), done.stderr
    page = ask(shell, "report", "left", "-o", "-").stdout
    for text in (done.stderr, page, ask(shell, "status", "left").stdout):
        assert "rank 1 on" in text and "had ended before, without an error" in text, text
        assert "do all ranks make the same number of steps?" in text


@pytest.fixture
def full_disk(shell: Shell) -> Iterator[Path]:
    """A disk of 2 MB."""
    place = shell.folder / "small"
    place.mkdir()
    mounted = run("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place), check=False)
    if mounted.returncode:
        pytest.skip("cannot mount")
    yield place
    run("umount", str(place), check=False)


@pytest.mark.root
def test_a_full_disk(shell: Shell, full_disk: Path) -> None:
    (full_disk / "old.ckpt").write_bytes(bytes(2 << 20))
    done = ask(shell, "doctor", "--only", "disk", "--json", PDRUN_LOG_DIR=str(full_disk / "logs"))
    found = json.loads(done.stdout)["findings"]
    assert done.returncode == 78
    assert {one["level"] for one in found} == {"fail"}
    assert all(one["where"] == str(full_disk) and one["hint"] for one in found)
    assert any("0 MiB free" in one["what"] for one in found)


def test_a_wrong_variable(shell: Shell) -> None:
    done = ask(shell, "doctor", "--only", "variables", NCCL_SOCKET_IFNAME="eth7")
    assert done.returncode == 78
    assert "NCCL_SOCKET_IFNAME=eth7: names interface 'eth7'" in done.stdout
    assert "-> one of " in done.stdout


FAILS = """
import os
if os.environ["RANK"] == "0":
    raise RuntimeError("Message truncated")
import time
time.sleep(60)
"""


def test_two_versions_of_torch(shell: Shell) -> None:
    """The summary, the status and the report name them, whatever the failure looks like."""
    (shell.folder / "fails.py").write_text(FAILS)
    other = shell.folder / "other" / "torch"
    other.mkdir(parents=True)
    (other / "version.py").write_text("__version__ = '2.12.1'\n")
    scheduler = f"127.0.0.1:{free_port()}"

    def start(rank: int, **env: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "pdrun",
            "--nodes",
            "2",
            "--devices",
            "1",
            "--job",
            "mixed",
        ]
        command += ["--scheduler", scheduler, "--node-rank", str(rank), "--node-name", f"n{rank}"]
        return subprocess.Popen(
            [*command, "fails.py"],
            cwd=shell.folder,
            env={**shell.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    jobs = [start(0)]
    try:
        jobs.append(start(1, PYTHONPATH=str(other.parent)))
        texts = [job.communicate(timeout=60)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [1, 1], texts
    for text in (*texts, ask(shell, "status", "mixed").stdout):
        assert "torch differs: " in text and "'2.12.1' on n1" in text, text
    page = ask(shell, "report", "mixed", "-o", "-").stdout
    assert "torch differs between nodes: " in page and "2.12.1 on n1" in page
    assert "<td>resources.nodes</td><td>2</td><td>--nodes</td>" in page
