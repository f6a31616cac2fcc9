"""
Prices: the seconds that operators, moves of tensors and sums of gradients take on a topology.

    operator            max(FLOPs / attained rate, bytes / bandwidth, launch), forward and backward
    move                latency + bytes / bandwidth of the links along its axes, as `explain` counts
                        bytes
    weight              the sum of its gradient over tensor axes, once per step

The search and `price_plan` use the same functions, so that the price of a plan that was found is
the price of the same plan given by hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdrun.parallel.auto.flops import VIEW_KINDS, count_products
from pdrun.parallel.auto.topology import Topology
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.view import View
from pdrun.parallel.operators.explain import list_moves
from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.operators.plan import OperatorPlan, OperatorSharding
from pdrun.parallel.operators.redistribute import (
    LayoutMove,
    largest_shard_numel,
    redistribution_path,
)

EAGER_BYTES = 2.0
"""
Bytes of an operator that is one kernel, relative to what it reads and writes: kernels that are not
compiled cast, copy and use strides. Measured with a decoder on an H200
(benchmarks/auto_gpu_h200_2026-11-30.md).
"""
KIND_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
Seconds = tuple[float, float]
"""Forward and backward."""
MovePrice = tuple[tuple[LayoutMove, ...], float]
"""The moves up to and including one, and the seconds of that one, forward and backward together."""


@dataclass(frozen=True)
class PlanPrice:
    """
    Seconds of one pass over a graph.

    Attributes:
        compute, moves: by operator, (forward, backward); moves of results are the last entry.
        weights: by index of the weight: the sums of its gradient, and the price of its bytes.
    """

    compute: tuple[Seconds, ...]
    moves: tuple[Seconds, ...]
    weights: dict[int, float]

    @property
    def compute_seconds(self) -> float:
        """Of all operators, forward and backward."""
        return math.fsum(value for pair in self.compute for value in pair)

    @property
    def move_seconds(self) -> float:
        """Of all moves, forward and backward."""
        return math.fsum(value for pair in self.moves for value in pair)

    @property
    def total(self) -> float:
        """All together, with one pass per step."""
        return self.compute_seconds + self.move_seconds + math.fsum(self.weights.values())


class PriceList:
    """
    Prices for the operators of one graph on one grid of tensor axes.

    Args:
        grid: the tensor axes; they are the innermost ones of the mesh.
        passes: micro-batches per step: sums of gradients are divided by it.
        byte_price: seconds that a byte of a stored weight costs, so that a search can trade time
            for memory.
        compiled: whether operators that only read and write are compiled into common kernels.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        grid: Grid,
        topology: Topology,
        passes: int = 1,
        byte_price: float = 0.0,
        compiled: bool = True,
    ) -> None:
        self.graph = graph
        self.grid = grid
        self.topology = topology
        self.passes = passes
        self.byte_price = byte_price
        self.compiled = compiled
        self._paths: dict[object, tuple[MovePrice, ...] | None] = {}
        self._shard_sizes: dict[tuple[L, tuple[int, ...]], tuple[int, ...]] = {}
        self._operators: dict[object, Seconds] = {}

    # ---- operators ----------------------------------------------------------

    def operator_seconds(self, position: int, sharding: OperatorSharding) -> Seconds:
        """Return the seconds of an operator on the largest shards, forward and backward."""
        operator = self.graph.operators[position]
        if operator.kind in VIEW_KINDS:
            return 0.0, 0.0
        key = (position, tuple(sharding.splits.items()), sharding.axis_order)
        if key not in self._operators:
            self._operators[key] = self._compute_operator(position, sharding)
        return self._operators[key]

    def _compute_operator(self, position: int, sharding: OperatorSharding) -> Seconds:
        graph = self.graph
        operator = graph.operators[position]
        ins, outs = (
            [
                self.local_shape(layout_of(slot, len(graph.shape_of(index))), graph.shape_of(index))
                for slot, index in enumerate(indices)
            ]
            for layout_of, indices in (
                (sharding.input_layout, operator.inputs),
                (sharding.output_layout, operator.outputs),
            )
        )
        itemsizes = [graph.tensors[i].dtype.itemsize for i in (*operator.inputs, *operator.outputs)]
        nbytes = sum(
            math.prod(shape) * size for shape, size in zip([*ins, *outs], itemsizes, strict=True)
        )
        if operator.kind == "embedding":  # reads the rows that are looked up, not the table
            nbytes -= math.prod(ins[0]) * itemsizes[0] - math.prod(outs[0]) * itemsizes[0]
        device = self.topology.device
        product = count_products(operator, ins, outs)
        is_own_kernel = product is None and not self.compiled
        forward = nbytes / device.bandwidth * (EAGER_BYTES if is_own_kernel else 1.0)
        backward = 2 * forward
        if product is not None:
            kind = KIND_NAMES.get(graph.tensors[operator.outputs[0]].dtype, "fp32")
            seconds = product.flops / device.rate_of(kind).attained(product.size)
            trained = sum(graph.tensors[index].requires_grad for index in operator.inputs)
            forward = max(forward, seconds)
            backward = max(backward, seconds * product.backward * min(trained, product.operands))
        has_grad = any(graph.tensors[index].requires_grad for index in operator.outputs)
        return (
            max(forward, device.launch),
            max(backward, device.launch) if has_grad else 0.0,
        )

    def local_shape(self, layout: L, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the largest shard."""
        key = (layout, shape)
        if key not in self._shard_sizes:
            self._shard_sizes[key] = tuple(
                high - low for low, high in layout.box(self.grid, shape, 0)
            )
        return self._shard_sizes[key]

    # ---- moves --------------------------------------------------------------

    def collective_seconds(self, grid: Grid, axes: Sequence[str], nbytes: float) -> float:
        """
        Return the seconds of a collective over some axes of a grid of the tensor ranks.

        Args:
            grid: the tensor axes, or a refinement of them.
            nbytes: bytes that a rank sends with a ring algorithm.
        """
        parts = grid.group_size(tuple(axes))
        span = 1
        inner = 1
        for name, size in zip(reversed(grid.names), reversed(grid.sizes), strict=True):
            inner *= size
            if name in axes:
                span = inner
        return self.topology.link_seconds(max(1, span // parts), parts, nbytes)

    def move_seconds(self, move: LayoutMove, itemsize: int, has_grad: bool) -> Seconds:
        """Return the seconds of a move, forward and backward."""
        forward, backward = (
            self.collective_seconds(move.after.grid, move.axes, nbytes) if nbytes else 0.0
            for nbytes in move.count_bytes(itemsize, has_grad)
        )
        return forward, backward

    def path_prices(
        self,
        index: int,
        source: L,
        target: L,
        grad_sums: tuple[str, ...] = (),
        grad_shares: tuple[str, ...] = (),
    ) -> tuple[MovePrice, ...] | None:
        """
        Return the moves of a tensor from one layout to another with their seconds; None if there is
        no way.
        """
        tensor = self.graph.tensors[index]
        key = (
            tensor.shape,
            tensor.dtype,
            tensor.requires_grad,
            source,
            target,
            grad_sums,
            grad_shares,
        )
        if key not in self._paths:
            try:
                moves = redistribution_path(
                    View(self.grid, source, tensor.shape),
                    target,
                    tensor.requires_grad,
                    grad_sums,
                    grad_shares,
                )
            except ValueError:
                self._paths[key] = None
                return None
            self._paths[key] = tuple(
                (
                    moves[: count + 1],
                    sum(self.move_seconds(move, tensor.dtype.itemsize, tensor.requires_grad)),
                )
                for count, move in enumerate(moves)
            )
        return self._paths[key]

    # ---- weights ------------------------------------------------------------

    def sum_seconds(self, index: int, layout: L, axes: tuple[str, ...]) -> float:
        """Return the seconds per pass of the sums of a weight's gradient over axes."""
        tensor = self.graph.tensors[index]
        if not tensor.requires_grad:
            return 0.0
        local = largest_shard_numel(self.grid, layout, tensor.shape) * tensor.dtype.itemsize
        total = 0.0
        for axis in axes:
            parts = self.grid.degree(axis)
            total += self.collective_seconds(self.grid, (axis,), 2 * local * (parts - 1) / parts)
        return total / self.passes

    def weight_seconds(self, index: int, layout: L, axes: tuple[str, ...]) -> float:
        """Return what a weight costs per pass: its gradient's sums, and the price of its bytes."""
        tensor = self.graph.tensors[index]
        seconds = self.sum_seconds(index, layout, axes)
        if self.byte_price:
            local = largest_shard_numel(self.grid, layout, tensor.shape) * tensor.dtype.itemsize
            seconds += self.byte_price * local
        return seconds


def price_plan(prices: PriceList, plan: OperatorPlan) -> PlanPrice:
    """Return the price of a plan, of any origin."""
    graph = plan.graph
    moves = [[0.0, 0.0] for _ in range(len(graph.operators) + 1)]
    for traffic in list_moves(plan):
        tensor = graph.tensors[traffic.tensor]
        seconds = prices.move_seconds(traffic.move, tensor.dtype.itemsize, tensor.requires_grad)
        for direction in (0, 1):
            moves[traffic.position][direction] += seconds[direction]
    return PlanPrice(
        tuple(
            prices.operator_seconds(position, sharding)
            for position, sharding in enumerate(plan.shardings)
        ),
        tuple((forward, backward) for forward, backward in moves),
        {
            index: prices.weight_seconds(index, layout, plan.grad_sums.get(index, ()))
            for index, layout in plan.weights.items()
        },
    )
