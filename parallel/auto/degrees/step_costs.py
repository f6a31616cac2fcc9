"""
The seconds and bytes of a step for a choice of degrees and savers, from the prices of the parts.

Closed forms: a pipeline's bubble by its schedule, collectives of the data axes as far as they do
not fit beside computation.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from pdrun.parallel.auto.degrees.choices import StepChoice, StepCost
from pdrun.parallel.auto.degrees.condense import HEAD, LAYER, TAIL
from pdrun.parallel.auto.degrees.memory import FLOAT_BYTES, TrainingBytes, resident_bytes
from pdrun.parallel.auto.degrees.pass_costs import PartCost, PassCost
from pdrun.parallel.auto.topology import Topology

LOSS_PASSES = 9
"""
Times that a cross entropy reads or writes its fp32 logits: the cast from a narrow type and back 3,
the logarithm of the softmax 2, its gradient 4.
"""
BUBBLE_SHARES = {"1f1b": 1.0, "interleaved": 0.5, "zero-bubble": 1 / 3}
"""Bubble of a schedule relative to that of 1f1b."""
CHUNKS = {"1f1b": 1, "interleaved": 2, "zero-bubble": 1}


def cost_step(
    choice: StepChoice, cost: PassCost, kinds: TrainingBytes, topology: Topology, itemsize: int
) -> StepCost:
    """Return the seconds and bytes of a step."""
    layer = cost.parts[LAYER]
    count = choice.microbatches
    stages = [_cost_stage(choice, cost, place, topology) for place in range(choice.pp)]
    busiest = max(stages, key=lambda one: one.busy)
    seconds = {"compute": count * busiest.compute, "tensor axes": count * busiest.moves}
    seconds["tensor axes"] += busiest.sums
    if choice.ep > 1:
        seconds["experts"] = count * busiest.exchanges
    if choice.pp > 1:
        schedule = choice.schedule or "1f1b"
        stride = choice.tp * choice.row_parts
        send = topology.link_seconds(stride, 2, 2 * cost.boundary) * 2 * CHUNKS[schedule]
        seconds["stages"] = count * send
        # while a micro-batch is on the other stages, the busiest one waits for its first or last
        others = math.fsum(one.busy for one in stages if one is not busiest)
        seconds["bubble"] = BUBBLE_SHARES[schedule] * (others + (choice.pp - 1) * send)
    largest = max(stages, key=lambda one: one.elements)
    backward = count * (busiest.compute - busiest.layers * layer.forward)
    seconds["data axes"] = _data_axis_seconds(
        choice, largest, kinds, topology, count * busiest.compute, backward
    )
    own = float(largest.elements)
    if choice.level:
        own = largest.dense / choice.row_parts + largest.experts / choice.dp
    traffic = 2 * kinds.state + 2 * kinds.master + kinds.weight + kinds.gradient
    seconds["optimizer"] = own * traffic / topology.device.bandwidth
    memories = [_stage_memory(choice, cost, kinds, one, itemsize) for one in stages]
    return StepCost(seconds, max(memories, key=lambda memory: sum(memory.values())))


@dataclass(frozen=True)
class StageCost:
    """
    One pass over a stage, on one device.

    Attributes:
        place: of the stage, from 0.
        compute, moves: seconds, forward and backward.
        sums: seconds of gradient sums over tensor axes, once per step.
        elements: of its weights.
        experts: elements among them that other ranks of ep do not have.
        exchanges: seconds of rows that go to experts and come back, forward and backward.
    """

    place: int
    layers: int
    compute: float
    moves: float
    sums: float
    elements: int
    experts: int = 0
    exchanges: float = 0.0

    @property
    def dense(self) -> int:
        """Elements of the weights that every rank of ep has."""
        return self.elements - self.experts

    @property
    def busy(self) -> float:
        """Seconds of one pass."""
        return self.compute + self.moves + self.exchanges


def _cost_stage(choice: StepChoice, cost: PassCost, place: int, topology: Topology) -> StageCost:
    """Return the cost of a stage: its layers, and head or tail at an end of the model."""
    layer = cost.parts[LAYER]
    layers = choice.layers_of(cost.layers)[place]
    passes = 1 if choice.recompute is None else 2
    compute = layers * (layer.forward * passes + layer.backward)
    moves = layers * (layer.moves[0] * passes + layer.moves[1])
    sums, elements = layers * layer.sums, layers * layer.elements
    experts = layers * layer.experts
    exchanges = layers * _exchange_seconds(choice, layer, topology, passes)
    for part in _ends_of(choice, cost, place):
        compute += part.forward + part.backward
        moves += sum(part.moves)
        sums += part.sums
        elements += part.elements
        experts += part.experts
        exchanges += _exchange_seconds(choice, part, topology)
    if place == choice.pp - 1:
        compute += LOSS_PASSES * cost.logits * FLOAT_BYTES / topology.device.bandwidth
    if choice.pp == 1:
        elements -= cost.shared
    return StageCost(place, layers, compute, moves, sums, elements, experts, exchanges)


def _exchange_seconds(
    choice: StepChoice, part: PartCost, topology: Topology, forwards: int = 1
) -> float:
    """
    Return the seconds of the rows that go to experts and come back, forward and backward.

    With equal loads a device sends the share of its rows whose experts the other devices have. The
    numbers of rows travel first: they cost the latency of a message.
    """
    if choice.ep == 1 or not part.rows:
        return 0.0
    sent = part.rows * (choice.ep - 1) / choice.ep
    one_way = topology.link_seconds(choice.tp, choice.ep, sent / 2)
    numbers = topology.link_seconds(choice.tp, choice.ep, 0)
    return (1 + forwards) * 2 * one_way + forwards * numbers


def _ends_of(choice: StepChoice, cost: PassCost, place: int) -> list[PartCost]:
    """Return head and tail, as far as a stage has them."""
    ends = [cost.parts[HEAD]] * (place == 0)
    return ends + [cost.parts[TAIL]] * (place == choice.pp - 1)


def balance_stages(choice: StepChoice, cost: PassCost, topology: Topology) -> tuple[int, ...]:
    """
    Return the layers of each stage for which the busiest stage has least to do.

    Each stage has a layer. Layers are equal, so each further one is best on the stage that is
    cheapest with it; of equal ones, on the first.
    """
    layer = cost.parts[LAYER]
    passes = 1 + (choice.recompute is not None)
    own = layer.seconds + (layer.forward + layer.moves[0]) * (passes - 1)
    own += _exchange_seconds(choice, layer, topology, passes)
    bare = replace(choice, stage_layers=(0,) * choice.pp)
    stages = [_cost_stage(bare, cost, place, topology) for place in range(choice.pp)]
    seconds = [one.busy + own for one in stages]
    counts = [1] * choice.pp
    for _ in range(cost.layers - choice.pp):
        place = min(range(choice.pp), key=lambda at: seconds[at])
        counts[place] += 1
        seconds[place] += own
    return tuple(counts)


def _data_axis_seconds(
    choice: StepChoice,
    stage: StageCost,
    kinds: TrainingBytes,
    topology: Topology,
    compute: float,
    backward: float,
) -> float:
    """
    Return the seconds of sums and gathers over the data axes that computation does not hide.

    All weights but experts are the same on the ranks of dp and ep, experts on those of dp.
    """
    groups = (
        (stage.dense, choice.tp, choice.row_parts),
        (stage.experts, choice.tp * choice.ep, choice.dp),
    )
    gradients, weights = kinds.gradient, kinds.weight
    passes = choice.microbatches
    last_backward = backward / passes

    def send(nbytes: float) -> float:
        return math.fsum(
            topology.link_seconds(stride, parts, elements * nbytes * (parts - 1) / parts)
            for elements, stride, parts in groups
            if elements
        )

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


def _stage_memory(
    choice: StepChoice, cost: PassCost, kinds: TrainingBytes, stage: StageCost, itemsize: int
) -> dict[str, int]:
    """Return the bytes on a device of a stage."""
    layer = cost.parts[LAYER]
    ends = _ends_of(choice, cost, stage.place)
    weights = [(stage.dense, layer.elements - layer.experts, choice.row_parts)]
    if stage.experts:
        weights.append((stage.experts, layer.experts, choice.dp))
    memory: Counter[str] = Counter()
    for elements, unit, shards in weights:
        memory.update(
            resident_bytes(
                elements,
                2 * unit,
                kinds,
                choice.level,
                shards,
                choice.gather == "step",
                choice.microbatches > 1,
                elements - stage.layers * unit,
            )
        )
    layers = stage.layers * layer.saved
    transient = 2 * max(part.transient for part in (layer, *ends))
    if choice.recompute is not None:
        layers = stage.layers * cost.boundary
        transient += layer.saved
    live = 1
    if choice.pp > 1:
        live = min(choice.pp - stage.place, choice.microbatches)
        if choice.schedule == "interleaved":
            live += choice.pp // 2
    activations = live * (layers + sum(part.saved for part in ends))
    if stage.place == choice.pp - 1:
        activations += cost.logits * (itemsize + FLOAT_BYTES)
    return {**memory, "activations": activations + transient}
