"""
The layout of every weight of a model: a mesh, and per weight its layout, stages and blocks.

The plan of a run has it (``run.plan.save("plan.json")``); the file gives it to tools without a run.
`rank_list` computes which ranks of one job have the weights that a rank of another needs.

    {"mesh": {"dp": 2, "tp": 2}, "weights": {"fc.weight": {"layout": ["tp", null]},
     "qkv.weight": {"layout": ["tp", null], "blocks": {"0": [8, 4, 4]}, "stages": [0]}}}

Weights that are not named are replicated on every rank.
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
"""For each dim of a weight the ranges of a rank's shard."""
STAGE_AXIS = "pp"
"""The axis of pipeline stages."""
IRREGULAR_LAYOUT = "irregular"
"""Marks a weight whose shards no layout describes."""
Blocks = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class WeightLayout:
    """
    The layout of one weight.

    Attributes:
        layout: the axes that shard its dims; None: replicated.
        stages: pipeline stages that have it; None: all.
        blocks: dims with several matrices side by side, each of which is sharded; with their sizes.
    """

    layout: L | None = None
    stages: tuple[int, ...] | None = None
    blocks: Blocks = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON value."""
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
        Return the weight layout of a JSON value.

        Raises:
            TypeError, ValueError, KeyError, UsageError: the value has another form.
        """
        dims = value["layout"]
        if dims == IRREGULAR_LAYOUT:
            raise ValueError("a weight has an irregular layout")
        if not (dims is None or isinstance(dims, list)):
            raise ValueError(f"the layout {dims!r} is no list")
        layout = None
        if dims is not None:
            layout = L(*[tuple(dim) if isinstance(dim, list) else dim for dim in dims])
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
    if not dim:
        return None
    if len(dim) == 1:
        return dim[0]
    return list(dim)


REPLICATED = WeightLayout()


@dataclass(frozen=True)
class Placement:
    """
    The layout of all weights.

    Attributes:
        grid: the ranks.
        weights: by name; missing ones are replicated on every rank.

    Raises:
        ConfigError: a layout names an axis that the grid lacks, or a weight is on a missing stage.
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
        Return the shard of a weight on a rank; None if its stage does not have the weight.

        Raises:
            ConfigError: the layout has another number of dims, or the blocks have other sizes.
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
        """Return the different shards of a weight, each with its ranks."""
        found: dict[ShardRanges, list[int]] = {}
        for rank in range(self.grid.size):
            part = self.shard_ranges(name, shape, rank)
            if part is not None:
                found.setdefault(part, []).append(rank)
        return found

    # ---- files --------------------------------------------------------------

    def to_json(self) -> str:
        """Return indented JSON."""
        mesh = dict(zip(self.grid.names, self.grid.sizes, strict=True))
        weights = {name: one.to_plain() for name, one in self.weights.items()}
        return json.dumps({"mesh": mesh, "weights": weights}, indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the JSON to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def from_plain(cls, value: Any, where: str = "placement") -> Placement:
        """
        Return the placement of a JSON object with ``mesh`` and ``weights``; other keys are ignored.

        Raises:
            ConfigError: the object has another form.
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
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"is no file of layouts ({reason})", where=where) from None


# ---- ranks ------------------------------------------------------------------


def shards_overlap(a: ShardRanges, b: ShardRanges) -> bool:
    """Return whether two shards of a weight have an element in common."""
    return all(
        any(max(low, first) < min(high, last) for low, high in here for first, last in there)
        for here, there in zip(a, b, strict=True)
    )


def rank_list(
    source: Placement, target: Placement, shapes: Mapping[str, tuple[int, ...]], rank: int
) -> list[int]:
    """
    Return the smallest list of ranks of ``source`` that have the shards which a rank of ``target``
    needs.

    A shard of several ranks is taken from a rank that is needed anyway, or from the first: no rank
    of the list can be left out.

    Args:
        shapes: of all full weights.
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
    Return the layout that gives each rank of a grid its shard.

    Args:
        parts: by rank; None if the rank's stage does not have the weight.

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
    """Return a shard with its ranges in their shortest form."""
    if part is None:
        return None
    return tuple(join_neighbours(pair for pair in ranges if pair[0] < pair[1]) for ranges in part)


def _find_axes(
    grid: Grid, size: int, held: Mapping[int, Ranges]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the axes that shard a dim, and its blocks, from the ranges of each rank."""
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
    raise ConfigError(f"no axes of ({grid}) split {size} into the ranges of the ranks")
