"""Processes in messages: those with the same command are one entry."""

from __future__ import annotations

from collections.abc import Iterable

MAX_PIDS_SHOWN = 5


def group_processes(lines: Iterable[str]) -> str:
    """
    Return the processes as one text.

    Args:
        lines: ``PID COMMAND`` of each; a line without a number is kept as it is.
    """
    pids: dict[str, list[str]] = {}
    for line in lines:
        pid, _, command = line.partition(" ")
        if not pid.isdigit():
            command = line
            pid = ""
        pids.setdefault(command, []).append(pid)
    return "; ".join(_format_group(command, numbers) for command, numbers in pids.items())


def _format_group(command: str, pids: list[str]) -> str:
    if len(pids) == 1:
        return f"{pids[0]} {command}".strip()
    shown = ", ".join(pids[:MAX_PIDS_SHOWN])
    if len(pids) > MAX_PIDS_SHOWN:
        shown += " ..."
    return f"{len(pids)} x {command} ({shown})"
