"""The forms in which a layout can be given, and every way to give a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import UsageError
from pdrun.parallel.layouts.device_matrix import (
    REPEAT_AXIS,
    Layout,
    as_layout,
    from_tensor_map,
    layout_from_counts,
    match_counts,
    to_tensor_map,
)
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.view import VIRTUAL_AXIS, View

MESH = Grid(("pp", "dp", "x", "y"), (1, 2, 2, 4))


def test_a_layout_by_names() -> None:
    bound = Layout((2, 2, 2), ("dp", "sp", "mp"))("dp", "None", ("sp", "mp"))
    assert bound.layout == L("dp", None, ("sp", "mp"))
    assert bound.grid == Grid(("dp", "sp", "mp"), (2, 2, 2))
    assert bound.tensor_map == (2, -1, (1, 0))
    assert [bound.view_of((4, 3, 8)).ranges_of(rank)[2] for rank in range(4)] == [
        ((0, 2),),
        ((2, 4),),
        ((4, 6),),
        ((6, 8),),
    ]


@pytest.mark.parametrize(
    ("matrix", "names", "text"),
    [
        ([2, 2], ("a", "b"), "must be tuples"),
        ((2, 2), ["a", "b"], "must be tuples"),
        ((2, 2), ("a",), "2 axes of the device matrix have 1 names"),
        ((), (), "0 axes"),
        ((2, 0), ("a", "b"), "0 in device_matrix"),
        ((2, True), ("a", "b"), "True in device_matrix"),
        ((2, 2), ("a", "a"), "'a' is given twice"),
        ((2, 2), ("a", "None"), "reserved"),
        ((2, 2), ("a", ""), "is not a name"),
        ((2, 2), ("a", 3), "3 in alias_name is not a name"),
        ((2, 2), (VIRTUAL_AXIS, "a"), "must be the last axis"),
    ],
)
def test_wrong_device_matrices(matrix: Any, names: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Layout(matrix, names)


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        (("a", "c"), "no axis 'c'"),
        (("a", "a"), "'a' is used twice"),
        ((("a", "b"), "b"), "'b' is used twice"),
        ((["a"], "None"), "neither a name nor a tuple"),
        ((None, "a"), "neither a name nor a tuple"),
        (((), "a"), "neither a name nor a tuple"),
        ((("a", 1),), "neither a name nor a tuple"),
        ((("a", "None"),), "no axis 'None'"),
    ],
)
def test_wrong_tensor_maps(dims: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Layout((2, 2), ("a", "b"))(*dims)


def test_a_wrong_number_of_dims_shows_with_the_tensor() -> None:
    with pytest.raises(UsageError, match="for 2 dims"):
        Layout((2, 2), ("a", "b"))("a", "b").view_of((4,))


def test_virtual_parts_lie_on_the_device() -> None:
    matrix = Layout((2, 2), ("mp", VIRTUAL_AXIS))
    assert matrix.grid == Grid(("mp",), (2,))
    outer = matrix((VIRTUAL_AXIS, "mp"), "None").view_of((8, 3))
    assert [outer.ranges_of(rank)[0] for rank in range(2)] == [((0, 2), (4, 6)), ((2, 4), (6, 8))]
    inner = matrix(("mp", VIRTUAL_AXIS), "None").view_of((8, 3))
    assert [inner.ranges_of(rank)[0] for rank in range(2)] == [((0, 4),), ((4, 8),)]
    assert outer.local_shape() == inner.local_shape() == (4, 3)
    assert matrix((VIRTUAL_AXIS, "mp"), "None").tensor_map == ((0, 1), -1)
    with pytest.raises(UsageError, match="not cut evenly"):
        matrix((VIRTUAL_AXIS, "mp"), "None").view_of((6, 3))


@given(st.permutations(["a", "b", "c", "d"]), st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_tensor_maps_there_and_back(names: list[str], dims: list[int]) -> None:
    layout = L(
        *[
            tuple(name for name, at in zip(names, dims, strict=True) if at == dim)
            for dim in range(3)
        ]
    )
    assert from_tensor_map(to_tensor_map(layout, tuple(names)), tuple(names)) == layout


def test_a_wrong_number_in_a_tensor_map() -> None:
    with pytest.raises(UsageError, match="no axis of 2"):
        from_tensor_map((2, -1), ("a", "b"))
    with pytest.raises(UsageError, match="used twice"):
        from_tensor_map((1, 1), ("a", "b"))


def test_counts_with_fewer_parts_than_devices_repeat_at_the_end() -> None:
    bound = layout_from_counts((2, 1), 8)
    assert bound.grid == Grid(("d0", "d1", REPEAT_AXIS), (2, 1, 4)) and bound.layout == L(
        "d0", None
    )
    assert [bound.view_of((4, 4)).ranges_of(rank)[0][0] for rank in range(8)] == [(0, 2)] * 4 + [
        (2, 4)
    ] * 4
    assert layout_from_counts((4, 2), 8).grid == Grid(("d0", "d1"), (4, 2))


@pytest.mark.parametrize(
    ("cuts", "text"), [((3, 1), "does not divide 8"), ((0, 2), "not a count"), ((16,), "divide")]
)
def test_counts_that_do_not_fit_the_devices(cuts: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        layout_from_counts(cuts, 8)


def test_counts_by_the_axes_of_a_mesh() -> None:
    assert match_counts((1, 4), MESH, ("x", "y")) == L(None, "y")
    assert match_counts((1, 1), MESH) == L(None, None)
    assert match_counts((4, 2), MESH, ("x", "y")) == L("y", "x")
    assert match_counts((1, 8), MESH, ("x", "y")) == L(None, ("x", "y"))
    assert match_counts((1, 16), MESH) == L(None, ("dp", "x", "y"))


def test_counts_that_are_ambiguous_or_impossible_say_why() -> None:
    with pytest.raises(UsageError, match=r"can be L\('dp', 'y'\) or L\('x', 'y'\).*dp=2, x=2, y=4"):
        match_counts((2, 4), MESH)
    with pytest.raises(
        UsageError, match=r"no axes make the counts \(3, 1\); the axes are dp=2, x=2, y=4"
    ):
        match_counts((3, 1), MESH)
    with pytest.raises(UsageError, match="none of more than one device"):
        match_counts((2,), Grid(("tp",), (1,)))
    with pytest.raises(UsageError, match="not a count"):
        match_counts((-1, 1), MESH)


def test_whatever_form_becomes_one_by_the_axes_of_the_mesh() -> None:
    assert as_layout(L("x", None), MESH) == L("x", None)
    assert as_layout((1, 8), MESH, ("x", "y")) == L(None, ("x", "y"))
    assert as_layout(Layout((2, 2, 4), ("dp", "sp", "mp"))("mp", ("sp", "dp")), MESH) == L(
        "y", ("x", "dp")
    )
    assert as_layout(Layout((4, 4), ("rows", "columns"))("rows", "None"), MESH) == L(
        ("dp", "x"), None
    )
    assert as_layout(layout_from_counts((2, 1), 16), MESH) == L("dp", None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (L("z"), "no axis 'z'"),
        ("x", "a layout must be an L"),
        ((1, True), "a layout must be an L"),
        (Layout((2, 2), ("a", "b"))("a"), "has 4 devices"),
        (Layout((8, 2), ("a", "b"))("b"), "made of no whole axes"),
        (
            Layout((2, 2, 4, 2), ("a", "b", "c", VIRTUAL_AXIS))("a", VIRTUAL_AXIS),
            "no axis of the mesh",
        ),
    ],
)
def test_what_is_no_layout_on_the_mesh(value: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        as_layout(value, MESH)


def test_a_view_says_what_a_rank_holds() -> None:
    view = View(MESH, L(("x", "y"), None), (10, 3))
    assert [view.local_shape(rank)[0] for rank in range(8)] == [2, 1, 1, 1, 2, 1, 1, 1]
    assert str(view) == "L(('x', 'y'), None) of [10, 3] on (pp=1, dp=2, x=2, y=4)"
