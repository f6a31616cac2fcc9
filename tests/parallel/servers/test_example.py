"""The example trains with servers of a real job, and with the same loss without any."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.worker_processes import clean, run_program

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/train_recommender.py"
SMALL = ("--rows", "6000", "--ids", "3000", "--batch", "500", "--epochs", "2")

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def read_losses(text: str) -> list[float]:
    """Return the losses of the example's epochs."""
    return [float(loss) for loss in re.findall(r"epoch \d: loss ([0-9.]+)", text)]


def run_job(folder: Path, *command: str) -> str:
    """Run a command in a folder; return its output."""
    done = subprocess.run(
        [sys.executable, *command],
        env=clean(),
        capture_output=True,
        text=True,
        timeout=170,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_recommender_has_one_loss_with_and_without_servers(tmp_path: Path) -> None:
    want = read_losses(run_program(tmp_path, EXAMPLE, *SMALL))
    assert len(want) == 2
    job = ("-m", "pdrun", "--no-files", "--servers", "2", "--devices", "2", "--backend", "cpu")
    text = run_job(tmp_path, *job, str(EXAMPLE), *SMALL, "--folder", str(tmp_path / "saved"))
    assert read_losses(text) == pytest.approx(want, abs=2e-4)
    assert (tmp_path / "saved" / "step-00000024" / "served" / "server-00001.json").exists()


@pytest.mark.thorough
def test_async_learns_as_sync_does(tmp_path: Path) -> None:
    """
    While it learns both agree. Later it learns the log by heart, where the order of arrival makes
    more of a difference, in both directions.
    """
    log = ("--rows", "20000", "--ids", "10000", "--batch", "500", "--epochs", "4")
    job = ("-m", "pdrun", "--no-files", "--servers", "2", "--devices", "2", "--backend", "cpu")
    want = read_losses(run_program(tmp_path, EXAMPLE, *log))
    found = read_losses(run_job(tmp_path, *job, str(EXAMPLE), *log, "--mode", "async"))
    assert found[:2] == pytest.approx(want[:2], rel=0.02)
    assert want[-1] < 0.9 * want[0]
    assert found[2:] == pytest.approx(want[2:], rel=0.1)
