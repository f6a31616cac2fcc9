"""Threads that take turns: one at a time, in a fixed order, with what is theirs."""

from __future__ import annotations

import threading

import pytest

from pdrun.parallel.training.turn_taking import TurnTaking


def test_threads_run_one_at_a_time_in_the_order_of_the_round() -> None:
    text: list[str] = []
    state = {"of": "caller"}

    def enter(kept: str) -> None:
        state["of"] = kept

    turns = TurnTaking(3, lambda: state["of"], enter)

    def work(name: str, pauses: int) -> str:
        state["of"] = name
        for place in range(pauses):
            text.append(f"{name}{place}")
            turns.yield_turn()
            assert state["of"] == name
        return name

    found = turns.run_all([lambda: work("a", 3), lambda: work("b", 1), lambda: work("c", 2)])
    assert found == ["a", "b", "c"]
    assert text == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert turns.switches == 8  # a, b, c, a, b (which ends), c, a, c (which ends), a


def test_one_thread_never_waits() -> None:
    turns = TurnTaking(1, lambda: None, lambda kept: None)
    assert turns.run_all([lambda: turns.yield_turn() or threading.current_thread()]) == [
        threading.current_thread()
    ]
    assert turns.switches == 0


def test_a_pause_outside_of_the_round_does_nothing() -> None:
    turns = TurnTaking(2, lambda: None, lambda kept: None)
    turns.yield_turn()
    assert turns.switches == 0


@pytest.mark.parametrize("who", [0, 1])
def test_an_error_ends_the_others_where_they_pause(who: int) -> None:
    turns = TurnTaking(2, lambda: None, lambda kept: None)
    ended: list[int] = []

    def work(index: int) -> None:
        try:
            turns.yield_turn()
            if index == who:
                raise ValueError(f"copy {index}")
            while True:
                turns.yield_turn()
        finally:
            ended.append(index)

    before = threading.active_count()
    with pytest.raises(ValueError, match=f"copy {who}"):
        turns.run_all([lambda: work(0), lambda: work(1)])
    assert sorted(ended) == [0, 1]
    assert threading.active_count() == before
