"""
Strategy files of MindSpore in JSON: to placements and back.

Each parameter has its own device matrix, over the devices of its stage, and a tensor map. With
optimizer parallel its dim 0 is sharded further, over ``opt_weight_shard_size`` devices that are
``opt_weight_shard_step`` apart. The file has no shapes and at most one axis per dim: neighbouring
axes of the mesh become one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.layouts.common_grid import axis_spans, find_common_grid, split_at_strides
from pdrun.parallel.layouts.device_matrix import from_tensor_map, to_tensor_map
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.placement import STAGE_AXIS, Placement, WeightLayout

LAYOUT_KEY = "parallel_layout_item"
STRATEGY_KEY = "parallel_strategy_item"


def is_mindspore(value: Any) -> bool:
    """Return whether a JSON value is a strategy file of MindSpore."""
    return isinstance(value, dict) and LAYOUT_KEY in value


def from_mindspore(value: Any, where: str = "strategy file") -> Placement:
    """
    Return the placement of a strategy file.

    The mesh is the coarsest that can express all device matrices, with axes ``d0``, ``d1`` and so
    on, and ``pp`` outside them if there are several stages.

    Raises:
        ConfigError: not a strategy file, device matrices without a common mesh, or manual splits of
            parameters.
    """
    try:
        items: dict[str, Any] = value[LAYOUT_KEY]
        stages = {
            name: int(one.get("stage", 0)) for name, one in value.get(STRATEGY_KEY, {}).items()
        }
        if min(stages.values(), default=0) < 0:
            raise ValueError("a stage below 0")
        own = {name: _read_parameter(name, item) for name, item in items.items()}
    except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
        raise ConfigError(f"is no strategy file of MindSpore's ({error})", where=where) from None
    if not own:
        raise ConfigError("has no parameters", where=where)
    grid = _common_mesh((grid for grid, _ in own.values()), where)
    count = max(stages.values(), default=0) + 1
    weights = {}
    for name, (mine, layout) in own.items():
        joined = find_common_grid(grid, mine)
        assert joined is not None, "the mesh refines all"
        _, ours, theirs = joined
        back = {fine: axis for axis, run in ours.items() for fine in run}
        dims = [tuple(back[fine] for axis in dim for fine in theirs[axis]) for dim in layout.dims]
        weights[name] = WeightLayout(L(*dims), (stages.get(name, 0),) if count > 1 else None)
    if count > 1:
        grid = Grid((STAGE_AXIS, *grid.names), (count, *grid.sizes))
    return Placement(grid, weights)


def _read_parameter(name: str, item: dict[str, Any]) -> tuple[Grid, L]:
    """
    Return the device matrix and layout of a parameter; optimizer parallel is an axis like others.
    """
    if item.get("indices_offset") or item.get("param_split_shape"):
        raise ValueError(f"{name} is split manually; a layout cannot express it")
    matrix = tuple(int(size) for size in item["dev_matrix"])
    names = tuple(f"m{place}" for place in range(len(matrix)))
    layout = from_tensor_map(
        tuple(tuple(e) if isinstance(e, list) else e for e in item["tensor_map"]), names
    )
    grid = Grid(names, matrix)
    size = int(item.get("opt_weight_shard_size") or 0)
    step = int(item.get("opt_weight_shard_step") or 0)
    if size <= 1 or step < 1 or not layout.dims:
        return grid, layout
    fine, split = split_at_strides(grid, (step, step * size))
    dims = [tuple(new for axis in dim for new in split[axis]) for dim in layout.dims]
    shards = tuple(
        axis
        for axis, (low, high) in reversed(axis_spans(fine).items())
        if step <= low and high <= step * size
    )
    return fine, L((*dims[0], *shards), *dims[1:])


def _common_mesh(grids: Iterable[Grid], where: str) -> Grid:
    found: Grid | None = None
    for grid in grids:
        joined = find_common_grid(grid if found is None else found, grid)
        if joined is None:
            raise ConfigError(
                f"no mesh has the device matrices {found} and {grid} in common", where=where
            )
        sizes = [size for size in joined[0].sizes if size > 1] or [1]
        found = Grid(tuple(f"d{place}" for place in range(len(sizes))), tuple(sizes))
    assert found is not None
    return found


def to_mindspore(placement: Placement) -> dict[str, Any]:
    """
    Return a placement as the JSON value of a strategy file.

    Raises:
        ConfigError: MindSpore cannot express it: blocks, weights on several stages or of unknown
        dims,
            several axes on one dim that are not neighbours in the mesh.
    """
    layouts = {}
    strategies = {}
    for name, one in placement.weights.items():
        stages = one.stages or (0,)
        if len(stages) > 1 or one.blocks or one.layout is None:
            what = "it has no dims"
            if len(stages) > 1:
                what = "it is on several stages"
            elif one.blocks:
                what = "it has blocks"
            raise ConfigError(f"MindSpore has no form for it: {what}", where=name)
        names, sizes, layout = _single_axis_dims(name, placement.grid, one.layout)
        layouts[name] = {
            "dev_matrix": list(sizes),
            "tensor_map": list(to_tensor_map(layout, names)),
            "param_split_shape": [],
            "indices_offset": [],
            "field": 0,
            "opt_weight_shard_size": 0,
            "opt_weight_shard_step": 0,
        }
        strategies[name] = {"stage": stages[0]}
    return {"current_stage": 0, STRATEGY_KEY: strategies, LAYOUT_KEY: layouts}


def _single_axis_dims(
    name: str, grid: Grid, layout: L
) -> tuple[tuple[str, ...], tuple[int, ...], L]:
    """Return a device matrix and a layout with at most one axis per dim."""
    axes = [
        (axis, size)
        for axis, size in zip(grid.names, grid.sizes, strict=True)
        if axis != STAGE_AXIS
    ]
    dims = []
    for dim in layout.dims:
        dim = tuple(axis for axis in dim if grid.degree(axis) > 1)
        if len(dim) > 1:
            real = [axis for axis, size in axes if size > 1]
            at = real.index(dim[0])
            if tuple(real[at : at + len(dim)]) != dim:
                what = f"the axes {dim} of one dim are not neighbours in the mesh ({grid})"
                raise ConfigError(f"MindSpore has no form for it: {what}", where=name)
            total = math.prod(size for axis, size in axes if axis in dim)
            axes = [
                (a, total if a == dim[0] else s) for a, s in axes if a == dim[0] or a not in dim
            ]
        dims.append(dim[:1])
    return tuple(axis for axis, _ in axes), tuple(size for _, size in axes), L(*dims)
