"""
A plan as text: the layouts of each operator, the redistribution of its inputs, and the bytes.

Bytes are what a rank sends in one forward and backward pass with ring algorithms. If shards are
uneven, it is the rank with the largest shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.graph import TensorRef
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.operators.redistribute import (
    LayoutMove,
    largest_shard_numel,
    redistribution_path,
)
from pdrun.parallel.operators.stages import StagePlan, stage_plans


@dataclass(frozen=True)
class MoveTraffic:
    """
    One move of a plan.

    Attributes:
        position: index of the operator before which the tensor moves; the number of operators for
            results.
        tensor: its index.
        forward_bytes, backward_bytes: per rank.
    """

    position: int
    tensor: int
    move: LayoutMove
    forward_bytes: int
    backward_bytes: int


def list_moves(plan: OperatorPlan, stage: StagePlan | None = None) -> Iterator[MoveTraffic]:
    """
    Return all moves in the order in which operators need them; shared ones once.

    Args:
        stage: only those of one pipeline stage; default: all.
    """
    if stage is None:
        for one in stage_plans(plan):
            yield from list_moves(plan, one)
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
    ) -> Iterator[MoveTraffic]:
        tensor = graph.tensors[index]
        done: tuple[LayoutMove, ...] = ()
        for move in redistribution_path(source, target, fans, shares):
            done = (*done, move)
            if (index, source, done) not in seen:
                seen.add((index, source, done))
                sent = move.count_bytes(
                    plan.grid, tensor.shape, tensor.dtype.itemsize, tensor.requires_grad
                )
                yield MoveTraffic(place, index, move, *sent)

    for place in stage.operators:
        operator = graph.operators[place]
        choice = plan.shardings[place]
        for at, index in enumerate(operator.inputs):
            target = choice.input_layout(at, len(graph.shape_of(index)))
            source = stage.source_layout(plan, index)
            yield from new(
                place,
                index,
                source,
                target,
                plan.grad_sum_axes(place, at),
                plan.grad_share_axes(place, at),
            )
        for at, index in enumerate(operator.outputs):
            if index in plan.out_layouts:
                raw = choice.output_layout(at, len(graph.shape_of(index)))
                yield from new(place, index, raw, plan.out_layouts[index])
    for index, layout in stage.sent.items():
        yield from new(len(graph.operators), index, stage.source_layout(plan, index), layout)
    for value in graph.results if stage.is_last else ():
        if isinstance(value, TensorRef):
            yield from new(
                len(graph.operators),
                value.index,
                stage.source_layout(plan, value.index),
                plan.result_layout(value.index),
            )


def explain_plan(plan: OperatorPlan) -> str:
    """Return a plan as text, stage by stage in a pipeline."""
    every = list[MoveTraffic]()
    lines = [f"operators over ({plan.grid})"]
    for part in stage_plans(plan):
        mine = list(list_moves(plan, part))
        every += mine
        if plan.graph.stage_count:
            lines.append(f"stage {part.stage}")
        lines += _operator_lines(plan, part, mine)
    return "\n".join([*lines, *_weight_lines(plan), *_total_lines(plan, every), *plan.notes])


def _operator_lines(
    plan: OperatorPlan, stage: StagePlan, moves: list[MoveTraffic]
) -> Iterator[str]:
    """
    Yield a line per operator of a stage, with the moves before it, and the lines of its results.
    """
    graph = plan.graph
    found: dict[int, list[MoveTraffic]] = {}
    for moved in moves:
        found.setdefault(moved.position, []).append(moved)
    for place in stage.operators:
        operator = graph.operators[place]
        choice = plan.shardings[place]
        for moved in found.get(place, ()):
            yield f"    {_describe_move(plan, moved)}"
        ins = ", ".join(
            _format_layout(choice.input_layout(at, len(graph.shape_of(index))))
            for at, index in enumerate(operator.inputs)
        )
        outs = ", ".join(
            _format_layout(choice.output_layout(at, len(graph.shape_of(index))))
            for at, index in enumerate(operator.outputs)
        )
        said = "  (as configured)" if choice.fixed_axes else ""
        yield f"{operator.name}: {ins} -> {outs}{said}"
    for moved in found.get(len(graph.operators), ()):
        yield f"    {'result ' if stage.is_last else ''}{_describe_move(plan, moved)}"
    for index, layout in stage.sent.items():
        yield f"    to stage {stage.stage + 1}: {_describe_tensor(plan, index)} as {_format_layout(layout)} {_describe_sent(plan, index, layout)}"
    for value in graph.results if stage.is_last else ():
        if isinstance(value, TensorRef) and value.index in plan.sharded_results:
            yield f"    result {_describe_tensor(plan, value.index)} stays {_format_layout(plan.sharded_results[value.index])}"


def _describe_sent(plan: OperatorPlan, index: int, layout: L) -> str:
    """Return the bytes that a rank sends of a tensor, and receives of its gradient, as text."""
    tensor = plan.graph.tensors[index]
    nbytes = largest_shard_numel(plan.grid, layout, tensor.shape) * tensor.dtype.itemsize
    return f"({format_bytes(nbytes)} forward{f', {format_bytes(nbytes)} backward' if tensor.requires_grad else ''})"


def _describe_tensor(plan: OperatorPlan, index: int) -> str:
    tensor = plan.graph.tensors[index]
    return f"{tensor.name} {list(tensor.shape)}"


def _describe_move(plan: OperatorPlan, moved: MoveTraffic) -> str:
    told = moved.move.describe(plan.graph.tensors[moved.tensor].requires_grad)
    return f"{_describe_tensor(plan, moved.tensor)}: {told} {_format_traffic(moved)}".rstrip()


def _format_layout(layout: L) -> str:
    """Return a layout without the letter: ``[tp, -]``, and ``+tp`` for partial sums over tp."""
    dims = ", ".join("*".join(axes) or "-" for axes in layout.dims)
    return f"[{dims}]" + "".join(f"+{axis}" for axis in layout.sums)


def _format_traffic(moved: MoveTraffic) -> str:
    told = [
        f"{format_bytes(count)} {way}"
        for way, count in (("forward", moved.forward_bytes), ("backward", moved.backward_bytes))
        if count
    ]
    return f"({', '.join(told)})" if told else ""


def _weight_lines(plan: OperatorPlan) -> Iterator[str]:
    cut = {index: layout for index, layout in plan.weights.items() if layout.axes}
    if cut:
        yield "weights that are cut"
        for index, layout in cut.items():
            yield f"    {_describe_tensor(plan, index)} {_format_layout(layout)}"
    for axis in plan.grid.names:
        summed = [index for index, axes in plan.grad_sums.items() if axis in axes]
        if summed:
            nbytes = sum(plan.graph.tensors[index].nbytes for index in summed)
            names = ", ".join(plan.graph.tensors[index].name for index in summed)
            yield f"gradients added up over {axis} once a step ({format_bytes(nbytes)}): {names}"


def _total_lines(plan: OperatorPlan, moves: list[MoveTraffic]) -> Iterator[str]:
    for axis in plan.grid.names:
        mine = [moved for moved in moves if moved.move.axis == axis]
        forward = sum(moved.forward_bytes for moved in mine)
        backward = sum(moved.backward_bytes for moved in mine)
        yield f"over {axis}: {format_bytes(forward)} forward, {format_bytes(backward)} backward a pass"


def format_bytes(count: int) -> str:
    """Return a number of bytes as text."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
