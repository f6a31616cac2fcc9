"""
The operator engine as a strategy of `parallelize`: cuts a model operator by operator.

    run = pdrun.parallelize(model, ..., mesh=pdrun.mesh(dp=-1, tp=4), sample=batch, strategy=pdrun.Operators({
        "blocks.*.attn.qkv.weight": L("tp", None),
        "blocks.*.attn.out.weight": L(None, "tp"),
    }))

The model stays the object that it is, with its parameters' names; its class becomes one whose forward runs this rank's
local graph. Graphs are made for the shapes that come, by the layouts that were chosen first, and kept.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel.axes import Axes
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.mesh import FIXED
from pdrun.parallel.operators import rules as rules  # registers them
from pdrun.parallel.operators.constraints import Said, Sharding
from pdrun.parallel.operators.graph import Graph, trace
from pdrun.parallel.operators.partition import Program, partition
from pdrun.parallel.operators.plan import Plan
from pdrun.parallel.operators.propagate import propagate
from pdrun.parallel.operators.segments import called, derived, prepare, tensor_at
from pdrun.parallel.operators.strategy import WHERE, Entry, resolve
from pdrun.parallel.tiles import set_tile, tile


class Operators:
    """
    Cuts operators over the tensor axes of a mesh; see `pdrun.parallel.operators.strategy` for what may be said.

    Args:
        entries: operators, modules and weights by name or glob. What is left out follows by propagation.
    """

    def __init__(self, entries: Mapping[str, Entry] | None = None) -> None:
        if entries is not None and not (
            isinstance(entries, Mapping) and all(isinstance(name, str) for name in entries)
        ):
            hint = '{"fc1.weight": pdrun.L("tp", None)}'
            raise UsageError(f"{entries!r} is no dict of layouts and cuts by name", where=WHERE, hint=hint)
        self.entries = dict(entries or {})

    def plan(self, model: nn.Module, mesh: Grid, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Plan:
        """
        Return the plan for a model, for all ranks; nothing is computed, and no device is needed.

        Args:
            model: whole; its weights may be on the meta device.
            mesh: all axes.
            args, kwargs: of a call, with the rows of one data rank; only shapes and types matter.

        Raises:
            UsageError: the model does not export, an operator has no rule, or an entry can't be met.
        """
        shadow = meta_copy(model)
        args, kwargs = on_meta((args, kwargs or {}))
        return self.plan_of(trace(shadow, args, kwargs), mesh, _inner(model))

    def plan_of(self, graph: Graph, mesh: Grid, inner: Mapping[str, Said]) -> Plan:
        """Return the plan for a graph (see `plan`)."""
        grid = tensor_grid(mesh)
        return propagate(graph, grid, resolve(graph, grid, mesh, self.entries, inner))

    def apply(self, model: nn.Module, axes: Axes, sample: Any) -> nn.Module:
        """
        Cut a model: its weights become this rank's tiles, its forward this rank's share.

        Args:
            sample: a batch as `parallelize` takes it.

        Raises:
            UsageError: see `plan`; or there is no sample, or the model is cut into stages or sequences besides.
        """
        for axis, what in (("pp", "stages, which are made of modules"), ("cp", "parts of sequences")):
            if axes.grid.degree(axis) > 1:
                told = f"the graph of a whole model has no {what}: {axis}={axes.grid.degree(axis)}"
                raise UsageError(told, where=WHERE, hint="module styles, pdrun.Strategy({...}), go with every axis")
        if sample is None:
            raise UsageError(
                "a strategy of operators needs a batch to see shapes", where=WHERE, hint="give sample=batch"
            )
        return self.cut(model, axes, *arguments(model, sample))

    def cut(self, model: nn.Module, axes: Axes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
        """Cut a model (see `apply`) for a call with these arguments."""
        engine = Engine(self, model, axes)
        plan = engine.plan(args, kwargs, model.training)
        params = dict(model.named_parameters())
        for index, layout in plan.weights.items():
            tensor = plan.graph.tensors[index]
            sums = plan.sums[index]
            if layout.axes or sums:
                cut = tile(tensor.shape, layout, axes.grid, axes.rank, sums)
                param = params[tensor.name]
                if param.device.type == "meta":
                    param.data = torch.empty(cut.local_shape, dtype=param.dtype, device="meta")
                else:
                    param.data = cut.take(param.data)
                set_tile(param, cut)
        derived(model, PartitionedModule)
        prepare(model)
        model._pdrun_engine = engine
        return model


class Engine:
    """
    Plans and programs of one model on one rank, by the shapes that they are for.

    Copies of the model share it: it holds process groups.
    """

    def __init__(self, strategy: Operators, model: nn.Module, axes: Axes) -> None:
        self.strategy, self.axes = strategy, axes
        self.shadow, self.inner = meta_copy(model), _inner(model)
        self.plans: dict[Any, Plan] = {}
        self.programs: dict[Any, Program] = {}
        self.first: Plan | None = None

    def __deepcopy__(self, memo: Any) -> Engine:
        return self

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Plan:
        """Return the plan for a call, made now where there is none for its shapes yet."""
        key = _key(args, kwargs, training)
        if key not in self.plans:
            self.shadow.train(training)
            graph = trace(self.shadow, *on_meta((args, kwargs)))
            if self.first is None:
                self.first = self.strategy.plan_of(graph, self.axes.grid, self.inner)
                self.plans[key] = self.first
            else:
                self.plans[key] = again(self.first, graph)
        return self.plans[key]

    def program(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """Return what runs for a call, made now where there is nothing for its shapes yet."""
        key = _key(args, kwargs, model.training)
        if key not in self.programs:
            self.programs[key] = partition(self.plan(args, kwargs, model.training), self.axes, called(model))
        return self.programs[key]


def again(first: Plan, graph: Graph) -> Plan:
    """
    Return the plan for the same model on other shapes: the layouts of the first plan, by name.

    An operator that the first plan lacks, or whose way needs other sizes, follows by propagation.
    """
    from pdrun.parallel.operators.again import wishes_like

    plan = propagate(graph, first.grid, wishes_like(first, graph))
    sums = {first.graph.tensors[index].name: axes for index, axes in first.sums.items()}
    plan.sums = {index: sums.get(graph.tensors[index].name, ()) for index in plan.sums}
    return plan


def _key(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Any:
    flat, structure = pytree.tree_flatten((args, kwargs))
    return (training, str(structure), *map(_part, flat))


def _part(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


class PartitionedModule(nn.Module):
    """What a model's class gets as a base: its forward is this rank's share of the model's."""

    _pdrun_engine: Engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, on every rank, whole."""
        program = self._pdrun_engine.program(self, args, kwargs)
        weights = [tensor_at(self, name) for name in program.names]
        results = program.module(self, *weights, *pytree.tree_leaves((args, kwargs)))
        return pytree.tree_unflatten(results, program.plan.graph.structure)

    def explain(self) -> str:
        """Return each operator's layout, its collectives and their bytes, as text."""
        from pdrun.parallel.operators.explain import explain

        assert self._pdrun_engine.first is not None
        return explain(self._pdrun_engine.first)


def tensor_grid(mesh: Grid) -> Grid:
    """Return the tensor axes of a mesh."""
    names = tuple(name for name in mesh.names if name not in FIXED)
    return Grid(names, tuple(mesh.degree(name) for name in names))


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy without memory; ties hold."""
    memo = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    return copy.deepcopy(model, memo)


def on_meta(values: Any) -> Any:
    """Return nested values with their tensors on the meta device."""
    return pytree.tree_map(lambda value: value.to("meta") if isinstance(value, torch.Tensor) else value, values)


def _inner(model: nn.Module) -> dict[str, Said]:
    """Return the layouts of weights that `shard` set on modules, by the first name of the weight."""
    first = {id(param): name for name, param in model.named_parameters()}
    found = {}
    for module in model.modules():
        sharding = getattr(module, "_pdrun_sharding", None)
        if isinstance(sharding, Sharding):
            params = dict(module.named_parameters())
            found.update({first[id(params[name])]: layout for name, layout in sharding.weights.items()})
    return found


def arguments(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return how `parallelize` calls a model on a batch; see `pdrun.parallel.loss.call_model`."""
    if isinstance(batch, Mapping):
        known = inspect.signature(model.forward).parameters
        takes_all = any(found.kind is found.VAR_KEYWORD for found in known.values())
        return (), {key: value for key, value in batch.items() if takes_all or key in known}
    if isinstance(batch, (tuple, list)) and not batch:
        raise UsageError("the sample is empty", where=WHERE, hint="sample= is a batch as run.step takes it")
    return (batch[0] if isinstance(batch, (tuple, list)) else batch,), {}
