"""
The process groups of one rank along the axes of a mesh.

    axes = MeshGroups(mesh.grid, rank, device, watchdog)
    axes["tp"].all_reduce(x)            over the ranks that differ along tp only
    axes["dp", "cp"]                    over two axes, dp is the major one

Collectives are counted: ``axes.counts[("all_reduce", ("tp",))]`` has the number of calls and the
bytes of this rank's input.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from pdrun.errors import UsageError
from pdrun.parallel import torch_compat
from pdrun.parallel.comm import custom_ops as custom_ops  # defines the operators of compiled code
from pdrun.parallel.comm.axis_transport import CollectiveCount, CollectiveState
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.watchdog import CollectiveWatchdog
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.startup.group_exit import register_holder


class MeshGroups:
    """
    The process groups of one rank along the axes of a grid, created on first use.

    Every rank of a group must ask for it, in the same order as for other groups of the same ranks.

    Args:
        grid: the axes.
        rank: this process's rank in the grid.
        device: device on which collectives work.
        watchdog: bounds every wait.
    """

    def __init__(
        self, grid: Grid, rank: int, device: torch.device, watchdog: CollectiveWatchdog
    ) -> None:
        self.grid = grid
        self.rank = rank
        self.device = device
        self.coordinate = grid.coordinate(rank)
        self.state = CollectiveState(watchdog)
        self._axis_groups: dict[tuple[str, ...], AxisGroup] = {}
        self._process_groups: dict[tuple[int, ...], Any] = {}
        self._views: dict[Grid, MeshGroups] = {}
        register_holder(self)

    def drop_groups(self) -> None:
        """Drop the process groups: the job is left."""
        self._process_groups.clear()

    @property
    def watchdog(self) -> CollectiveWatchdog:
        """The watchdog that bounds every wait."""
        return self.state.watchdog

    @property
    def counts(self) -> dict[tuple[str, tuple[str, ...]], CollectiveCount]:
        """Calls and bytes by (name of the collective, names of the axes)."""
        return self.state.counts

    def __getitem__(self, names: str | tuple[str, ...]) -> AxisGroup:
        """Return the group along one axis or several; axes of size 1 are left out of the names."""
        wanted = (names,) if isinstance(names, str) else tuple(names)
        key = tuple(name for name in wanted if self.grid.degree(name) > 1)
        if key not in self._axis_groups:
            ranks = self.grid.group_ranks(key, self.rank)
            index = self.grid.group_index(key, self.rank)
            self._axis_groups[key] = self._make_group(key, ranks, index)
        return self._axis_groups[key]

    def on_grid(self, grid: Grid) -> MeshGroups:
        """
        Return the groups along the axes of another grid over the same ranks.

        Process groups, counts and watchdog are shared.
        """
        if grid == self.grid:
            return self
        if grid not in self._views:
            if grid.size != self.grid.size:
                what = f"the grids ({grid}) and ({self.grid}) must have the same number of ranks"
                raise UsageError(what, where="MeshGroups")
            view = MeshGroups(grid, self.rank, self.device, self.watchdog)
            view.state = self.state
            view._process_groups = self._process_groups
            self._views[grid] = view
        return self._views[grid]

    def on_device(self, device: torch.device) -> MeshGroups:
        """Return the same groups for tensors on another device."""
        view = MeshGroups(self.grid, self.rank, device, self.watchdog)
        view.state = self.state
        view._process_groups = self._process_groups
        return view

    def make_subgroup(self, name: str, indices: tuple[int, ...]) -> AxisGroup | None:
        """
        Return the group of the ranks with some indices along an axis; None if this rank is not one
        of them.
        """
        axis = self[name]
        if axis.index not in indices:
            return None
        ranks = tuple(axis.ranks[index] for index in indices)
        return self._make_group(axis.names, ranks, indices.index(axis.index))

    def dry_run(self) -> AbstractContextManager[None]:
        """Inside, collectives return tensors of the right shape and move nothing (fake tensors)."""
        return self.state.dry_run()

    def overlapping(self, yield_turn: Callable[[], None]) -> AbstractContextManager[None]:
        """Inside, ``yield_turn`` is called between the start and the wait of each collective."""
        return self.state.overlapping(yield_turn)

    def reset_counts(self) -> None:
        """Set all counts to zero."""
        self.state.counts.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshGroups:
        """Return itself: a copy of a model uses the same groups."""
        return self

    def _make_group(self, names: tuple[str, ...], ranks: tuple[int, ...], index: int) -> AxisGroup:
        group = self._process_group(ranks)
        return AxisGroup(self.state, names, ranks, index, group, self.device, self.grid, self.rank)

    def _process_group(self, ranks: tuple[int, ...]) -> Any:
        """Return torch's process group of some ranks; None for a single rank."""
        if len(ranks) == 1:
            return None
        if list(ranks) == list(range(dist.get_world_size())):
            return dist.group.WORLD
        if ranks not in self._process_groups:
            # torch sorts the ranks of a group: see AxisTransport.group_positions
            self._process_groups[ranks] = torch_compat.new_group(
                sorted(ranks), self.watchdog.seconds, self
            )
        return self._process_groups[ranks]
