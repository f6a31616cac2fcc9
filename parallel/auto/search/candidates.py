"""
Candidates: the ways in which one operator can be split over all tensor axes.

A candidate has one split of the operator's rule for each axis. What the user configured is fixed
before anything is searched. Operators without a rule, and constants (masks and positions, which
depend on buffers and numbers alone), have one candidate: every rank computes them in full.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.operators.plan import OperatorSharding, UserLayouts
from pdrun.parallel.operators.rules.rule import (
    PARTIAL,
    REPLICATED,
    OpSplit,
    list_splits,
    view_operator,
)

MAX_IMBALANCE = 1.25
"""Largest shard of a dim, relative to equal shards, up to which a candidate is considered."""


@dataclass(frozen=True)
class Candidate:
    """
    One way to split an operator.

    Attributes:
        in_layouts, out_layouts: of its inputs and outputs.
        grad_sums: for each input the axes along which its gradients are terms of a sum.
    """

    sharding: OperatorSharding
    in_layouts: tuple[L, ...]
    out_layouts: tuple[L, ...]
    grad_sums: tuple[tuple[str, ...], ...]


class CandidateLists:
    """
    The candidates of the operators of one graph, made when they are needed.

    Attributes:
        without_rule: operators that no rule splits.
        constants: operators that depend on buffers and numbers alone.
    """

    def __init__(self, graph: OperatorGraph, grid: Grid, user: UserLayouts) -> None:
        self.graph = graph
        self.grid = grid
        self.user = user
        self.axes = [axis for axis in grid.names if grid.degree(axis) > 1]
        self.without_rule: list[int] = []
        self._splits: dict[int, list[OpSplit]] = {}
        self._lists: dict[int, tuple[Candidate, ...]] = {}
        self.constants = _find_constants(graph, user)
        for position, operator in enumerate(graph.operators):
            view = view_operator(graph, operator)
            splits = None
            if position not in user.replicated:
                splits = list_splits(view)
                if splits is None:
                    self.without_rule.append(position)
            replicated = OpSplit(
                (REPLICATED,) * len(view.in_shapes), (REPLICATED,) * len(view.out_shapes)
            )
            if splits is None or position in self.constants:
                splits = [replicated]
            self._splits[position] = splits

    def of(self, position: int) -> tuple[Candidate, ...]:
        """Return the candidates of an operator, the replicated one first if it is allowed."""
        if position not in self._lists:
            self._lists[position] = tuple(self._make_list(position))
        return self._lists[position]

    def index_of(self, position: int, sharding: OperatorSharding) -> int | None:
        """Return the index of the candidate with the splits of a sharding; None if it has none."""
        wanted = {
            axis: (split.in_states, split.out_states) for axis, split in sharding.splits.items()
        }
        for index, candidate in enumerate(self.of(position)):
            splits = candidate.sharding.splits
            if wanted == {
                axis: (split.in_states, split.out_states) for axis, split in splits.items()
            }:
                return index
        return None

    def _make_list(self, position: int) -> list[Candidate]:
        given = self.user.shardings.get(position)
        per_axis = []
        for axis in self.axes:
            splits = self._splits[position]
            if given is not None and axis in given.fixed_axes:
                splits = [given.splits.get(axis, splits[0])]
            per_axis.append(splits)
        order = self.grid.names
        if given is not None and given.axis_order:
            order = given.axis_order
        fixed = given.fixed_axes if given is not None else ()
        found = []
        for combination in itertools.product(*per_axis):
            splits_by_axis = {
                axis: split
                for axis, split in zip(self.axes, combination, strict=True)
                if not split.is_replicated
            }
            is_given = len(fixed) >= len(self.axes)
            if is_given or self._is_possible(position, splits_by_axis):
                sharding = OperatorSharding(splits_by_axis, order, fixed)
                found.append(make_candidate(self.graph, self.grid, position, sharding))
        if not found:  # the fixed axes allow no similar shards: keep them alone
            splits_by_axis = {} if given is None else dict(given.splits)
            sharding = OperatorSharding(splits_by_axis, order, fixed)
            found.append(make_candidate(self.graph, self.grid, position, sharding))
        return found

    def _is_possible(self, position: int, splits: dict[str, OpSplit]) -> bool:
        """Return whether the shards exist and are of similar sizes."""
        operator = self.graph.operators[position]
        for split in splits.values():
            parts = self.grid.group_size(
                tuple(axis for axis, other in splits.items() if other == split)
            )
            if split.must_divide and split.must_divide % parts:
                return False
        for side, tensors in (("in_states", operator.inputs), ("out_states", operator.outputs)):
            for slot, index in enumerate(tensors):
                parts_of_dim: dict[int, int] = {}
                for axis, split in splits.items():
                    state = getattr(split, side)[slot]
                    if state is not None and state != PARTIAL:
                        parts_of_dim[state] = parts_of_dim.get(state, 1) * self.grid.degree(axis)
                for dim, parts in parts_of_dim.items():
                    size = self.graph.shape_of(index)[dim]
                    if size < parts or -(-size // parts) * parts > size * MAX_IMBALANCE:
                        return False
        return True


def make_candidate(
    graph: OperatorGraph, grid: Grid, position: int, sharding: OperatorSharding
) -> Candidate:
    """Return the candidate of a sharding."""
    operator = graph.operators[position]
    ins = tuple(
        sharding.input_layout(slot, len(graph.shape_of(index)))
        for slot, index in enumerate(operator.inputs)
    )
    outs = tuple(
        sharding.output_layout(slot, len(graph.shape_of(index)))
        for slot, index in enumerate(operator.outputs)
    )
    sums = tuple(
        tuple(axis for axis in grid.names if sharding.sums_input_grad(axis, slot))
        if graph.tensors[index].requires_grad
        else ()
        for slot, index in enumerate(operator.inputs)
    )
    return Candidate(sharding, ins, outs, sums)


def _find_constants(graph: OperatorGraph, user: UserLayouts) -> frozenset[int]:
    """
    Return the operators that depend on buffers, numbers and integers of the batch alone: masks and
    positions.
    """
    derived = [
        tensor.kind in ("buffer", "constant")
        or (tensor.kind == "input" and not tensor.dtype.is_floating_point)
        for tensor in graph.tensors
    ]
    found = set()
    for position, operator in enumerate(graph.operators):
        if all(derived[index] for index in operator.inputs):
            for index in operator.outputs:
                derived[index] = True
            if position not in user.shardings:
                found.add(position)
    return frozenset(found)
