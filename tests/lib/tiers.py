"""
Two tiers of tests: the default run, and `--thorough` (a nightly run, and once before a release).

The default run has a case of each feature and of each pair of features. The thorough run has all
cases, more hypothesis examples, longer simulations and soaks. ``pytest --thorough`` or
PYTEST_PDRUN_THOROUGH=1 selects it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

VARIABLE = "PYTEST_PDRUN_THOROUGH"
Value = TypeVar("Value")


def is_thorough() -> bool:
    """Return whether this is the thorough run."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def by_tier(default: Value, thorough: Value) -> Value:
    """Return the value for this run's tier."""
    return thorough if is_thorough() else default


def thorough(*values: Any, **kwargs: Any) -> Any:
    """Return a ``pytest.param`` that only the thorough run has."""
    return pytest.param(*values, marks=pytest.mark.thorough, **kwargs)


def mark_all_but(keep: int, cases: Sequence[Any]) -> list[Any]:
    """Return the cases of which all but ``keep``, spread evenly, belong to the thorough run."""
    step = max(1, len(cases) / keep)
    kept = {int(index * step) for index in range(keep)}
    return [case if index in kept else thorough(case) for index, case in enumerate(cases)]


def cover_pairs(
    cases: Iterable[Value], features: Callable[[Value], Sequence[Hashable]]
) -> list[Value | Any]:
    """
    Return all cases in their order; those that no pair of features needs are marked `thorough`.

    The default run keeps a greedy cover: as long as a feature or a pair is missing, the case that
    adds most of them.

    Args:
        cases: what a test is parametrized with.
        features: the features of a case, one value per position; a pair is two values at two
            positions.
    """
    listed = list(cases)
    pairs: list[set[Any]] = []
    for case in listed:
        values = list(enumerate(features(case)))
        pairs.append({*values, *itertools.combinations(values, 2)})
    missing: set[Any] = set().union(*pairs)
    kept: set[int] = set()
    while missing:
        best = max(range(len(listed)), key=lambda index: (len(pairs[index] & missing), -index))
        kept.add(best)
        missing -= pairs[best]
    return [case if index in kept else thorough(case) for index, case in enumerate(listed)]
