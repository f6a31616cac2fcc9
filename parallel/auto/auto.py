"""
`pdrun.Auto`: the strategy of `parallelize` whose operators are split as a search chooses.

    run = pdrun.parallelize(
        model, ..., mesh=pdrun.mesh(dp=-1, tp=8), sample=batch, strategy="auto")
    run = pdrun.parallelize(
        model, ..., mesh=pdrun.mesh(dp=-1, tp=8), sample=batch,
        strategy=pdrun.Auto({"emb.weight": L("tp", None)}, topology="h100x8"))

Entries are those of `pdrun.Operators`. They are fixed first, and the search chooses the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.auto.builtin_topologies import find_topology
from pdrun.parallel.auto.choose import AUTO_API, EXACT, check_search, choose_plan
from pdrun.parallel.auto.prices import PriceList
from pdrun.parallel.auto.search.exact import PlanSearchResult
from pdrun.parallel.auto.search.problem import SearchProblem
from pdrun.parallel.auto.topology import Topology
from pdrun.parallel.auto.topology_file import load_topology
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.data.batch_slicing import count_rows, parse_batch_slicing, take_rows
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.operators.compiler import tensor_grid
from pdrun.parallel.operators.graph.constraints import LayoutSpec
from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.operators.strategy import StrategyEntry, resolve_entries
from pdrun.parallel.zero.precision import parse_precision

if TYPE_CHECKING:
    from pdrun.parallel.pipeline.split import StageSplit


HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of the name of `pdrun.Precision.compute`."""


class Auto(Operators):
    """
    Searches the split of every operator over the tensor axes of a mesh.

    Args:
        entries: what is fixed; see `pdrun.Operators`.
        search: "dynamic_programming" (the cheapest plan of all), "recursive_programming" (axis
            after axis, each operator in turn) or "sharding_propagation" (from the entries; without
            entries the cheapest template).
        gather: False allows results that are sharded on their last dim, for `pdrun.cross_entropy`.
        topology: a `Topology`, the name of a built-in one, or a file; default: by the device.

    Raises:
        UsageError: the search is unknown.
        ConfigError: the topology is unknown.
    """

    def __init__(
        self,
        entries: Mapping[str, StrategyEntry] | None = None,
        *,
        search: str = EXACT,
        gather: bool = True,
        topology: Topology | str | None = None,
    ) -> None:
        super().__init__(entries, gather=gather)
        self.search = check_search(search)
        if isinstance(topology, str):
            topology = load_topology(topology)
        if not (topology is None or isinstance(topology, Topology)):
            raise UsageError(
                f"topology must be a name, a file or a Topology, got {topology!r}", where=AUTO_API
            )
        self.topology = topology
        self._passes = 1
        self._compiled = False
        self._dtype: torch.dtype | None = None

    def for_step(self, passes: int, precision: Any, compiled: bool = False) -> Auto:
        """
        Return a copy that prices the passes of a run.

        Args:
            passes: per step, each over that part of a data rank's rows.
            precision: as for `parallelize`.
            compiled: whether the run has ``compile=``.
        """
        same = copy.copy(self)
        same._compiled = compiled
        same._passes = passes
        same._dtype = compute_type(precision)
        return same

    def plan_of(
        self, graph: OperatorGraph, mesh: Grid, inner: Mapping[str, LayoutSpec]
    ) -> OperatorPlan:
        """Return the plan that the search chooses for a graph; see `Operators.plan`."""
        return self.search_graph(graph, mesh, inner).plan

    def search_graph(
        self, graph: OperatorGraph, mesh: Grid, inner: Mapping[str, LayoutSpec]
    ) -> PlanSearchResult:
        """Return the plan that the search chooses for a graph, and its price."""
        grid = tensor_grid(mesh)
        user = resolve_entries(
            graph, grid, mesh, self.entries, inner, self.finer, self.input_layouts
        )
        priced = graph if self._dtype is None else cast_graph(graph, self._dtype)
        prices = PriceList(
            priced, grid, self.topology or detect_topology(), compiled=self._compiled
        )
        problem = SearchProblem(priced, grid, prices, user, self.gather)
        found = choose_plan(problem, self.search)
        return replace(found, plan=replace(found.plan, graph=graph))

    def _check_and_cut(
        self, model: nn.Module, axes: MeshGroups, sample: Any, split: StageSplit | None
    ) -> nn.Module:
        """Shard the model for the rows of one pass; without tensor axes nothing is chosen."""
        if tensor_grid(axes.grid).size == 1 and not self.entries:
            return model
        if sample is not None:
            sample = _take_part(sample, axes.grid.degree("dp") * self._passes)
        return super()._check_and_cut(model, axes, sample, split)


def compute_type(precision: Any) -> torch.dtype | None:
    """Return the narrow type in which a run computes; None if it is that of the weights."""
    return HALF_TYPES.get(parse_precision(precision).compute or "")


def cast_graph(graph: OperatorGraph, dtype: torch.dtype) -> OperatorGraph:
    """Return a graph for prices: its fp32 tensors have another type."""
    tensors = [
        replace(tensor, dtype=dtype) if tensor.dtype == torch.float32 else tensor
        for tensor in graph.tensors
    ]
    return replace(graph, tensors=tensors)


def _take_part(sample: Any, parts: int) -> Any:
    """Return the first of equal parts of a batch; the batch itself if it cannot be divided."""
    slicing = parse_batch_slicing(None, 1)
    try:
        rows = count_rows(sample, slicing)
    except UsageError:  # the run slices its batches in another way
        return sample
    if parts == 1 or rows % parts:
        return sample
    return take_rows(sample, range(rows // parts), slicing)


def detect_topology() -> Topology:
    """
    Return the built-in topology of this process's devices.

    Raises:
        ConfigError: no built-in topology has such a device.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return find_topology("cpu")
    module = torch.get_device_module(accelerator)
    return find_topology(str(module.get_device_name()))
