"""The fault matrix: its rows name tests that exist, and its program takes its hosts away."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import fault_matrix
from tests.lib.tiers import thorough

PROGRAM = [sys.executable, "benchmarks/fault_matrix.py"]


def test_every_row_names_tests_that_exist() -> None:
    rows = list(fault_matrix.read_rows(fault_matrix.PAGE.read_text()))
    numbers = [number for row in rows for number in fault_matrix.expand_numbers(row.number)]
    assert len(rows) > 70 and len(numbers) == len(set(numbers))
    for row in rows:
        for path, names in row.tests:
            files = Path(fault_matrix.ROOT, path)
            text = "".join(
                file.read_text() for file in (files.rglob("*.py") if files.is_dir() else [files])
            )
            for name in names:
                assert re.search(rf"\bdef \w*{name.strip('_')}|[\"']{name}", text), (row, name)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", set()), ("1,3", {"1", "3"}), ("54 - 56, 60", {"54", "55", "56", "60"})],
)
def test_numbers_of_rows(text: str, numbers: set[str]) -> None:
    assert fault_matrix.expand_numbers(text) == numbers


@pytest.mark.parametrize("rows", ["x", "1-", "999999"])
def test_rows_that_do_not_exist_are_refused(rows: str) -> None:
    ended = subprocess.run(
        [*PROGRAM, "--rows", rows], cwd=fault_matrix.ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 2 and "--rows" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("number", [thorough(signal.SIGTERM), thorough(signal.SIGINT)])
def test_a_stop_takes_the_hosts_away(possible: None, number: signal.Signals) -> None:
    with subprocess.Popen([*PROGRAM, "--rows", "81"], cwd=fault_matrix.ROOT) as program:
        child = 0
        deadline = time.monotonic() + 90
        while not child or not namespaces(child):
            assert time.monotonic() < deadline and program.poll() is None
            found = subprocess.run(["pgrep", "-P", str(program.pid)], capture_output=True)
            child = int(found.stdout.split()[0]) if found.stdout else 0
            time.sleep(0.1)
        program.send_signal(number)
        assert program.wait(120) == 128 + number
        assert not namespaces(child)


def namespaces(child: int) -> list[str]:
    """The hosts that a process of pytest has made."""
    return [path.name for path in Path("/run/netns").glob(f"pdt{child}-*")]
