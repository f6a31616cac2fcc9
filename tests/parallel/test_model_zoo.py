"""The benchmark of architectures runs, and tells its outcomes apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.tiers import thorough

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def run_zoo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Return the finished benchmark."""
    command = [sys.executable, str(ROOT / "benchmarks/model_zoo.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize(
    ("model", "plans", "row"),
    [thorough("plain_mlp", "level3,tensor,pipeline,context", ["=", "=", "=", "."])],
)
def test_cells_of_a_plain_model(model: str, plans: str, row: list[str]) -> None:
    done = run_zoo("--only", model, "--plan", plans)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [model, *row] in lines


def test_unknown_plans_are_refused() -> None:
    done = run_zoo("--plan", "level9")
    assert done.returncode == 2
    assert "plans: level0, level1" in done.stderr
