"""
Plans and local graphs of one model on one rank, by the shapes of the call.

The first plan decides the layouts. Plans for other shapes follow it. In a pipeline every rank plans
the full model and builds the local graphs of its stages.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import FIXED_AXES
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.operators.choose_splits import OPERATORS_API
from pdrun.parallel.operators.graph.constraints import LayoutSpec, ModuleSharding
from pdrun.parallel.operators.graph.export import export_graph
from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.operators.partition import build_local_program
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.operators.program import LocalProgram
from pdrun.parallel.operators.propagate import propagate_layouts
from pdrun.parallel.operators.replan import replan
from pdrun.parallel.operators.segments import find_called_modules
from pdrun.parallel.operators.stages import StagePlan, assign_stages, assign_weights, stage_plans
from pdrun.parallel.operators.strategy import StrategyEntry, resolve_entries

if TYPE_CHECKING:
    from pdrun.parallel.pipeline.split import StageSplit
    from pdrun.parallel.pipeline.stage import PipelineStages


class OperatorEngine:
    """
    Plans and local programs of one model on one rank, by the shapes of the call.

    Copies of the model share the engine: it has process groups.

    Args:
        entries, gather: see `pdrun.parallel.operators.module.Operators`.
        split: the stage of each module, in a pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        axes: MeshGroups,
        entries: Mapping[str, StrategyEntry],
        *,
        gather: bool = True,
        split: StageSplit | None = None,
    ) -> None:
        self.axes = axes
        self.entries = entries
        self.gather = gather
        self._split = split
        self.meta_model = meta_copy(model)
        self.weight_layouts = find_weight_layouts(model)
        self.all_names = _names_of_tensors(self.meta_model)
        self.plans: dict[Any, OperatorPlan] = {}
        self.programs: dict[Any, LocalProgram] = {}
        self.first_plan: OperatorPlan | None = None
        self.stages: PipelineStages | None = None
        """Those that this rank runs, once the pipeline has made them."""

    def __deepcopy__(self, memo: Any) -> OperatorEngine:
        return self

    def plan_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> OperatorPlan:
        """Return the plan for a call. It is made on the first call with these shapes."""
        key = _call_key(args, kwargs, training)
        if key not in self.plans:
            self.meta_model.train(training)
            graph = export_graph(self.meta_model, *on_meta((args, kwargs)))
            if self._split is not None:
                assign_stages(graph, self._split)
            if self.first_plan is None:
                self.first_plan = plan_graph(
                    graph, self.axes.grid, self.entries, self.weight_layouts, gather=self.gather
                )
                self.plans[key] = self.first_plan
            else:
                self.plans[key] = replan(self.first_plan, graph)
                if not self.gather:
                    self.plans[key].keep_results_sharded()
        return self.plans[key]

    def program_for(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stage: int = 0
    ) -> LocalProgram:
        """Return the local program for a call. It is built on the first call with these shapes."""
        key = (stage, _call_key(args, kwargs, model.training))
        if key not in self.programs:
            plan = self.plan_call(args, kwargs, model.training)
            stage_plan = stage_plans(plan)[stage]
            local_name: Callable[[str], str] = str
            if self._split is not None:
                local_name = functools.partial(self._local_name, model, stage_plan)
            self.programs[key] = build_local_program(
                plan, self.axes, stage_plan, find_called_modules(model), local_name
            )
        return self.programs[key]

    def split(self) -> StageSplit | None:
        """See `pdrun.parallel.pipeline.stage.Graphed`."""
        assert self.first_plan is not None
        if self._split is None:
            return None
        return assign_weights(self.first_plan, self._split, self.all_names)

    def enter(self, stages: PipelineStages) -> None:
        """See `pdrun.parallel.pipeline.stage.Graphed`."""
        self.stages = stages

    def _local_name(self, model: nn.Module, stage_plan: StagePlan, first_name: str) -> str:
        """
        Return the name of a weight or buffer on this rank. In the full model it can have several.
        """
        for name in self.all_names[first_name]:
            path, _, key = name.rpartition(".")
            module = model.get_submodule(path)
            if key in module._parameters or key in module._buffers:
                return name
        what = f"stage {stage_plan.stage} uses {first_name}, but not for the first batch"
        hint = f"Pipeline(shared={{{first_name!r}: [{stage_plan.stage}]}})"
        raise UsageError(what, where=OPERATORS_API, hint=hint)


def plan_graph(
    graph: OperatorGraph,
    mesh: Grid,
    entries: Mapping[str, StrategyEntry],
    weight_layouts: Mapping[str, LayoutSpec],
    *,
    gather: bool = True,
) -> OperatorPlan:
    """
    Return the plan for a graph.

    Args:
        mesh: all axes.
        entries, gather: see `pdrun.parallel.operators.module.Operators`.
        weight_layouts: layouts of weights that `shard` set, by name.

    Raises:
        UsageError: an operator has no rule, an entry is impossible, or ``gather`` is False and no
            result is sharded on its last dim.
    """
    grid = tensor_grid(mesh)
    plan = propagate_layouts(
        graph, grid, resolve_entries(graph, grid, mesh, entries, weight_layouts)
    )
    if not gather:
        plan.keep_results_sharded()
        if not plan.sharded_results and grid.size > 1:
            what = "gather=False, but no result of the model is sharded on its last dim"
            hint = 'shard the head over the vocabulary: {"head.weight": pdrun.L("tp", None)}'
            raise UsageError(what, where=OPERATORS_API, hint=hint)
    return plan


def tensor_grid(mesh: Grid) -> Grid:
    """Return the tensor axes of a mesh."""
    names = tuple(name for name in mesh.names if name not in FIXED_AXES)
    return Grid(names, tuple(mesh.degree(name) for name in names))


def _call_key(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Any:
    flat, structure = pytree.tree_flatten((args, kwargs))
    return (training, str(structure), *map(_value_key, flat))


def _value_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    return str(value)


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device. Tied weights stay tied."""
    memo = {}
    for tensor in (*model.parameters(), *model.buffers()):
        meta_tensor = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            meta_tensor = nn.Parameter(meta_tensor, tensor.requires_grad)
        memo[id(tensor)] = meta_tensor
    return copy.deepcopy(model, memo)


def on_meta(values: Any) -> Any:
    """Return nested values with their tensors on the meta device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), values)


def _names_of_tensors(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each weight and buffer, by the first name."""
    first_names: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for tensors in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in tensors:
            names.setdefault(first_names.setdefault(id(tensor), name), []).append(name)
    return names


def find_weight_layouts(model: nn.Module) -> dict[str, LayoutSpec]:
    """
    Return the layouts of weights that `shard` set on modules, by the first name of the weight.
    """
    first_names = {id(param): name for name, param in model.named_parameters()}
    layouts = {}
    for module in model.modules():
        sharding = getattr(module, "_pdrun_sharding", None)
        if isinstance(sharding, ModuleSharding):
            params = dict(module.named_parameters())
            layouts.update(
                {first_names[id(params[name])]: layout for name, layout in sharding.weights.items()}
            )
    return layouts
