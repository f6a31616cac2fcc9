"""
Plans and local graphs of one model on one rank, by the shapes that they are for.

The first plan decides the layouts; later ones, for other shapes, follow it. In a pipeline every
rank plans the whole model, and makes the local graphs of the stages that it runs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel.comm.groups import Axes
from pdrun.parallel.comm.mesh import FIXED
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.operators.choose_splits import WHERE
from pdrun.parallel.operators.graph.constraints import Said, Sharding
from pdrun.parallel.operators.graph.export import trace
from pdrun.parallel.operators.graph.graph import Graph
from pdrun.parallel.operators.partition import partition
from pdrun.parallel.operators.plan import Plan
from pdrun.parallel.operators.program import Program
from pdrun.parallel.operators.propagate import propagate
from pdrun.parallel.operators.replan import wishes_like
from pdrun.parallel.operators.segments import called
from pdrun.parallel.operators.stages import Part, holders, locate, parts
from pdrun.parallel.operators.strategy import Entry, resolve

if TYPE_CHECKING:
    from pdrun.parallel.pipeline.split import Split
    from pdrun.parallel.pipeline.stage import Stages


class Engine:
    """
    Plans and programs of one model on one rank, by the shapes that they are for.

    Copies of the model share it: it holds process groups.

    Args:
        entries, gather: see `pdrun.parallel.operators.module.Operators`.
        split: the stage of each module, in a pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        axes: Axes,
        entries: Mapping[str, Entry],
        *,
        gather: bool = True,
        split: Split | None = None,
    ) -> None:
        self.axes = axes
        self.entries = entries
        self.gather = gather
        self._split = split
        self.shadow = meta_copy(model)
        self.inner = inner(model)
        self.names = _names(self.shadow)
        self.plans: dict[Any, Plan] = {}
        self.programs: dict[Any, Program] = {}
        self.first: Plan | None = None
        self.stages: Stages | None = None
        """Those that this rank runs, once the pipeline has made them."""

    def __deepcopy__(self, memo: Any) -> Engine:
        return self

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Plan:
        """Return the plan for a call, made now where there is none for its shapes yet."""
        key = _key(args, kwargs, training)
        if key not in self.plans:
            self.shadow.train(training)
            graph = trace(self.shadow, *on_meta((args, kwargs)))
            if self._split is not None:
                locate(graph, self._split)
            if self.first is None:
                self.first = plan_graph(
                    graph, self.axes.grid, self.entries, self.inner, gather=self.gather
                )
                self.plans[key] = self.first
            else:
                self.plans[key] = again(self.first, graph)
                if not self.gather:
                    self.plans[key].keep()
        return self.plans[key]

    def program(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stage: int = 0
    ) -> Program:
        """Return what runs for a call, made now where there is nothing for its shapes yet."""
        key = (stage, _key(args, kwargs, model.training))
        if key not in self.programs:
            plan = self.plan(args, kwargs, model.training)
            part = parts(plan)[stage]
            held = str if self._split is None else functools.partial(self._held, model, part)
            self.programs[key] = partition(plan, self.axes, part, called(model), held)
        return self.programs[key]

    def split(self) -> Split | None:
        """See `pdrun.parallel.pipeline.stage.Graphed`."""
        assert self.first is not None
        if self._split is None:
            return None
        return holders(self.first, self._split, self.names)

    def enter(self, stages: Stages) -> None:
        """See `pdrun.parallel.pipeline.stage.Graphed`."""
        self.stages = stages

    def _held(self, model: nn.Module, part: Part, first: str) -> str:
        """
        Return the name under which this rank has a weight or buffer, which in the whole model may
        have several.
        """
        for name in self.names[first]:
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            if own in module._parameters or own in module._buffers:
                return name
        what = f"stage {part.stage} uses {first}, which for the first batch it did not"
        hint = f"Pipeline(shared={{{first!r}: [{part.stage}]}})"
        raise UsageError(what, where=WHERE, hint=hint)


def plan_graph(
    graph: Graph,
    mesh: Grid,
    entries: Mapping[str, Entry],
    inner: Mapping[str, Said],
    *,
    gather: bool = True,
) -> Plan:
    """
    Return the plan for a graph.

    Args:
        mesh: all axes.
        entries, gather: see `pdrun.parallel.operators.module.Operators`.
        inner: layouts of weights that `shard` set, by name.

    Raises:
        UsageError: an operator has no rule, an entry cannot be met, or ``gather`` is False and no
            result is cut along its last dim.
    """
    grid = tensor_grid(mesh)
    plan = propagate(graph, grid, resolve(graph, grid, mesh, entries, inner))
    if not gather:
        plan.keep()
        if not plan.kept and grid.size > 1:
            what = "gather=False, and no result of the model is cut along its last dim"
            hint = 'cut the head by words: {"head.weight": pdrun.L("tp", None)}'
            raise UsageError(what, where=WHERE, hint=hint)
    return plan


def tensor_grid(mesh: Grid) -> Grid:
    """Return the tensor axes of a mesh."""
    names = tuple(name for name in mesh.names if name not in FIXED)
    return Grid(names, tuple(mesh.degree(name) for name in names))


def again(first: Plan, graph: Graph) -> Plan:
    """
    Return the plan for the same model on other shapes: the layouts of the first plan, by name.

    An operator that the first plan lacks, or whose way needs other sizes, follows by propagation.
    """
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
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    return str(value)


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy without memory; ties hold."""
    memo = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = tensor.detach().to("meta")
        memo[id(tensor)] = (
            nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
        )
    return copy.deepcopy(model, memo)


def on_meta(values: Any) -> Any:
    """Return nested values with their tensors on the meta device."""
    return pytree.tree_map(
        lambda value: value.to("meta") if isinstance(value, torch.Tensor) else value, values
    )


def _names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each weight and buffer, by the first."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for kind in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in kind:
            found.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return found


def inner(model: nn.Module) -> dict[str, Said]:
    """
    Return the layouts of weights that `shard` set on modules, by the first name of the weight.
    """
    first = {id(param): name for name, param in model.named_parameters()}
    found = {}
    for module in model.modules():
        sharding = getattr(module, "_pdrun_sharding", None)
        if isinstance(sharding, Sharding):
            params = dict(module.named_parameters())
            found.update(
                {first[id(params[name])]: layout for name, layout in sharding.weights.items()}
            )
    return found
