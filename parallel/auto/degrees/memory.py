"""
The memory of a step on one device, from layouts and shapes alone.

What autograd saves is read from one forward pass over the graph on fake tensors. A saved tensor of
the graph has the bytes of its shard in the plan. What an operator saves for itself (the statistics
of a norm) is sharded as its result is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pdrun.parallel.layouts.layout import L
from pdrun.parallel.model.weights import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES
from pdrun.parallel.operators.graph.graph import OperatorGraph, TensorRef, replace_refs
from pdrun.parallel.operators.plan import OperatorPlan

BUCKETS_ON_WAY = 3
"""Buckets of gradients that are reduced at one time."""
FLOAT_BYTES = 4
"""Bytes of an element of a master weight, and of the loss."""


@dataclass(frozen=True)
class SavedTensor:
    """
    A tensor that autograd keeps for the backward pass of an operator.

    Attributes:
        position: the operator.
        tensor: the tensor of the graph that it is, or is a view of; None: the operator's own.
        root: what shares its storage; each storage counts once.
        nbytes: of the full storage.
    """

    position: int
    tensor: int | None
    root: int
    nbytes: int


def list_saved_tensors(graph: OperatorGraph) -> list[SavedTensor]:
    """Return what autograd saves in a forward pass over a graph. Nothing is computed."""
    with FakeTensorMode(), torch.enable_grad():
        return _SavedRecorder(graph).record_pass()


class _SavedRecorder:
    """One forward pass over a graph on fake tensors."""

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self.found: list[SavedTensor] = []
        self._position = 0
        self._values: dict[int, Any] = {}
        self._roots: dict[int, int] = {}
        """Index of the first tensor of each storage; below 0 for an operator's own."""
        self._alive: list[torch.Tensor] = []

    def record_pass(self) -> list[SavedTensor]:
        """Run the operators, and return what they saved."""
        made = {index for operator in self.graph.operators for index in operator.outputs}
        for index, tensor in enumerate(self.graph.tensors):
            if index not in made:
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                self._set_value(index, value.requires_grad_(tensor.requires_grad))
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved):
            for position, operator in enumerate(self.graph.operators):
                self._position = position
                args, kwargs = (
                    replace_refs(value, lambda ref: self._values[ref.index])
                    for value in (operator.args, operator.kwargs)
                )
                target = operator.target
                if operator.kind == "view":  # the graph has no `contiguous`; as the local graph
                    target = torch.ops.aten.reshape.default
                result = target(*args, **kwargs)
                results = result if isinstance(result, (list, tuple)) else [result]
                tensors = [value for value in results if isinstance(value, torch.Tensor)]
                for index, value in zip(operator.outputs, tensors, strict=False):
                    self._set_value(index, value)
        return self.found

    def _set_value(self, index: int, value: torch.Tensor) -> None:
        self._values[index] = value
        self._roots.setdefault(value.untyped_storage()._cdata, index)

    def _pack(self, saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        key = storage._cdata
        self._alive.append(saved)
        operator = self.graph.operators[self._position]
        if key not in self._roots:
            self._roots[key] = -1 - len(self._alive)
        root = self._roots[key]
        tensor = None
        for index in (*operator.inputs, *operator.outputs):
            value = self._values.get(index)
            if value is not None and value.untyped_storage()._cdata == key:
                tensor = index
                break
        if root < 0 or self.graph.tensors[root].kind == "op":
            self.found.append(SavedTensor(self._position, tensor, root, storage.nbytes()))
        return saved


def saved_bytes(plan: OperatorPlan, saved: Sequence[SavedTensor]) -> list[int]:
    """
    Return by operator the bytes that a device keeps for the backward pass, on the largest shards.
    """
    found = [0] * len(plan.graph.operators)
    known: set[tuple[int, int]] = set()
    for one in saved:
        local = int(one.nbytes * _shard_share(plan, one))
        if (one.root, local) not in known:
            known.add((one.root, local))
            found[one.position] += local
    return found


def _shard_share(plan: OperatorPlan, saved: SavedTensor) -> float:
    """Return the share of a saved tensor that the largest shard has."""
    graph, sharding = plan.graph, plan.shardings[saved.position]
    operator = graph.operators[saved.position]
    if saved.tensor in operator.inputs:
        slot = operator.inputs.index(saved.tensor)
        index = operator.inputs[slot]
        layout = sharding.input_layout(slot, len(graph.shape_of(index)))
    else:
        slot = operator.outputs.index(saved.tensor) if saved.tensor in operator.outputs else 0
        index = operator.outputs[slot]
        layout = sharding.output_layout(slot, len(graph.shape_of(index)))
    return shard_share(plan, layout, graph.shape_of(index))


def shard_share(plan: OperatorPlan, layout: L, shape: tuple[int, ...]) -> float:
    """Return the elements of the largest shard per element of the full tensor."""
    box = layout.box(plan.grid, shape, 0)
    return math.prod(high - low for low, high in box) / max(1, math.prod(shape))


def result_elements(plan: OperatorPlan) -> int:
    """Return the elements of the results on a device: of the logits."""
    total = 0
    for value in plan.graph.results:
        if isinstance(value, TensorRef):
            shape = plan.graph.shape_of(value.index)
            share = shard_share(plan, plan.result_layout(value.index), shape)
            total += int(share * math.prod(shape))
    return total


@dataclass(frozen=True)
class TrainingBytes:
    """
    Bytes per element of a weight, by what keeps them.

    Attributes:
        weight: the weight as the model computes with it.
        master: its fp32 copy; 0 if the model computes in fp32.
        gradient: its gradient.
        state: what the optimizer keeps.
    """

    weight: int = 4
    master: int = 0
    gradient: int = 4
    state: float = 8.0


def resident_bytes(
    elements: int,
    largest_units: int,
    kinds: TrainingBytes,
    level: int,
    shards: int,
    keeps_step: bool,
    accumulates: bool,
    root: int = 0,
) -> dict[str, int]:
    """
    Return the bytes that stay during a step, by the names of `MemoryEstimate`.

    Args:
        elements: of the weights on this device, before the optimizer level shards them.
        largest_units: elements of the two largest units, which level 3 gathers at one time.
        shards: ranks over which the optimizer level shards.
        keeps_step: level 3: gathered weights stay for the step.
        accumulates: there are several passes per step.
        root: elements outside of units, which level 3 gathers for the whole pass.
    """
    is_sharded = level > 0 and shards > 1
    own = -(-elements // shards) if is_sharded else elements
    weights = elements * kinds.weight
    masters = own * kinds.master
    total = elements * kinds.gradient
    # the first bucket is small, so that its sum starts early
    largest = max(FIRST_BUCKET_BYTES, total - FIRST_BUCKET_BYTES)
    bucket = min(total, DEFAULT_BUCKET_BYTES, largest)
    if level == 3 and is_sharded:
        gathered = elements if keeps_step else min(elements, root + largest_units)
        weights = gathered * kinds.weight
        masters = own * (kinds.master or kinds.weight)  # the shards are the weights themselves
        bucket = min(elements, largest_units) * kinds.gradient // 2
    gradients = own * kinds.gradient
    if is_sharded and accumulates and (level == 1 or keeps_step):
        gradients += total  # running sums, reduced at the end of the step
    elif is_sharded:
        gradients += min(total, BUCKETS_ON_WAY * bucket)
    gradients += bucket * kinds.weight // kinds.gradient  # those that wait for their bucket
    return {
        "weights": weights,
        "masters": masters,
        "gradients": gradients,
        "state": int(own * kinds.state),
    }
