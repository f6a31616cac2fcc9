"""
The seconds and bytes of a step for a choice of degrees and savers, from the prices of the parts.

Closed forms: a pipeline's bubble by its schedule, collectives of the data axes as far as they do
not fit beside computation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdrun.parallel.auto.degrees.choices import StepChoice, StepCost
from pdrun.parallel.auto.degrees.condense import COPY, HEAD, LAYER, TAIL
from pdrun.parallel.auto.degrees.memory import (
    FLOAT_BYTES,
    SavedTensor,
    TrainingBytes,
    resident_bytes,
    result_elements,
    saved_bytes,
    shard_share,
)
from pdrun.parallel.auto.flops import count_products
from pdrun.parallel.auto.prices import PriceList, price_plan
from pdrun.parallel.auto.topology import Topology
from pdrun.parallel.operators.plan import OperatorPlan

LOSS_PASSES = 5
"""Times that a cross entropy reads or writes its logits."""
BUBBLE_SHARES = {"1f1b": 1.0, "interleaved": 0.5, "zero-bubble": 1 / 3}
"""Bubble of a schedule relative to that of 1f1b."""
CHUNKS = {"1f1b": 1, "interleaved": 2, "zero-bubble": 1}


@dataclass(frozen=True)
class PartCost:
    """
    One pass over the head, over one layer, or over the tail, on one device.

    Attributes:
        forward, backward: seconds of computation.
        moves: seconds of collectives of tensor axes, forward and backward.
        sums: seconds of gradient sums over tensor axes, once per step.
        saved: bytes that autograd keeps.
        elements: of the weights.
        transient: bytes of the largest operator.
    """

    forward: float = 0.0
    backward: float = 0.0
    moves: tuple[float, float] = (0.0, 0.0)
    sums: float = 0.0
    saved: int = 0
    elements: int = 0
    transient: int = 0

    @property
    def seconds(self) -> float:
        """Computation and moves of a pass."""
        return self.forward + self.backward + sum(self.moves)


@dataclass(frozen=True)
class PassCost:
    """
    One pass over the model.

    Attributes:
        parts: head, one layer, and tail.
        layers: number of layers.
        boundary: bytes of what a layer sends to the next, on a device.
        shared: elements of weights that head and tail share.
        logits: elements of the results on a device.
    """

    parts: dict[str, PartCost]
    layers: int
    boundary: int
    shared: int
    logits: int


def price_parts(
    prices: PriceList,
    plan: OperatorPlan,
    parts: Sequence[str],
    layers: int,
    saved: Sequence[SavedTensor],
) -> PassCost:
    """Return the cost of a pass, by part."""
    graph = plan.graph
    price = price_plan(prices, plan)
    kept = saved_bytes(plan, saved)
    names = (HEAD, LAYER, TAIL)
    places: dict[str, list[int]] = {name: [] for name in (*names, COPY)}
    for position, part in enumerate(parts):
        places[part].append(position)
    uses: dict[int, set[str]] = {}
    for position, operator in enumerate(graph.operators):
        for index in operator.inputs:
            if graph.tensors[index].kind == "param":
                uses.setdefault(index, set()).add(parts[position])
    local = {
        index: int(
            shard_share(plan, plan.weights[index], graph.shape_of(index))
            * math.prod(graph.shape_of(index))
        )
        for index in uses
    }
    found = {}
    for name in names:
        own = places[name]
        moves = [price.moves[place] for place in own]
        if name == TAIL or (name == HEAD and not layers):
            moves.append(price.moves[-1])
        weights = [index for index, used in uses.items() if name in used]
        found[name] = PartCost(
            math.fsum(price.compute[place][0] for place in own),
            math.fsum(price.compute[place][1] for place in own),
            (math.fsum(move[0] for move in moves), math.fsum(move[1] for move in moves)),
            math.fsum(price.weights[index] for index in weights),
            sum(kept[place] for place in own),
            sum(local[index] for index in weights),
            max((_operator_bytes(plan, place) for place in own), default=0),
        )
    shared = sum(local[index] for index, used in uses.items() if {HEAD, TAIL} <= used)
    return PassCost(found, layers, _boundary_bytes(plan, places), shared, result_elements(plan))


def _operator_bytes(plan: OperatorPlan, position: int) -> int:
    """Return the bytes of the results of an operator on a device."""
    graph, sharding = plan.graph, plan.shardings[position]
    return sum(
        int(
            shard_share(plan, sharding.output_layout(slot, len(shape)), shape)
            * graph.tensors[index].nbytes
        )
        for slot, index in enumerate(graph.operators[position].outputs)
        for shape in [graph.shape_of(index)]
    )


def _boundary_bytes(plan: OperatorPlan, places: dict[str, list[int]]) -> int:
    """Return the bytes of what the layer in the middle reads from the one before."""
    graph = plan.graph
    inside = set(places[LAYER])
    producers = graph.tensor_producers()
    read = {
        index
        for place in inside
        for index in graph.operators[place].inputs
        if producers.get(index) in places[COPY] and graph.tensors[index].requires_grad
    }
    return sum(
        int(
            shard_share(plan, plan.source_layout(index), graph.shape_of(index))
            * graph.tensors[index].nbytes
        )
        for index in read
    )


def count_model_flops(plan: OperatorPlan, parts: Sequence[str], layers: int) -> float:
    """Return the FLOPs of a forward pass over the full model."""
    total = 0.0
    graph = plan.graph
    for place, operator in enumerate(graph.operators):
        ins, outs = (
            [graph.shape_of(index) for index in indices]
            for indices in (operator.inputs, operator.outputs)
        )
        product = count_products(operator, ins, outs)
        if product is not None and parts[place] != COPY:
            total += product.flops * (layers if parts[place] == LAYER else 1)
    return total


def cost_step(
    choice: StepChoice, cost: PassCost, kinds: TrainingBytes, topology: Topology, itemsize: int
) -> StepCost:
    """Return the seconds and bytes of a step."""
    head, layer, tail = (cost.parts[name] for name in (HEAD, LAYER, TAIL))
    per_stage = cost.layers // choice.pp
    count = choice.microbatches
    again = choice.recompute is not None
    bandwidth = topology.device.bandwidth
    loss = LOSS_PASSES * cost.logits * FLOAT_BYTES / bandwidth
    compute_layers = per_stage * (layer.forward * (2 if again else 1) + layer.backward)
    move_layers = per_stage * (layer.moves[0] * (2 if again else 1) + layer.moves[1])
    ends_compute = [head.forward + head.backward, tail.forward + tail.backward + loss]
    ends_moves = [sum(head.moves), sum(tail.moves)]
    if choice.pp == 1:
        compute, moves = compute_layers + sum(ends_compute), move_layers + sum(ends_moves)
        elements = per_stage * layer.elements + head.elements + tail.elements - cost.shared
    else:
        end = max((0, 1), key=lambda place: ends_compute[place] + ends_moves[place])
        compute, moves = compute_layers + ends_compute[end], move_layers + ends_moves[end]
        elements = per_stage * layer.elements + max(head.elements, tail.elements)
    seconds = {"compute": count * compute, "tensor axes": count * moves}
    seconds["tensor axes"] += per_stage * layer.sums + head.sums + tail.sums
    if choice.pp > 1:
        schedule = choice.schedule or "1f1b"
        stride = choice.tp * choice.dp
        send = topology.link_seconds(stride, 2, 2 * cost.boundary) * 2 * CHUNKS[schedule]
        seconds["stages"] = count * send
        bubble = (choice.pp - 1) * BUBBLE_SHARES[schedule]
        seconds["bubble"] = bubble * (compute + moves + send)
    backward = count * (compute - per_stage * layer.forward)
    seconds["data axes"] = _data_axis_seconds(
        choice, elements, kinds, topology, count * compute, backward
    )
    own = elements / choice.dp if choice.level else elements
    traffic = 2 * kinds.state + 2 * kinds.master + kinds.weight + kinds.gradient
    seconds["optimizer"] = own * traffic / bandwidth
    return StepCost(seconds, _step_memory(choice, cost, kinds, elements, itemsize))


def _data_axis_seconds(
    choice: StepChoice,
    elements: int,
    kinds: TrainingBytes,
    topology: Topology,
    compute: float,
    backward: float,
) -> float:
    """Return the seconds of sums and gathers over dp that computation does not hide."""
    if choice.dp == 1:
        return 0.0
    share = (choice.dp - 1) / choice.dp
    gradients = elements * kinds.gradient * share
    weights = elements * kinds.weight * share
    passes = choice.microbatches
    last_backward = backward / passes

    def send(nbytes: float) -> float:
        return topology.link_seconds(choice.tp, choice.dp, nbytes)

    if choice.level == 0:
        exposed = _exposed(send(2 * gradients), last_backward, topology)
    elif choice.level == 1:
        exposed = _exposed(send(gradients), last_backward, topology) + send(weights)
    elif choice.level == 2:
        exposed = _exposed(passes * send(gradients), backward, topology) + send(weights)
    elif choice.gather == "step":
        exposed = _exposed(send(weights), compute / passes / 3, topology)
        exposed += _exposed(send(gradients), last_backward, topology)
    else:
        sent = passes * (2 * send(weights) + send(gradients))
        exposed = _exposed(sent, compute, topology)
    return exposed


def _exposed(seconds: float, beside: float, topology: Topology) -> float:
    """Return the seconds of a collective that do not fit beside computation."""
    hidden = min(seconds * topology.overlap, beside)
    return seconds - hidden


def _step_memory(
    choice: StepChoice, cost: PassCost, kinds: TrainingBytes, elements: int, itemsize: int
) -> dict[str, int]:
    """Return the bytes of the fullest stage."""
    head, layer, tail = (cost.parts[name] for name in (HEAD, LAYER, TAIL))
    per_stage = cost.layers // choice.pp
    root = elements - per_stage * layer.elements
    memory = resident_bytes(
        elements,
        2 * layer.elements,
        kinds,
        choice.level,
        choice.dp,
        choice.gather == "step",
        choice.microbatches > 1,
        root,
    )
    layers = per_stage * layer.saved
    transient = 2 * max(head.transient, layer.transient, tail.transient)
    if choice.recompute is not None:
        layers = per_stage * cost.boundary
        transient += layer.saved
    logits = cost.logits * (itemsize + FLOAT_BYTES)
    if choice.pp == 1:
        activations = head.saved + layers + tail.saved + logits
    else:
        live = min(choice.pp, choice.microbatches)
        if choice.schedule == "interleaved":
            live += choice.pp // 2
        activations = max(live * (head.saved + layers), layers + tail.saved + logits)
    return {**memory, "activations": activations + transient}
