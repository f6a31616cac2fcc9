"""Processes that are waited for together."""

from __future__ import annotations

import subprocess

import pytest

from tests.lib.worker_processes import finish_all


def start(command: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(["sh", "-c", command], text=True, stdout=pipe, stderr=pipe)


def test_a_process_that_does_not_end_shows_what_all_of_them_said() -> None:
    processes = [start("echo waits; exec sleep 100"), start("echo here; echo why >&2; exit 3")]
    with pytest.raises(pytest.fail.Exception) as failure:
        finish_all(processes, timeout=0.2)
    text = str(failure.value)
    assert "did not end in 0.2 s: [0]" in text
    assert "process 0: killed\nwaits\n" in text
    assert "process 1: exit code 3\nhere\n\nwhy\n" in text
    assert all(process.poll() is not None for process in processes)


def test_codes_and_output_are_those_of_each_in_order() -> None:
    assert finish_all([start("echo a; exit 7"), start("echo b >&2")]) == [
        (7, "a\n", ""),
        (0, "", "b\n"),
    ]
