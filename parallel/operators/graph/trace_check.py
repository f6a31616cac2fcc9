"""
Compares the graph of a model with the model: both compute the sample once, in full, on this rank.

A graph is what `forward` did for fake tensors. It differs from the model if `forward` depends on
something else than shapes and devices: a generator of Python, an earlier call, whether it is being
exported. The error names the first operator of the graph whose result the model does not compute.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pdrun.errors import UsageError
from pdrun.parallel.model.caches import turn_off_caches
from pdrun.parallel.operators.graph.export_hooks import OPERATORS_API, without_hooks
from pdrun.parallel.operators.graph.graph import Operator, OperatorGraph, TensorRef, replace_refs
from pdrun.parallel.operators.rules.rule import full_context, make_local_call

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Allowed difference of a result, relative to its norm, by type."""
HALF_TOLERANCE = 2e-2


def check_trace(
    graph: OperatorGraph,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> None:
    """
    Compare the results of a graph and of its model.

    Args:
        model: with full weights, on the device; it is not changed.
        args, kwargs: those of the export.

    Raises:
        UsageError: they differ.
    """
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs)
    )
    evaluator = _GraphEvaluator(graph, model, pytree.tree_leaves((args, kwargs)))
    # some modules of torch have another implementation without gradients
    for has_grad in (False, True):
        with same_generators(device), torch.set_grad_enabled(has_grad):
            wanted = _call_copy(model, args, kwargs)
        with same_generators(device), torch.set_grad_enabled(has_grad):
            found = evaluator.run()
        difference = _compare_results(found, wanted)
        if difference is None:
            return
    recorder = _ResultRecorder()
    with same_generators(device), torch.no_grad(), recorder:
        _call_copy(model, args, kwargs)
    with same_generators(device), torch.no_grad():
        place = _find_parting(evaluator, recorder.results)
    raise UsageError(
        f"{type(model).__name__} computes something else than its trace on the sample:"
        f" {difference}{place}",
        where=OPERATORS_API,
        hint="forward must depend on its arguments only: not on torch.compiler.is_compiling(),"
        " Python's random numbers or earlier calls; or use pdrun.Strategy",
    )


def _call_copy(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the flat results of a copy of a model, which shares its tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    reference = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    turn_off_caches(reference)
    with without_hooks(reference):
        leaves: list[Any] = pytree.tree_leaves(reference(*args, **kwargs))
    return leaves


@contextmanager
def same_generators(device: torch.device) -> Iterator[None]:
    """Inside, random numbers are the same each time; afterwards generators are as before."""
    devices = [device] if device.type != "cpu" else []
    state = random.getstate()
    try:
        with (
            torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        random.setstate(state)


class _GraphEvaluator:
    """Computes the operators of a graph in order, with full tensors."""

    def __init__(self, graph: OperatorGraph, model: nn.Module, leaves: list[Any]) -> None:
        self.graph = graph
        named = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self._given: dict[int, torch.Tensor] = dict(graph.constants)
        for index, tensor in enumerate(graph.tensors):
            if tensor.kind in ("param", "buffer"):
                self._given[index] = named[tensor.name]
        for leaf, tensor_index in zip(leaves, graph.inputs, strict=True):
            if tensor_index is not None:
                self._given[tensor_index] = leaf
        self._last_use = {
            index: position
            for position, operator in enumerate(graph.operators)
            for index in operator.inputs
        }
        for value in graph.results:
            if isinstance(value, TensorRef):
                self._last_use[value.index] = len(graph.operators)

    def run(self) -> list[Any]:
        """Return the results."""
        values = dict(self._given)
        for _ in self.iter_results(values):
            pass
        return [
            values[value.index] if isinstance(value, TensorRef) else value
            for value in self.graph.results
        ]

    def iter_results(
        self, values: dict[int, torch.Tensor] | None = None
    ) -> Iterator[tuple[Operator, torch.Tensor]]:
        """
        Yield each operator with its first result.

        Args:
            values: given tensors by index; gets those that are still used.
        """
        tensors = dict(self._given) if values is None else values

        def value_of(ref: TensorRef) -> torch.Tensor:
            return tensors[ref.index]

        for position, operator in enumerate(self.graph.operators):
            target, args, kwargs = make_local_call(full_context(self.graph, operator))
            found = target(*replace_refs(args, value_of), **replace_refs(kwargs, value_of))
            outputs = list(found) if operator.returns_list else [found]
            tensors.update(zip(operator.outputs, outputs, strict=True))
            yield operator, outputs[0]
            for index in (*operator.inputs, *operator.outputs):
                if self._last_use.get(index, -1) <= position:
                    tensors.pop(index, None)


def _compare_results(found: list[Any], wanted: list[Any]) -> str | None:
    """Return the first difference as text."""
    if len(found) != len(wanted):
        return f"{len(wanted)} results instead of {len(found)}"
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if type(one) is not type(other) or one != other:
                return f"result {number} is {other!r} instead of {one!r}"
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"result {number} is {_describe(other)} instead of {_describe(one)}"
        share = _relative_difference(one.detach(), other.detach())
        if share > TOLERANCES.get(one.dtype, HALF_TOLERANCE):
            return f"result {number}, {_describe(one)}, differs by {share:.2g} of its norm"
    return None


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else float("inf")
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    finite = torch.isfinite(other)
    if not torch.equal(torch.isfinite(one), finite):
        return float("inf")
    one, other = one[finite], other[finite]
    norm = float(torch.linalg.vector_norm(other))
    difference = float(torch.linalg.vector_norm(one - other))
    return difference / norm if norm else difference


# ---- where they part --------------------------------------------------------

Fingerprint = tuple[int, str, str]


def _fingerprint_of(value: Any) -> Fingerprint | None:
    """Return what identifies a result, for tensors of floating point with several elements."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() < 2:
        return None
    wide = value.detach().double()
    return value.numel(), f"{float(wide.sum()):.4e}", f"{float(wide.abs().sum()):.4e}"


class _ResultRecorder(TorchDispatchMode):
    """Records what the operators of a call compute."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[str, Fingerprint]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and record its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            found = _fingerprint_of(leaf)
            if found is not None:
                self.results.append((func.overloadpacket.__name__, found))
        return result


def _find_parting(evaluator: _GraphEvaluator, results: list[tuple[str, Fingerprint]]) -> str:
    """
    Return as text the first operator of a graph with a result that the model does not compute.
    """
    places: dict[Fingerprint, int] = {}
    for position, (_, fingerprint) in enumerate(results):
        places.setdefault(fingerprint, position)
    last = -1
    for operator, result in evaluator.iter_results():
        made = _fingerprint_of(result)
        if made is None:
            continue
        if made in places:
            last = max(last, places[made])
            continue
        instead = ""
        if last + 1 < len(results):
            instead = f", where the model computes {results[last + 1][0]}"
        line = f" at {operator.source}" if operator.source else ""
        return f". They part at {operator.name}{line}{instead}"
    return ""
