"""A registry of its own for each test, and processes that end with it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """Filled by `start`; reaped at once when it ends, as a shell would."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        threading.Thread(target=child.wait, daemon=True).start()
        return child

    yield start  # type: ignore[misc]
    for child in started:
        child.kill()
        child.wait(10)
        child.stdout.close()  # type: ignore[union-attr]
