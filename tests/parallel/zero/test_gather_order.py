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


class Fake:
    """Stands in for a cut: writes down when it is gathered."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.open = name, log, False

    def start(self) -> None:
        if not self.open:
            self.log.append(f"gather {self.name}")
        self.open = True

    def ready(self) -> None:
        assert self.open

    def close(self) -> None:
        self.open = False


class Rank:
    """
    A rank that runs some units of a chunk, and sums the gradients of each when they are complete.
    """

    def __init__(self, count: int, keeps: bool) -> None:
        self.log: list[str] = []
        self.cuts = [Fake(str(index), self.log) for index in range(count)]
        units: Any = {index: [cut] for index, cut in enumerate(self.cuts)}
        self.lane, self.keeps, self.most = GatherSchedule(units, [], self.sum), keeps, 0

    def sum(self, unit: int) -> None:
        self.log.append(f"sum {unit}")

    def forward(self, mine: set[int]) -> None:
        self.lane.begin_pass(backward=False, keep_units=self.keeps)
        for unit in sorted(mine):
            self.lane.open_unit(unit, mine)
            self.most = max(self.most, sum(cut.open for cut in self.cuts))
            if not self.keeps:
                self.cuts[unit].close()
        self.lane.finish_pass(mine)
        self.lane.is_resident = self.keeps

    def backward(self, mine: set[int], for_input: bool = False) -> None:
        self.lane.begin_pass(backward=True, keep_units=self.keeps)
        ran = set(range(len(self.cuts))) if for_input else mine
        for unit in sorted(mine, reverse=True):
            self.lane.open_unit(unit, ran)
            self.most = max(self.most, sum(cut.open for cut in self.cuts))
            if not for_input:
                self.cuts[unit].open = self.keeps
                self.sum(unit)
        self.lane.finish_pass(ran)


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
    assert all(cut.open for cut in rank.cuts)


@given(count=st.integers(1, 6), data=st.data())
def test_a_backward_for_the_input_holds_two_units(count: int, data: Any) -> None:
    mine, rank = data.draw(parts(count)), Rank(count, False)
    for part in mine:
        rank.forward(part)
    for part in mine:
        rank.backward(part, for_input=True)
        rank.lane.close_units()
    assert rank.most <= 2
    assert not any(event.startswith("sum") for event in rank.log)
    assert len(rank.log) == 2 * count * len(mine)
