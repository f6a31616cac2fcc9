"""The examples run as their first lines say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lib.tiers import is_thorough
from tests.lib.worker_processes import clean, torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = [
    "--steps",
    "12",
    "--batch",
    "2",
    "--context",
    "32",
    "--width",
    "32",
    "--layers",
    "1",
    "--validation",
    "8",
    "--log-every",
    "5",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = [torch, pytest.mark.torch]


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=clean(environ), capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.thorough  # test_torch.py has the default run's case
def test_train_gpt_under_torchrun() -> None:
    done = run(*TORCHRUN, str(EXAMPLES / "train_gpt.py"), *SMALL)
    assert done.returncode == 0, done.stderr
    assert "2 worker(s) on cpu" in done.stdout
    assert re.findall(r"^step +(\d+)/12  loss \d\.\d{3}  [\d,]+ tokens/s", done.stdout, re.M) == [
        "5",
        "10",
        "12",
    ]
    assert re.search(r"^validation loss \d\.\d{3} \(uniform 5\.545\)", done.stdout, re.M)


@pytest.mark.thorough  # test_torch.py has the default run's case
def test_train_gpt_alone_learns_and_saves(tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    done = run(
        sys.executable, str(EXAMPLES / "train_gpt.py"), *SMALL, "--steps", "60", "--out", str(out)
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"^validation loss (\d\.\d{3})", done.stdout, re.M)
    assert found, done.stdout
    assert float(found[1]) < 4.5  # the uniform model has 5.545
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.thorough
def test_train_gpt_stops_when_its_time_is_over() -> None:
    done = run(
        sys.executable,
        str(EXAMPLES / "train_gpt.py"),
        *SMALL,
        "--steps",
        "1000000",
        "--seconds",
        "1",
    )
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout


@pytest.mark.thorough
def test_train_gpt_fails_when_the_loss_is_not_finite() -> None:
    done = run(sys.executable, str(EXAMPLES / "train_gpt.py"), *SMALL, "--lr", "inf")
    assert done.returncode == 1
    assert "the loss is nan at step" in done.stderr


def test_launch_function() -> None:
    done = run(sys.executable, str(EXAMPLES / "launch_function.py"))
    assert done.returncode == 0, done.stderr
    values = re.findall(r"^rank \d: pi is about (\d\.\d{4})$", done.stdout, re.M)
    assert len(values) == 4
    assert abs(float(values[0]) - 3.1416) < 0.02
    assert len(set(values)) == 1


def test_dynamic_cluster(tmp_path: Path) -> None:
    done = run(
        sys.executable, str(EXAMPLES / "dynamic_cluster.py"), "demo", XDG_CONFIG_HOME=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"^rank (\d) of 2 on cpu: .* to 1$", done.stdout, re.M)) == ["0", "1"]


@pytest.mark.slow
@pytest.mark.thorough  # test_elastic.py has jobs that save and go on
def test_elastic_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    script, folder = str(EXAMPLES / "elastic_training.py"), str(tmp_path / "kept")
    words = [
        sys.executable,
        "-m",
        "pdrun",
        "--local",
        "--nodes",
        "1:2",
        "--gather",
        "60",
        "--log-dir",
        str(tmp_path / "logs"),
        script,
        "--folder",
        folder,
        "--steps",
    ]
    home = {
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path),
    }
    with subprocess.Popen(
        [*words, "1000000"], env=clean(home), stdout=subprocess.PIPE, text=True
    ) as job:
        try:
            assert job.stdout is not None
            assert "generation 0: 2 workers from step 0" in job.stdout.readline()
            second = agents(job.pid)[1]
            deadline = time.monotonic() + 60
            while not list(Path(folder).glob("*.pt")) and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(second, signal.SIGTERM)
            stopped = re.search(r"stopping after step (\d+)", job.stdout.readline())
            assert stopped
            begun = re.search(r"generation 1: 1 workers from step (\d+)", job.stdout.readline())
            assert begun and int(begun[1]) == int(stopped[1]) + 1
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(60)
    if is_thorough():
        alone = run(sys.executable, script, "--folder", folder, "--steps", "200")
        assert "y = 3.0" in alone.stdout or "y = 2.9" in alone.stdout, alone.stdout + alone.stderr


def agents(front: int) -> list[int]:
    """Pids of the agents that a front has started, in the order of their nodes."""
    return [int(pid) for pid in Path(f"/proc/{front}/task/{front}/children").read_text().split()]
