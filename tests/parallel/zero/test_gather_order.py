"""
The order of gathers and sums over the units of a chunk: the same on every rank, whatever its data
make it run.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.parallel.zero.gather_order import GatherSchedule

pytestmark = pytest.mark.torch


class FakeBucket:
    """A bucket that logs when it is gathered."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.is_open = name, log, False

    def start_gather(self) -> None:
        if not self.is_open:
            self.log.append(f"gather {self.name}")
        self.is_open = True

    def wait_gather(self) -> None:
        assert self.is_open

    def release(self, is_checked: bool = True) -> None:
        self.is_open = False


class Rank:
    """
    A rank that runs some units of a chunk, and sums the gradients of each when they are complete.
    """

    def __init__(self, count: int, keeps: bool) -> None:
        self.log: list[str] = []
        self.buckets = [FakeBucket(str(index), self.log) for index in range(count)]
        units: Any = {index: [bucket] for index, bucket in enumerate(self.buckets)}
        self.schedule, self.keeps, self.most = GatherSchedule(units, [], self.sum), keeps, 0

    def sum(self, unit: int) -> None:
        self.log.append(f"sum {unit}")

    def forward(self, mine: set[int]) -> None:
        self.schedule.begin_pass(backward=False, keep_units=self.keeps)
        for unit in sorted(mine):
            self.schedule.open_unit(unit, mine)
            self.most = max(self.most, sum(bucket.is_open for bucket in self.buckets))
            if not self.keeps:
                self.buckets[unit].release()
        self.schedule.finish_pass(mine)
        self.schedule.is_resident = self.keeps

    def backward(self, mine: set[int], for_input: bool = False) -> None:
        self.schedule.begin_pass(backward=True, keep_units=self.keeps)
        ran = set(range(len(self.buckets))) if for_input else mine
        for unit in sorted(mine, reverse=True):
            self.schedule.open_unit(unit, ran)
            self.most = max(self.most, sum(bucket.is_open for bucket in self.buckets))
            if not for_input:
                self.buckets[unit].is_open = self.keeps
                self.sum(unit)
        self.schedule.finish_pass(ran)


def parts(count: int) -> Any:
    """Draw the units that a rank runs, micro-batch by micro-batch."""
    return st.lists(st.sets(st.integers(0, count - 1)), min_size=1, max_size=4)


@given(count=st.integers(1, 6), data=st.data())
def test_ranks_gather_and_sum_in_one_order(count: int, data: Any) -> None:
    """A rank that leaves units out starts what the others start, between the same sums."""
    mine, (one, all_) = data.draw(parts(count)), (Rank(count, False), Rank(count, False))
    for part in mine:
        for rank, units in ((one, part), (all_, set(range(count)))):
            rank.forward(units)
            rank.backward(units)
    assert one.log == all_.log
    assert len([event for event in one.log if event.startswith("gather")]) == 2 * count * len(mine)
    assert one.most <= 2


@given(count=st.integers(1, 6), data=st.data())
def test_units_that_stay_are_gathered_once(count: int, data: Any) -> None:
    rank = Rank(count, True)
    for part in data.draw(parts(count)):
        rank.forward(part)
        rank.backward(part)
    assert [event for event in rank.log if event.startswith("gather")] == [
        f"gather {unit}" for unit in range(count)
    ]
    assert all(bucket.is_open for bucket in rank.buckets)


@given(count=st.integers(1, 6), data=st.data())
def test_a_backward_for_the_input_holds_two_units(count: int, data: Any) -> None:
    mine, rank = data.draw(parts(count)), Rank(count, False)
    for part in mine:
        rank.forward(part)
    for part in mine:
        rank.backward(part, for_input=True)
        rank.schedule.close_units()
    assert rank.most <= 2
    assert not any(event.startswith("sum") for event in rank.log)
    assert len(rank.log) == 2 * count * len(mine)
