"""The fields of each kind of event that a status depends on, checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pdrun.ui.job_status import RankStatus
from pdrun.ui.remedies import split_early_end, suggest_remedies

MAX_RANKS = 1 << 20
"""Ranks of a generation. An event with more is damaged."""
MAX_FACTS = 256
"""Lines of a plan."""
_EXIT = re.compile(
    r'\n\{"kind": "exit(?:ed", "time": (?:0|[1-9]\d{0,14})(?:\.\d{1,9})?'
    r', "generation": (?:0|[1-9]\d{0,8}), "rank": (0|[1-9]\d{0,8}), "node": "([^"\\\x00-\x1f]+)"'
    r', "code": (.*))?',
    re.ASCII,
)
"""A line about an exit; without groups if it has another form."""
_EXIT_END = re.compile(
    r'(0|-?[1-9]\d{0,8}), "how": "([a-z_]*)"'
    r', "cause": ("[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*")\}',
    re.ASCII,
)
"""An exit as `pdrun.eventlog` writes it: many have the same end."""
ExitFields = tuple[str, str, str]
"""Rank, node and the rest of the line of an exit, from its code on."""
make_rank = partial(tuple.__new__, RankStatus)
"""Make a RankStatus of a tuple, without a call in Python."""


def read_fields(kind: str, data: Mapping[str, Any]) -> Any:
    """
    Return the fields of an event; None: the kind changes no status.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: they do not fit the kind.
    """
    match kind:
        case "suspect" | "recovered" | "lost" | "left" | "standby":
            return str(data["node"])
        case "joined":
            return str(data["node"]), int(data.get("workers", 0))
        case "exited":
            return _read_exit(data)
        case "progress":
            step, saved = int(data.get("step", -1)), int(data.get("saved", -1))
            bad = read_bad_steps(data.get("bad") or {})
            total, values = int(data.get("total", 0)), read_values(data.get("values") or {})
            return step, saved, total, values, bad
        case "usage":
            return read_usage(data["values"])
        case "plan":
            return read_plan(data["facts"])
        case "assigned":
            return _read_assignment(data)
        case "started" | "resumed":
            return ()
        case "stopping" | "restarting" | "gathering":
            return str(data.get("reason", ""))
        case "warning":
            return str(data.get("text", ""))
        case "hang":
            return f"rank {data.get('rank')} on {data.get('node')} hangs: {data.get('reason', '')}"
        case "created":
            return str(data.get("job", "")), str(data.get("run", "")), int(data.get("nodes", 0))
        case "verdict":
            return int(data["code"]), str(data.get("reason", "")), read_hints(data)
    return None


def read_hints(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a user can do about the first cause in a verdict."""
    if "how" not in data:  # no worker failed
        return ()
    code = int(data["code"])
    reason, early_end = split_early_end(str(data.get("reason", "")))
    summary = reason.partition(" failed: ")[2] or reason
    remedies = suggest_remedies(
        str(data["how"]),
        summary,
        str(data.get("traceback", "")),
        code=code,
        signal=max(0, code - 128),
        early_end=early_end,
    )
    return tuple(remedies)


def read_values(data: Mapping[str, Any]) -> dict[str, tuple[float | None, int, int]]:
    """
    Return the numbers of a ``progress`` event: name -> mean, rank of the largest, bad rank.

    Raises:
        TypeError, ValueError: they have another form.
    """
    found = {}
    for name, (mean, _, _, rank, bad_rank) in data.items():
        found[str(name)] = (None if mean is None else float(mean), int(rank), int(bad_rank))
    return found


def read_bad_steps(data: Mapping[str, Any]) -> dict[str, int]:
    """
    Return ``bad`` of a ``progress`` event: name -> first step with a value that is not finite.

    Raises:
        TypeError, ValueError: it has another form.
    """
    return {str(name): int(step) for name, step in data.items()}


def read_usage(data: Mapping[str, Any]) -> dict[str, tuple[float, float, int]]:
    """
    Return the values of a ``usage`` event: name -> mean, largest, rank of the largest.

    Raises:
        TypeError, ValueError: they have another form.
    """
    return {
        str(name): (float(mean), float(most), int(rank))
        for name, (mean, _, most, rank, _) in data.items()
        if mean is not None
    }


def read_plan(facts: Sequence[Sequence[str]]) -> list[tuple[str, str, str]]:
    """
    Return the lines of a ``plan`` event: name, value, and where it came from.

    Raises:
        TypeError, ValueError: they have another form.
    """
    return [(str(name), str(value), str(source)) for name, value, source in facts[:MAX_FACTS]]


def join_plan(
    before: Mapping[str, tuple[str, str]], facts: Sequence[tuple[str, str, str]]
) -> dict[str, tuple[str, str]]:
    """Return a plan with more lines: name -> value, source; at most MAX_FACTS."""
    plan = {**before, **{name: (value, source) for name, value, source in facts}}
    return dict(list(plan.items())[:MAX_FACTS])


def find_exits(block: bytes | memoryview) -> list[ExitFields] | None:
    """
    Return the exits in lines that `pdrun.eventlog` has written; None if one has another form.

    A hundred thousand workers may have failed: one regular expression reads them all.

    Args:
        block: lines, each with a line end before it.
    """
    try:
        rows = _EXIT.findall(str(block, "ascii"))
    except UnicodeDecodeError:
        return None
    return rows if all(map(_EXIT_END.fullmatch, {end for _, _, end in rows})) else None


def make_exits(rows: Sequence[ExitFields]) -> dict[int, RankStatus] | None:
    """Return the ranks that have exited, the last exit of each; None: an escape is invalid."""
    known: dict[str, tuple[str, int, str]] = {}
    for end in {end for _, _, end in rows}:
        match = _EXIT_END.fullmatch(end)
        if match is None:
            return None
        code, how, cause = match.groups()
        state = "done" if code == "0" else "stopped" if how == "stopped" else "failed"
        try:
            known[end] = (state, int(code), json.loads(cause))
        except ValueError:  # an invalid escape
            return None
    return {
        (number := int(rank)): make_rank((number, node, *known[end])) for rank, node, end in rows
    }


def _read_exit(data: Mapping[str, Any]) -> RankStatus:
    code = int(data["code"])
    if not code:
        state = "done"
    elif data.get("how") == "stopped":
        state = "stopped"
    else:
        state = "failed"
    return RankStatus(
        int(data["rank"]), str(data.get("node", "")), state, code, str(data.get("cause", ""))
    )


def _read_assignment(data: Mapping[str, Any]) -> tuple[int, int, list[tuple[str, int, int]]]:
    """
    Return the generation, the restarts so far, and its nodes: name, first rank, workers.

    ``nodes`` is a list of ``[name, first rank, workers]`` in node order.
    """
    nodes = [(str(name), int(first), int(workers)) for name, first, workers in data["nodes"]]
    if sum(max(0, workers) for _, _, workers in nodes) > MAX_RANKS:
        raise ValueError("too many ranks")
    return int(data["generation"]), int(data.get("restarts", 0)), nodes
