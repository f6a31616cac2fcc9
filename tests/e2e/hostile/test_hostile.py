"""
Hostile inputs: no traceback, no code that runs, no start of only some workers, no hang.

The thorough run plays all of them, more than 600; the default run a few of each kind.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from pdrun.launcher.cli.commands import build_command_line
from tests.e2e.hostile.cases import HostileCase, all_cases
from tests.lib.tiers import by_tier

SEED = 20261129
EXIT_CODES = {0, 1, 2, 69, 77, 78, 124, 126, 127, 130}
"""A fault of pdrun is 70; a signal is negative."""
Result = dict[str, Any]


def cases() -> list[HostileCase]:
    group = build_command_line()
    command = group.get_command(click.Context(group), "run")
    assert command is not None
    found = all_cases(command, SEED)
    assert len(found) >= 600
    return random.Random(SEED).sample(found, by_tier(25, len(found)))


def play(found: list[HostileCase], folder: Path) -> Iterator[Result]:
    player = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.hostile.player", str(folder / "case")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert player.stdin and player.stdout
    try:
        for case in found:
            player.stdin.write(case.to_json() + "\n")
            player.stdin.flush()
            line = player.stdout.readline()
            assert line, "the player has ended"
            yield json.loads(line)
    finally:
        player.stdin.close()
        player.stdout.close()
        player.wait(60)


def what_is_wrong(result: Result) -> str:
    """Return why a result is no refusal and no complete run; empty: it is one."""
    output = result["output"]
    if result["code"] is None:
        return "hangs"
    if result["pwned"]:
        return "runs code of an input"
    if "Traceback" in output or "pdrun-fault" in output:
        return "traceback"
    if result["code"] not in EXIT_CODES:
        return f"exit code {result['code']}"
    if result["code"] in (2, 77, 78) and result["started"]:
        return f"refused, but {result['started']} workers ran"
    if any((ord(char) < 32 and char not in "\n\t") or 0x7F <= ord(char) < 0xA0 for char in output):
        return "control characters"
    return ""


@pytest.mark.timeout(3000)
def test_hostile_inputs(tmp_path: Path) -> None:
    wrong = []
    count = 0
    for result in play(cases(), tmp_path):
        count += 1
        if reason := what_is_wrong(result):
            wrong.append(f"{reason}: {result['name']!a}: {result['output'][-300:]!a}")
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"code": None}, "hangs"),
        ({"code": 70}, "exit code 70"),
        ({"code": -9}, "exit code -9"),
        ({"pwned": True}, "runs code"),
        ({"output": "Traceback (most recent call last)"}, "traceback"),
        ({"code": 2, "started": 1}, "refused, but 1"),
        ({"output": "\x1b[31m"}, "control"),
    ],
)
def test_the_judge(changes: Result, reason: str) -> None:
    result = {"code": 0, "pwned": False, "output": "", "started": 1, **changes}
    found = what_is_wrong(result)
    assert found.startswith(reason) and bool(found) == bool(reason)
