"""
Steps between layouts: thousands of random ones against dense tensors, and the documented cases word
for word.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import UsageError
from pdrun.parallel.layouts.common_grid import unify_views
from pdrun.parallel.layouts.device_matrix import Layout
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.redistribute import (
    _plan_by_search,
    plan_full_gather,
    plan_redistribution,
    redistribute,
)
from pdrun.parallel.layouts.view import VIRTUAL_AXIS, View
from tests.parallel.layouts import simulated_ranks as simulate

NAMES = ("a", "b", "c", "d")
XY = Grid(("x", "y"), (2, 4))


@st.composite
def grid_of(draw: st.DrawFn, size: int) -> Grid:
    """A grid of a number of ranks: its prime factors in any order, some of them together."""
    rest, found = size, []
    for prime in (2, 2, 2, 3):
        if rest % prime == 0:
            rest //= prime
            found.append(prime)
    found = draw(st.permutations([*found, *([rest] if rest > 1 else [])]))
    sizes: list[int] = []
    for factor in found:
        if sizes and draw(st.booleans()):
            sizes[-1] *= factor
        else:
            sizes.append(factor)
    if draw(st.booleans()):
        sizes.insert(draw(st.integers(0, len(sizes))), 1)
    names = draw(st.permutations(NAMES + ("e", "f")))[: len(sizes)]
    return Grid(tuple(names), tuple(sizes))


@st.composite
def layout_on(draw: st.DrawFn, grid: Grid, dims: int, sums: bool = True) -> L:
    """Any layout: each axis cuts some dim, at any place in it, or sums, or nothing."""
    stacks: list[list[str]] = [[] for _ in range(dims)]
    partial = []
    for axis in draw(st.permutations(grid.names)):
        place = draw(st.integers(-2 if sums else -1, dims - 1))
        if place >= 0:
            stacks[place].append(axis)
        elif place == -2:
            partial.append(axis)
    return L(*[tuple(stack) for stack in stacks], sums=tuple(partial))


@st.composite
def shape_of(draw: st.DrawFn, even: bool) -> tuple[int, ...]:
    sizes = st.sampled_from([2, 4, 6, 8, 12]) if even else st.integers(0, 9)
    return tuple(draw(st.lists(sizes, min_size=1, max_size=3)))


@st.composite
def reshaped(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of as many elements: dims joined, or fallen into factors."""
    found = list(shape)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(found) - 1))
        if draw(st.booleans()) and at + 1 < len(found):
            found[at : at + 2] = [found[at] * found[at + 1]]
        else:
            factors = [p for p in (2, 3, 4) if found[at] and found[at] % p == 0]
            if factors and len(found) < 5:
                factor = draw(st.sampled_from(factors))
                found[at : at + 1] = draw(st.permutations([factor, found[at] // factor]))
    return tuple(found)


SIZES = st.sampled_from([1, 2, 4, 6, 8, 12])


@st.composite
def ends(draw: st.DrawFn, same_grid: bool, same_shape: bool, even: bool) -> tuple[View, View]:
    size = draw(SIZES)
    grid = draw(grid_of(size))
    other = grid if same_grid else draw(grid_of(size))
    shape = draw(shape_of(even))
    turned = shape if same_shape else draw(reshaped(shape))
    return (
        View(grid, draw(layout_on(grid, len(shape))), shape),
        View(other, draw(layout_on(other, len(turned))), turned),
    )


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("same_shape", [True, False], ids=["shape", "shapes"])
@pytest.mark.parametrize("same_grid", [True, False], ids=["grid", "grids"])
def test_random_layouts_against_dense_tensors(
    same_grid: bool, same_shape: bool, even: bool
) -> None:
    @given(ends(same_grid, same_shape, even))
    def holds(pair: tuple[View, View]) -> None:
        plan = plan_redistribution(*pair)
        simulate.check(plan)
        assert plan.sent_bytes() <= plan_full_gather(*pair).sent_bytes()
        assert plan_redistribution(*pair) == plan

    holds()


@given(ends(same_grid=True, same_shape=True, even=False))
def test_what_the_search_finds_is_right(pair: tuple[View, View]) -> None:
    """For small tensors `route` does not search."""
    for expand in (False, True):
        common = unify_views(*pair, expand)
        if common is not None:
            simulate.check(_plan_by_search(*pair, common))


def test_axes_wait_on_another_dim() -> None:
    """Gathering tp to cut it once more inside of dp sends four times as much."""
    grid, shape = Grid(("dp", "tp"), (2, 4)), (1 << 12, 1 << 10)
    plan = redistribute(L("tp", None), L(("dp", "tp"), None), shape, grid)
    assert [(step.kind, step.axes) for step in plan.steps[1:-1]] == [
        ("slice", ("dp",)),
        ("all_to_all", ("tp.1",)),
        ("all_to_all", ("tp.0",)),
        ("all_to_all", ("dp",)),
    ]
    assert 4 * plan.sent_bytes() == plan_full_gather(plan.source, plan.target).sent_bytes()
    simulate.check(redistribute(L("tp", None), L(("dp", "tp"), None), (1 << 9, 1 << 9), grid))
    simulate.check(redistribute(L("tp", None), L(("dp", "tp"), None), (16, 16), grid))


@given(ends(same_grid=False, same_shape=False, even=False))
def test_the_fall_back_itself_is_right(pair: tuple[View, View]) -> None:
    simulate.check(plan_full_gather(*pair))


@given(st.data())
def test_virtual_parts_lie_on_one_device(data: st.DataObject) -> None:
    grid = data.draw(grid_of(4))
    views = []
    for _ in range(2):
        dims = [list(dim) for dim in data.draw(layout_on(grid, 2, sums=False)).dims]
        dim = dims[data.draw(st.integers(0, 1))]
        dim.insert(data.draw(st.integers(0, len(dim))), VIRTUAL_AXIS)
        views.append(View(grid, L(*map(tuple, dims)), (16, 8), 2))
    simulate.check(plan_redistribution(*views))


def said(*args: object) -> list[str]:
    return str(redistribute(*args)).splitlines()  # type: ignore[arg-type]


def test_the_plain_steps() -> None:
    shape = (8, 8)
    assert said(L("x", "y"), L("x", "y"), shape, XY) == ["nothing"]
    assert said(L(None, None), L("x", None), shape, XY) == ["slice over x: dim 0"]
    assert said(L("y", None), L(None, "y"), shape, XY) == ["all_to_all over y: dim 0 -> dim 1"]
    assert said(L("x", "y"), L(None, None), shape, XY) == [
        "all_gather over x: dim 0",
        "all_gather over y: dim 1",
    ]
    assert said(L(("x", "y"), None), L(None, None), shape, XY) == ["all_gather over x/y: dim 0"]
    assert said(L(None, None).partial("y"), L(None, None), shape, XY) == ["all_reduce over y"]
    assert said(L(None, None).partial("x", "y"), L(None, None), shape, XY) == [
        "all_reduce over x/y"
    ]
    assert said(L(None, None).partial("y"), L(None, "y"), shape, XY) == [
        "reduce_scatter over y: dim 1"
    ]
    assert said(L(None, None), L(None, None).partial("y"), shape, XY) == ["first over y"]
    assert said(L(None, "y"), L(None, None).partial("y"), shape, XY) == ["pad over y: dim 1"]


def test_the_rules_in_order() -> None:
    """
    Slices come first, so that what is sent is small; sums before gathers; circles are opened at the
    first dim.
    """
    shape = (8, 8, 8)
    assert said(L("y", None, None), L(None, "y", "x"), shape, XY) == [
        "slice over x: dim 2",
        "all_to_all over y: dim 0 -> dim 1",
    ]
    assert said(L("x", None, None).partial("y"), L(None, None, None), shape, XY) == [
        "all_reduce over y",
        "all_gather over x: dim 0",
    ]
    assert said(L("x", "y", None), L("y", "x", None), shape, XY) == [
        "all_gather over x: dim 0",
        "all_to_all over y: dim 1 -> dim 0",
        "slice over x: dim 1",
    ]


def test_rows_and_columns_of_the_reference() -> None:
    """
    ("mp", ("sp", "dp")) on (dp, sp, mp) = (2, 2, 2): row blocks by mp, column blocks by sp, then
    dp.
    """
    matrix = Layout((2, 2, 2), ("dp", "sp", "mp"))
    view = matrix("mp", ("sp", "dp")).view_of((4, 8))
    assert [rank for rank in range(8) if view.ranges_of(rank)[0] == ((0, 2),)] == [0, 2, 4, 6]
    assert [view.ranges_of(rank)[1][0] for rank in (0, 2, 4, 6)] == [(0, 2), (4, 6), (2, 4), (6, 8)]
    plan = plan_redistribution(view, matrix("mp", ("dp", "sp")).view_of((4, 8)))
    simulate.check(plan)
    assert str(plan).splitlines() == [
        "reshape to [4, 2, 4]",
        "all_gather over sp: dim 1",
        "all_to_all over dp: dim 2 -> dim 1",
        "slice over sp: dim 2",
        "reshape to [4, 8]",
    ]
    assert (plan.sent_bytes(), plan_full_gather(plan.source, plan.target).sent_bytes()) == (8, 28)


def test_uneven_dims_are_gathered_axis_after_axis() -> None:
    """6 over 2 and 2 is 2, 1, 2, 1: not what 6 over 4 is."""
    grid = Grid(("a", "b"), (2, 2))
    plan = redistribute(L(("a", "b")), L(None), (6,), grid)
    assert [step.axes for step in plan.steps] == [("b",), ("a",)]
    simulate.check(plan)


def test_two_device_matrices_of_the_same_ranks() -> None:
    rows, columns = Grid(("r",), (8,)), Grid(("x", "y"), (4, 2))
    plan = redistribute(L("r", None), L("x", "y"), (16, 8), rows, columns)
    assert str(plan) == "all_to_all over y: dim 0 -> dim 1"
    simulate.check(plan)


def test_a_reshape_takes_its_cut_along() -> None:
    """
    [batch, heads * width] cut by heads is [batch, heads, width] cut by heads: nothing is sent.
    """
    plan = redistribute(L(None, "y"), L(None, "y", None), (2, 32), XY, target_shape=(2, 8, 4))
    assert [step.kind for step in plan.steps] == ["reshape"]
    joined = redistribute(
        L("x", "y", None), L(("x", "y"), None), (2, 8, 4), XY, target_shape=(16, 4)
    )
    assert [step.kind for step in joined.steps] == ["reshape"]
    lost = redistribute(L(None, "y"), L(None, None, "y"), (2, 32), XY, target_shape=(2, 8, 4))
    assert [step.kind for step in lost.collectives] == ["all_to_all"]


def test_an_axis_falls_apart_where_a_dim_is_smaller_than_it() -> None:
    plan = redistribute(L("y"), L(None, "y"), (8,), XY, target_shape=(2, 4))
    simulate.check(plan)
    assert [step.axes for step in plan.collectives] == [("y.1",), ("y.0",)]
    assert (plan.sent_bytes(), plan_full_gather(plan.source, plan.target).sent_bytes()) == (2, 6)


def test_without_a_common_form_everything_is_gathered() -> None:
    two, three = Grid(("a", "b"), (2, 3)), Grid(("a", "b"), (3, 2))
    plan = redistribute(L("a", "b"), L("a", "b"), (6, 6), two, three)
    assert [step.kind for step in plan.steps] == ["all_gather", "all_gather", "slice", "slice"]
    simulate.check(plan)


def test_what_it_costs() -> None:
    gather = redistribute(L(None, "y"), L(None, None), (8, 16), XY)
    assert (gather.sent_bytes(4), gather.sent_bytes(4, backward=True)) == (4 * 96, 0)
    assert (
        gather.estimate_seconds(1.0, 0.0, 4) == 3
        and gather.estimate_seconds(0.0, 2.0, 4) == 2 * 4 * 96
    )
    cost = gather.mindspore_cost()
    assert (cost.forward, cost.backward) == (4 * 32 / 2, 32 / 2)
    assert (cost.computation, cost.memory) == (32 + 2 * 32 * 4, 2 * 32 * 4 + 32)
    first = redistribute(L("y", None), L(None, None), (8, 16), XY).mindspore_cost()
    assert (first.computation, first.memory) == (32, 4 * 32)
    turn = redistribute(L("y", None), L(None, "y"), (8, 16), XY)
    assert (turn.sent_bytes(), turn.sent_bytes(backward=True)) == (24, 24)
    assert (turn.mindspore_cost().forward, turn.mindspore_cost().backward) == (64, 64)
    total = redistribute(L(None, None).partial("y"), L(None, None), (8, 16), XY)
    assert (total.sent_bytes(), total.estimate_seconds(1.0, 0.0, 1)) == (2 * 96, 6)
    scattered = redistribute(L(None, None).partial("y"), L("y", None), (8, 16), XY)
    assert (scattered.sent_bytes(), scattered.sent_bytes(backward=True)) == (96, 96)
    assert redistribute(L("x", None), L("x", "y"), (8, 16), XY).sent_bytes() == 0
    assert redistribute(L("x", None), L("x", "y"), (8, 16), XY).sent_bytes(backward=True) == 64 - 16
    assert math.isclose(total.estimate_seconds(0.0, 1.0, 2), 2 * 2 * 96)


def test_ends_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(UsageError, match="other numbers of ranks"):
        redistribute(L("x"), L("x"), (8,), XY, Grid(("x",), (2,)))
    with pytest.raises(UsageError, match="other numbers of elements"):
        redistribute(L("x"), L("x"), (8,), XY, target_shape=(9,))
    with pytest.raises(UsageError, match="for 2 dims"):
        redistribute(L("x", "y"), L("x"), (8,), XY)
    with pytest.raises(UsageError, match="no axis 'z'"):
        redistribute(L("z"), L("x"), (8,), XY)
