"""
Partition: from a plan to one rank's local graph, torch functions on local tensors with explicit
collectives.

The inputs of every operator are redistributed to the layouts of its sharding
(`redistribute.redistribution_path`). Each move of a tensor is made once, for all operators that use
it. The result is an `fx.GraphModule` without state. Autograd runs through it. Its arguments are, in
order:

* the model, whose submodules are called where needed (`segments`)
* the weights and buffers by name
* the tensors of the call
* what the pipeline stage before has sent
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.view import View
from pdrun.parallel.operators.graph.graph import Operator, TensorRef, iter_refs, replace_refs
from pdrun.parallel.operators.graph.recomputed import RecomputedCall
from pdrun.parallel.operators.interleaving.builder import PartBuilder
from pdrun.parallel.operators.plan import (
    InterleavedSplit,
    OperatorPlan,
    add_part_split,
    part_grid,
)
from pdrun.parallel.operators.program import LocalProgram, MoveModule
from pdrun.parallel.operators.redistribute import (
    LayoutMove,
    redistribution_path,
)
from pdrun.parallel.operators.rules.rule import LocalContext, make_local_call
from pdrun.parallel.operators.segments import UNIT_KEY, extract_segments, find_unit, get_item
from pdrun.parallel.operators.stages import StagePlan
from pdrun.parallel.tensor.vocab_cross_entropy import VocabShard

NO_OP_KINDS = ("constrain", "stop", "detach")
"""Kinds without a computation on a rank. The last two stop gradients."""


def build_local_program(
    plan: OperatorPlan,
    axes: MeshGroups,
    stage: StagePlan,
    units: list[str] | None = None,
    local_name: Callable[[str], str] = str,
    recomputed: frozenset[str] = frozenset(),
) -> LocalProgram:
    """
    Return what this rank runs.

    Args:
        stage: the operators of its stage, and what it receives and sends.
        units: paths of submodules that are called for their segment of the graph.
        local_name: maps the first name of a weight or buffer to its name in this rank's model.
        recomputed: names of operators whose results are not kept.
    """
    return ProgramBuilder(plan, axes, stage, units or [], local_name, recomputed).build()


class ProgramBuilder:
    """Builds the local graph of one rank."""

    def __init__(
        self,
        plan: OperatorPlan,
        axes: MeshGroups,
        stage: StagePlan,
        units: list[str],
        local_name: Callable[[str], str],
        recomputed: frozenset[str],
    ) -> None:
        self.plan = plan
        self.recomputed = recomputed
        self.axes = axes
        self.graph = plan.graph
        self.units = units
        self.stage = stage
        self.local_name = local_name
        self.grid: Grid = axes.grid
        self.root = nn.Module()
        self.local_graph = fx.Graph()
        self.nodes: dict[tuple[int, tuple[LayoutMove, ...]], fx.Node] = {}
        self.module_count = 0
        self.unit = ""
        """The submodule that is called for what is added."""
        self.parts = PartBuilder(self)

    def build(self) -> LocalProgram:
        """Build the local graph."""
        self.local_graph.placeholder("model")
        names = self._add_placeholders()
        for run in self.parts.find_runs(self.stage.operators):
            last_node = self.local_graph._root.prev
            unit = find_unit(self.graph.operators[run[0]].module, self.units)
            if unit != self.unit:
                self.parts.unit_nodes.clear()
            self.unit = unit
            if run[0] in self.plan.interleaved:
                self.parts.add_run(run)
            else:
                self._add_operator(run[0], self.graph.operators[run[0]])
            self._mark_unit(last_node, unit)
        self.unit = ""
        self.local_graph.output(self._build_results())
        self.local_graph.eliminate_dead_code(_is_impure)
        graph = self.local_graph
        if self.units:
            graph, names = extract_segments(self.root, graph, names)
        graph.lint()
        vocab_shards = {}
        if self.stage.is_last:
            vocab_shards = {
                position: self._vocab_shard(value.index)
                for position, value in enumerate(self.graph.results)
                if isinstance(value, TensorRef) and value.index in self.plan.sharded_results
            }
        module = fx.GraphModule(self.root, graph, "LocalGraph")
        return LocalProgram(self.plan, module, names, vocab_shards)

    def _build_results(self) -> list[Any]:
        if not self.stage.is_last:
            return [self._in_layout(index, layout, ()) for index, layout in self.stage.sent.items()]
        results = list(self.graph.results)
        for position, value in enumerate(results):
            if isinstance(value, TensorRef):
                layout = self.plan.result_layout(value.index)
                results[position] = self._in_layout(value.index, layout, ())
        return results

    def _vocab_shard(self, index: int) -> VocabShard:
        layout = self.plan.sharded_results[index]
        shape = self.graph.shape_of(index)
        return VocabShard(
            self.axes[layout.dims[-1]], shape[-1], *layout.box(self.grid, shape, self.axes.rank)[-1]
        )

    def _mark_unit(self, last_node: fx.Node, unit: str) -> None:
        """Set the submodule of all nodes after one."""
        node = last_node.next
        while unit and node is not self.local_graph._root:
            node.meta[UNIT_KEY] = unit
            node = node.next

    def _add_placeholders(self) -> list[str]:
        used = {
            index
            for position in self.stage.operators
            for index in self.graph.operators[position].inputs
        }
        if self.stage.is_last:
            used |= {value.index for value in self.graph.results if isinstance(value, TensorRef)}
        used |= set(self.stage.sent)
        names: list[str] = []
        for index, tensor in enumerate(self.graph.tensors):
            if (
                tensor.kind in ("param", "buffer")
                and index in used
                and index not in self.stage.received
            ):
                self.nodes[index, ()] = self.local_graph.placeholder(f"w_{len(names)}")
                names.append(self.local_name(tensor.name))
        for index, tensor in enumerate(self.graph.tensors):
            if tensor.kind == "constant" and index in used:
                self.root.register_buffer(
                    f"c_{index}", self.graph.constants[index].to(self.axes.device)
                )
                self.nodes[index, ()] = self.local_graph.get_attr(f"c_{index}")
        for position, tensor_index in enumerate(self.graph.inputs):
            node = self.local_graph.placeholder(f"x_{position}")
            if tensor_index is not None:
                self.nodes[tensor_index, ()] = node
        for position, index in enumerate(self.stage.received):
            self.nodes[index, ()] = self.local_graph.placeholder(f"t_{position}")
        return names

    def _in_layout(
        self,
        index: int,
        target: L,
        grad_sum_axes: tuple[str, ...],
        grad_share_axes: tuple[str, ...] = (),
    ) -> fx.Node:
        """Return a tensor in a layout. Missing moves are inserted."""
        joined = self.parts.joined_node(index, target, grad_sum_axes, grad_share_axes)
        if joined is not None:
            return joined
        source = self.stage.source_layout(self.plan, index)
        moves = self._find_path(index, source, target, grad_sum_axes, grad_share_axes)
        return self._apply_moves(index, (), moves)

    def _find_path(
        self, index: int, source: L, target: L, *grad_axes: tuple[str, ...]
    ) -> tuple[LayoutMove, ...]:
        view = View(self.grid, source, self.graph.shape_of(index))
        has_grad = self.graph.tensors[index].requires_grad
        return redistribution_path(view, target, has_grad, *grad_axes)

    def _apply_moves(
        self, index: int, done: tuple[LayoutMove, ...], rest: tuple[LayoutMove, ...]
    ) -> fx.Node:
        """Return a tensor after some moves. Moves that exist are shared."""
        node = self.nodes[index, done] if done else self.source_node(index)
        for move in rest:
            done = (*done, move)
            if (index, done) not in self.nodes:
                self.nodes[index, done] = self._insert_move(node, move)
            node = self.nodes[index, done]
        return node

    def _insert_move(self, node: fx.Node, move: LayoutMove) -> fx.Node:
        axis = self.axes.on_grid(move.after.grid)[move.axes]
        local_shape = move.after.local_shape(self.axes.rank)
        name = self.add_module(move.kind, MoveModule(move, axis, local_shape))
        return self.local_graph.call_module(name, (node,))

    def add_module(self, kind: str, module: nn.Module) -> str:
        """Add a module that the graph calls; return its name."""
        name = f"{kind}_{self.module_count}"
        self.module_count += 1
        self.root.add_module(name, module)
        return name

    def source_node(self, index: int) -> fx.Node:
        """Return a tensor in one piece as it is made, received or stored."""
        if (index, ()) not in self.nodes:
            self.nodes[index, ()] = self.parts.whole_node(index)
        return self.nodes[index, ()]

    def input_node(self, position: int, slot: int) -> fx.Node:
        """Return an input of an operator in the layout that the operator takes."""
        index = self.graph.operators[position].inputs[slot]
        wanted = self.plan.shardings[position].input_layout(slot, len(self.graph.shape_of(index)))
        sums = self.plan.grad_sum_axes(position, slot)
        return self._in_layout(index, wanted, sums, self.plan.grad_share_axes(position, slot))

    def move_result(self, index: int, made_layout: L, node: fx.Node) -> fx.Node:
        """Return a result of an operator in the layout that the user has given it."""
        self.nodes[index, ()] = node
        moves = self._find_path(index, made_layout, self.plan.out_layouts[index])
        return self._apply_moves(index, (), moves)

    # ---- operators ----------------------------------------------------------

    def _add_operator(self, position: int, operator: Operator) -> None:
        sharding = self.plan.shardings[position]
        inputs = [self.input_node(position, slot) for slot in range(len(operator.inputs))]
        context = local_context(self.plan, position, self.grid, self.axes.rank)
        result = self.call_operator(position, operator, inputs, context)
        for slot, index in enumerate(operator.outputs):
            node = result
            if operator.returns_list:
                node = self.local_graph.call_function(get_item, (result, slot))
            made_layout = sharding.output_layout(slot, len(self.graph.shape_of(index)))
            self.nodes[index, ()] = node
            if index in self.plan.out_layouts:
                self.nodes[index, ()] = self.move_result(index, made_layout, node)

    def context_of(self, position: int, given: InterleavedSplit, part: int) -> LocalContext:
        """Return what this rank computes of one part of an operator."""
        return local_context(self.plan, position, self.grid, self.axes.rank, given, part)

    def call_operator(
        self, position: int, operator: Operator, inputs: list[fx.Node], context: LocalContext
    ) -> fx.Node:
        """Return the result of an operator on this rank, or of one part of it."""
        if operator.kind in NO_OP_KINDS:
            if operator.kind == "constrain":
                return inputs[0]
            return self.local_graph.call_method("detach", (inputs[0],))
        target, args, kwargs = make_local_call(context)
        node_of_ref = dict(zip(_ref_ids(operator), inputs, strict=True))

        def node_of(ref: TensorRef) -> fx.Node:
            return node_of_ref[id(ref)]

        args, kwargs = (
            _on_device(replace_refs(values, node_of), self.axes.device) for values in (args, kwargs)
        )
        if operator.name in self.recomputed:
            name = self.add_module("recomputed", RecomputedCall(target))
            return self.local_graph.call_module(name, tuple(args), dict(kwargs))
        return self.local_graph.call_function(target, tuple(args), dict(kwargs))


def _on_device(value: Any, device: torch.device) -> Any:
    """
    Return arguments with this rank's device in place of devices: everything is on it.
    """
    if isinstance(value, torch.device):
        return device
    if isinstance(value, (list, tuple)):
        return type(value)(_on_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _on_device(item, device) for key, item in value.items()}
    return value


def _ref_ids(operator: Operator) -> list[int]:
    """Return the identities of an operator's references, in order."""
    return [id(ref) for ref in iter_refs(operator.args, operator.kwargs)]


def local_context(
    plan: OperatorPlan,
    position: int,
    grid: Grid,
    rank: int,
    interleaved: InterleavedSplit | None = None,
    part: int = 0,
) -> LocalContext:
    """
    Return one rank's part of an operator.

    Args:
        interleaved, part: one of the parts that the rank computes one after the other.
    """
    graph = plan.graph
    operator = plan.graph.operators[position]
    sharding = plan.shardings[position]
    if interleaved is not None:
        sharding = add_part_split(sharding, interleaved)
        grid, rank = part_grid(grid, interleaved.parts), rank * interleaved.parts + part
    in_shapes = tuple(graph.shape_of(index) for index in operator.inputs)
    out_shapes = tuple(graph.shape_of(index) for index in operator.outputs)
    coordinate = grid.coordinate(rank)
    return LocalContext(
        operator,
        sharding.splits,
        in_shapes,
        out_shapes,
        tuple(
            sharding.input_layout(slot, len(shape)).box(grid, shape, rank)
            for slot, shape in enumerate(in_shapes)
        ),
        tuple(
            sharding.output_layout(slot, len(shape)).box(grid, shape, rank)
            for slot, shape in enumerate(out_shapes)
        ),
        {axis: coordinate[axis] for axis in sharding.splits},
        {axis: grid.degree(axis) for axis in sharding.splits},
    )


def _is_impure(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output")
