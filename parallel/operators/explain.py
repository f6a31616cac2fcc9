"""
A plan as text: the layouts of each operator, the redistribution of its inputs, and the bytes.

Bytes are what a rank sends in one forward and backward pass with ring algorithms. If shards are
uneven, it is the rank with the largest shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.view import VIRTUAL_AXIS, View
from pdrun.parallel.operators.graph.graph import TensorRef
from pdrun.parallel.operators.interleaving.paths import PartPaths
from pdrun.parallel.operators.plan import InterleavedSplit, OperatorPlan
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
        parts: number of collectives that the move is made with.
    """

    position: int
    tensor: int
    move: LayoutMove
    forward_bytes: int
    backward_bytes: int
    parts: int = 1


def list_moves(plan: OperatorPlan, stage: StagePlan | None = None) -> Iterator[MoveTraffic]:
    """
    Return all moves in the order in which operators need them; shared ones once.

    Args:
        stage: only those of one pipeline stage; default: all.
    """
    if stage is None:
        for stage_plan in stage_plans(plan):
            yield from list_moves(plan, stage_plan)
        return
    graph = plan.graph
    paths = PartPaths(plan, stage, plan.grid)
    seen = set()

    def new_moves(
        position: int,
        index: int,
        source: L,
        target: L,
        fans: tuple[str, ...] = (),
        shares: tuple[str, ...] = (),
    ) -> Iterator[MoveTraffic]:
        view = View(plan.grid, source, graph.shape_of(index))
        has_grad = graph.tensors[index].requires_grad
        yield from count_moves(
            position, index, redistribution_path(view, target, has_grad, fans, shares)
        )

    def count_moves(
        position: int, index: int, moves: Iterable[LayoutMove], parts: int = 1
    ) -> Iterator[MoveTraffic]:
        tensor = graph.tensors[index]
        path: tuple[LayoutMove, ...] = ()
        for move in moves:
            path = (*path, move)
            if (index, path) not in seen:
                seen.add((index, path))
                sent = move.count_bytes(tensor.dtype.itemsize, tensor.requires_grad)
                forward, backward = (parts * nbytes for nbytes in sent)
                yield MoveTraffic(position, index, move, forward, backward, parts)

    for position in stage.operators:
        operator = graph.operators[position]
        sharding = plan.shardings[position]
        for slot, index in enumerate(operator.inputs):
            in_parts = paths.input_moves(position, slot)
            if in_parts is not None:
                yield from count_moves(position, index, in_parts[1], in_parts[0].parts)
                continue
            target = sharding.input_layout(slot, len(graph.shape_of(index)))
            source = stage.source_layout(plan, index)
            yield from new_moves(
                position,
                index,
                source,
                target,
                plan.grad_sum_axes(position, slot),
                plan.grad_share_axes(position, slot),
            )
        for slot, index in enumerate(operator.outputs):
            if index in plan.out_layouts:
                given = plan.interleaved.get(position)
                out_moves = None if given is None else paths.out_moves(position, slot)
                if given is not None and out_moves is not None:
                    yield from count_moves(position, index, out_moves, given.parts)
                    continue
                made_layout = sharding.output_layout(slot, len(graph.shape_of(index)))
                yield from new_moves(position, index, made_layout, plan.out_layouts[index])
    for index, layout in paths.ends():
        joined = paths.joined_moves(index, layout)
        if joined is not None:
            yield from count_moves(len(graph.operators), index, joined[1], joined[0].parts)
        else:
            source = stage.source_layout(plan, index)
            yield from new_moves(len(graph.operators), index, source, layout)


def explain_plan(plan: OperatorPlan) -> str:
    """Return a plan as text, stage by stage in a pipeline."""
    all_moves = list[MoveTraffic]()
    lines = [f"operators over ({plan.grid})"]
    for stage_plan in stage_plans(plan):
        moves = list(list_moves(plan, stage_plan))
        all_moves += moves
        if plan.graph.stage_count:
            lines.append(f"stage {stage_plan.stage}")
        lines += _operator_lines(plan, stage_plan, moves)
    return "\n".join([*lines, *_weight_lines(plan), *_total_lines(plan, all_moves), *plan.notes])


def _operator_lines(
    plan: OperatorPlan, stage: StagePlan, moves: list[MoveTraffic]
) -> Iterator[str]:
    """
    Yield a line per operator of a stage, with the moves before it, and the lines of its results.
    """
    graph = plan.graph
    moves_before: dict[int, list[MoveTraffic]] = {}
    for move in moves:
        moves_before.setdefault(move.position, []).append(move)
    for position in stage.operators:
        operator = graph.operators[position]
        sharding = plan.shardings[position]
        for move in moves_before.get(position, ()):
            yield f"    {_describe_move(plan, move)}"
        ins = ", ".join(
            _format_layout(sharding.input_layout(slot, len(graph.shape_of(index))))
            for slot, index in enumerate(operator.inputs)
        )
        outs = ", ".join(
            _format_layout(sharding.output_layout(slot, len(graph.shape_of(index))))
            for slot, index in enumerate(operator.outputs)
        )
        line = f"{operator.name}: {ins} -> {outs}"
        if sharding.fixed_axes:
            line += "  (as configured)"
        if position in plan.interleaved:
            line += f"  {_format_parts(plan.interleaved[position])}"
        yield line
    for move in moves_before.get(len(graph.operators), ()):
        prefix = "    result" if stage.is_last else "   "
        yield f"{prefix} {_describe_move(plan, move)}"
    for index, layout in stage.sent.items():
        tensor = f"{_describe_tensor(plan, index)} as {_format_layout(layout)}"
        yield f"    to stage {stage.stage + 1}: {tensor} {_describe_sent(plan, index, layout)}"
    if not stage.is_last:
        return
    for value in graph.results:
        if isinstance(value, TensorRef) and value.index in plan.sharded_results:
            layout = plan.sharded_results[value.index]
            yield f"    result {_describe_tensor(plan, value.index)} stays {_format_layout(layout)}"


def _describe_sent(plan: OperatorPlan, index: int, layout: L) -> str:
    """Return the bytes that a rank sends of a tensor, and receives of its gradient, as text."""
    tensor = plan.graph.tensors[index]
    nbytes = largest_shard_numel(plan.grid, layout, tensor.shape) * tensor.dtype.itemsize
    if tensor.requires_grad:
        return f"({format_bytes(nbytes)} forward, {format_bytes(nbytes)} backward)"
    return f"({format_bytes(nbytes)} forward)"


def _describe_tensor(plan: OperatorPlan, index: int) -> str:
    tensor = plan.graph.tensors[index]
    return f"{tensor.name} {list(tensor.shape)}"


def _describe_move(plan: OperatorPlan, move: MoveTraffic) -> str:
    text = move.move.describe(plan.graph.tensors[move.tensor].requires_grad)
    if move.parts > 1:
        text += f" in {move.parts} parts"
    return f"{_describe_tensor(plan, move.tensor)}: {text} {_format_traffic(move)}".rstrip()


def _format_layout(layout: L) -> str:
    """Return a layout without the letter: ``[tp, -]``, and ``+tp`` for partial sums over tp."""
    dims = ", ".join("*".join(axes) or "-" for axes in layout.dims)
    return f"[{dims}]" + "".join(f"+{axis}" for axis in layout.sums)


def _format_parts(given: InterleavedSplit) -> str:
    """Return how an operator runs in parts: the dim of each input, - for those in one piece."""
    dims = ", ".join("-" if dim is None else str(dim) for dim in given.split.in_states)
    return f"({VIRTUAL_AXIS}: {given.parts} parts on dims {dims})"


def _format_traffic(move: MoveTraffic) -> str:
    texts = [
        f"{format_bytes(count)} {direction}"
        for direction, count in (("forward", move.forward_bytes), ("backward", move.backward_bytes))
        if count
    ]
    if not texts:
        return ""
    return f"({', '.join(texts)})"


def _weight_lines(plan: OperatorPlan) -> Iterator[str]:
    sharded = {index: layout for index, layout in plan.weights.items() if layout.axes}
    if sharded:
        yield "sharded weights"
        for index, layout in sharded.items():
            yield f"    {_describe_tensor(plan, index)} {_format_layout(layout)}"
    for axis in plan.grid.names:
        summed = [index for index, axes in plan.grad_sums.items() if axis in axes]
        if summed:
            nbytes = sum(plan.graph.tensors[index].nbytes for index in summed)
            names = ", ".join(plan.graph.tensors[index].name for index in summed)
            size = format_bytes(nbytes)
            yield f"gradients all-reduced over {axis} once per step ({size}): {names}"


def _total_lines(plan: OperatorPlan, moves: list[MoveTraffic]) -> Iterator[str]:
    single_axes = [(axis,) for axis in plan.grid.names]
    several_axes = sorted({move.move.axes for move in moves if len(move.move.axes) > 1})
    for axes in (*single_axes, *several_axes):
        own_moves = [move for move in moves if move.move.axes == axes]
        forward = sum(move.forward_bytes for move in own_moves)
        backward = sum(move.backward_bytes for move in own_moves)
        total = f"{format_bytes(forward)} forward, {format_bytes(backward)} backward"
        yield f"over {'*'.join(axes)}: {total} per pass"


def format_bytes(count: int) -> str:
    """Return a number of bytes as text."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    if unit == "B":
        return f"{amount:.0f} B"
    return f"{amount:.1f} {unit}"
