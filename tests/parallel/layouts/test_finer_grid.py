"""Axes are split where device matrices and counts need it, and rank lists reorder them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import UsageError
from pdrun.parallel.layouts.device_matrix import DeviceMatrixLayout, Layout, as_layout
from pdrun.parallel.layouts.finer_grid import WantedCounts, derive_degrees, refine_grid
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L


def wanted(*given: Any) -> list[DeviceMatrixLayout | WantedCounts]:
    return [one if isinstance(one, DeviceMatrixLayout) else WantedCounts(one) for one in given]


def axes_after(grid: dict[str, int], *given: Any) -> dict[str, int]:
    """Return the tensor axes of a grid that is refined for some forms."""
    names = tuple(name for name in grid if name != "dp")
    finer = refine_grid(Grid(tuple(grid), tuple(grid.values())), names, wanted(*given)).grid
    return {name: finer.degree(name) for name in finer.names if name != "dp"}


MATRIX = Layout((2, 2, 2), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("grid", "forms", "axes"),
    [
        ({"x": 8}, [((4, 2), (2, 1))], {"x_0": 4, "x_1": 2}),
        ({"dp": 2, "x": 8}, [((4, 2), (2, 1))], {"x_0": 4, "x_1": 2}),
        ({"x": 8}, [((2, 4), (4, 1)), ((4, 2), (2, 1))], {"x_0": 2, "x_1": 4}),
        ({"x": 8}, [((2, 2), (2, 2))], {"x_0": 2, "x_1": 2, "x_2": 2}),
        ({"x": 12}, [((3, 4), (4, 1)), ((4, 3), (3, 1))], {"x_0": 3, "x_1": 4}),
        ({"x": 12}, [((3, 4), (4, 1)), ((6, 2), (2, 1))], {"x_0": 3, "x_1": 2, "x_2": 2}),
        ({"x": 8}, [((2, 1),)], {"x_0": 2, "x_1": 4}),
        ({"x": 2, "y": 4}, [((2, 1), (1, 4))], {"x": 2, "y": 4}),
        ({"dp": 2, "x": 4}, [((2, 4), (4, 1))], {"x": 4}),  # dp on the rows
        ({"dp": 2, "x": 4}, [MATRIX("a", "b")], {"x_0": 2, "x_1": 2}),
        ({"x": 6}, [((5, 1), (1, 1))], {"x": 6}),  # no axes make it
        ({"x": 1}, [((2, 1), (1, 1))], {"x": 1}),
        ({"x": 8, "x_0": 1}, [((2, 1), (1, 1))], {"x_0_": 2, "x_1": 4, "x_0": 1}),
    ],
)
def test_axes_are_split_no_more_than_needed(
    grid: dict[str, int], forms: Any, axes: dict[str, int]
) -> None:
    assert axes_after(grid, *forms) == axes


def test_names_of_split_axes_mean_their_parts() -> None:
    finer = refine_grid(Grid(("dp", "x"), (2, 8)), ("x",), wanted(((4, 2), (2, 1))))
    assert finer.expand(L("dp", "x").partial()) == L("dp", ("x_0", "x_1"))
    assert finer.expand(L(None, None, sums=("x",))).sums == ("x_0", "x_1")
    coarse = Grid(("dp", "x"), (2, 8))
    for rank in range(16):
        boxes = [
            layout.box(grid, (4, 16), rank)
            for layout, grid in ((L("dp", "x"), coarse), (finer.expand(L("dp", "x")), finer.grid))
        ]
        assert boxes[0] == boxes[1]


@pytest.mark.parametrize(
    ("world", "forms", "degrees"),
    [
        (8, [], None),
        (8, [((8, 1), (1, 1))], None),  # rows
        (8, [((1, 1), (1, 1))], None),
        (8, [((4, 2), (2, 1))], {"tp": 8}),
        (4, [Layout((2, 2), ("dp", "mp"))("dp", "mp")], {"dp": 2, "tp": -1}),
        (4, [Layout((4,), ("dp",))("dp", "None")], None),
        (4, [Layout((4,), ("mp",))("None", "mp")], {"tp": 4}),
        (4, [Layout((2, 2), ("x", "y"))("None", "y")], {"tp": 4}),
    ],
)
def test_meshes_are_derived_from_layouts(
    world: int, forms: Any, degrees: dict[str, int] | None
) -> None:
    assert derive_degrees(wanted(*forms), world) == degrees


# ---- rank lists -------------------------------------------------------------


@given(st.data())
def test_rank_lists_reorder_axes(data: st.DataObject) -> None:
    """The rank at a place of the device matrix has the shard of that place."""
    sizes = data.draw(st.sampled_from([(2, 2, 2), (4, 3), (2, 6), (6, 2), (12,), (1, 4, 2)]))
    dice = random.Random(data.draw(st.integers(0, 10_000)))
    digits = []
    for size in sizes:
        while size > 1:
            digits.append(dice.choice([part for part in range(2, size + 1) if size % part == 0]))
            size //= digits[-1]
    strides = [0] * len(digits)
    stride = 1
    for at in dice.sample(range(len(digits)), len(digits)):
        strides[at] = stride
        stride *= digits[at]
    first = stride * dice.randrange(3)
    ranks = [
        first + sum(one * at for one, at in zip(strides, place, strict=True))
        for place in itertools.product(*map(range, digits))
    ]
    names = ("a", "b", "c")[: len(sizes)]
    layout = Layout(sizes, names, rank_list=ranks)(tuple(names))
    view = layout.view_of((stride,))
    assert [view.ranges_of(rank - first)[0] for rank in ranks] == [
        ((place, place + 1),) for place in range(stride)
    ]


def test_a_rank_list_in_axes_of_a_mesh() -> None:
    layout = Layout((2, 2), ("a", "b"), rank_list=(0, 2, 1, 3))("a", "b")
    assert as_layout(layout, Grid(("x", "y"), (2, 2))) == L("y", "x")
    assert layout.tensor_map == (0, 1)  # of the device matrix in the order of the ranks
    split = Layout((2, 4), ("a", "b"), rank_list=[0, 1, 4, 5, 2, 3, 6, 7])("a", "b")
    assert as_layout(split, Grid(("x", "y", "z"), (2, 2, 2))) == L("y", ("x", "z"))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0, 1, 3, 2), "is no order of the axes"),
        ((0, 1, 2), "must have each of 4 consecutive ranks once"),
        ((0, 1, 2, 2), "must have each of 4 consecutive ranks once"),
        ((1, 2, 3, 4), "must have each of 4 consecutive ranks once"),
        ((), "must have each of 4"),
        ("0123", "must be a list of ranks"),
        ((0, 1, 2, True), "must be a list of ranks"),
    ],
)
def test_rank_lists_that_are_no_order(ranks: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Layout((2, 2), ("a", "b"), rank_list=ranks)
