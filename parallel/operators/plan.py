"""
The plan: how each operator, weight and result of a graph is sharded over the tensor axes.

A plan is data. `propagate` makes it, `partition` builds one rank's graph from it, `explain` prints
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.graph import OperatorGraph, TensorRef
from pdrun.parallel.operators.rules.rule import PARTIAL, REPLICATED, OpSplit, State

PART_AXIS = "(parts)"
"""The axis of the parts of a rank, after those of the grid; no axis of a mesh has such a name."""


@dataclass(frozen=True)
class OperatorSharding:
    """
    How one operator is split.

    Attributes:
        splits: the split along each axis; along all other axes every rank computes everything.
        axis_order: axes, major first: how axes that shard one dim are nested.
        fixed_axes: axes that the user configured; propagation does not change them.
    """

    splits: dict[str, OpSplit] = field(default_factory=dict)
    axis_order: tuple[str, ...] = ()
    fixed_axes: tuple[str, ...] = ()

    def input_state(self, axis: str, position: int) -> State:
        """Return the state that an input must have along an axis."""
        if axis not in self.splits:
            return REPLICATED
        return self.splits[axis].in_states[position]

    def output_state(self, axis: str, position: int) -> State:
        """Return the state that an output has along an axis."""
        if axis not in self.splits:
            return REPLICATED
        return self.splits[axis].out_states[position]

    def sums_input_grad(self, axis: str, position: int) -> bool:
        """
        Return whether an input is replicated and each rank uses it for another part.

        Its gradients along the axis are then terms of a sum.
        """
        split = self.splits.get(axis)
        return (
            split is not None
            and not split.is_replicated
            and split.in_states[position] is REPLICATED
        )

    def input_layout(self, position: int, ndim: int) -> L:
        """Return the layout that an input with ``ndim`` dims must have."""
        return layout_of(
            {axis: split.in_states[position] for axis, split in self.splits.items()},
            self.axis_order,
            ndim,
        )

    def output_layout(self, position: int, ndim: int) -> L:
        """Return the layout that an output with ``ndim`` dims has."""
        return layout_of(
            {axis: split.out_states[position] for axis, split in self.splits.items()},
            self.axis_order,
            ndim,
        )


@dataclass(frozen=True)
class InterleavedSplit:
    """
    How a rank computes an operator in parts.

    Attributes:
        parts: their number.
        split: the state of each input and output along the axis of the parts.
    """

    parts: int
    split: OpSplit


def part_grid(grid: Grid, parts: int) -> Grid:
    """Return a grid with the axis of the parts: part k of rank r is its rank r * parts + k."""
    return Grid((*grid.names, PART_AXIS), (*grid.sizes, parts))


def add_part_split(sharding: OperatorSharding, given: InterleavedSplit) -> OperatorSharding:
    """Return the sharding of an operator with the parts of each rank as the innermost axis."""
    splits = {**sharding.splits, PART_AXIS: given.split}
    return OperatorSharding(splits, (*sharding.axis_order, PART_AXIS), sharding.fixed_axes)


def layout_of(states: dict[str, State], order: tuple[str, ...], ndim: int) -> L:
    """Return the layout of a tensor from its state along each axis."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    sums = []
    for axis in order:
        state = states.get(axis)
        if state == PARTIAL:
            sums.append(axis)
        elif state is not None:
            dims[state].append(axis)
    return L(*map(tuple, dims), sums=tuple(sums))


def states_of(layout: L) -> dict[str, State]:
    """Return the state along each axis that a layout names."""
    found: dict[str, State] = {axis: dim for dim, axes in enumerate(layout.dims) for axis in axes}
    return found | dict.fromkeys(layout.sums, PARTIAL)


@dataclass
class UserLayouts:
    """
    What the user configured for a graph.

    Attributes:
        shardings: by index of the operator.
        weights: by index of the tensor.
        results: layouts of results, by index of the operator.
        replicated: operators that need no rule.
        interleaved: operators that run in parts, by index.
        entry_names: the name of the entry of each operator (by its index) and weight (by -1 -
            index).
    """

    shardings: dict[int, OperatorSharding] = field(default_factory=dict)
    weights: dict[int, L] = field(default_factory=dict)
    results: dict[int, L] = field(default_factory=dict)
    replicated: set[int] = field(default_factory=set)
    entry_names: dict[int, str] = field(default_factory=dict)
    interleaved: dict[int, InterleavedSplit] = field(default_factory=dict)


@dataclass
class OperatorPlan:
    """
    A sharded graph.

    Attributes:
        grid: the tensor axes.
        shardings: one per operator of the graph.
        weights: how parameters are stored, by index of the tensor.
        grad_sums: axes over which gradients of parameters are all-reduced once per step, by index
            of the tensor.
        out_layouts: tensors that are redistributed where they are made: the user gave an operator's
            ``out``.
        sharded_results: results that stay sharded on their last dim, by index of the tensor; all
            others are gathered.
        interleaved: operators that each rank computes in parts, by index.
        notes: inconsistencies that cost communication, for the reader.
    """

    graph: OperatorGraph
    grid: Grid
    shardings: list[OperatorSharding]
    weights: dict[int, L] = field(default_factory=dict)
    grad_sums: dict[int, tuple[str, ...]] = field(default_factory=dict)
    out_layouts: dict[int, L] = field(default_factory=dict)
    sharded_results: dict[int, L] = field(default_factory=dict)
    interleaved: dict[int, InterleavedSplit] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def source_layout(self, index: int) -> L:
        """Return the layout in which a tensor is made or stored."""
        for layouts in (self.weights, self.out_layouts):
            if index in layouts:
                return layouts[index]
        return self._output_layouts.get(index) or L(*[None] * len(self.graph.shape_of(index)))

    def result_layout(self, index: int) -> L:
        """Return the layout in which the model returns a tensor."""
        return self.sharded_results.get(index) or L(*[None] * len(self.graph.shape_of(index)))

    def keep_results_sharded(self) -> None:
        """
        Keep results sharded on their last dim (the vocabulary of logits), and on that dim only.
        """
        for value in self.graph.results:
            if isinstance(value, TensorRef) and len(self.graph.shape_of(value.index)) > 1:
                *dims, last = self.source_layout(value.index).dims
                if last and self.graph.tensors[value.index].dtype.is_floating_point:
                    self.sharded_results[value.index] = L(*[None] * len(dims), last)

    def grad_sum_axes(self, position: int, input_position: int) -> tuple[str, ...]:
        """
        Return the axes over which an operator must sum the gradient of an input.

        Axes of weights in `grad_sums` are left out: the optimizer sums these once per step.
        """
        index = self.graph.operators[position].inputs[input_position]
        if not self.graph.tensors[index].requires_grad:
            return ()
        sharding = self.shardings[position]
        summed = self.grad_sums.get(index, ())
        return tuple(
            axis
            for axis in self.grid.names
            if sharding.sums_input_grad(axis, input_position) and axis not in summed
        )

    def grad_share_axes(self, position: int, input_position: int) -> tuple[str, ...]:
        """
        Return the axes over which a weight's gradients are summed although this use is the same on
        all ranks.
        """
        summed = self.grad_sums.get(self.graph.operators[position].inputs[input_position], ())
        return tuple(
            axis
            for axis in summed
            if not self.shardings[position].sums_input_grad(axis, input_position)
        )

    @property
    def _output_layouts(self) -> dict[int, L]:
        found = self.__dict__.get("_layouts")
        if found is None:
            found = {}
            for operator, sharding in zip(self.graph.operators, self.shardings, strict=True):
                for position, index in enumerate(operator.outputs):
                    found[index] = sharding.output_layout(position, len(self.graph.shape_of(index)))
            self.__dict__["_layouts"] = found
        return found
