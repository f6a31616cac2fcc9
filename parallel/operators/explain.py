"""
A plan as text: for each operator what it is cut into, what happens to its inputs before, and how
many bytes that moves.

Bytes are what a rank sends in one forward and backward pass, by rings; the rank with the largest
part where parts are uneven.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.graph import Ref
from pdrun.parallel.operators.plan import Plan
from pdrun.parallel.operators.redistribute import Move, count, way
from pdrun.parallel.operators.stages import Part, parts


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


def moves(plan: Plan, part: Part | None = None) -> Iterator[Moved]:
    """
    Return all moves, in the order in which operators ask for them; shared ones once.

    Args:
        part: those of one stage of a pipeline; default: all.
    """
    if part is None:
        for one in parts(plan):
            yield from moves(plan, one)
        return
    graph = plan.graph
    seen = set()

    def new(
        place: int,
        index: int,
        source: L,
        target: L,
        fans: tuple[str, ...] = (),
        shares: tuple[str, ...] = (),
    ) -> Iterator[Moved]:
        tensor = graph.tensors[index]
        done: tuple[Move, ...] = ()
        for move in way(source, target, fans, shares):
            done = (*done, move)
            if (index, source, done) not in seen:
                seen.add((index, source, done))
                sent = move.moved(plan.grid, tensor.shape, tensor.dtype.itemsize, tensor.grad)
                yield Moved(place, index, move, *sent)

    for place in part.places:
        operator = graph.operators[place]
        choice = plan.choices[place]
        for at, index in enumerate(operator.inputs):
            target = choice.layout_in(at, len(graph.shape(index)))
            source = part.source(plan, index)
            yield from new(
                place, index, source, target, plan.fans(place, at), plan.shares(place, at)
            )
        for at, index in enumerate(operator.outputs):
            if index in plan.placed:
                raw = choice.layout_out(at, len(graph.shape(index)))
                yield from new(place, index, raw, plan.placed[index])
    for index, layout in part.given.items():
        yield from new(len(graph.operators), index, part.source(plan, index), layout)
    for value in graph.results if part.ends else ():
        if isinstance(value, Ref):
            yield from new(
                len(graph.operators),
                value.index,
                part.source(plan, value.index),
                plan.result(value.index),
            )


def explain(plan: Plan) -> str:
    """Return a plan as text, stage by stage where there are some."""
    every = list[Moved]()
    lines = [f"operators over ({plan.grid})"]
    for part in parts(plan):
        mine = list(moves(plan, part))
        every += mine
        if plan.graph.stages:
            lines.append(f"stage {part.stage}")
        lines += _operators(plan, part, mine)
    return "\n".join([*lines, *_weights(plan), *_total(plan, every), *plan.notes])


def _operators(plan: Plan, part: Part, mine: list[Moved]) -> Iterator[str]:
    """
    Yield a line for each operator of a part, with what is moved before it, and for what goes out.
    """
    graph = plan.graph
    found: dict[int, list[Moved]] = {}
    for moved in mine:
        found.setdefault(moved.operator, []).append(moved)
    for place in part.places:
        operator = graph.operators[place]
        choice = plan.choices[place]
        for moved in found.get(place, ()):
            yield f"    {_move(plan, moved)}"
        ins = ", ".join(
            _short(choice.layout_in(at, len(graph.shape(index))))
            for at, index in enumerate(operator.inputs)
        )
        outs = ", ".join(
            _short(choice.layout_out(at, len(graph.shape(index))))
            for at, index in enumerate(operator.outputs)
        )
        said = "  (as configured)" if choice.fixed else ""
        yield f"{operator.name}: {ins} -> {outs}{said}"
    for moved in found.get(len(graph.operators), ()):
        yield f"    {'result ' if part.ends else ''}{_move(plan, moved)}"
    for index, layout in part.given.items():
        yield f"    to stage {part.stage + 1}: {_what(plan, index)} as {_short(layout)} {_sent(plan, index, layout)}"
    for value in graph.results if part.ends else ():
        if isinstance(value, Ref) and value.index in plan.kept:
            yield f"    result {_what(plan, value.index)} stays {_short(plan.kept[value.index])}"


def _sent(plan: Plan, index: int, layout: L) -> str:
    """Return the bytes that a rank sends of a tensor, and gets back of its gradient, as text."""
    tensor = plan.graph.tensors[index]
    nbytes = count(plan.grid, layout, tensor.shape) * tensor.dtype.itemsize
    return f"({size(nbytes)} forward{f', {size(nbytes)} backward' if tensor.grad else ''})"


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
        f"{size(count)} {way}"
        for way, count in (("forward", moved.forward), ("backward", moved.backward))
        if count
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


def _total(plan: Plan, every: list[Moved]) -> Iterator[str]:
    for axis in plan.grid.names:
        mine = [moved for moved in every if moved.move.axis == axis]
        forward = sum(moved.forward for moved in mine)
        backward = sum(moved.backward for moved in mine)
        yield f"over {axis}: {size(forward)} forward, {size(backward)} backward a pass"


def size(count: int) -> str:
    """Return a number of bytes as text."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
