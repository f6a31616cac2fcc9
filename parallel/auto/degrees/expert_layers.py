"""
Layers whose experts a plan can cut over the axis ep, and their weights and traffic in a graph.

Along ep ranks have other rows and other experts. A pass sends the rows of tokens to the ranks of
their experts and back, and so does the backward pass. A price takes equal loads: a rank then gets
as many rows as it sends.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from pdrun.parallel.auto.flops import COUNTERS
from pdrun.parallel.comm.mesh import EXPERT_AXIS
from pdrun.parallel.experts.adapters import find_adapter
from pdrun.parallel.experts.fused import is_fused
from pdrun.parallel.experts.moe import MoE
from pdrun.parallel.experts.style import ExpertsStyle
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.tensor.strategy import Strategy
from pdrun.parallel.tensor.style import GridPosition

LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number that is a part of a module's name."""


@dataclass(frozen=True)
class ExpertLayer:
    """
    A module with experts.

    Attributes:
        experts: their number.
        weights: full names of the weights that have an entry per expert.
    """

    name: str
    experts: int
    weights: tuple[str, ...]


@dataclass(frozen=True)
class ExpertTraffic:
    """
    Experts of a graph.

    Attributes:
        weights: indices of the weights that ranks along ep have other parts of.
        rows: by position of an operator, bytes of the rows that go to experts before it, or come
            back behind it, in a forward pass on a device.
    """

    weights: frozenset[int] = frozenset()
    rows: Mapping[int, int] = field(default_factory=dict)


def find_expert_layers(model: nn.Module) -> tuple[ExpertLayer, ...]:
    """Return the modules that are `pdrun.MoE` or fused experts of transformers, in order."""
    found = []
    alone = GridPosition(Grid((EXPERT_AXIS,), (1,)), 0)
    for name, module in model.named_modules():
        if name and (isinstance(module, MoE) or is_fused(module)):
            adapter = find_adapter(name, module, None)
            keys = adapter.shard_weights(name, module, alone, EXPERT_AXIS)
            weights = tuple(f"{name}.{key}" for key in keys)
            found.append(ExpertLayer(name, adapter.count_experts(module), weights))
    return tuple(found)


def refuse_degree(layers: Sequence[ExpertLayer], degree: int, graph: OperatorGraph) -> str:
    """
    Return why experts cannot be cut into a number of parts; empty if they can.

    Args:
        graph: of the model, for any number of rows.
    """
    if degree == 1:
        return ""
    if not layers:
        return "the model has no experts that a plan can cut (pdrun.MoE, or those of transformers)"
    for layer in layers:
        if layer.experts % degree:
            return f"the {layer.experts} experts of {layer.name} do not divide by it"
    _, traffic = cut_expert_weights(graph, layers, 1)
    modules = {graph.operators[place].module for place in traffic.rows}
    names = {graph.tensors[index].name for index in traffic.weights}
    for layer in layers:
        if names & {*layer.weights} and layer.name not in modules:
            return f"the graph has no products of the experts of {layer.name}, so no price"
    return ""


def cut_expert_weights(
    graph: OperatorGraph, layers: Iterable[ExpertLayer], degree: int
) -> tuple[OperatorGraph, ExpertTraffic]:
    """
    Return the graph of a rank along ep, whose experts are a part of all, and what it sends.

    Weights and what is computed from them alone, such as their transposes, have fewer experts. The
    numbers of rows stay.
    """
    counts = {name: layer.experts for layer in layers for name in layer.weights}
    weights = {
        index: counts[graph.tensors[index].name]
        for operator in graph.operators
        for index in operator.inputs
        if graph.tensors[index].kind == "param" and graph.tensors[index].name in counts
    }
    cut = dict(weights)
    products: dict[str, list[int]] = {}
    for position, operator in enumerate(graph.operators):
        mine = [cut[index] for index in operator.inputs if index in cut]
        if mine and len(mine) == len(operator.inputs):
            for index in operator.outputs:
                if graph.shape_of(index)[:1] == (mine[0],):
                    cut[index] = mine[0]
        elif mine and operator.kind in COUNTERS:
            products.setdefault(operator.module, []).append(position)
    rows: Counter[int] = Counter()
    for first, *_, last in ([*places, *places[-1:]] for places in products.values()):
        sent = next(index for index in graph.operators[first].inputs if index not in cut)
        rows[first] += graph.tensors[sent].nbytes
        rows[last] += graph.tensors[graph.operators[last].outputs[0]].nbytes
    tensors = [
        replace(tensor, shape=(tensor.shape[0] // degree, *tensor.shape[1:]))
        if index in cut
        else tensor
        for index, tensor in enumerate(graph.tensors)
    ]
    return replace(graph, tensors=tensors), ExpertTraffic(frozenset(weights), rows)


# ---- entries of plan files ----------------------------------------------------------------------


def describe_experts(model: nn.Module, layers: Sequence[ExpertLayer]) -> dict[str, str]:
    """Return the entries of a plan: the axis by glob of the modules, equal layers as one glob."""
    names = [layer.name for layer in layers]
    every = [name for name, _ in model.named_modules() if name]
    found: dict[str, str] = {}
    for name in names:
        glob = LAYER_NUMBER.sub("*", name, count=1)
        matched = fnmatch.filter(every, glob)
        found[glob if set(matched) <= set(names) else name] = EXPERT_AXIS
    return found


def describe_strategy(strategy: object) -> dict[str, str]:
    """Return the entries of a strategy that cuts experts over ep and nothing else; else nothing."""
    if not isinstance(strategy, Strategy):
        return {}
    styles = strategy.rules.values()
    if not all(isinstance(one, ExpertsStyle) and one.axis == EXPERT_AXIS for one in styles):
        return {}
    return dict.fromkeys(strategy.rules, EXPERT_AXIS)


def make_expert_strategy(entries: Mapping[str, str]) -> Strategy:
    """Return the strategy of the entries of a plan."""
    return Strategy({glob: ExpertsStyle(axis) for glob, axis in entries.items()})
