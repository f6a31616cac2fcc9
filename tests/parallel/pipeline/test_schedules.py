"""
Pipeline schedules as data: closed forms, soundness on all sizes, pictures, faults that are named.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import UsageError
from pdrun.parallel.pipeline.balance import split_by_cost, split_evenly
from pdrun.parallel.pipeline.schedules.builders import make_schedule
from pdrun.parallel.pipeline.schedules.schedule import parse_schedule
from pdrun.parallel.pipeline.schedules.timeline import (
    ActionCosts,
    bubble_share,
    draw_schedule,
    simulate_schedule,
)
from pdrun.parallel.pipeline.schedules.validate import list_messages, validate_schedule

SIZES = [(1, 1), (1, 3), (2, 2), (2, 5), (3, 7), (4, 4), (4, 8), (8, 32)]


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"]),
    st.integers(1, 9),
    st.integers(1, 26),
    st.integers(1, 4),
)
def test_every_schedule_of_every_size_is_sound(
    name: str, ranks: int, micros: int, chunks: int
) -> None:
    schedule = make_schedule(name, ranks, micros, chunks if name == "interleaved" else None)
    per_rank = {"interleaved": chunks, "zero-bubble-v": 2}.get(name, 1)
    assert (schedule.rank_count, schedule.stage_count, schedule.microbatch_count) == (
        ranks,
        ranks * per_rank,
        micros,
    )
    live = validate_schedule(schedule).live
    assert max(live) <= micros * per_rank
    sent = list_messages(schedule)
    crossing = sum(a != b for a, b in itertools.pairwise(schedule.stage_ranks))
    assert sum(map(len, sent.values())) == 2 * crossing * micros
    assert all(message.target == target for (_, target), those in sent.items() for message in those)
    assert parse_schedule(str(schedule)).rows == schedule.rows


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_has_its_closed_form(name: str, ranks: int, micros: int) -> None:
    schedule = make_schedule(name, ranks, micros)
    for costs in (ActionCosts(), ActionCosts(forward=3, input=2, weight=5)):
        assert bubble_share(schedule, costs) == pytest.approx((ranks - 1) / (micros + ranks - 1))


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "rounds"), [(1, 2), (2, 1), (2, 3), (4, 2), (8, 4)])
def test_chunks_divide_the_bubble(ranks: int, rounds: int, chunks: int) -> None:
    share = bubble_share(
        make_schedule("interleaved", ranks, ranks * rounds, chunks),
        ActionCosts(forward=1, input=1, weight=1),
    )
    assert share / (1 - share) == pytest.approx((ranks - 1) / (ranks * rounds) / chunks)


@pytest.mark.parametrize(
    ("ranks", "micros"), [(1, 3), (2, 2), (2, 5), (3, 7), (4, 4), (4, 9), (8, 32)]
)
def test_zero_bubble_leaves_a_third_of_the_bubble(ranks: int, micros: int) -> None:
    for name, work in (("zero-bubble", 3 * micros), ("zero-bubble-v", 6 * micros)):
        assert simulate_schedule(make_schedule(name, ranks, micros)).duration == work + ranks - 1
    assert simulate_schedule(make_schedule("1f1b", ranks, micros)).duration == 3 * (
        micros + ranks - 1
    )


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_memory_of_the_schedules(ranks: int, micros: int) -> None:
    assert set(validate_schedule(make_schedule("gpipe", ranks, micros)).live) == {micros}
    assert list(validate_schedule(make_schedule("1f1b", ranks, micros)).live) == [
        min(micros, ranks - r) for r in range(ranks)
    ]
    assert max(validate_schedule(make_schedule("zero-bubble", ranks, micros)).live) <= ranks
    assert max(validate_schedule(make_schedule("zero-bubble-v", ranks, micros)).live) <= 2 * ranks


PICTURES = {
    ("1f1b", 2, 3): """
rank 0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -
rank 1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .""",
    ("interleaved", 2, 2): """
rank 0  Fa0 Fa1 Fb0 Fb1 .   .   Bb0 -   .   Bb1 -   Ba0 -   Ba1 -
rank 1  .   Fa0 Fa1 Fb0 Bb0 -   Fb1 Bb1 -   Ba0 -   Ba1 -   .   .""",
    ("zero-bubble", 2, 3): """
rank 0  F0 F1 .  I0 W0 F2 I1 W1 I2 W2
rank 1  .  F0 I0 F1 I1 W0 F2 I2 W1 W2""",
    ("zero-bubble-v", 2, 2): """
rank 0  Fa0 Fa1 .   Fb0 Ib0 Fb1 Ib1 Ia0 Wb0 Ia1 Wb1 Wa0 Wa1
rank 1  .   Fa0 Fb0 Fa1 Fb1 Ib0 Ia0 Ib1 Ia1 Wb0 Wb1 Wa0 Wa1""",
}


@pytest.mark.parametrize("key", PICTURES, ids=str)
def test_pictures(key: tuple[str, int, int]) -> None:
    assert draw_schedule(make_schedule(*key)) == PICTURES[key].strip()


def test_sends_cost_time() -> None:
    assert (
        simulate_schedule(make_schedule("gpipe", 3, 1), ActionCosts(send=0.5)).duration
        == 3 * 3 + 4 * 0.5
    )


def test_unequal_stages_wait_for_the_largest() -> None:
    even_, uneven = make_schedule("gpipe", 2, 8), ActionCosts(shares=(1, 3))
    assert bubble_share(even_, uneven) > bubble_share(even_)
    assert simulate_schedule(even_, uneven).duration == pytest.approx(8 * 3 * 1.5 + 1.5)


# ---- of the user's own ------------------------------------------------------


def test_a_schedule_of_the_users_own() -> None:
    lines = parse_schedule("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0")
    listed = parse_schedule(
        [[(0, "F", 0), (0, "F", 1), "0B1", "0B0"], ["1F0", "1F1", "1B1", "1B0"]]
    )
    assert lines.rows == listed.rows
    assert validate_schedule(lines).live == (2, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0F0 0X0", "'0X0', action 1 of rank 0"),
        ("", "no actions"),
        ("0F0\n1F0 1B0", "stage 0 with micro-batch 0 has F, not F and B"),
        ("0F0 0B0 0F0", "0F0 is listed 2 times"),
        ("0F0 0B0 1F0\n1B0", "ranks [0, 1] share stage 1"),
        ("0B0 0F0", "rank 0 has 0B0 before 0F0"),
        ("0F0 0W0 0I0", "rank 0 has 0W0 before 0I0"),
        ("0F0 0B0 0I0 0W0", "has F and B and I and W"),
        (
            "0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1",
            "would deadlock: rank 0 waits at 0B0 for 1B0; rank 1 waits at 1F1",
        ),
        ("0F0 0B0\n2F0 2B0", "stage 1 with micro-batch 0 has nothing"),
    ],
)
def test_what_is_wrong_with_a_schedule_is_named(text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        validate_schedule(parse_schedule(text))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("name", "chunks", "told"),
    [
        ("2f2b", None, "no schedule '2f2b'"),
        ("1f1b", 2, "interleaved"),
        ("zero-bubble-v", 1, "2 a rank"),
        ("interleaved", 0, "chunks=0"),
    ],
)
def test_unknown_schedules(name: str, chunks: int | None, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        make_schedule(name, 2, 4, chunks)


def test_names_of_mindspore() -> None:
    for name, ours in (("zero_bubble_v", "zero-bubble-v"), ("zero_bubble", "zero-bubble")):
        assert make_schedule(name, 2, 4) == make_schedule(ours, 2, 4)
    with pytest.raises(UsageError, match="there is no schedule 'seqmodel'"):
        make_schedule("seqmodel", 2, 4)


# ---- partition --------------------------------------------------------------


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 9))
def test_the_balanced_cut_is_the_best_there_is(costs: list[int], parts: int) -> None:
    if parts > len(costs):
        with pytest.raises(UsageError, match="cannot be split"):
            split_by_cost(costs, parts)
        return
    found = split_by_cost(costs, parts)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert len(found) == parts
    assert all(found)
    least = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs)]))
        for cuts in itertools.combinations(range(1, len(costs)), parts - 1)
    )
    assert max(sum(costs[i] for i in part) for part in found) == least


def test_even_cuts() -> None:
    assert [list(part) for part in split_evenly(5, 3)] == [[0, 1], [2, 3], [4]]
