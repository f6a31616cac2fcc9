"""
`pdrun.Operators`: the strategy of `parallelize` that shards a model operator by operator.

    run = pdrun.parallelize(
        model, ..., mesh=pdrun.mesh(dp=-1, tp=4), sample=batch,
        strategy=pdrun.Operators({
            "blocks.*.attn.qkv.weight": L("tp", None),
            "blocks.*.attn.out.weight": L(None, "tp"),
        }))

The model stays the same object and keeps the names of its parameters. Its class is replaced by one
whose forward runs this rank's local graph. A graph is built for each shape, with the layouts that
were chosen first, and kept. In a pipeline every rank plans the full model and runs the local graph
of the current stage.
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
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import Mesh, solve_mesh
from pdrun.parallel.layouts.device_matrix import DeviceMatrixLayout, is_counts
from pdrun.parallel.layouts.finer_grid import (
    FinerGrid,
    WantedCounts,
    derive_degrees,
    refine_grid,
)
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.model.shards import make_shard, set_shard
from pdrun.parallel.operators import rules as rules  # registers them
from pdrun.parallel.operators.choose_splits import OPERATORS_API
from pdrun.parallel.operators.compiler import (
    OperatorEngine,
    find_weight_layouts,
    plan_graph,
    tensor_grid,
)
from pdrun.parallel.operators.graph.constraints import LayoutSpec, ModuleSharding, is_layout
from pdrun.parallel.operators.graph.fake_model import FakeModel, find_device
from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.operators.graph.recomputed import recompute_results
from pdrun.parallel.operators.graph.sample_call import capture_call
from pdrun.parallel.operators.graph.trace_check import check_trace
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.operators.segments import accept_segments, derive_class
from pdrun.parallel.operators.strategy import OpLayout, StrategyEntry
from pdrun.parallel.tensor.vocab_cross_entropy import mark_sharded_logits

if TYPE_CHECKING:
    from pdrun.parallel.pipeline.split import StageSplit
    from pdrun.parallel.training.loss import ForwardFunction


class Operators:
    """
    Shards operators over the tensor axes of a mesh. `pdrun.parallel.operators.strategy` lists the
    entries.

    Args:
        entries: operators, modules and weights by name or glob. The rest follows by propagation.
        gather: False leaves results that are sharded on their last dim (the vocabulary of logits)
            as they are, for `pdrun.cross_entropy`. True: every rank returns full results.
    """

    def __init__(
        self, entries: Mapping[str, StrategyEntry] | None = None, *, gather: bool = True
    ) -> None:
        if entries is not None and not (
            isinstance(entries, Mapping) and all(isinstance(name, str) for name in entries)
        ):
            raise UsageError(
                f"entries must be a dict of layouts by name, got {entries!r}",
                where=OPERATORS_API,
                hint='{"fc1.weight": pdrun.L("tp", None)}',
            )
        if not isinstance(gather, bool):
            raise UsageError(
                f"gather must be True or False, got {gather!r}",
                where=OPERATORS_API,
                hint="gather=False leaves logits sharded, for pdrun.cross_entropy",
            )
        self.entries = dict(entries or {})
        self.gather = gather
        self.batch_layouts: tuple[LayoutSpec | None, ...] = ()
        """Of the tensors of a batch, in order."""
        self.input_layouts: dict[int, LayoutSpec] = {}
        """Of the arguments of the model, by position among their leaves."""
        self.finer: FinerGrid | None = None
        """How axes of the user's mesh have been split for the entries."""
        self._forward: ForwardFunction | None = None

    def with_forward(self, forward: ForwardFunction) -> Operators:
        """Return a copy that traces the call which ``forward(model, batch)`` makes of a sample."""
        same = copy.copy(self)
        same._forward = forward
        return same

    def plan(
        self,
        model: nn.Module,
        mesh: Grid,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> OperatorPlan:
        """
        Return the plan of a model, for all ranks. Nothing is computed and no device is needed.

        Args:
            model: the full model; its weights can be on the meta device.
            mesh: all axes.
            args, kwargs: of a call, with the rows of one data rank; only shapes and types matter.

        Raises:
            UsageError: the model does not export, or an entry is impossible.
        """
        fake_model = FakeModel(model, find_device(model, (args, kwargs)))
        finer = refine_grid(mesh, tensor_grid(mesh).names, self.find_forms(model))
        graph = fake_model.export(args, kwargs)
        return self._with_parts(finer).plan_of(graph, finer.grid, find_weight_layouts(model))

    def refine_mesh(
        self, model: nn.Module, mesh: Mesh | None, world: int
    ) -> tuple[Mesh | None, Operators]:
        """
        Return a mesh whose axes express all entries, and the strategy for it.

        Axes of the user's mesh are split where a device matrix or counts need it. Without a mesh
        the devices become tensor axes, if the entries need other axes than dp.
        """
        forms = self.find_forms(model)
        if mesh is None:
            degrees = derive_degrees(forms, world)
            if degrees is None:
                return None, self
            mesh = solve_mesh(world, degrees)
        finer = refine_grid(mesh.grid, mesh.tensor_axes, forms)
        return Mesh(finer.grid), self._with_parts(finer)

    def with_inputs(self, layouts: tuple[Any, ...]) -> Operators:
        """
        Return a copy for a batch whose tensors have layouts: the operators that read them follow.

        Raises:
            UsageError: an entry is no layout.
        """
        for layout in layouts:
            if not (layout is None or is_layout(layout)):
                raise UsageError(
                    f"entries must be layouts, counts or None, got {layout!r}",
                    where="dataset_strategy",
                )
        same = copy.copy(self)
        same.batch_layouts = layouts
        return same

    def _with_call(
        self, sample: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int
    ) -> Operators:
        """Return a copy that knows which arguments of the model are which tensors of the batch."""
        if not self.batch_layouts:
            return self
        leaves = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, torch.Tensor)]
        if len(leaves) != len(self.batch_layouts):
            what = f"has {len(self.batch_layouts)} entries, the sample has {len(leaves)} tensors"
            raise UsageError(what, where="dataset_strategy")
        layouts = {
            id(leaf): layout
            for leaf, layout in zip(leaves, self.batch_layouts, strict=True)
            if layout is not None
        }
        same = copy.copy(self)
        same.input_layouts = {
            position: _without_rows(layouts[id(leaf)], rows)
            for position, leaf in enumerate(pytree.tree_leaves((args, kwargs)))
            if id(leaf) in layouts
        }
        return same

    def _with_parts(self, finer: FinerGrid) -> Operators:
        """Return a copy for a mesh with split axes."""
        if not finer.parts:
            return self
        same = copy.copy(self)
        same.finer = finer
        return same

    def find_forms(self, model: nn.Module) -> list[DeviceMatrixLayout | WantedCounts]:
        """Return all layouts by device matrices and counts, of the entries and of `shard`."""
        found = [form for entry in self.entries.values() for form in _forms_of(entry)]
        found += [form for layout in self.batch_layouts for form in _forms_of((layout,))]
        for module in model.modules() if isinstance(model, nn.Module) else ():
            sharding = getattr(module, "_pdrun_sharding", None)
            if isinstance(sharding, ModuleSharding):
                found += (one for each in sharding.weights.values() for one in _forms_of(each))
                values = (*sharding.in_, *(sharding.out or ()))
                found += (one for each in values for one in _forms_of((each,)))
        return found

    def plan_of(
        self, graph: OperatorGraph, mesh: Grid, inner: Mapping[str, LayoutSpec]
    ) -> OperatorPlan:
        """Return the plan of a graph; see `plan`."""
        return plan_graph(
            graph,
            mesh,
            self.entries,
            inner,
            gather=self.gather,
            finer=self.finer,
            inputs=self.input_layouts,
        )

    def apply(self, model: nn.Module, axes: MeshGroups, sample: Any) -> nn.Module:
        """
        Shard a model: its weights become this rank's shards, its forward this rank's graph.

        Args:
            sample: a batch as `parallelize` takes it.

        Raises:
            UsageError: see `plan`; the model computes something else on the sample than its graph;
                or there is no sample, or the mesh has axes for context
                parallel, or for stages without a `pdrun.Pipeline`.
        """
        if axes.grid.degree("pp") > 1:
            raise UsageError(
                f"the mesh has pp={axes.grid.degree('pp')}, but no pipeline= assigns modules to"
                " stages",
                where=OPERATORS_API,
                hint="pipeline=pdrun.Pipeline(microbatches=8)",
            )
        return self._check_and_cut(model, axes, sample, None)

    def apply_in_stages(
        self, model: nn.Module, axes: MeshGroups, sample: Any, split: StageSplit
    ) -> nn.Module:
        """Shard a model that a pipeline splits, too; see `pdrun.parallel.interfaces`."""
        return self._check_and_cut(model, axes, sample, split)

    def _check_and_cut(
        self, model: nn.Module, axes: MeshGroups, sample: Any, split: StageSplit | None
    ) -> nn.Module:
        """Check the mesh and the sample, then shard the model."""
        parts = axes.grid.degree("cp")
        if parts > 1:
            raise UsageError(
                f"cp={parts} is not supported here: pdrun.Operators shards sequences over tensor"
                " axes",
                where=OPERATORS_API,
                hint=f"remove context=, use an axis of another name, mesh(..., sp={parts}), and"
                ' shard the sequence over it: {"emb": (None, pdrun.L("dp", "sp"))}, or'
                ' pdrun.constrain(x, pdrun.L("dp", "sp", None)) in forward',
            )
        if sample is None:
            raise UsageError(
                "sample must be a batch, got None: pdrun.Operators needs its shapes",
                where=OPERATORS_API,
                hint="give sample=batch",
            )
        if isinstance(sample, (tuple, list)) and not sample:
            raise UsageError(
                f"sample must be a batch, got an empty {type(sample).__name__}",
                where=OPERATORS_API,
                hint="sample= is a batch as run.step takes it",
            )
        sample = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(axes.device), sample)
        args, kwargs = capture_call(model, self._forward, sample, axes.device)
        strategy = self._with_call(sample, args, kwargs, axes.grid.degree("dp"))
        return strategy.cut(model, axes, args, kwargs, split)

    def cut(
        self,
        model: nn.Module,
        axes: MeshGroups,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        split: StageSplit | None = None,
    ) -> nn.Module:
        """Shard a model (see `apply`) for a call with these arguments."""
        engine = OperatorEngine(model, axes, self.plan_of, gather=self.gather, split=split)
        plan = engine.plan_call(model, args, kwargs)
        if all(param.device.type != "meta" for param in model.parameters()):
            check_trace(plan.graph, model, args, kwargs, axes.device)
        params = dict(model.named_parameters())
        for index, layout in plan.weights.items():
            tensor = plan.graph.tensors[index]
            grad_sums = plan.grad_sums[index]
            if layout.axes or grad_sums:
                shard = make_shard(tensor.shape, layout, axes.grid, axes.rank, grad_sums)
                param = params[tensor.name]
                if param.device.type == "meta":
                    param.data = torch.empty(shard.local_shape, dtype=param.dtype, device="meta")
                else:
                    param.data = shard.take_from(param.data)
                set_shard(param, shard)
        derive_class(model, PartitionedModule)
        accept_segments(model)
        model._pdrun_engine = engine
        return model


def _forms_of(entry: Any) -> list[DeviceMatrixLayout | WantedCounts]:
    """Return the device matrices and counts of one entry."""
    if isinstance(entry, OpLayout):
        return [*_forms_of(entry.in_), *_forms_of((entry.out,))]
    if isinstance(entry, DeviceMatrixLayout):
        return [entry]
    if not isinstance(entry, tuple) or not entry:
        return []
    if is_counts(entry):
        return [WantedCounts((entry,), has_rows=False)]
    counts = tuple(each for each in entry if each and is_counts(each))
    matrices = [each for each in entry if isinstance(each, DeviceMatrixLayout)]
    return [*matrices, *([WantedCounts(counts)] if counts else [])]


def _without_rows(layout: LayoutSpec, rows: int) -> LayoutSpec:
    """Return counts without those of the rows of other data ranks, which are sliced already."""
    if isinstance(layout, tuple) and rows > 1 and layout[0] % rows == 0:
        return (layout[0] // rows, *layout[1:])
    return layout


class PartitionedModule(nn.Module):
    """Base class that a sharded model gets: its forward runs this rank's local graph."""

    _pdrun_engine: OperatorEngine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """
        Return the full results of the model on every rank. In a pipeline, run the current stage.
        """
        engine = self._pdrun_engine
        if engine.recomputed:
            with recompute_results():
                return self._run_graph(engine, args, kwargs)
        return self._run_graph(engine, args, kwargs)

    def _run_graph(
        self, engine: OperatorEngine, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if engine.stages is None:
            program = engine.program_for(self, args, kwargs)
            results = program.run(self, leaves)
        else:
            stage = engine.stages.require_running()
            program = engine.program_for(self, args, kwargs, stage.stage)
            results = stage.run_graph(functools.partial(program.run, self, leaves))
        for position, vocab_shard in program.vocab_shards.items():
            mark_sharded_logits(results[position], vocab_shard)
        return pytree.tree_unflatten(results, program.plan.graph.result_structure)

    def explain(self) -> str:
        """
        Return each operator's layout, its collectives and their bytes as text, for every stage.
        """
        from pdrun.parallel.operators.explain import explain_plan

        assert self._pdrun_engine.first_plan is not None
        return explain_plan(self._pdrun_engine.first_plan)
