"""The seconds and bytes of one pass over the model, by part: head, one layer, and tail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdrun.parallel.auto.degrees.condense import COPY, HEAD, LAYER, TAIL
from pdrun.parallel.auto.degrees.expert_layers import ExpertTraffic
from pdrun.parallel.auto.degrees.memory import (
    SavedTensor,
    result_elements,
    saved_bytes,
    shard_share,
)
from pdrun.parallel.auto.flops import count_products
from pdrun.parallel.auto.prices import PriceList, price_plan
from pdrun.parallel.operators.plan import OperatorPlan


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
        experts: elements among those of the weights that other ranks of ep do not have.
        rows: bytes of the rows that go to experts and come back, in a forward pass.
    """

    forward: float = 0.0
    backward: float = 0.0
    moves: tuple[float, float] = (0.0, 0.0)
    sums: float = 0.0
    saved: int = 0
    elements: int = 0
    transient: int = 0
    experts: int = 0
    rows: int = 0

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
    traffic: ExpertTraffic | None = None,
) -> PassCost:
    """
    Return the cost of a pass, by part.

    Args:
        traffic: of experts that are cut over ep.
    """
    experts = traffic or ExpertTraffic()
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
            sum(local[index] for index in weights if index in experts.weights),
            sum(experts.rows.get(place, 0) for place in own),
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
