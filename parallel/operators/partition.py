"""
Partition: from a plan to what one rank runs, a graph of torch functions over local tensors with
explicit collectives.

Every operator's inputs are brought to the layouts that its choice wants (`convert.way`), each
(tensor, moves) once, however many operators use it. The result is an `fx.GraphModule` whose
arguments are the weights and buffers by name, then the tensors of the call, then those that the
pipeline stage before has sent: it holds no state, and autograd runs through it. The first argument
is the model, whose submodules are called where they have to be (`segments`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from pdrun.parallel.comm.groups import Axes
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators import redistribute as convert
from pdrun.parallel.operators.graph.graph import Operator, Ref, refs, substitute
from pdrun.parallel.operators.plan import Plan
from pdrun.parallel.operators.program import MoveModule, Program
from pdrun.parallel.operators.redistribute import Move, way
from pdrun.parallel.operators.rules.rule import Place, call_of
from pdrun.parallel.operators.segments import UNIT, item, segmented, unit_of
from pdrun.parallel.operators.stages import Part
from pdrun.parallel.tensor.vocab_cross_entropy import Words

NOTHING = ("constrain", "stop", "detach")
"""Kinds that a rank has nothing to compute for; the last two end gradients."""


def partition(
    plan: Plan,
    axes: Axes,
    part: Part,
    units: list[str] | None = None,
    held: Callable[[str], str] = str,
) -> Program:
    """
    Return what this rank runs.

    Args:
        part: the operators of its stage, and what comes in and goes out.
        units: paths of submodules that are to be called for their part of the graph.
        held: from the first name of a weight or buffer to the one that this rank's model has it
            under.
    """
    return _Partition(plan, axes, part, units or [], held).run()


class _Partition:
    def __init__(
        self, plan: Plan, axes: Axes, part: Part, units: list[str], held: Callable[[str], str]
    ) -> None:
        self.plan = plan
        self.axes = axes
        self.graph = plan.graph
        self.units = units
        self.part = part
        self.held = held
        self.grid: Grid = axes.grid
        self.root = nn.Module()
        self.local = fx.Graph()
        self.nodes: dict[tuple[int, tuple[Move, ...]], fx.Node] = {}
        self.count = 0

    def run(self) -> Program:
        """Build the local graph."""
        self.local.placeholder("model")
        names = self._placeholders()
        for place in self.part.places:
            before = self.local._root.prev
            self._operator(place, self.graph.operators[place])
            self._mark(before, unit_of(self.graph.operators[place].module, self.units))
        self.local.output(self._results())
        self.local.eliminate_dead_code(_is_impure)
        graph, names = (
            segmented(self.root, self.local, names) if self.units else (self.local, names)
        )
        graph.lint()
        words = {
            place: self._words(value.index)
            for place, value in enumerate(self.graph.results if self.part.ends else ())
            if isinstance(value, Ref) and value.index in self.plan.kept
        }
        return Program(self.plan, fx.GraphModule(self.root, graph, "LocalGraph"), names, words)

    def _results(self) -> list[Any]:
        if not self.part.ends:
            return [self._as(index, layout, ()) for index, layout in self.part.given.items()]
        return [
            self._as(value.index, self.plan.result(value.index), ())
            if isinstance(value, Ref)
            else value
            for value in self.graph.results
        ]

    def _words(self, index: int) -> Words:
        layout = self.plan.kept[index]
        shape = self.graph.shape(index)
        return Words(
            self.axes[layout.dims[-1]], shape[-1], *layout.box(self.grid, shape, self.axes.rank)[-1]
        )

    def _mark(self, before: fx.Node, unit: str) -> None:
        """Note on all nodes behind one which submodule they belong to."""
        node = before.next
        while unit and node is not self.local._root:
            node.meta[UNIT] = unit
            node = node.next

    def _placeholders(self) -> list[str]:
        used = {index for place in self.part.places for index in self.graph.operators[place].inputs}
        used |= (
            {value.index for value in self.graph.results if isinstance(value, Ref)}
            if self.part.ends
            else set()
        )
        used |= set(self.part.given)
        names: list[str] = []
        for index, tensor in enumerate(self.graph.tensors):
            if (
                tensor.kind in ("param", "buffer")
                and index in used
                and index not in self.part.taken
            ):
                self.nodes[index, ()] = self.local.placeholder(f"w_{len(names)}")
                names.append(self.held(tensor.name))
        for index, tensor in enumerate(self.graph.tensors):
            if tensor.kind == "constant" and index in used:
                self.root.register_buffer(
                    f"c_{index}", self.graph.constants[index].to(self.axes.device)
                )
                self.nodes[index, ()] = self.local.get_attr(f"c_{index}")
        for place, known in enumerate(self.graph.inputs):
            node = self.local.placeholder(f"x_{place}")
            if known is not None:
                self.nodes[known, ()] = node
        for place, index in enumerate(self.part.taken):
            self.nodes[index, ()] = self.local.placeholder(f"t_{place}")
        return names

    def _as(
        self, index: int, target: L, fans: tuple[str, ...], shares: tuple[str, ...] = ()
    ) -> fx.Node:
        """
        Return a tensor in a layout; the moves that lead there are inserted where they haven't been
        yet.
        """
        moves = way(self.part.source(self.plan, index), target, fans, shares)
        return self._moved(index, (), moves)

    def _moved(self, index: int, done: tuple[Move, ...], rest: tuple[Move, ...]) -> fx.Node:
        node = self.nodes[index, done]
        for move in rest:
            done = (*done, move)
            if (index, done) not in self.nodes:
                self.nodes[index, done] = self._insert(node, move, self.graph.shape(index))
            node = self.nodes[index, done]
        return node

    def _insert(self, node: fx.Node, move: Move, shape: tuple[int, ...]) -> fx.Node:
        total = 0
        if move.kind in (convert.GATHER, convert.COLLECT):
            total = self._size(move.after, shape, move.dim)
        elif move.kind == convert.SWAP:
            total = self._size(move.after, shape, move.origin)
        name = f"{move.kind}_{self.count}"
        self.count += 1
        self.root.add_module(name, MoveModule(move, self.axes[move.axis], total))
        return self.local.call_module(name, (node,))

    def _size(self, layout: L, shape: tuple[int, ...], dim: int) -> int:
        low, high = layout.box(self.grid, shape, self.axes.rank)[dim]
        return high - low

    # ---- operators ----------------------------------------------------------

    def _operator(self, place: int, operator: Operator) -> None:
        choice = self.plan.choices[place]
        inputs = []
        for at, index in enumerate(operator.inputs):
            wanted = choice.layout_in(at, len(self.graph.shape(index)))
            inputs.append(
                self._as(index, wanted, self.plan.fans(place, at), self.plan.shares(place, at))
            )
        if operator.kind in NOTHING:
            made: Any = (
                inputs[0]
                if operator.kind == "constrain"
                else self.local.call_method("detach", (inputs[0],))
            )
        else:
            made = self._call(place, operator, inputs)
        for at, index in enumerate(operator.outputs):
            node = self.local.call_function(item, (made, at)) if operator.many else made
            raw = choice.layout_out(at, len(self.graph.shape(index)))
            self.nodes[index, ()] = node
            if index in self.plan.placed:
                moves = way(raw, self.plan.placed[index])
                self.nodes[index, ()] = self._moved(index, (), moves)

    def _call(self, place: int, operator: Operator, inputs: list[fx.Node]) -> fx.Node:
        target, args, kwargs = call_of(place_of(self.plan, place, self.grid, self.axes.rank))
        rest = dict(zip(_positions(operator), inputs, strict=True))

        def take(ref: Ref) -> fx.Node:
            return rest[id(ref)]

        args, kwargs = (
            _placed(substitute(some, take), self.axes.device) for some in (args, kwargs)
        )
        return self.local.call_function(target, tuple(args), dict(kwargs))


def _placed(value: Any, device: torch.device) -> Any:
    """
    Return arguments with this rank's device in place of those that they name: it was exported on
    none.
    """
    if isinstance(value, torch.device):
        return device
    if isinstance(value, (list, tuple)):
        return type(value)(_placed(one, device) for one in value)
    if isinstance(value, dict):
        return {key: _placed(one, device) for key, one in value.items()}
    return value


def _positions(operator: Operator) -> list[int]:
    """Return the identities of an operator's references, in order."""
    return [id(ref) for ref in refs(operator.args, operator.kwargs)]


def place_of(plan: Plan, place: int, grid: Grid, rank: int) -> Place:
    """Return one rank's share of an operator."""
    graph = plan.graph
    operator = plan.graph.operators[place]
    choice = plan.choices[place]
    ins = tuple(graph.shape(index) for index in operator.inputs)
    outs = tuple(graph.shape(index) for index in operator.outputs)
    here = grid.coordinate(rank)
    return Place(
        operator,
        choice.splits,
        ins,
        outs,
        tuple(
            choice.layout_in(at, len(shape)).box(grid, shape, rank) for at, shape in enumerate(ins)
        ),
        tuple(
            choice.layout_out(at, len(shape)).box(grid, shape, rank)
            for at, shape in enumerate(outs)
        ),
        {axis: here[axis] for axis in choice.splits},
        {axis: grid.degree(axis) for axis in choice.splits},
    )


def _is_impure(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output")
