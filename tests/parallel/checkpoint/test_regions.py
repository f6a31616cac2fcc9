"""
Parts of tensors without any process: boxes, what one needs of others, files of them, and masks of
parts.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import ConfigError
from pdrun.parallel.checkpoint import storage
from pdrun.parallel.checkpoint.reader import CheckpointReader
from pdrun.parallel.checkpoint.regions import Region, find_overlap, full_region, iter_spans
from pdrun.parallel.checkpoint.storage import TensorPiece
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L, shard_range
from pdrun.parallel.model.shards import Shard, make_shard
from pdrun.parallel.rng.shard_region import shard_region
from pdrun.parallel.rng.step_rng import StepRNG

pytestmark = pytest.mark.torch


@st.composite
def parted(draw: Any, shape: tuple[int, ...]) -> list[tuple[Shard, int, int]]:
    """
    Draw a grid, a layout on it and a number of shards; return the parts, of which some are
    replicas.
    """
    grid = Grid(("a", "b"), (draw(st.integers(1, 3)), draw(st.integers(1, 3))))
    dims: list[list[str]] = [[] for _ in shape]
    for axis in draw(st.permutations(["a", "b"])):
        place = draw(st.integers(0, len(shape)))
        if place < len(shape):
            dims[place].append(axis)
    blocks = {}
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        first = draw(st.integers(0, shape[dim]))
        blocks = {dim: (first, shape[dim] - first)}
    shards, found = draw(st.integers(1, 3)), []
    for rank in range(grid.size):
        made = make_shard(shape, L(*map(tuple, dims)), grid, rank, blocks=blocks)
        size = torch.Size(made.local_shape).numel()
        found += [(made, *shard_range(size, shards, shard)) for shard in range(shards)]
    return found


@st.composite
def moves(draw: Any) -> tuple[tuple[int, ...], Any, Any]:
    """Draw a shape and two ways to part a tensor of it."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    return shape, draw(parted(shape)), draw(parted(shape))


def box_of(part: tuple[Shard, int, int]) -> Region:
    return Region(part[0].shape, part[0].ranges, part[1], part[2])


def values_of(part: tuple[Shard, int, int], whole: torch.Tensor) -> torch.Tensor:
    return part[0].take_from(whole).reshape(-1)[part[1] : part[2]]


@given(moves())
def test_any_parts_are_made_of_any_others(move: Any) -> None:
    """Every part is whole, is made of nothing that it doesn't need, and takes no element twice."""
    shape, before, after = move
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = [TensorPiece.for_region("x", whole.dtype, box_of(part)) for part in before]
    for part in after:
        box, out = box_of(part), torch.full((part[2] - part[1],), -1)
        for piece, copies in storage.find_sources(pieces, box):
            held = values_of(before[pieces.index(piece)], whole)
            for copy in copies:
                at, where = copy.source - piece.start, copy.target - box.start
                assert (out[where : where + copy.count] == -1).all()
                out[where : where + copy.count] = held[at : at + copy.count]
        assert torch.equal(out, values_of(part, whole))


@given(moves())
def test_runs_are_the_elements_of_a_box(move: Any) -> None:
    shape, parts, _ = move
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for part in parts:
        flat = [
            place
            for run in iter_spans(box_of(part))
            for place in range(run.tensor_offset, run.tensor_offset + run.count)
        ]
        assert flat == values_of(part, whole).tolist()


def test_rows_that_follow_each_other_are_one() -> None:
    rows = Region((8, 6), (((2, 5),), ((0, 6),)), 0, 18)
    assert [(run.region_offset, run.tensor_offset, run.count) for run in iter_spans(rows)] == [
        (0, 12, 18)
    ]
    assert len(find_overlap(full_region((8, 6)), rows)) == 1
    columns = Region((8, 6), (((0, 8),), ((0, 3),)), 0, 24)
    assert len(find_overlap(full_region((8, 6)), columns)) == 8


# ---- files ------------------------------------------------------------------


def write(folder: Path, parts: list[tuple[Shard, int, int]], whole: torch.Tensor) -> None:
    pieces = [
        (TensorPiece.for_region("x", whole.dtype, box_of(part)), values_of(part, whole).clone())
        for part in parts
    ]
    storage.write_rank(folder, 0, pieces)
    storage.write_json(
        folder / "run.json", {"format": storage.FORMAT_VERSION, "indices": ["rank-00000.json"]}
    )


def quarters(shape: tuple[int, ...]) -> list[tuple[Shard, int, int]]:
    grid = Grid(("a", "b"), (2, 2))
    tiles = [make_shard(shape, L("a", "b"), grid, rank) for rank in range(4)]
    return [(made, 0, torch.Size(made.local_shape).numel()) for made in tiles]


def test_only_what_is_needed_is_opened(tmp_path: Path) -> None:
    """A column of a matrix in quarters lies in two of them; the others' files need not be there."""
    whole = torch.randn(9, 7)
    for place, part in enumerate(quarters((9, 7))):
        storage.write_rank(
            tmp_path,
            place,
            [(TensorPiece.for_region("x", whole.dtype, box_of(part)), values_of(part, whole))],
        )
    names = [f"rank-{place:05d}.json" for place in range(4)]
    storage.write_json(tmp_path / "run.json", {"format": storage.FORMAT_VERSION, "indices": names})
    for place in (1, 3):
        (tmp_path / f"rank-{place:05d}.bin").unlink()
    reader = CheckpointReader(tmp_path)
    column = Region((9, 7), (((0, 9),), ((2, 3),)), 0, 9)
    assert [piece.file for piece, _ in storage.find_sources(reader.pieces_of("x"), column)] == [
        "rank-00000.bin",
        "rank-00002.bin",
    ]
    assert torch.equal(reader.read_tensor("x", column), whole[:, 2])
    with pytest.raises(ConfigError, match=r"rank-00001\.bin cannot be read"):
        reader.read_tensor("x")


def test_a_checkpoint_of_format_1_is_read(tmp_path: Path) -> None:
    """Its pieces are ranges of whole tensors."""
    whole = torch.randn(9, 7)
    write(
        tmp_path,
        [
            (make_shard((9, 7), L(None, None), Grid(("a",), (1,)), 0), *shard_range(63, 3, part))
            for part in range(3)
        ],
        whole,
    )
    index = json.loads((tmp_path / "rank-00000.json").read_text())
    for entry in index:
        del entry["ranges"]
    (tmp_path / "rank-00000.json").write_text(json.dumps(index))
    (tmp_path / "run.json").write_text('{"format": 1, "indices": ["rank-00000.json"]}')
    assert torch.equal(CheckpointReader(tmp_path).read_tensor("x").view(9, 7), whole)
    assert torch.equal(
        CheckpointReader(tmp_path)
        .read_tensor("x", Region((9, 7), (((3, 5),), ((1, 4),)), 0, 6))
        .view(2, 3),
        whole[3:5, 1:4],
    )


def test_what_is_missing_or_damaged_is_reported(tmp_path: Path) -> None:
    whole = torch.randn(9, 7)
    write(tmp_path, quarters((9, 7))[:3], whole)
    assert torch.equal(
        CheckpointReader(tmp_path)
        .read_tensor("x", Region((9, 7), (((0, 5),), ((0, 7),)), 0, 35))
        .view(5, 7),
        whole[:5],
    )
    with pytest.raises(ConfigError, match="lacks elements 39 to 63 of x"):
        CheckpointReader(tmp_path).read_tensor("x")
    content = bytearray((tmp_path / "rank-00000.bin").read_bytes())
    content[3] ^= 1
    (tmp_path / "rank-00000.bin").write_bytes(content)
    with pytest.raises(ConfigError, match="wrong checksum"):
        CheckpointReader(tmp_path).read_tensor("x", Region((9, 7), (((0, 5),), ((0, 7),)), 0, 35))
    (tmp_path / "rank-00000.bin").write_bytes(content[:20])
    with pytest.raises(ConfigError, match="too short"):
        CheckpointReader(tmp_path).read_tensor("x", Region((9, 7), (((0, 2),), ((0, 2),)), 0, 4))


# ---- masks of parts ---------------------------------------------------------


def thrown(rows: int) -> StepRNG:
    made = StepRNG(7)
    made.begin_forward(3, 1, range(10, 10 + rows), torch.device("cpu"))
    return made


@given(st.data())
def test_the_mask_of_a_part_is_part_of_the_mask(data: Any) -> None:
    rows = data.draw(st.integers(1, 3))
    shape = (
        rows * data.draw(st.integers(1, 3)),
        *data.draw(st.lists(st.integers(1, 6), max_size=3)),
    )
    want = thrown(rows).draw_keep_mask(torch.empty(shape), 0.5)
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    counts = {dim: data.draw(st.integers(1, shape[dim])) for dim in sorted(dims)}
    for places in itertools.product(*(range(count) for count in counts.values())):
        cuts = {
            dim: (*shard_range(shape[dim], counts[dim], at), shape[dim])
            for dim, at in zip(counts, places, strict=True)
        }
        part = want
        for dim, (low, high, _) in cuts.items():
            part = part.narrow(dim, low, high - low)
        with shard_region(
            {dim - len(shape) if dim % 2 else dim: bounds for dim, bounds in cuts.items()}
        ):
            assert torch.equal(thrown(rows).draw_keep_mask(torch.empty(part.shape), 0.5), part)


def test_two_ranges_of_a_dim_and_regions_that_end() -> None:
    want = thrown(2).draw_keep_mask(torch.empty(2, 12), 0.5)
    with shard_region({1: (((0, 3), (9, 12)), 12)}):
        assert torch.equal(
            thrown(2).draw_keep_mask(torch.empty(2, 6), 0.5), want[:, [0, 1, 2, 9, 10, 11]]
        )
        assert torch.equal(
            thrown(2).draw_keep_mask(torch.empty(2, 12), 0.5), want
        )  # not of the part's size: whole
        with shard_region({}):
            assert not torch.equal(
                thrown(2).draw_keep_mask(torch.empty(2, 6), 0.5), want[:, [0, 1, 2, 9, 10, 11]]
            )


def test_dropouts_are_counted_over_stages_and_found_again() -> None:
    """
    The second half of a model drops what it drops in the whole, and a recomputed one drops it
    again.
    """
    whole = thrown(4)
    want = [whole.draw_keep_mask(torch.empty(4, 50), 0.5) for _ in range(4)]
    first = thrown(4)
    assert [
        torch.equal(first.draw_keep_mask(torch.empty(4, 50), 0.5), mask) for mask in want[:2]
    ] == [
        True,
        True,
    ]
    second = StepRNG(7)
    second.begin_forward(
        3, 1, range(10, 14), torch.device("cpu"), part=1, calls=first.dropout_calls
    )
    state = torch.get_rng_state()
    assert [
        torch.equal(second.draw_keep_mask(torch.empty(4, 50), 0.5), mask) for mask in want[2:]
    ] == [
        True,
        True,
    ]
    assert second.dropout_calls == 4
    second.begin_forward(3, 2, range(14, 18), torch.device("cpu"), part=1, calls=2)
    assert not torch.equal(second.draw_keep_mask(torch.empty(4, 50), 0.5), want[2])
    torch.set_rng_state(state)  # as a checkpoint does
    assert torch.equal(second.draw_keep_mask(torch.empty(4, 50), 0.5), want[2])
