"""
A plan as text: for each operator what it is cut into, what happens to its inputs before, and how many bytes that moves.

Bytes are what a rank sends in one forward and backward pass, by rings; the rank with the largest part where parts are
uneven.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.convert import Move, way
from pdrun.parallel.operators.graph import Ref
from pdrun.parallel.operators.plan import Plan


@dataclass(frozen=True)
class Moved:
    """
    One move of a plan.

    Attributes:
        operator: its place, before which the tensor moves, or behind the last one for results.
        tensor: which.
        forward, backward: bytes.
    """

    operator: int
    tensor: int
    move: Move
    forward: int
    backward: int


def moves(plan: Plan) -> Iterator[Moved]:
    """Return all moves, in the order in which operators ask for them; shared ones once."""
    graph, seen = plan.graph, set()

    def new(
        place: int, index: int, source: L, target: L, fans: tuple[str, ...] = (), shares: tuple[str, ...] = ()
    ) -> Iterator[Moved]:
        tensor = graph.tensors[index]
        done: tuple[Move, ...] = ()
        for move in way(source, target, fans, shares):
            done = (*done, move)
            if (index, source, done) not in seen:
                seen.add((index, source, done))
                sent = move.moved(plan.grid, tensor.shape, tensor.dtype.itemsize, tensor.grad)
                yield Moved(place, index, move, *sent)

    for place, operator in enumerate(graph.operators):
        choice = plan.choices[place]
        for at, index in enumerate(operator.inputs):
            target = choice.layout_in(at, len(graph.shape(index)))
            yield from new(place, index, plan.source(index), target, plan.fans(place, at), plan.shares(place, at))
        for at, index in enumerate(operator.outputs):
            if index in plan.placed:
                raw = choice.layout_out(at, len(graph.shape(index)))
                yield from new(place, index, raw, plan.placed[index])
    for value in graph.results:
        if isinstance(value, Ref):
            whole = L(*[None] * len(graph.shape(value.index)))
            yield from new(len(graph.operators), value.index, plan.source(value.index), whole)


def explain(plan: Plan) -> str:
    """Return a plan as text."""
    graph = plan.graph
    found: dict[int, list[Moved]] = {}
    for moved in moves(plan):
        found.setdefault(moved.operator, []).append(moved)
    lines = [f"operators over ({plan.grid})"]
    for place, operator in enumerate(graph.operators):
        choice = plan.choices[place]
        for moved in found.get(place, ()):
            lines.append(f"    {_move(plan, moved)}")
        ins = ", ".join(
            _short(choice.layout_in(at, len(graph.shape(index)))) for at, index in enumerate(operator.inputs)
        )
        outs = ", ".join(
            _short(choice.layout_out(at, len(graph.shape(index)))) for at, index in enumerate(operator.outputs)
        )
        said = "  (as configured)" if choice.fixed else ""
        lines.append(f"{operator.name}: {ins} -> {outs}{said}")
    for moved in found.get(len(graph.operators), ()):
        lines.append(f"    result {_move(plan, moved)}")
    return "\n".join([*lines, *_weights(plan), *_total(plan, found), *plan.notes])


def _what(plan: Plan, index: int) -> str:
    tensor = plan.graph.tensors[index]
    return f"{tensor.name} {list(tensor.shape)}"


def _move(plan: Plan, moved: Moved) -> str:
    told = moved.move.told(plan.graph.tensors[moved.tensor].grad)
    return f"{_what(plan, moved.tensor)}: {told} {_bytes(moved)}".rstrip()


def _short(layout: L) -> str:
    """Return a layout without the letter: ``[tp, -]``, and ``+tp`` for sums over tp."""
    dims = ", ".join("*".join(axes) or "-" for axes in layout.dims)
    return f"[{dims}]" + "".join(f"+{axis}" for axis in layout.sums)


def _bytes(moved: Moved) -> str:
    told = [
        f"{size(count)} {way}" for way, count in (("forward", moved.forward), ("backward", moved.backward)) if count
    ]
    return f"({', '.join(told)})" if told else ""


def _weights(plan: Plan) -> Iterator[str]:
    cut = {index: layout for index, layout in plan.weights.items() if layout.axes}
    if cut:
        yield "weights that are cut"
        for index, layout in cut.items():
            yield f"    {_what(plan, index)} {_short(layout)}"
    for axis in plan.grid.names:
        summed = [index for index, axes in plan.sums.items() if axis in axes]
        if summed:
            nbytes = sum(plan.graph.tensors[index].nbytes for index in summed)
            names = ", ".join(plan.graph.tensors[index].name for index in summed)
            yield f"gradients added up over {axis} once a step ({size(nbytes)}): {names}"


def _total(plan: Plan, found: dict[int, list[Moved]]) -> Iterator[str]:
    every = [moved for some in found.values() for moved in some]
    for axis in plan.grid.names:
        mine = [moved for moved in every if moved.move.axis == axis]
        forward, backward = sum(moved.forward for moved in mine), sum(moved.backward for moved in mine)
        yield f"over {axis}: {size(forward)} forward, {size(backward)} backward a pass"


def size(count: int) -> str:
    """Return a number of bytes as text."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
