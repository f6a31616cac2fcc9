"""
Strategy files of MindSpore in JSON: to placements and back.

Each parameter has its own device matrix, over the devices of its stage, and a tensor map. With
optimizer parallel its dim 0 is sharded further, over ``opt_weight_shard_size`` of the devices that
hold the same (-1: all of them), the innermost axes first, as MindSpore's own transform reads it.
The file has no shapes and at most one axis per dim: neighbouring axes of the mesh become one.

Pipelines: a merged file names parameters ``STAGE-NAME``; a file of one stage has the stage in the
items of its operators.
"""

from __future__ import annotations

import math
import re
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
_STAGE_PREFIX = re.compile(r"([0-9]+)-")


def is_mindspore(value: Any) -> bool:
    """Return whether a JSON value is a strategy file of MindSpore."""
    return isinstance(value, dict) and LAYOUT_KEY in value


def from_mindspore(value: Any, where: str = "strategy file") -> Placement:
    """
    Return the placement of a strategy file.

    The mesh is the coarsest that can express all device matrices, with axes ``d0``, ``d1`` and so
    on, and ``pp`` outside them if there are several stages.

    Raises:
        ConfigError: not a strategy file, device matrices without a common mesh, manual splits of
            parameters, or a parameter whose stages shard it differently.
    """
    try:
        own, stages = _read_items(value)
    except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
        raise ConfigError(f"is no strategy file of MindSpore's ({error})", where=where) from None
    if not own:
        raise ConfigError("has no parameters", where=where)
    grid = _common_mesh((grid for grid, _ in own.values()), where)
    count = max((stage for each in stages.values() for stage in each), default=0) + 1
    weights = {}
    for name, (mine, layout) in own.items():
        joined = find_common_grid(grid, mine)
        assert joined is not None, "the mesh refines all"
        _, ours, theirs = joined
        back = {fine: axis for axis, run in ours.items() for fine in run}
        dims = [tuple(back[fine] for axis in dim for fine in theirs[axis]) for dim in layout.dims]
        weights[name] = WeightLayout(L(*dims), stages[name] if count > 1 else None)
    if count > 1:
        grid = Grid((STAGE_AXIS, *grid.names), (count, *grid.sizes))
    return Placement(grid, weights)


def _read_items(
    value: dict[str, Any],
) -> tuple[dict[str, tuple[Grid, L]], dict[str, tuple[int, ...]]]:
    """
    Return the device matrix and layout of each parameter, and its stages.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, UsageError: the file is not well formed.
    """
    items: dict[str, Any] = value[LAYOUT_KEY]
    named = {name: int(one.get("stage", 0)) for name, one in value.get(STRATEGY_KEY, {}).items()}
    if min(named.values(), default=0) < 0:
        raise ValueError("a stage below 0")
    default = 0
    if named.keys().isdisjoint(items):  # the items are operators: all of the file's own stage
        default = next(iter(named.values()), 0)
    own: dict[str, tuple[Grid, L]] = {}
    stages: dict[str, tuple[int, ...]] = {}
    for key, item in items.items():
        prefix = _STAGE_PREFIX.match(key)
        name = key[prefix.end() :] if prefix else key
        stage = int(prefix[1]) if prefix else named.get(key, default)
        found = _read_parameter(name, item)
        if own.setdefault(name, found) != found:
            raise ValueError(f"{name} is sharded differently in its stages")
        stages[name] = tuple(sorted({*stages.get(name, ()), stage}))
    return own, stages


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
    size = int(item.get("opt_weight_shard_size") or 0)
    step = int(item.get("opt_weight_shard_step") or 0)
    if size in (0, 1) or step < 1 or not layout.dims:
        return Grid(names, matrix), layout
    return _shard_replicas(Grid(names, matrix), layout, size, step)


def _shard_replicas(grid: Grid, layout: L, size: int, step: int) -> tuple[Grid, L]:
    """Shard dim 0 over ``size`` ranks that hold the same, the innermost axes first; -1: all."""
    replicas = _replica_axes(grid, layout)
    total = math.prod(grid.degree(axis) for axis in replicas)
    if size < 0:
        size = total
    if len(replicas) == 1 and axis_spans(grid)[replicas[0]][0] != step:
        raise ValueError(f"opt_weight_shard_step {step} does not fit ({grid})")
    if total % size:
        raise ValueError(f"opt_weight_shard_size {size} does not fit {total} ranks with the same")
    shards = list[str]()
    for axis in reversed(replicas):
        if size == 1:
            break
        degree = grid.degree(axis)
        if degree > size:  # the inner part of the axis
            grid, split = split_at_strides(grid, (axis_spans(grid)[axis][0] * size,))
            layout = L(*[tuple(new for one in dim for new in split[one]) for dim in layout.dims])
            shards = [split[axis][-1], *(new for one in shards for new in split[one])]
            break
        if size % degree:
            raise ValueError(f"opt_weight_shard_size {size} does not fit ({grid})")
        shards.insert(0, axis)
        size //= degree
    return grid, L((*layout.dims[0], *shards), *layout.dims[1:])


def _replica_axes(grid: Grid, layout: L) -> list[str]:
    """Return the axes along which all ranks hold the same, outermost first."""
    return [axis for axis in grid.names if grid.degree(axis) > 1 and axis not in layout.axes]


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
    Return a placement as the JSON value of a strategy file, for a pipeline as MindSpore merges it.

    Axes of dim 0 that are not neighbours of the others become optimizer parallel where they are the
    innermost of those that hold the same.

    Raises:
        ConfigError: MindSpore cannot express it: blocks, weights of unknown dims, other axes on one
            dim that are not neighbours in the mesh, or a name that starts as ``STAGE-``.
    """
    layouts = {}
    strategies = {}
    count = placement.grid.degree(STAGE_AXIS) if STAGE_AXIS in placement.grid.names else 1
    for name, one in placement.weights.items():
        what = ""
        if one.layout is None:
            what = "it has no dims"
        elif one.blocks:
            what = "it has blocks"
        elif _STAGE_PREFIX.match(name):
            what = "its name looks like that of a stage"
        if what or one.layout is None:
            raise ConfigError(f"MindSpore has no form for it: {what}", where=name)
        item = _layout_item(name, placement.grid, one.layout)
        for stage in one.stages or (range(count) if count > 1 else (0,)):
            key = f"{stage}-{name}" if count > 1 else name
            layouts[key] = item
            strategies[key] = {"stage": stage}
    return {"current_stage": int(count > 1), STRATEGY_KEY: strategies, LAYOUT_KEY: layouts}


def _layout_item(name: str, grid: Grid, layout: L) -> dict[str, Any]:
    """Return the entry of one parameter."""
    stage_grid = Grid(
        tuple(axis for axis in grid.names if axis != STAGE_AXIS),
        tuple(grid.degree(axis) for axis in grid.names if axis != STAGE_AXIS),
    )
    dims = [tuple(axis for axis in dim if grid.degree(axis) > 1) for dim in layout.dims]
    tail = _optimizer_axes(stage_grid, dims)
    if tail:
        dims[0] = dims[0][: -len(tail)]
    names, sizes, single = _single_axis_dims(name, stage_grid, L(*dims))
    return {
        "dev_matrix": list(sizes),
        "tensor_map": list(to_tensor_map(single, names)),
        "param_split_shape": [],
        "indices_offset": [],
        "field": 0,
        "opt_weight_shard_size": stage_grid.group_size(tail) if tail else 0,
        "opt_weight_shard_step": axis_spans(stage_grid)[tail[-1]][0] if tail else 0,
    }


def _optimizer_axes(grid: Grid, dims: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the axes of dim 0 that are written as optimizer parallel; none if it needs none."""
    if not dims or _is_run(grid, dims[0]):
        return ()
    for kept in reversed(range(len(dims[0]))):
        head, tail = dims[0][:kept], dims[0][kept:]
        replicas = _replica_axes(grid, L(head, *dims[1:]))
        if _is_run(grid, head) and tuple(replicas[-len(tail) :]) == tail:
            return tail
    return ()


def _is_run(grid: Grid, axes: tuple[str, ...]) -> bool:
    """Return whether axes are neighbours in a grid, apart from axes of size 1."""
    real = [axis for axis in grid.names if grid.degree(axis) > 1]
    at = real.index(axes[0]) if axes else 0
    return tuple(real[at : at + len(axes)]) == axes


def _single_axis_dims(
    name: str, grid: Grid, layout: L
) -> tuple[tuple[str, ...], tuple[int, ...], L]:
    """Return a device matrix and a layout with at most one axis per dim."""
    axes = list(zip(grid.names, grid.sizes, strict=True))
    dims = []
    for dim in layout.dims:
        if not _is_run(grid, dim):
            what = f"the axes {dim} of one dim are not neighbours in the mesh ({grid})"
            raise ConfigError(f"MindSpore has no form for it: {what}", where=name)
        if len(dim) > 1:
            total = grid.group_size(dim)
            axes = [
                (a, total if a == dim[0] else s) for a, s in axes if a == dim[0] or a not in dim
            ]
        dims.append(dim[:1])
    return tuple(axis for axis, _ in axes), tuple(size for _, size in axes), L(*dims)
