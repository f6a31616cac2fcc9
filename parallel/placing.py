"""Where a run's weights lie, told as `Placement` files have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.placement import STAGES, Part, WeightLayout, from_parts

if TYPE_CHECKING:
    from pdrun.parallel.run import Run


def weights_of(run: Run) -> dict[str, Any]:
    """Return each weight's shape, layout, stages and blocks, alike on all ranks: the ``weights`` of a plan's file."""
    names = (STAGES, *run.mesh.tensor_axes)
    grid = Grid(names, tuple(run.mesh.degree(name) for name in names))
    known: dict[tuple[tuple[int, ...], tuple[Part | None, ...]], WeightLayout] = {}  # blocks repeat
    found = {}
    for entry in run.engine.catalogue.entries:
        parts = tuple(held.get(entry.index) for held in run.engine.holders.parts)
        if (entry.shape, parts) not in known:
            known[entry.shape, parts] = from_parts(grid, entry.shape, parts)
        found[entry.name] = {"shape": list(entry.shape), **known[entry.shape, parts].to_plain()}
    return found
