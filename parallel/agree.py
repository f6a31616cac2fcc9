"""
All ranks of a job call `parallelize` with the same arguments, or hear at once who has others.

Told through torch's store before the first group is made: with other meshes the ranks would wait for groups that nobody
else makes, and end with the network's error on a rank that has done nothing wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from pdrun.errors import DeadlineExceeded, UsageError

WHERE = "pdrun.parallelize"
_calls = itertools.count()
"""Agreements of this process so far; every rank makes the same ones."""


def agree(what: Mapping[str, Any], rank: int, store: Any, seconds: float) -> None:
    """
    Compare arguments with those of rank 0.

    Args:
        what: names and values, which are compared as text.
        store: torch's store of the job.
        seconds: how long to wait for rank 0.

    Raises:
        UsageError: rank 0 has others; names the first that differs.
        DeadlineExceeded: rank 0 has not come so far.
    """
    key = f"pdrun/agree/{next(_calls)}"
    mine = "\n".join(f"{name}={value}" for name, value in what.items())
    if rank == 0:
        store.set(key, mine)
        return
    try:
        store.wait([key], timedelta(seconds=seconds))
    except Exception as error:  # torch's kind of it depends on the version
        told = f"rank 0 has not called parallelize within {seconds:g} s of rank {rank}"
        raise DeadlineExceeded(told, where=WHERE) from error
    theirs = store.get(key).decode()
    if theirs != mine:
        pairs = zip(mine.split("\n"), theirs.split("\n"), strict=False)
        here, there = next((pair for pair in pairs if pair[0] != pair[1]), (mine, theirs))
        what_differs = f"rank {rank} has {here}, rank 0 has {there}"
        raise UsageError(what_differs, where=WHERE, hint="every rank calls it with the same arguments")
