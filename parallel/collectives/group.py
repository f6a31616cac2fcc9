"""Groups of ranks for the collectives of a program that shards its tensors by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pdrun.errors import UsageError
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.watchdog import CollectiveWatchdog
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.startup.group_exit import register_holder
from pdrun.parallel.startup.init import init

if TYPE_CHECKING:
    from pdrun.parallel.comm.mesh import Mesh

API_NAME = "pdrun.parallel.collectives"
WORLD_AXIS = "world"
DEFAULT_TIMEOUT_SECONDS = 600.0


class _MadeGroups:
    """The groups that were made for torch's default group, and the watchdogs that bound them."""

    def __init__(self) -> None:
        self.world: Any = None
        self.by_grid: dict[tuple[Grid, float], MeshGroups] = {}
        self.watchdogs: dict[float, CollectiveWatchdog] = {}
        register_holder(self)

    def drop_groups(self) -> None:
        """Forget all groups: the job is left."""
        self.world = None
        self.by_grid.clear()
        for watchdog in self.watchdogs.values():
            watchdog.close()
        self.watchdogs.clear()

    def find_groups(self, grid: Grid, timeout: float) -> MeshGroups:
        """Return the groups along the axes of a grid."""
        if self.world is not dist.group.WORLD:  # the script has made another default group
            self.drop_groups()
            self.world = dist.group.WORLD
        key = (grid, timeout)
        if key not in self.by_grid:
            context = init()
            device = torch.device(context.device)
            if timeout not in self.watchdogs:
                store = None
                if context.world_size > 1:
                    store = dist.distributed_c10d._get_default_store()
                self.watchdogs[timeout] = CollectiveWatchdog(
                    timeout, context.rank, context.world_size, store, device.type == "cpu"
                )
            watchdog = self.watchdogs[timeout]
            self.by_grid[key] = MeshGroups(grid, context.rank, device, watchdog)
        return self.by_grid[key]


_made = _MadeGroups()


def group(
    axes: str | Sequence[str] | None = None,
    mesh: Mesh | None = None,
    *,
    ranks: Sequence[int] | None = None,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
) -> AxisGroup:
    """
    Return the ranks along some axes of a mesh, some ranks, or all ranks; this rank is one of them.

    All ranks of the group must call it, in the same order as for other groups of the same ranks.

    Args:
        axes: names of one axis or several of ``mesh``, outermost first.
        mesh: see `pdrun.mesh`.
        ranks: instead of axes, ranks of the job in the order of their index in the group.
        timeout: seconds that a collective may take on a CPU before it fails.

    Raises:
        UsageError: axes without a mesh or the reverse, an axis that the mesh lacks, or ranks that
            are repeated, not of the job, or without this one.
    """
    context = init()
    if ranks is not None and (axes is not None or mesh is not None):
        raise UsageError("ranks= replaces axes and mesh", where=f"{API_NAME}.group")
    if (axes is None) != (mesh is None):
        raise UsageError(
            "axes and mesh= belong together",
            where=f"{API_NAME}.group",
            hint='group("tp", pdrun.mesh(dp=-1, tp=2)), or group() for all ranks',
        )
    if mesh is not None and axes is not None:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        unknown = [name for name in names if name not in mesh.grid.names]
        if unknown:
            raise UsageError(f"{mesh} has no axis {unknown[0]!r}", where=f"{API_NAME}.group")
        return _made.find_groups(mesh.grid, timeout)[names]
    world = _made.find_groups(Grid((WORLD_AXIS,), (context.world_size,)), timeout)
    if ranks is None:
        return world[WORLD_AXIS]
    wanted = tuple(ranks)
    if len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(context.world_size)):
        raise UsageError(
            f"{list(wanted)} are not different ranks of {context.world_size}",
            where=f"{API_NAME}.group",
        )
    made = world.make_subgroup(WORLD_AXIS, wanted)
    if made is None:
        raise UsageError(
            f"rank {context.rank} is not one of {list(wanted)}",
            where=f"{API_NAME}.group",
            hint="call it on the ranks of the group only",
        )
    return made


def barrier(ranks: AxisGroup | None = None) -> None:
    """Return when all ranks of a group have called it."""
    ranks = ranks or group()
    ranks.all_reduce(torch.zeros(1, device=ranks.device))
    if ranks.device.type != "cpu":
        torch.accelerator.synchronize()


def check_index(index: int, ranks: AxisGroup, function: str) -> None:
    """Raise UsageError for an index that a group lacks; ``function`` is named as its place."""
    if not 0 <= index < ranks.size:
        raise UsageError(
            f"index {index} is not one of the group's {ranks.size} ranks",
            where=f"{API_NAME}.{function}",
        )
