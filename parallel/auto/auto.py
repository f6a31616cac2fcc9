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

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.auto.builtin_topologies import find_topology
from pdrun.parallel.auto.choose import AUTO_API, EXACT, check_search, choose_plan
from pdrun.parallel.auto.prices import PriceList
from pdrun.parallel.auto.search.exact import SearchResult
from pdrun.parallel.auto.search.problem import SearchProblem
from pdrun.parallel.auto.topology import Topology
from pdrun.parallel.auto.topology_file import load_topology
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.operators.compiler import tensor_grid
from pdrun.parallel.operators.graph.constraints import LayoutSpec
from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.operators.strategy import StrategyEntry, resolve_entries

if TYPE_CHECKING:
    from pdrun.parallel.pipeline.split import StageSplit


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

    def plan_of(
        self, graph: OperatorGraph, mesh: Grid, inner: Mapping[str, LayoutSpec]
    ) -> OperatorPlan:
        """Return the plan that the search chooses for a graph; see `Operators.plan`."""
        return self.search_graph(graph, mesh, inner).plan

    def search_graph(
        self, graph: OperatorGraph, mesh: Grid, inner: Mapping[str, LayoutSpec]
    ) -> SearchResult:
        """Return the plan that the search chooses for a graph, and its price."""
        grid = tensor_grid(mesh)
        user = resolve_entries(graph, grid, mesh, self.entries, inner)
        prices = PriceList(graph, grid, self.topology or detect_topology())
        problem = SearchProblem(graph, grid, prices, user, self.gather)
        return choose_plan(problem, self.search)

    def _check_and_cut(
        self, model: nn.Module, axes: MeshGroups, sample: Any, split: StageSplit | None
    ) -> nn.Module:
        """Shard the model; without tensor axes there is nothing to choose."""
        if tensor_grid(axes.grid).size == 1 and not self.entries:
            return model
        return super()._check_and_cut(model, axes, sample, split)


def detect_topology() -> Topology:
    """
    Return the built-in topology of this process's devices.

    Raises:
        ConfigError: no built-in topology has such a device.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return find_topology("cpu")
    module = torch.get_device_module(accelerator)
    return find_topology(str(module.get_device_name()))
