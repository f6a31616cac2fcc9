"""
How tensors get to operators in parts, and from them to operators in one piece.

A part moves by itself where no move needs another part. Otherwise the tensor is joined and moves in
one piece, of which each part is a slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.view import View
from pdrun.parallel.operators.graph.graph import TensorRef
from pdrun.parallel.operators.plan import PART_AXIS, InterleavedSplit, OperatorPlan, part_grid
from pdrun.parallel.operators.redistribute import (
    ALL_GATHER,
    ALL_GATHER_SUM_GRAD,
    ALL_REDUCE,
    ALL_TO_ALL,
    COPY_TO_AXIS,
    REDUCE_SCATTER,
    SLICE,
    LayoutMove,
    redistribution_path,
)
from pdrun.parallel.operators.rules.rule import PARTIAL
from pdrun.parallel.operators.stages import StagePlan

FORWARD_KINDS = frozenset({ALL_REDUCE, ALL_GATHER, ALL_GATHER_SUM_GRAD, REDUCE_SCATTER, ALL_TO_ALL})
"""Moves that send something in the forward pass."""
BACKWARD_KINDS = frozenset({COPY_TO_AXIS, ALL_GATHER_SUM_GRAD, SLICE, REDUCE_SCATTER, ALL_TO_ALL})
"""Moves that send something in the backward pass."""
PartMoves = tuple[LayoutMove, ...]


@dataclass(frozen=True)
class PartState:
    """The number of parts of a tensor and their dim; `PARTIAL`: the parts are terms of a sum."""

    parts: int
    dim: int


def state_of_result(given: InterleavedSplit, slot: int) -> PartState:
    """Return the state in which an operator in parts makes a result."""
    dim = given.split.out_states[slot]
    assert dim is not None  # the choice of the split
    return PartState(given.parts, dim)


class PartPaths:
    """
    The moves of parts in one stage of a plan.

    Args:
        grid: of the layouts: the tensor axes, or all axes.
    """

    def __init__(self, plan: OperatorPlan, stage: StagePlan, grid: Grid) -> None:
        self.plan = plan
        self.stage = stage
        self.grid = grid
        self.made: dict[int, PartState] = {}
        """The state of tensors that are made in parts, after the move to the layout of `out=`."""
        for position in stage.operators:
            given = plan.interleaved.get(position)
            if given is None:
                continue
            for slot, index in enumerate(plan.graph.operators[position].outputs):
                state = state_of_result(given, slot)
                if index not in plan.out_layouts or self.out_moves(position, slot) is not None:
                    self.made[index] = state

    def out_moves(self, position: int, slot: int) -> PartMoves | None:
        """Return the moves of each part of a result to the layout of ``out=``; None: joined."""
        given = self.plan.interleaved[position]
        index = self.plan.graph.operators[position].outputs[slot]
        state = state_of_result(given, slot)
        if state.dim == PARTIAL:
            return None
        shape = self.plan.graph.shape_of(index)
        source = self.plan.shardings[position].output_layout(slot, len(shape))
        target = self.plan.out_layouts[index]
        return self._find_moves(index, source, target, state)

    def input_state(self, position: int, slot: int) -> PartState | None:
        """Return the state in which an operator takes an input; None: in one piece."""
        given = self.plan.interleaved.get(position)
        dim = None if given is None else given.split.in_states[slot]
        return None if given is None or dim is None else PartState(given.parts, dim)

    def input_moves(self, position: int, slot: int) -> tuple[PartState, PartMoves] | None:
        """
        Return in which parts an input moves, and how; None if it moves in one piece.

        Weights move in one piece, as they are stored.
        """
        operator = self.plan.graph.operators[position]
        index = operator.inputs[slot]
        target = self.plan.shardings[position].input_layout(
            slot, len(self.plan.graph.shape_of(index))
        )
        sums = self.plan.grad_sum_axes(position, slot)
        shares = self.plan.grad_share_axes(position, slot)
        state = self.input_state(position, slot)
        if state is None:
            return self.joined_moves(index, target, sums, shares)
        if self.plan.graph.tensors[index].kind in ("param", "buffer", "constant"):
            return None
        if self.made.get(index, state) != state:
            return None
        source = self.stage.source_layout(self.plan, index)
        moves = self._find_moves(index, source, target, state, sums, shares)
        return None if moves is None else (state, moves)

    def joined_moves(
        self, index: int, target: L, *grad_axes: tuple[str, ...]
    ) -> tuple[PartState, PartMoves] | None:
        """Return how the parts of a tensor move before they are joined; None: joined first."""
        state = self.made.get(index)
        if state is None or state.dim == PARTIAL:
            return None
        source = self.stage.source_layout(self.plan, index)
        moves = self._find_moves(index, source, target, state, *grad_axes)
        return None if moves is None else (state, moves)

    def _find_moves(
        self, index: int, source: L, target: L, state: PartState, *grad_axes: tuple[str, ...]
    ) -> PartMoves | None:
        """Return the moves of each part; None if parts cannot move by themselves."""
        tensor = self.plan.graph.tensors[index]
        grid = part_grid(self.grid, state.parts)
        view = View(grid, _with_part(source, state.dim), tensor.shape)
        target = _with_part(target, state.dim)
        moves = redistribution_path(view, target, tensor.requires_grad, *grad_axes)
        if any(move.after.grid != grid or PART_AXIS in move.axes for move in moves):
            return None
        return moves

    def all_paths(self) -> dict[tuple[int, PartState], set[PartMoves]]:
        """Return every path by which parts of a tensor move."""
        found: dict[tuple[int, PartState], set[PartMoves]] = {}

        def add(index: int, path: tuple[PartState, PartMoves] | None) -> None:
            if path is not None:
                found.setdefault((index, path[0]), set()).add(path[1])

        for position in self.stage.operators:
            for slot, index in enumerate(self.plan.graph.operators[position].inputs):
                add(index, self.input_moves(position, slot))
        for index, target in self.ends():
            add(index, self.joined_moves(index, target))
        return found

    def ends(self) -> Iterator[tuple[int, L]]:
        """Yield what the stage sends or returns, with its layout."""
        if not self.stage.is_last:
            yield from self.stage.sent.items()
            return
        for value in self.plan.graph.results:
            if isinstance(value, TensorRef):
                yield value.index, self.plan.result_layout(value.index)


def group_moves(moves: PartMoves, others: Iterable[PartMoves]) -> list[PartMoves]:
    """
    Return moves in groups that each send at most once forward and once backward.

    Args:
        others: paths of the same tensor; what is common to two paths is a separate group.
    """
    ends = {_count_common(moves, other) for other in others if other != moves}
    groups: list[list[LayoutMove]] = [[]]
    for at, move in enumerate(moves):
        sends_twice = any(
            move.kind in kinds and any(one.kind in kinds for one in groups[-1])
            for kinds in (FORWARD_KINDS, BACKWARD_KINDS)
        )
        if at in ends or sends_twice:
            groups.append([])
        groups[-1].append(move)
    return [tuple(group) for group in groups if group]


def sends_something(moves: Iterable[LayoutMove]) -> bool:
    """Return whether moves send something, forward or backward."""
    return any(move.kind in FORWARD_KINDS | BACKWARD_KINDS for move in moves)


def _count_common(moves: Sequence[LayoutMove], other: Sequence[LayoutMove]) -> int:
    count = 0
    while count < min(len(moves), len(other)) and moves[count] == other[count]:
        count += 1
    return count


def _with_part(layout: L, dim: int) -> L:
    """Return a layout whose dim is in parts, too."""
    dims = [(*axes, PART_AXIS) if at == dim else axes for at, axes in enumerate(layout.dims)]
    return L(*dims, sums=layout.sums)
