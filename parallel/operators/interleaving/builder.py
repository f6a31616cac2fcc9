"""
The nodes of operators in parts, in a local graph.

Runs of such operators are added part by part, up to the next collective of either pass: part 0
starts its collective, then part 1 computes, and so on. Collectives start right after what they send
is made, and are awaited right before what they bring is used. As autograd takes the last operator
first, this holds for the backward pass, too. A tensor in parts is joined where an operator needs it
in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.nn import functional

from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L, shard_range
from pdrun.parallel.operators.graph.graph import Operator
from pdrun.parallel.operators.interleaving.moves import StartMoves, WaitForMoves
from pdrun.parallel.operators.interleaving.paths import (
    PartMoves,
    PartPaths,
    PartState,
    group_moves,
    sends_something,
    state_of_result,
)
from pdrun.parallel.operators.plan import InterleavedSplit, OperatorPlan
from pdrun.parallel.operators.redistribute import LayoutMove
from pdrun.parallel.operators.rules.rule import PARTIAL, LocalContext
from pdrun.parallel.operators.segments import UNIT_KEY, find_unit, get_item
from pdrun.parallel.operators.stages import StagePlan


class ProgramParts(Protocol):
    """What a `PartBuilder` uses of the builder of the local graph."""

    plan: OperatorPlan
    stage: StagePlan
    grid: Grid
    axes: MeshGroups
    units: list[str]
    unit: str
    local_graph: fx.Graph
    nodes: dict[tuple[int, tuple[LayoutMove, ...]], fx.Node]

    def add_module(self, kind: str, module: nn.Module) -> str:
        """Add a module that the graph calls; return its name."""

    def source_node(self, index: int) -> fx.Node:
        """Return a tensor in one piece as it is made, received or stored."""

    def input_node(self, position: int, slot: int) -> fx.Node:
        """Return an input of an operator in the layout that the operator takes."""

    def move_result(self, index: int, made_layout: L, node: fx.Node) -> fx.Node:
        """Return a result of an operator in the layout that the user has given it."""

    def context_of(self, position: int, given: InterleavedSplit, part: int) -> LocalContext:
        """Return what this rank computes of one part of an operator."""

    def call_operator(
        self, position: int, operator: Operator, inputs: list[fx.Node], context: LocalContext
    ) -> fx.Node:
        """Return the result of one part of an operator."""


class PartBuilder:
    """
    Adds the nodes of operators in parts.

    Args:
        program: builds the rest of the local graph.
    """

    def __init__(self, program: ProgramParts) -> None:
        self.program = program
        self.plan = program.plan
        self.paths = PartPaths(program.plan, program.stage, program.grid)
        self.needed = self.paths.all_paths() if self.plan.interleaved else {}
        self.nodes: dict[tuple[int, PartState, PartMoves, int], fx.Node] = {}
        """Part k of a tensor after some moves."""
        self.started: dict[tuple[int, PartState, PartMoves, int], fx.Node] = {}
        """The start of the last moves to it."""
        self.masks: dict[int, fx.Node] = {}
        self.unit_nodes: set[fx.Node] = set()
        """Nodes that were added since the current unit began."""

    # ---- runs of operators --------------------------------------------------

    def find_runs(self, positions: tuple[int, ...]) -> Iterator[list[int]]:
        """Yield operators in order: runs of those in parts, and all others one by one."""
        run: list[int] = []
        for position in positions:
            if run and not self._continues(run, position):
                yield run
                run = []
            run.append(position)
        if run:
            yield run

    def _continues(self, run: list[int], position: int) -> bool:
        """Return whether an operator belongs to a run."""
        here, before = (self.plan.interleaved.get(one) for one in (position, run[-1]))
        if here is None or before is None or here.parts != before.parts:
            return False
        operators = self.plan.graph.operators
        units = {find_unit(operators[one].module, self.program.units) for one in (position, run[0])}
        made = {index for one in run for index in operators[one].outputs}
        return len(units) == 1 and not any(
            index in made
            and (
                index in self.plan.out_layouts  # which move behind the run
                or self.paths.input_state(position, slot) is None
                or self.paths.input_moves(position, slot) is None
            )
            for slot, index in enumerate(operators[position].inputs)
        )

    def add_run(self, run: list[int]) -> None:
        """Add a run of operators in parts."""
        operators = self.plan.graph.operators
        parts = self.plan.interleaved[run[0]].parts
        made_by = {index: one for one in run for index in operators[one].outputs}
        depths: dict[int, int] = {}  # collectives before an operator, within the run
        for position in run:
            depths[position] = 0
            for slot, index in enumerate(operators[position].inputs):
                path = self.paths.input_moves(position, slot)
                if index in made_by and path is not None:
                    depth = depths[made_by[index]] + sends_something(path[1])
                    depths[position] = max(depths[position], depth)
            self._add_mask(position)
        for position in run:
            for slot, index in enumerate(operators[position].inputs):
                if index not in made_by:
                    self._start_early(position, slot)
        for _, part, position in sorted(
            (depths[position], part, position) for position in run for part in range(parts)
        ):
            self._add_part(position, part)
        for position in run:
            self._move_results(position)

    def _start_early(self, position: int, slot: int) -> None:
        """Start the moves of all parts of what a run gets."""
        path = self.paths.input_moves(position, slot)
        state = self.paths.input_state(position, slot)
        if path is None or state is None or not path[1]:
            return
        index = self.plan.graph.operators[position].inputs[slot]
        first = group_moves(path[1], self.needed[index, state])[0]
        for part in range(state.parts):
            self._start(index, state, (), first, part)

    def _add_part(self, position: int, part: int) -> None:
        """Add one part of an operator."""
        operator = self.plan.graph.operators[position]
        given = self.plan.interleaved[position]
        inputs = [self._input_node(position, slot, part) for slot in range(len(operator.inputs))]
        context = self.program.context_of(position, given, part)
        if position in self.masks:
            args = (inputs[0], self.masks[position], context.out_boxes[0])
            result = self._keep(self.program.local_graph.call_function(apply_mask, args))
        else:
            result = self._keep(self.program.call_operator(position, operator, inputs, context))
        for slot, index in enumerate(operator.outputs):
            node = result
            if operator.returns_list:
                node = self._keep(self.program.local_graph.call_function(get_item, (result, slot)))
            state = state_of_result(given, slot)
            self.nodes[index, state, (), part] = node

    def _move_results(self, position: int) -> None:
        """Move results for which the user has given a layout."""
        given = self.plan.interleaved[position]
        for slot, index in enumerate(self.plan.graph.operators[position].outputs):
            if index not in self.plan.out_layouts:
                continue
            state = state_of_result(given, slot)
            moves = self.paths.out_moves(position, slot)
            if moves is None:
                made = [self.nodes[index, state, (), part] for part in range(state.parts)]
                layout = self.plan.shardings[position].output_layout(
                    slot, len(self.plan.graph.shape_of(index))
                )
                joined = self._join(made, state)
                for part in range(state.parts):
                    del self.nodes[index, state, (), part]
                self.program.nodes[index, ()] = self.program.move_result(index, layout, joined)
                continue
            for part in range(state.parts):
                for group in group_moves(moves, ()):
                    started = self._insert_start(self.nodes[index, state, (), part], group, part)
                    self.nodes[index, state, (), part] = self._insert_wait(started)

    def _add_mask(self, position: int) -> None:
        """Draw the mask of a dropout, once for all parts, in the order of the model."""
        operator = self.plan.graph.operators[position]
        if operator.kind != "dropout":
            return
        p, is_training = operator.get_arg(1, "p"), operator.get_arg(2, "train")
        if p and is_training:
            tensor = self.plan.graph.tensors[operator.outputs[0]]
            args = (tuple(tensor.shape), p, tensor.dtype, self.program.axes.device)
            node = self.program.local_graph.call_function(draw_mask, args)
            self.masks[position] = self._keep(node)

    # ---- tensors ------------------------------------------------------------

    def _input_node(self, position: int, slot: int, part: int) -> fx.Node:
        """Return an input of one part of an operator."""
        state = self.paths.input_state(position, slot)
        path = self.paths.input_moves(position, slot)
        index = self.plan.graph.operators[position].inputs[slot]
        if state is None:
            return self._keep(self.program.input_node(position, slot))
        if path is not None:
            return self._moved_part(index, state, path[1], part)
        whole = self.program.input_node(position, slot)
        layout = self.plan.shardings[position].input_layout(
            slot, len(self.plan.graph.shape_of(index))
        )
        return self._keep(self._slice_part(whole, index, layout, state, part))

    def joined_node(self, index: int, target: L, *grad_axes: tuple[str, ...]) -> fx.Node | None:
        """Return a tensor in one piece whose parts move by themselves; None if they cannot."""
        path = self.paths.joined_moves(index, target, *grad_axes)
        if path is None:
            return None
        state, moves = path
        if (index, moves) not in self.program.nodes:
            parts = [self._moved_part(index, state, moves, part) for part in range(state.parts)]
            self.program.nodes[index, moves] = self._join(parts, state)
        return self.program.nodes[index, moves]

    def whole_node(self, index: int) -> fx.Node:
        """Return a tensor that was made in parts, joined."""
        state = self.paths.made[index]
        parts = [self._part_node(index, state, part) for part in range(state.parts)]
        return self._join(parts, state)

    def _join(self, parts: list[fx.Node], state: PartState) -> fx.Node:
        if state.dim == PARTIAL:
            return self._keep(self.program.local_graph.call_function(add_parts, tuple(parts)))
        return self._keep(self.program.local_graph.call_function(torch.cat, (parts, state.dim)))

    def _moved_part(self, index: int, state: PartState, moves: PartMoves, part: int) -> fx.Node:
        """Return a part after some moves."""
        done: PartMoves = ()
        for group in group_moves(moves, self.needed[index, state]):
            started = self._start(index, state, done, group, part)
            done += group
            if (index, state, done, part) not in self.nodes:
                self.nodes[index, state, done, part] = self._insert_wait(started)
        if not done:
            return self._part_node(index, state, part)
        return self.nodes[index, state, done, part]

    def _part_node(self, index: int, state: PartState, part: int) -> fx.Node:
        """Return a part as it is made, or a slice of the tensor."""
        key = (index, state, (), part)
        if key not in self.nodes:
            layout = self.program.stage.source_layout(self.plan, index)
            whole = self.program.source_node(index)
            self.nodes[key] = self._keep(self._slice_part(whole, index, layout, state, part))
        return self.nodes[key]

    def _slice_part(
        self, whole: fx.Node, index: int, layout: L, state: PartState, part: int
    ) -> fx.Node:
        shape = self.plan.graph.shape_of(index)
        box = layout.box(self.program.grid, shape, self.program.axes.rank)
        low, high = box[state.dim]
        start, stop = shard_range(high - low, state.parts, part)
        args = (whole, state.dim, start, stop - start)
        return self.program.local_graph.call_function(torch.narrow, args)

    def _start(
        self, index: int, state: PartState, done: PartMoves, group: PartMoves, part: int
    ) -> fx.Node:
        """Return the start of some moves of a part."""
        key = (index, state, done + group, part)
        if key not in self.started:
            node = self.nodes[index, state, done, part] if done else None
            if node is None:
                node = self._part_node(index, state, part)
            self.started[key] = self._insert_start(node, group, part)
        return self.started[key]

    def _insert_start(self, node: fx.Node, group: PartMoves, part: int) -> fx.Node:
        """
        Add the start of some moves right behind a node; at the end if that is of another unit.
        """
        graph = self.program.local_graph
        unit = self.program.unit
        is_near = node.op != "placeholder" and not node.meta.get(UNIT_KEY, "")
        if unit:
            is_near = node in self.unit_nodes
        name = self.program.add_module("start", self._make_start(group, part))
        if not is_near:
            return self._keep(graph.call_module(name, (node,)))
        with graph.inserting_after(node):
            started = graph.call_module(name, (node,))
        if unit:
            started.meta[UNIT_KEY] = unit
        return self._keep(started)

    def _make_start(self, group: PartMoves, part: int) -> StartMoves:
        axes = [self.program.axes[move.axes] for move in group]
        parts = group[0].after.grid.sizes[-1]
        rank = self.program.axes.rank * parts + part
        return StartMoves(group, axes, [move.after.local_shape(rank) for move in group])

    def _insert_wait(self, started: fx.Node) -> fx.Node:
        """Add a wait at the end; it is in the unit of its start."""
        name = self.program.add_module("wait", WaitForMoves())
        return self._keep(self.program.local_graph.call_module(name, (started,)))

    def _keep(self, node: fx.Node) -> fx.Node:
        self.unit_nodes.add(node)
        return node


def draw_mask(
    shape: tuple[int, ...], p: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return what a dropout of a tensor multiplies its elements by."""
    return functional.dropout(torch.ones(shape, dtype=dtype, device=device), p, True)


def apply_mask(x: torch.Tensor, mask: torch.Tensor, box: Any) -> torch.Tensor:
    """Return a part of a tensor after dropout; ``box`` is its (low, high) in every dim."""
    return x * mask[tuple(slice(low, high) for low, high in box)].to(x.dtype)


def add_parts(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return the sum of the parts of a product."""
    for other in others:
        first = first + other
    return first
