"""Where the weights of a model lie: files, tight lists of ranks, MindSpore's strategy files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import ConfigError
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.mindspore import from_mindspore, is_mindspore, to_mindspore
from pdrun.parallel.layouts.placement import (
    Placement,
    ShardRanges,
    WeightLayout,
    layout_from_shards,
    rank_list,
    shards_overlap,
)

AXES = ("pp", "dp", "x", "y")
SHAPES = {"w": (8, 6), "b": (8,), "qkv": (12, 4), "n": (3,)}


@st.composite
def placements(draw: st.DrawFn, sizes: tuple[int, ...] | None = None) -> Placement:
    """Any placement of `SHAPES`: stages, uneven cuts, blocks."""
    grid = Grid(AXES, sizes or tuple(draw(st.lists(st.integers(1, 3), min_size=4, max_size=4))))
    weights = {}
    for name, shape in SHAPES.items():
        stacks: list[list[str]] = [[] for _ in shape]
        for axis in draw(st.permutations(AXES[1:])):
            at = draw(st.integers(-1, len(shape) - 1))
            if at >= 0:
                stacks[at].append(axis)
        chosen = st.sets(st.integers(0, grid.degree("pp") - 1), min_size=1)
        stages = draw(st.none() | chosen.map(lambda found: tuple(sorted(found))))
        blocks = {0: (6, 3, 3)} if name == "qkv" and draw(st.booleans()) else {}
        weights[name] = WeightLayout(L(*map(tuple, stacks)), stages, blocks)
    return Placement(grid, weights)


def cells(part: ShardRanges, shape: tuple[int, ...]) -> np.ndarray:
    """Return which elements of a weight a part is."""
    found = np.zeros(shape, bool)
    found[np.ix_(*[[at for low, high in dim for at in range(low, high)] for dim in part])] = True
    return found


@given(placements())
def test_files_there_and_back(placement: Placement) -> None:
    again = Placement.from_plain(json.loads(placement.to_json()))
    assert again == placement


@given(placements())
def test_the_layout_follows_from_what_ranks_hold(placement: Placement) -> None:
    for name, shape in SHAPES.items():
        parts = [placement.shard_ranges(name, shape, rank) for rank in range(placement.grid.size)]
        found = Placement(placement.grid, {name: layout_from_shards(placement.grid, shape, parts)})
        for rank, part in enumerate(parts):
            again = found.shard_ranges(name, shape, rank)
            assert (again is None) == (part is None)
            assert (
                part is None or again is None or (cells(again, shape) == cells(part, shape)).all()
            )


def test_parts_that_no_layout_gives_are_refused() -> None:
    grid = Grid(("x",), (2,))
    with pytest.raises(ConfigError, match="no axes"):
        layout_from_shards(grid, (8,), [(((0, 3),),), (((3, 8),),)])


@given(placements(), placements(), st.data())
def test_the_list_of_ranks_is_enough_and_tight(
    source: Placement, target: Placement, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, target.grid.size - 1))
    found = rank_list(source, target, SHAPES, rank)

    def enough(ranks: list[int]) -> bool:
        for name, shape in SHAPES.items():
            wanted = target.shard_ranges(name, shape, rank)
            if wanted is None:
                continue
            held = np.zeros(shape, bool)
            for one in ranks:
                part = source.shard_ranges(name, shape, one)
                if part is not None:
                    held |= cells(part, shape)
            if not held[cells(wanted, shape)].all():
                return False
        return True

    assert enough(found)
    assert not any(enough([one for one in found if one != left]) for left in found)


@given(placements(), placements())
def test_parts_touch_where_they_share_elements(a: Placement, b: Placement) -> None:
    for name, shape in SHAPES.items():
        for first, second in itertools.product(
            a.holders_of(name, shape), b.holders_of(name, shape)
        ):
            assert shards_overlap(first, second) == bool(
                (cells(first, shape) & cells(second, shape)).any()
            )


def test_a_rank_that_holds_the_same_needs_itself_at_most() -> None:
    grid = Grid(("dp", "tp"), (2, 4))
    cut = Placement(grid, {"w": WeightLayout(L("tp", None))})
    lists = [rank_list(cut, cut, {"w": (8, 6)}, rank) for rank in range(8)]
    assert lists == [[0], [1], [2], [3]] * 2
    whole = Placement(Grid(("tp",), (1,)), {})
    assert rank_list(cut, whole, {"w": (8, 6)}, 0) == [0, 1, 2, 3]
    assert rank_list(whole, cut, {"w": (8, 6)}, 5) == [0]


def test_a_part_comes_from_a_rank_that_is_needed_anyway() -> None:
    """v is whole everywhere and would come from rank 0, w's part from rank 3: rank 3 has both."""
    source = Placement(Grid(("tp",), (4,)), {"w": WeightLayout(L("tp"))})
    target = Placement(Grid(("tp",), (4,)), {"w": WeightLayout(L("tp"))})
    assert rank_list(source, target, {"v": (4,), "w": (4,)}, 3) == [3]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "lacks 'mesh'"),
        ("[]", "is no file of layouts"),
        ('{"mesh": {"x": 2}}', "lacks 'weights'"),
        ('{"mesh": {"x": "2"}, "weights": {}}', "is no file"),
        ('{"mesh": {"x": 0}, "weights": {}}', "not all at least 1"),
        ('{"mesh": {"x": 2}, "weights": {"w": {}}}', "lacks 'layout'"),
        (
            '{"mesh": {"x": 2}, "weights": {"w": {"layout": ["y"]}}}',
            "w: is cut over 'y', and the mesh is",
        ),
        ('{"mesh": {"x": 2}, "weights": {"w": {"layout": ["x", "x"]}}}', "used twice"),
        ('{"mesh": {"x": 2}, "weights": {"w": {"layout": [3]}}}', "is no file"),
        ('{"mesh": {"x": 2}, "weights": {"w": {"layout": "irregular"}}}', "an irregular layout"),
        (
            '{"mesh": {"pp": 2}, "weights": {"w": {"layout": null, "stages": [2]}}}',
            "on stage 2 of 2",
        ),
    ],
)
def test_wrong_files(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Placement.from_plain(json.loads(text), "plan.json")


def test_a_file_for_another_model_is_refused() -> None:
    placement = Placement(
        Grid(("x",), (2,)),
        {"w": WeightLayout(L("x", None)), "q": WeightLayout(L("x"), blocks={0: (4, 4)})},
    )
    with pytest.raises(
        ConfigError, match="w: L\\('x', None\\) is for 2 dims, the tensor is \\[8\\]"
    ):
        placement.shard_ranges("w", (8,), 0)
    with pytest.raises(ConfigError, match=r"q: blocks .* do not add up to 9"):
        placement.shard_ranges("q", (9,), 0)


# ---- MindSpore --------------------------------------------------------------


def item(
    matrix: list[int], tensor_map: list[Any], size: int = 0, step: int = 0, **more: Any
) -> dict[str, Any]:
    return {
        "dev_matrix": matrix,
        "tensor_map": tensor_map,
        "param_split_shape": [],
        "indices_offset": [],
        "field": 0,
        "opt_weight_shard_size": size,
        "opt_weight_shard_step": step,
        **more,
    }


def strategy(**items: dict[str, Any]) -> dict[str, Any]:
    stages = {name: {"stage": one.pop("stage", 0)} for name, one in items.items()}
    return {"current_stage": 0, "parallel_strategy_item": stages, "parallel_layout_item": items}


def test_a_strategy_file_with_optimizer_parallel() -> None:
    """
    8 ranks, w cut by 4 and then among the 2 that are 4 apart: rank 4 * i + j holds rows 4 * j + 2 *
    i.
    """
    value = strategy(w=item([2, 4], [0, -1], 2, 4), b=item([2, 4], [0]))
    assert is_mindspore(value) and not is_mindspore({"mesh": {}})
    placement = from_mindspore(value)
    assert placement.grid == Grid(("d0", "d1"), (2, 4))
    for i, j in itertools.product(range(2), range(4)):
        low = 4 * j + 2 * i
        assert placement.shard_ranges("w", (16, 3), 4 * i + j) == (((low, low + 2),), ((0, 3),))
        assert placement.shard_ranges("b", (8,), 4 * i + j) == (((2 * j, 2 * j + 2),),)


def rows_of(placement: Placement, name: str, rows: int) -> list[tuple[int, int] | None]:
    """Return the rows of each rank."""
    found = []
    for rank in range(placement.grid.size):
        ranges = placement.shard_ranges(name, (rows, 1), rank)
        found.append(ranges[0][0] if ranges else None)
    return found


@pytest.mark.parametrize(
    ("matrix", "tensor_map", "size", "step", "firsts"),
    [
        ([8], [-1, -1], -1, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([8], [-1, -1], 4, 1, [0, 2, 4, 6, 0, 2, 4, 6]),
        ([2, 4], [0, -1], -1, 4, [0, 2, 4, 6, 1, 3, 5, 7]),
        ([2, 2, 2], [1, -1], 2, 1, [0, 2, 4, 6, 0, 2, 4, 6]),
        ([2, 2, 2], [1, -1], -1, 1, [0, 1, 4, 5, 2, 3, 6, 7]),
        ([2, 2, 2], [2, -1], 4, 2, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([2, 2, 2], [0, -1], 4, 2, [0, 4, 1, 5, 2, 6, 3, 7]),
        ([4, 2], [0, -1], 2, 2, [0, 4, 2, 6, 0, 4, 2, 6]),
    ],
)
def test_optimizer_parallel_is_over_the_innermost_ranks_with_the_same(
    matrix: list[int], tensor_map: list[int], size: int, step: int, firsts: list[int]
) -> None:
    """First rows as MindSpore 2.10 transforms a checkpoint of 8 rows with these strategies."""
    placement = from_mindspore(strategy(w=item(matrix, tensor_map, size, step)))
    assert [rows and rows[0] for rows in rows_of(placement, "w", 8)] == firsts


def test_an_optimizer_shard_is_written_where_axes_are_no_neighbours() -> None:
    grid = Grid(("dp", "x", "tp"), (2, 2, 2))
    placement = Placement(grid, {"w": WeightLayout(L(("tp", "dp", "x"), None))})
    value = to_mindspore(placement)
    entry = value["parallel_layout_item"]["w"]
    assert (entry["opt_weight_shard_size"], entry["opt_weight_shard_step"]) == (4, 2)
    assert rows_of(from_mindspore(value), "w", 8) == rows_of(placement, "w", 8)


def test_a_merged_file_of_a_pipeline() -> None:
    """Names have their stage in front; the items are those of operators."""
    value = {
        "current_stage": 1,
        "parallel_strategy_item": {"MatMul-op1": {"stage": 0}, "MatMul-op2": {"stage": 1}},
        "parallel_layout_item": {
            "0-emb.weight": item([2], [0, -1]),
            "1-emb.weight": item([2], [0, -1]),
            "1-head.weight": item([2], [-1, 0]),
        },
    }
    placement = from_mindspore(value)
    assert placement.grid == Grid(("pp", "d0"), (2, 2))
    assert placement.weights["emb.weight"].stages == (0, 1)
    assert placement.weights["head.weight"].stages == (1,)
    again = to_mindspore(placement)
    assert again["parallel_layout_item"].keys() == value["parallel_layout_item"].keys()


def test_a_file_of_one_stage_has_the_stage_of_its_operators() -> None:
    value = {
        "current_stage": 0,
        "parallel_strategy_item": {"MatMul-op1": {"stage": 1}},
        "parallel_layout_item": {"head.weight": item([2], [0, -1])},
    }
    placement = from_mindspore(value)
    assert rows_of(placement, "head.weight", 4) == [None, None, (0, 2), (2, 4)]


def test_device_matrices_that_differ_get_one_mesh() -> None:
    placement = from_mindspore(
        strategy(w=item([2, 4], [1, 0]), v=item([4, 2], [-1, 1]), b=item([8], [-1]))
    )
    assert placement.grid.sizes == (2, 2, 2)
    assert placement.weights["w"].layout == L("d0", ("d1", "d2"))
    assert placement.weights["v"].layout == L(None, ("d0", "d1"))
    assert placement.weights["b"].layout == L(None)
    one = from_mindspore(strategy(w=item([1], [-1])))
    assert one.grid.size == 1 and one.shard_ranges("w", (4,), 0) == (((0, 4),),)


def test_stages_are_the_outermost_axis() -> None:
    placement = from_mindspore(strategy(a=item([2], [0]), b=item([2], [0], stage=1)))
    assert placement.grid == Grid(("pp", "d0"), (2, 2))
    assert [placement.shard_ranges("b", (4,), rank) for rank in range(4)] == [
        None,
        None,
        (((0, 2),),),
        (((2, 4),),),
    ]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (strategy(w=item([2, 3], [0]), v=item([3, 2], [0])), "no mesh has the device matrices"),
        (strategy(w=item([2], [1])), "no axis of 1"),
        (strategy(w=item([2], [0], param_split_shape=[1, 2])), "split manually"),
        (strategy(w=item([2, 4], [0], 2, 3)), "does not fit"),
        (strategy(), "no parameters"),
        ({"parallel_layout_item": {"w": {}}}, "dev_matrix"),
        ({"parallel_layout_item": []}, "no strategy file"),
    ],
)
def test_wrong_strategy_files(value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        from_mindspore(value, "s.json")


@given(placements((2, 2, 2, 3)))
def test_placements_as_strategy_files(placement: Placement) -> None:
    """Whatever MindSpore has a form for comes back with every rank holding the same."""
    try:
        value = to_mindspore(placement)
    except ConfigError as error:
        assert "no form" in str(error)
        return
    again = from_mindspore(json.loads(json.dumps(value)))
    stages = {one["stage"] for one in value["parallel_strategy_item"].values()}
    if max(stages) + 1 < placement.grid.degree("pp"):
        return  # the file does not record how many empty stages follow
    for name, shape in SHAPES.items():
        ranks = range(placement.grid.size)
        own = Placement(
            placement.grid,
            {name: WeightLayout(placement.weights[name].layout, placement.weights[name].stages)},
        )
        layout = placement.weights[name].layout
        assert layout is not None
        shards = [placement.grid.group_size(dim) for dim in layout.dims]
        if any(size % n for size, n in zip(shape, shards, strict=True)):
            continue  # MindSpore shards evenly
        assert [again.shard_ranges(name, shape, r) for r in ranks] == [
            own.shard_ranges(name, shape, r) for r in ranks
        ]


def test_axes_that_are_no_neighbours_have_no_form() -> None:
    grid = Grid(("x", "y", "z"), (2, 2, 2))
    good = to_mindspore(Placement(grid, {"w": WeightLayout(L(("x", "y"), "z"))}))
    assert good["parallel_layout_item"]["w"]["dev_matrix"] == [4, 2]
    assert good["parallel_layout_item"]["w"]["tensor_map"] == [1, 0]
    for layout in (L(("y", "x")), L(None, ("x", "z"))):
        with pytest.raises(ConfigError, match="are not neighbours"):
            to_mindspore(Placement(grid, {"w": WeightLayout(layout)}))
    with pytest.raises(ConfigError, match="blocks"):
        to_mindspore(Placement(grid, {"w": WeightLayout(L("x"), blocks={0: (2, 2)})}))


def test_placements_are_saved(tmp_path: Path) -> None:
    placement = Placement(Grid(("x",), (2,)), {"w": WeightLayout(L("x", None))})
    placement.save(tmp_path / "plan.json")
    assert Placement.from_plain(json.loads((tmp_path / "plan.json").read_text())) == placement
