"""
Where every weight of a model lies: a mesh, and for each weight its layout, its stages and its
blocks.

A run's plan has it (``run.plan.save("plan.json")``), a file says it to those that work without a
run, and from it follows which ranks of one job hold what a rank of another needs (`rank_list`).

    {"mesh": {"dp": 2, "tp": 2}, "weights": {"fc.weight": {"layout": ["tp", null]},
     "qkv.weight": {"layout": ["tp", null], "blocks": {"0": [8, 4, 4]}, "stages": [0]}}}

Weights that aren't named are whole on every rank.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.view import Ranges, join_neighbours

ShardRanges = tuple[Ranges, ...]
"""For each dim of a weight the ranges that a rank holds."""
STAGE_AXIS = "pp"
"""The axis of pipeline stages."""
IRREGULAR_LAYOUT = "irregular"
"""Stands for the layout of a weight that is cut as none says."""
Blocks = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class WeightLayout:
    """
    Where one weight lies.

    Attributes:
        layout: the axes that cut its dims; None: it is whole.
        stages: which pipeline stages hold it; None: all.
        blocks: dims that hold several matrices side by side, each of which is cut, with the size of
            each.
    """

    layout: L | None = None
    stages: tuple[int, ...] | None = None
    blocks: Blocks = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        dims = self.layout.dims if self.layout is not None else None
        found: dict[str, Any] = {
            "layout": None if dims is None else [_plain_dim(dim) for dim in dims]
        }
        if self.stages is not None:
            found["stages"] = list(self.stages)
        if self.blocks:
            found["blocks"] = {str(dim): list(sizes) for dim, sizes in self.blocks.items()}
        return found

    @classmethod
    def from_plain(cls, value: Any) -> WeightLayout:
        """
        Undo `to_plain`; TypeError, ValueError, KeyError or UsageError where it is something else.
        """
        dims = value["layout"]
        if dims == IRREGULAR_LAYOUT:
            raise ValueError("a weight is cut as no layout says")
        if not (dims is None or isinstance(dims, list)):
            raise ValueError(f"the layout {dims!r} is no list")
        layout = (
            None
            if dims is None
            else L(*[tuple(dim) if isinstance(dim, list) else dim for dim in dims])
        )
        stages = value.get("stages")
        blocks = {
            int(dim): tuple(int(size) for size in sizes)
            for dim, sizes in value.get("blocks", {}).items()
        }
        if stages == [] or any(size < 0 for sizes in blocks.values() for size in sizes):
            raise ValueError(f"stages {stages!r}, blocks {blocks}")
        return cls(
            layout, None if stages is None else tuple(int(stage) for stage in stages), blocks
        )


def _plain_dim(dim: tuple[str, ...]) -> str | list[str] | None:
    return None if not dim else dim[0] if len(dim) == 1 else list(dim)


REPLICATED = WeightLayout()


@dataclass(frozen=True)
class Placement:
    """
    Where all weights lie.

    Attributes:
        grid: the ranks.
        weights: by name; those that are missing are whole on every rank.

    Raises:
        ConfigError: a layout names an axis that the grid lacks, or a weight is on a stage that
            there isn't.
    """

    grid: Grid
    weights: Mapping[str, WeightLayout]

    def __post_init__(self) -> None:
        stages = self.grid.degree(STAGE_AXIS) if STAGE_AXIS in self.grid.names else 1
        for name, one in self.weights.items():
            for axis in one.layout.axes if one.layout is not None else ():
                if axis not in self.grid.names:
                    raise ConfigError(
                        f"is cut over {axis!r}, and the mesh is ({self.grid})", where=name
                    )
            for stage in one.stages or ():
                if not 0 <= stage < stages:
                    raise ConfigError(f"is on stage {stage} of {stages}", where=name)

    def shard_ranges(self, name: str, shape: tuple[int, ...], rank: int) -> ShardRanges | None:
        """
        Return what a rank holds of a weight; None where its stage doesn't.

        Raises:
            ConfigError: the layout is for another number of dims, or the blocks are of another
                size.
        """
        one = self.weights.get(name, REPLICATED)
        stage = self.grid.coordinate(rank).get(STAGE_AXIS, 0)
        if one.stages is not None and stage not in one.stages:
            return None
        layout = one.layout if one.layout is not None else L(*[None] * len(shape))
        try:
            return layout.ranges(self.grid, shape, rank, one.blocks)
        except UsageError as error:
            raise ConfigError(
                error.what, where=name, hint="the file belongs to another model"
            ) from None

    def holders_of(self, name: str, shape: tuple[int, ...]) -> dict[ShardRanges, list[int]]:
        """Return the different parts of a weight, each with the ranks that hold it."""
        found: dict[ShardRanges, list[int]] = {}
        for rank in range(self.grid.size):
            part = self.shard_ranges(name, shape, rank)
            if part is not None:
                found.setdefault(part, []).append(rank)
        return found

    # ---- files --------------------------------------------------------------

    def to_json(self) -> str:
        """Return it as indented JSON."""
        mesh = dict(zip(self.grid.names, self.grid.sizes, strict=True))
        weights = {name: one.to_plain() for name, one in self.weights.items()}
        return json.dumps({"mesh": mesh, "weights": weights}, indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def from_plain(cls, value: Any, where: str = "placement") -> Placement:
        """
        Return the placement of a JSON object with ``mesh`` and ``weights``, which may have more in
        it.

        Raises:
            ConfigError: it is no such thing.
        """
        try:
            mesh = value["mesh"]
            sizes = tuple(mesh.values())
            if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
                raise ValueError(f"mesh {mesh}")
            weights = {
                str(name): WeightLayout.from_plain(one) for name, one in value["weights"].items()
            }
            return cls(Grid(tuple(mesh), sizes), weights)
        except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
            told = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"is no file of layouts ({told})", where=where) from None


# ---- ranks ------------------------------------------------------------------


def shards_overlap(a: ShardRanges, b: ShardRanges) -> bool:
    """Return whether two parts of a weight have an element in common."""
    return all(
        any(max(low, first) < min(high, last) for low, high in here for first, last in there)
        for here, there in zip(a, b, strict=True)
    )


def rank_list(
    source: Placement, target: Placement, shapes: Mapping[str, tuple[int, ...]], rank: int
) -> list[int]:
    """
    Return the ranks of ``source`` that together hold what a rank of ``target`` needs, and no
    others.

    A part that several hold is taken from one that is needed anyway, or else from the first: no
    rank of the list can be left out.

    Args:
        shapes: of all whole weights.
    """
    wanted: set[tuple[int, ...]] = set()
    for name, shape in shapes.items():
        part = target.shard_ranges(name, shape, rank)
        if part is not None:
            wanted |= {
                tuple(ranks)
                for held, ranks in source.holders_of(name, shape).items()
                if shards_overlap(held, part)
            }
    chosen: list[int] = []
    for ranks in sorted(wanted, key=lambda ranks: (len(ranks), ranks)):
        if not set(ranks) & set(chosen):
            chosen.append(ranks[0])
    for one in sorted(chosen, reverse=True):  # a later choice may have made an earlier one needless
        rest = set(chosen) - {one}
        if all(set(ranks) & rest for ranks in wanted):
            chosen.remove(one)
    return sorted(chosen)


# ---- from what ranks hold ---------------------------------------------------


def layout_from_shards(
    grid: Grid, shape: tuple[int, ...], parts: Sequence[ShardRanges | None]
) -> WeightLayout:
    """
    Return the layout that gives each rank of a grid the part that it holds.

    Args:
        parts: by rank; None where the rank's stage doesn't hold the weight.

    Raises:
        ConfigError: no layout does.
    """
    stage_of = [grid.coordinate(rank).get(STAGE_AXIS, 0) for rank in range(grid.size)]
    stages = tuple(
        sorted({stage for stage, part in zip(stage_of, parts, strict=True) if part is not None})
    )
    every = grid.degree(STAGE_AXIS) if STAGE_AXIS in grid.names else 1
    dims = []
    blocks = {}
    for dim, size in enumerate(shape):
        held = {rank: part[dim] for rank, part in enumerate(parts) if part is not None}
        axes, sizes = _find_axes(grid, size, held)
        dims.append(axes)
        if len(sizes) > 1:
            blocks[dim] = sizes
    made = WeightLayout(L(*dims), None if len(stages) == every else stages, blocks)
    placed = Placement(grid, {"": made})
    if any(
        _merge_ranges_of(placed.shard_ranges("", shape, rank)) != _merge_ranges_of(part)
        for rank, part in enumerate(parts)
    ):
        raise ConfigError(f"no layout on ({grid}) gives the ranks their parts of {list(shape)}")
    return made


def _merge_ranges_of(part: ShardRanges | None) -> ShardRanges | None:
    """Return a part with its ranges in their shortest form."""
    if part is None:
        return None
    return tuple(join_neighbours(pair for pair in ranges if pair[0] < pair[1]) for ranges in part)


def _find_axes(
    grid: Grid, size: int, held: Mapping[int, Ranges]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the axes that cut a dim, and its blocks, from the ranges that each rank holds."""
    if all(_merge_ranges_of((ranges,)) == (((0, size),),) for ranges in held.values()):
        return (), (size,)

    def differs(axis: str) -> bool:
        return any(
            held.get(other, held[rank]) != held[rank]
            for rank in held
            for other in grid.group_ranks((axis,), rank)
        )

    used = [axis for axis in grid.names if differs(axis)]
    first = next(
        ranges
        for rank, ranges in held.items()
        if all(grid.coordinate(rank)[axis] == 0 for axis in used)
    )
    starts = [low for low, _ in first]
    sizes = tuple(high - low for low, high in zip(starts, [*starts[1:], size], strict=True))
    for axes in itertools.permutations(used):
        layout = L(tuple(axes))
        if all(
            layout.ranges(grid, (size,), rank, {0: sizes})[0] == ranges
            for rank, ranges in held.items()
        ):
            return axes, sizes
    raise ConfigError(f"no axes of ({grid}) cut {size} as the ranks hold it")
