"""
Two tiers of tests: the default run, and `--thorough` (a nightly run, and once before a release).

The default run has a case of each feature and of each pair of features. The thorough run has all
cases, more hypothesis examples, longer simulations and soaks. ``pytest --thorough`` or
PDRUN_TEST_THOROUGH=1 selects it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

VARIABLE = "PDRUN_TEST_THOROUGH"
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
    Return all cases, of which those that add no new feature and no new pair are marked `thorough`.

    Args:
        cases: what a test is parametrized with, the most telling first: order decides.
        features: the features of a case, one value per position; a pair is two values at two
            positions.
    """
    seen: set[Any] = set()
    result: list[Any] = []
    for case in cases:
        values = list(enumerate(features(case)))
        new = set(values) | set(itertools.combinations(values, 2))
        result.append(thorough(case) if new <= seen else case)
        seen |= new
    return result
