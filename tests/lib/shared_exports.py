"""
One export for all cases of a model.

An export takes most of the CPU of a small run of operators, and depends on nothing but the model,
the modules in training mode and the shapes of the call. `share_exports` marks a model; in a process
that imports this module, a second one with the same mark and the same weights gets a copy of the
first one's graph. `forget_exports` has them exported again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.parallel.operators.graph.fake_model import FakeModel
from pdrun.parallel.operators.graph.graph import OperatorGraph

Model = TypeVar("Model", bound=nn.Module)
_MARK = "_pdrun_test_export"
_graphs: dict[Hashable, OperatorGraph] = {}
_export = FakeModel.export


def share_exports(model: Model, *key: Hashable) -> Model:
    """Mark a model whose class and settings are all in the key; return it."""
    setattr(model, _MARK, (type(model), key))
    return model


def forget_exports() -> None:
    """Export each model again when it is next planned."""
    _graphs.clear()


def _describe(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.requires_grad)
    return repr(value)


def _export_or_copy(
    self: FakeModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    training: frozenset[str] | None = None,
    fold: bool = True,
) -> OperatorGraph:
    """Do what `FakeModel.export` does, once for each mark, weights and call."""
    mark = getattr(self.model, _MARK, None)
    if mark is None:
        return _export(self, args, kwargs, training, fold)
    if training is None:
        training = frozenset(name for name, one in self.model.named_modules() if one.training)
    leaves, structure = pytree.tree_flatten((args, kwargs or {}))
    tensors = (*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers())
    first = {id(tensor): name for name, tensor in reversed(tensors)}  # tied weights have one
    weights = tuple((name, first[id(tensor)], _describe(tensor)) for name, tensor in tensors)
    call = (mark, weights, tuple(map(_describe, leaves)), str(structure), training, fold)
    if call not in _graphs:
        _graphs[call] = _export(self, args, kwargs, training, fold)
    graph = _graphs[call]
    return replace(  # planning writes into it
        graph,
        tensors=[*graph.tensors],
        operators=[*graph.operators],
        inputs=[*graph.inputs],
        results=[*graph.results],
        constants={**graph.constants},
        tensor_stages={**graph.tensor_stages},
    )


FakeModel.export = _export_or_copy  # type: ignore[method-assign]
