"""Thirty processes of one command are one entry of a message."""

from __future__ import annotations

from pdrun.launcher.common.process_names import group_processes


def test_processes_with_one_command_are_one_entry() -> None:
    lines = [f"{pid} python train.py" for pid in range(10, 40)]
    text = group_processes(["7 sleep 60", *lines, "... and 3 more"])
    assert text == "7 sleep 60; 30 x python train.py (10, 11, 12, 13, 14 ...); ... and 3 more"


def test_single_processes_are_listed_as_they_are() -> None:
    assert group_processes(["7 sleep 60", "8 sleep 61"]) == "7 sleep 60; 8 sleep 61"
    assert group_processes(["7 a", "8 a"]) == "2 x a (7, 8)"
