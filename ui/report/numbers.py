"""The numbers of a job's steps, one by one from its event log, for plots and other programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdrun.eventlog import take_event
from pdrun.text import escape_text

MAX_NAMES = 64


@dataclass(frozen=True)
class StepNumber:
    """One number of a step, over all workers that reported it."""

    mean: float | None
    """None: not finite on any worker."""
    least: float | None
    most: float | None
    rank: int
    """The worker with the largest value; -1: none."""
    bad_rank: int
    """The first worker with a value that is not finite; -1: none."""


@dataclass(frozen=True)
class StepRow:
    """A step of a job, and its numbers."""

    time: float
    """Wall clock."""
    generation: int
    step: int
    values: Mapping[str, StepNumber]


def read_rows(lines: Iterable[str]) -> Iterator[StepRow]:
    """Yield the steps of a log; damaged lines are left out."""
    generation = 0
    for line in lines:
        if '"progress"' not in line and '"assigned"' not in line:
            continue  # the numbers are a small part of a long log
        try:
            found = take_event(json.loads(line))
            if found is None:
                continue
            kind, when, data = found
            if kind == "assigned":
                generation = int(data["generation"])
            elif kind == "progress" and int(data.get("step", -1)) >= 0:
                values = _read_values(data.get("values") or {})
                generation = int(data.get("generation", generation))
                yield StepRow(when, generation, int(data["step"]), values)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
            continue


def _read_values(data: Mapping[str, Any]) -> dict[str, StepNumber]:
    found = {}
    for name, (mean, least, most, rank, bad_rank) in list(data.items())[:MAX_NAMES]:
        finite = [None if value is None else float(value) for value in (mean, least, most)]
        found[escape_text(str(name))] = StepNumber(
            finite[0], finite[1], finite[2], int(rank), int(bad_rank)
        )
    return found
