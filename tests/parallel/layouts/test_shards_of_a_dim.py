"""The shards of a dim cover it without gaps; the first ones are longer by one."""

from __future__ import annotations

import pytest

from pdrun.parallel.layouts.layout import shard_range


@pytest.mark.parametrize(
    ("size", "want"),
    [
        (6, [(0, 2), (2, 4), (4, 6)]),
        (7, [(0, 3), (3, 5), (5, 7)]),
        (8, [(0, 3), (3, 6), (6, 8)]),
        (1, [(0, 1), (1, 1), (1, 1)]),
    ],
)
def test_shards_of_an_uneven_dim(size: int, want: list[tuple[int, int]]) -> None:
    assert [shard_range(size, 3, index) for index in range(3)] == want
