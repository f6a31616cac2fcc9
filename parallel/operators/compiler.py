"""
Plans and local graphs of one model on one rank, by the shapes of the call.

The first plan decides the layouts. Plans for other shapes follow it. In a pipeline every rank plans
the full model and builds the local graphs of its stages.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError, did_you_mean
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import FIXED_AXES
from pdrun.parallel.layouts.finer_grid import FinerGrid
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.operators.choose_splits import OPERATORS_API
from pdrun.parallel.operators.graph.constraints import LayoutSpec, ModuleSharding
from pdrun.parallel.operators.graph.fake_model import FakeModel
from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.operators.graph.recomputed import refuse_reason
from pdrun.parallel.operators.partition import build_local_program
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.operators.program import LocalProgram
from pdrun.parallel.operators.propagate import propagate_layouts
from pdrun.parallel.operators.replan import replan
from pdrun.parallel.operators.segments import find_called_modules, find_unit
from pdrun.parallel.operators.stages import StagePlan, assign_stages, assign_weights, stage_plans
from pdrun.parallel.operators.strategy import StrategyEntry, resolve_entries

if TYPE_CHECKING:
    from pdrun.parallel.pipeline.split import StageSplit
    from pdrun.parallel.pipeline.stage import PipelineStages


PlanFunction = Callable[[OperatorGraph, Grid, Mapping[str, LayoutSpec]], OperatorPlan]


class OperatorEngine:
    """
    Plans and local programs of one model on one rank, by the shapes of the call.

    Copies of the model share the engine: it has process groups.

    Args:
        plan_first: makes the plan of the first graph, from the graph, the mesh and the layouts that
            `shard` set.
        gather: see `pdrun.parallel.operators.module.Operators`.
        split: the stage of each module, in a pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        axes: MeshGroups,
        plan_first: PlanFunction,
        *,
        gather: bool = True,
        split: StageSplit | None = None,
    ) -> None:
        self.axes = axes
        self.gather = gather
        self._plan_first = plan_first
        self._split = split
        self._fake_model = FakeModel(model, axes.device)
        self.weight_layouts = find_weight_layouts(model)
        self.all_names = _names_of_tensors(self._fake_model.model)
        self._first_modes = {name: module.training for name, module in model.named_modules()}
        self.plans: dict[Any, OperatorPlan] = {}
        self.programs: dict[Any, LocalProgram] = {}
        self.first_plan: OperatorPlan | None = None
        self.stages: PipelineStages | None = None
        """Those that this rank runs, once the pipeline has made them."""
        self.recomputed: frozenset[str] = frozenset()
        """Names of operators whose results are not kept for the backward pass."""

    def __deepcopy__(self, memo: Any) -> OperatorEngine:
        return self

    def plan_call(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OperatorPlan:
        """
        Return the plan for a call. It is made on the first call with these shapes.

        Args:
            model: this rank's part of it, whose modules are in training mode or not.
        """
        key = _call_key(args, kwargs, self._modules_in_training(model))
        if key not in self.plans:
            graph = self._fake_model.export(args, kwargs, self._modules_in_training(model))
            if self._split is not None:
                assign_stages(graph, self._split)
            if self.first_plan is None:
                self.first_plan = self._plan_first(graph, self.axes.grid, self.weight_layouts)
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
        key = (stage, _call_key(args, kwargs, self._modules_in_training(model)))
        if key not in self.programs:
            plan = self.plan_call(model, args, kwargs)
            stage_plan = stage_plans(plan)[stage]
            local_name: Callable[[str], str] = str
            if self._split is not None:
                local_name = functools.partial(self._local_name, model, stage_plan)
            self.programs[key] = build_local_program(
                plan,
                self.axes,
                stage_plan,
                find_called_modules(model),
                local_name,
                self.recomputed,
            )
        return self.programs[key]

    def recompute_operators(self, globs: Sequence[str], modules: Sequence[str]) -> list[str]:
        """
        Keep no results of some operators for the backward pass; return their names.

        Args:
            globs: of names of operators.
            modules: names of the modules that are recomputed in full.

        Raises:
            UsageError: a glob matches no operator, or only such that cannot be recomputed, or one
                inside of a module that is recomputed.
        """
        assert self.first_plan is not None
        operators = {operator.name: operator for operator in self.first_plan.graph.operators}
        chosen: dict[str, None] = {}
        for glob in globs:
            names = fnmatch.filter(operators, glob)
            if not names:
                hint = did_you_mean(glob, operators)
                raise UsageError(f"{glob!r} matches no operator", where="recompute", hint=hint)
            for name in names:
                reason = refuse_reason(operators[name])
                if not reason and find_unit(operators[name].module, list(modules)):
                    reason = "its module is recomputed already"
                if reason:
                    raise UsageError(f"{name} cannot be recomputed: {reason}", where="recompute")
            chosen |= dict.fromkeys(names)
        self.recomputed = frozenset(chosen)
        return list(chosen)

    def _modules_in_training(self, model: nn.Module) -> frozenset[str]:
        """
        Return the names of the modules in training mode. A rank does not have those of the other
        stages: they are as at the start if the model is.
        """
        modes = {name: module.training for name, module in model.named_modules()}
        if len(modes) != len(self._first_modes):
            is_as_at_start = model.training == self._first_modes[""]
            for name, mode in self._first_modes.items():
                modes.setdefault(name, mode if is_as_at_start else model.training)
        return frozenset(name for name, mode in modes.items() if mode)

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
    finer: FinerGrid | None = None,
    inputs: Mapping[int, LayoutSpec] | None = None,
) -> OperatorPlan:
    """
    Return the plan for a graph.

    Args:
        mesh: all axes.
        entries, gather: see `pdrun.parallel.operators.module.Operators`.
        finer: how the axes that the user named have been split.
        inputs: layouts of arguments, by position among their leaves.
        weight_layouts: layouts of weights that `shard` set, by name.

    Raises:
        UsageError: an entry is impossible, or ``gather`` is False and no
            result is sharded on its last dim.
    """
    grid = tensor_grid(mesh)
    user = resolve_entries(graph, grid, mesh, entries, weight_layouts, finer, inputs)
    plan = propagate_layouts(graph, grid, user)
    if not gather:
        plan.keep_results_sharded()
        if not plan.sharded_results and grid.size > 1:
            what = "gather=False, but no result of the model is sharded on its last dim"
            hint = 'shard the head over the vocabulary: {"head.weight": pdrun.L("tp", None)}'
            raise UsageError(what, where=OPERATORS_API, hint=hint)
    return plan


def find_engine(model: nn.Module) -> OperatorEngine | None:
    """Return the engine of a sharded model; None if the model has none."""
    engine = getattr(model, "_pdrun_engine", None)
    return engine if isinstance(engine, OperatorEngine) else None


def tensor_grid(mesh: Grid) -> Grid:
    """Return the tensor axes of a mesh."""
    names = tuple(name for name in mesh.names if name not in FIXED_AXES)
    return Grid(names, tuple(mesh.degree(name) for name in names))


def _call_key(args: tuple[Any, ...], kwargs: dict[str, Any], training: frozenset[str]) -> Any:
    flat, structure = pytree.tree_flatten((args, kwargs))
    return (training, str(structure), *map(_value_key, flat))


def _value_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    return str(value)


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
