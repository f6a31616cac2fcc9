"""Layers are split over stages so that the slowest stage is as fast as possible."""

from __future__ import annotations

import pytest

from pdrun.errors import UsageError
from pdrun.parallel.pipeline.balance import split_by_cost


@pytest.mark.parametrize(
    ("costs", "parts", "want"),
    [
        ([1, 5, 2, 3], 3, [[0], [1], [2, 3]]),
        ([3, 2, 5, 1], 3, [[0, 1], [2], [3]]),
        ([1, 1, 1, 1], 2, [[0, 1], [2, 3]]),
        ([9, 1, 1, 1], 2, [[0], [1, 2, 3]]),
    ],
)
def test_the_slowest_stage_counts(costs: list[int], parts: int, want: list[list[int]]) -> None:
    assert [list(part) for part in split_by_cost(costs, parts)] == want


def test_each_stage_needs_a_layer() -> None:
    with pytest.raises(UsageError, match="cannot be split"):
        split_by_cost([1.0, 2.0], 3)
