"""Numbers of the scripts: equal sums however the workers are spread over nodes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pdrun.rendezvous.policies.numbers import (
    MAX_NAMES,
    describe_numbers,
    find_bad_steps,
    sum_numbers,
)

VALUES = st.one_of(st.none(), st.integers(-1_000, 1_000).map(float))
REPORTS = st.dictionaries(
    st.integers(0, 40), st.dictionaries(st.sampled_from(["loss", "lr"]), VALUES), max_size=12
)


@given(REPORTS, st.integers(1, 5))
def test_the_spread_over_nodes_changes_nothing(
    reports: dict[int, dict[str, float | None]], nodes: int
) -> None:
    parts = [
        {rank: one for rank, one in reports.items() if rank % nodes == n} for n in range(nodes)
    ]
    found = describe_numbers(sum_numbers(part) for part in parts)
    for name in {name for one in reports.values() for name in one}:
        values = {rank: one[name] for rank, one in sorted(reports.items()) if name in one}
        finite = {rank: value for rank, value in values.items() if value is not None}
        bad = min((rank for rank, value in values.items() if value is None), default=-1)
        mean, least, most, rank, bad_rank = found[name]
        assert bad_rank == bad
        if finite:
            assert mean is not None
            assert math.isclose(mean, sum(finite.values()) / len(finite), abs_tol=1e-9)
            assert (least, most) == (min(finite.values()), max(finite.values()))
            assert rank == min(key for key, value in finite.items() if value == most)
        else:
            assert (mean, least, most, rank) == (None, None, None, -1)


@given(st.permutations(range(4)), st.integers(1, 3))
def test_the_rank_with_the_earliest_bad_step_is_named(order: list[int], nodes: int) -> None:
    """A value that is not finite is on all ranks one step later."""
    steps = {0: 26, 1: 26, 2: 25, 3: 26}
    parts = [
        sum_numbers(
            {rank: {"loss": None, "lr": 1.0} for rank in order if rank % nodes == node},
            {rank: {"loss": steps[rank]} for rank in order},
        )
        for node in range(nodes)
    ]
    assert describe_numbers(parts)["loss"][-1] == 2
    assert find_bad_steps(parts) == {"loss": 25}


def test_names_are_bounded() -> None:
    reports = {rank: {f"n{rank}_{index}": 1.0 for index in range(32)} for rank in range(8)}
    assert len(sum_numbers(reports)) == MAX_NAMES
    assert len(describe_numbers([sum_numbers({0: one}) for one in reports.values()])) == MAX_NAMES
