"""
The plan: how every operator, weight and result of a graph is cut over the tensor axes of a mesh.

A plan is data. `propagate` makes it, `partition` turns it into what one rank runs, `explain` into
text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.graph import OperatorGraph, TensorRef
from pdrun.parallel.operators.rules.rule import PARTIAL, REPLICATED, OpSplit, State


@dataclass(frozen=True)
class OperatorSharding:
    """
    How one operator is cut.

    Attributes:
        splits: along each axis that cuts it; along all others every rank computes everything.
        order: axes, major first: how those that cut one dim are nested.
        fixed: axes along which the user said so, which propagation leaves alone.
    """

    splits: dict[str, OpSplit] = field(default_factory=dict)
    axis_order: tuple[str, ...] = ()
    fixed_axes: tuple[str, ...] = ()

    def input_state(self, axis: str, position: int) -> State:
        """Return what the operator wants of an input along an axis."""
        split = self.splits.get(axis)
        return REPLICATED if split is None else split.in_states[position]

    def output_state(self, axis: str, position: int) -> State:
        """Return what the operator makes of an output along an axis."""
        split = self.splits.get(axis)
        return REPLICATED if split is None else split.out_states[position]

    def sums_input_grad(self, axis: str, position: int) -> bool:
        """
        Whether an input is whole and each rank along the axis uses it for another part: its
        gradient is a term.
        """
        split = self.splits.get(axis)
        return (
            split is not None
            and not split.is_replicated
            and split.in_states[position] is REPLICATED
        )

    def input_layout(self, position: int, ndim: int) -> L:
        """Return the layout that an input of ``rank`` dims has to have."""
        return layout_of(
            {axis: split.in_states[position] for axis, split in self.splits.items()},
            self.axis_order,
            ndim,
        )

    def output_layout(self, position: int, ndim: int) -> L:
        """Return the layout that an output of ``rank`` dims has."""
        return layout_of(
            {axis: split.out_states[position] for axis, split in self.splits.items()},
            self.axis_order,
            ndim,
        )


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
class OperatorPlan:
    """
    A whole graph, cut.

    Attributes:
        grid: the tensor axes.
        choices: one for each operator of the graph.
        weights: how parameters are stored, by index of the tensor.
        sums: axes over which gradients of parameters are added up once a step, by index of the
            tensor.
        placed: tensors that are laid out otherwise as soon as they are made: the user gave an
            operator's ``out``.
        kept: results that stay cut along their last dim, by index of the tensor; all others are
            made whole.
        notes: what a reader should know: inconsistencies that cost communication.
    """

    graph: OperatorGraph
    grid: Grid
    shardings: list[OperatorSharding]
    weights: dict[int, L] = field(default_factory=dict)
    grad_sums: dict[int, tuple[str, ...]] = field(default_factory=dict)
    out_layouts: dict[int, L] = field(default_factory=dict)
    sharded_results: dict[int, L] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def source_layout(self, index: int) -> L:
        """Return how a tensor lies where it comes from."""
        for given in (self.weights, self.out_layouts):
            if index in given:
                return given[index]
        return self._output_layouts.get(index) or L(*[None] * len(self.graph.shape_of(index)))

    def result_layout(self, index: int) -> L:
        """Return the layout in which a tensor that the model returns leaves it."""
        return self.sharded_results.get(index) or L(*[None] * len(self.graph.shape_of(index)))

    def keep_results_sharded(self) -> None:
        """
        Leave results that are cut along their last dim (the words of logits) cut there, and there
        alone.
        """
        for value in self.graph.results:
            if isinstance(value, TensorRef) and len(self.graph.shape_of(value.index)) > 1:
                *dims, last = self.source_layout(value.index).dims
                if last and self.graph.tensors[value.index].dtype.is_floating_point:
                    self.sharded_results[value.index] = L(*[None] * len(dims), last)

    def grad_sum_axes(self, position: int, input_position: int) -> tuple[str, ...]:
        """
        Return the axes along which an input of an operator has to fan out, because its gradients
        are terms of a sum.

        Those of weights are added up by whoever updates them (`sums`).
        """
        index = self.graph.operators[position].inputs[input_position]
        if not self.graph.tensors[index].requires_grad:
            return ()
        choice = self.shardings[position]
        summed = self.grad_sums.get(index, ())
        return tuple(
            axis
            for axis in self.grid.names
            if choice.sums_input_grad(axis, input_position) and axis not in summed
        )

    def grad_share_axes(self, position: int, input_position: int) -> tuple[str, ...]:
        """
        Return the axes over which gradients of a weight are added up though this use computes no
        other part.
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
            for operator, choice in zip(self.graph.operators, self.shardings, strict=True):
                for place, index in enumerate(operator.outputs):
                    found[index] = choice.output_layout(place, len(self.graph.shape_of(index)))
            self.__dict__["_layouts"] = found
        return found
