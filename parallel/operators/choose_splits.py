"""
Choose how one operator is split, from the layouts or counts that the user gave for its inputs.

Layouts name axes: each axis is looked up separately. Counts name no axes: the axes are assigned to
the counts, outer axes to the dims that are named first.
"""

from __future__ import annotations

from typing import Any

from pdrun.errors import UsageError
from pdrun.parallel.comm.mesh import STAGE_AXIS
from pdrun.parallel.layouts.device_matrix import DeviceMatrixLayout, match_counts, to_mesh_layout
from pdrun.parallel.layouts.finer_grid import FinerGrid
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.constraints import LayoutSpec
from pdrun.parallel.operators.graph.graph import Operator, OperatorGraph
from pdrun.parallel.operators.plan import OperatorSharding, states_of
from pdrun.parallel.operators.rules.rule import PARTIAL, REPLICATED, OpSplit

OPERATORS_API = "pdrun.Operators"
DimCounts = tuple[int, ...]


class SplitChooser:
    """
    Chooses the splits of the operators of one graph.

    Args:
        grid: the tensor axes.
        mesh: all axes.
        finer: how the axes that the user named have been split.
    """

    def __init__(
        self, graph: OperatorGraph, grid: Grid, mesh: Grid, finer: FinerGrid | None = None
    ) -> None:
        self.graph = graph
        self.grid = grid
        self.mesh = mesh
        self.finer = finer

    def to_mesh_axes(self, given: LayoutSpec, entry_name: str, has_batch: bool = True) -> L:
        """
        Return a layout by mesh axes. If the tensor has the batch, counts on dim 0 can include dp.
        """
        try:
            if isinstance(given, DeviceMatrixLayout):
                return to_mesh_layout(given, self._grid_of_size(given.grid.size))
            if isinstance(given, L):
                return given if self.finer is None else self.finer.expand(given)
            is_split = self.finer is not None
            try:
                return match_counts(given, self.grid, takes_outer=is_split)
            except UsageError:
                if not has_batch or "dp" not in self.mesh.names:
                    raise
            axes = ("dp", *self.grid.names)
            return match_counts(given, self.mesh, axes, takes_outer=is_split)
        except UsageError as error:
            raise UsageError(
                f"{entry_name}: {error.what}", where=OPERATORS_API, hint=error.hint
            ) from None

    def _grid_of_size(self, size: int) -> Grid:
        """Return the grid that a device matrix is for: the tensor axes, a stage, or all axes."""
        names = tuple(name for name in self.mesh.names if name != STAGE_AXIS)
        stage = Grid(names, tuple(self.mesh.degree(name) for name in names))
        return next((grid for grid in (self.grid, stage) if grid.size == size), self.mesh)

    def drop_data_axes(
        self, layout: L, shape: tuple[int, ...], entry_name: str, has_batch: bool = True
    ) -> L:
        """Return a layout without data axes. They shard the batch in any case."""
        try:
            layout.check(self.mesh, shape)
        except UsageError as error:
            raise UsageError(
                f"{entry_name}: {error.what}", where=OPERATORS_API, hint=error.hint
            ) from None
        for dim, axes in enumerate(layout.dims):
            for axis in axes:
                if axis not in self.grid.names and not (axis == "dp" and dim == 0 and has_batch):
                    raise UsageError(
                        f"{entry_name}: {layout} shards dim {dim} over {axis}",
                        where=OPERATORS_API,
                        hint="operators are split over tensor axes; dp is allowed only for the"
                        " batch, on dim 0 of a tensor that is not a weight",
                    )
        plain = tuple(
            tuple(axis for axis in axes if self._is_tensor_axis(axis)) for axes in layout.dims
        )
        return L(*plain, sums=tuple(axis for axis in layout.sums if self._is_tensor_axis(axis)))

    def _is_tensor_axis(self, axis: str) -> bool:
        return axis in self.grid.names and self.grid.degree(axis) > 1

    def choose_by_layouts(
        self,
        operator: Operator,
        splits: list[OpSplit],
        layouts: list[L | None],
        out: L | None,
        entry_name: str,
        by_weight: bool = False,
    ) -> OperatorSharding:
        """
        Return the sharding of an operator whose inputs have these layouts.

        Args:
            layouts: one per input; None leaves it open.
            out: the wanted layout of the first result, if known.
            entry_name: name of the user's entry, for errors.
            by_weight: the entry is a weight's layout: axes that it does not name stay open.

        Raises:
            UsageError: no split fits the layouts along some axis.
        """
        chosen = {}
        for axis in self.grid.names:
            split = _find_matching_split(splits, axis, layouts, out)
            if split is None:
                raise self._layout_error(operator, splits, axis, layouts, entry_name)
            if not split.is_replicated:
                chosen[axis] = split
        self._check_divisible(operator, chosen, entry_name)
        fixed = tuple(chosen) if by_weight else self.grid.names
        return OperatorSharding(chosen, _nest_axes(self.grid, [*layouts, out]), fixed)

    def _layout_error(
        self,
        operator: Operator,
        splits: list[OpSplit],
        axis: str,
        layouts: list[Any],
        entry_name: str,
    ) -> UsageError:
        """Return the error for layouts that no split fits."""
        options = "; ".join(describe_split(split) for split in splits)
        name = _describe_kind(operator)
        if operator.source:
            name = f"{name} at {operator.source}"
        given = ", ".join(str(layout) for layout in layouts)
        return UsageError(
            f"{entry_name}: {name} cannot take inputs ({given}) along {axis}",
            where=OPERATORS_API,
            hint=f"along one axis its inputs can be {options}",
        )

    def _check_divisible(
        self, operator: Operator, splits: dict[str, OpSplit], entry_name: str
    ) -> None:
        """Raise UsageError if a split cannot be made into that many shards."""
        for split in splits.values():
            parts = self.grid.group_size(
                tuple(axis for axis, other in splits.items() if other == split)
            )
            if split.must_divide and split.must_divide % parts:
                what = (
                    f"{entry_name}: the number of shards of {_describe_kind(operator)} must divide"
                    f" {split.must_divide}, got {parts}"
                )
                raise UsageError(what, where=operator.source or OPERATORS_API)

    # ---- counts per dim -----------------------------------------------------

    def choose_by_counts(
        self, operator: Operator, splits: list[OpSplit], wanted: tuple[Any, ...], entry_name: str
    ) -> OperatorSharding:
        """
        Return the sharding of an operator whose inputs have these counts per dim.

        Outer axes are assigned to the dims that are named first. Axes that no count needs repeat
        the computation.

        Raises:
            UsageError: a count is missing, or no assignment of axes gives the counts.
        """
        counts = []
        for position, entry in enumerate(wanted):
            shape = self.graph.shape_of(operator.inputs[position])
            if entry is not None and (not isinstance(entry, tuple) or len(entry) != len(shape)):
                what = (
                    f"{entry_name}: input {position} of {_describe_kind(operator)} must have one"
                    f" count per dim of {list(shape)}, got {entry!r}"
                )
                raise UsageError(what, where=OPERATORS_API)
            counts.append(entry)
        candidates = [self.grid.names]
        if "dp" in self.mesh.names and self.mesh.degree("dp") > 1:
            candidates.append(("dp", *self.grid.names))
        for axes in candidates:
            assigned = self._assign_axes(axes, splits, counts, {})
            if assigned is not None and axes:
                chosen = {axis: split for axis, split in assigned.items() if axis != "dp"}
                self._check_divisible(operator, chosen, entry_name)
                return OperatorSharding(chosen, self.grid.names, self.grid.names)
        options = "; ".join(describe_split(split) for split in splits)
        what = (
            f"{entry_name}: {_describe_kind(operator)} cannot be split into {tuple(wanted)} on a"
            f" mesh of ({self.mesh})"
        )
        hint = (
            "the mesh needs one axis per count, such as pdrun.mesh(x=2, y=4); along one axis its"
            f" inputs can be {options}"
        )
        raise UsageError(what, where=OPERATORS_API, hint=hint)

    def _assign_axes(
        self,
        axes: tuple[str, ...],
        splits: list[OpSplit],
        counts: list[DimCounts | None],
        chosen: dict[str, OpSplit],
    ) -> dict[str, OpSplit] | None:
        """Return the first assignment of splits to axes, depth first, that gives the counts."""
        if not axes:
            return chosen if self._compare_counts(counts, chosen) == 0 else None
        axis, *rest = axes
        for split in (*splits[1:], splits[0]):
            if PARTIAL in split.in_states or (axis == "dp" and split.in_states[0] != 0):
                continue
            if axis != "dp" and self.grid.degree(axis) == 1 and not split.is_replicated:
                continue
            more = chosen if split.is_replicated else {**chosen, axis: split}
            if self._compare_counts(counts, more) <= 0:
                result = self._assign_axes(tuple(rest), splits, counts, more)
                if result is not None:
                    return result
        return None

    def _compare_counts(self, counts: list[DimCounts | None], chosen: dict[str, OpSplit]) -> int:
        """
        Compare the shards along the chosen axes with the counts.

        Returns:
            0 if they are equal, -1 if more axes can make them equal, 1 if they cannot.
        """
        is_short = False
        for position, wanted in enumerate(counts):
            for dim, count in enumerate(wanted or ()):
                shards = self.mesh.group_size(
                    tuple(
                        axis for axis, split in chosen.items() if split.in_states[position] == dim
                    )
                )
                if count % shards:
                    return 1
                is_short |= shards != count
        return -1 if is_short else 0


def _find_matching_split(
    splits: list[OpSplit], axis: str, layouts: list[L | None], out: L | None
) -> OpSplit | None:
    """
    Return a split that fits the layouts along an axis, if possible one with the wanted result.
    """
    wanted = {
        position: states_of(layout).get(axis)
        for position, layout in enumerate(layouts)
        if layout is not None
    }
    fitting = [
        split
        for split in splits
        if all(split.in_states[position] == state for position, state in wanted.items())
    ]
    if out is not None:
        state = states_of(out).get(axis)
        for split in fitting:
            if split.out_states[0] == state:
                return split
    return fitting[0] if fitting else None


def _nest_axes(grid: Grid, layouts: list[L | None]) -> tuple[str, ...]:
    """Return the axes, major first: nested as in the layouts, otherwise as in the grid."""
    order = list(grid.names)
    for layout in layouts:
        if layout is None:
            continue
        for axes in layout.dims:
            ranks = sorted(order.index(axis) for axis in axes)
            for rank, axis in zip(ranks, axes, strict=True):
                order[rank] = axis
    return tuple(order)


def _describe_kind(operator: Operator) -> str:
    """Return the kind of an operator, with its name and stage in a pipeline."""
    if operator.stage is None:
        return operator.kind
    return f"{operator.kind} ({operator.display_name})"


def missing_rule_error(operator: Operator) -> UsageError:
    """Return the error for an operator without a rule."""
    what = f"no rule for splitting {operator.kind} ({operator.display_name})"
    hint = (
        f'Operators({{..., "{operator.name}": pdrun.replicate()}}) computes it in full on every'
        " rank"
    )
    return UsageError(what, where=operator.source or OPERATORS_API, hint=hint)


def describe_split(split: OpSplit) -> str:
    """Return a split as text: the state of each input."""
    names = {REPLICATED: "full", PARTIAL: "partial sum"}
    ins = [names.get(state, f"sharded on dim {state}") for state in split.in_states]
    return f"({', '.join(ins)})"
