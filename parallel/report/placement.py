"""The placement of a run's weights, in the form of `Placement` files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdrun.errors import ConfigError
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.placement import (
    IRREGULAR_LAYOUT,
    ShardRanges,
    layout_from_shards,
)

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState


def weight_layouts(state: RunState) -> dict[str, Any]:
    """
    Return each weight's shape, layout, stages and blocks, equal on all ranks: the ``weights`` of a
    plan file.
    """
    names = state.engine.place.holder_axes
    grid = Grid(names, tuple(state.mesh.degree(name) for name in names))
    known: dict[
        tuple[tuple[int, ...], tuple[ShardRanges | None, ...]], dict[str, Any]
    ] = {}  # blocks repeat
    found = {}
    for entry in state.engine.catalogue.weights:
        parts = tuple(held.get(entry.index) for held in state.engine.holders.regions)
        if (entry.shape, parts) not in known:
            known[entry.shape, parts] = _describe_layout(grid, entry.shape, parts)
        found[entry.name] = {"shape": list(entry.shape), **known[entry.shape, parts]}
    return found


def _describe_layout(
    grid: Grid, shape: tuple[int, ...], parts: tuple[ShardRanges | None, ...]
) -> dict[str, Any]:
    """Return a weight's layout as plain data; shards that were made by hand may have none."""
    try:
        return layout_from_shards(grid, shape, parts).to_plain()
    except ConfigError:
        return {"layout": IRREGULAR_LAYOUT}
