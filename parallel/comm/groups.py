"""
Places along the axes of a mesh: who is there, and the process groups; what travels along one is
`axis`'s.

    axes = Axes(mesh.grid, rank, device, watch)
    axes["tp"].all_reduce(x)            over the ranks that differ along tp only
    axes["dp", "cp"]                    over two axes at once, dp the major one

Collectives are counted: ``axes.counts[("all_reduce", ("tp",))]`` is how many there were and how
many bytes this rank gave to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from pdrun.errors import UsageError
from pdrun.parallel import torch_compat as compat
from pdrun.parallel.comm.communicator import Axis, Count, Pending
from pdrun.parallel.comm.watchdog import Watch
from pdrun.parallel.layouts.grid import Grid


class Axes:
    """
    The process groups of one rank along a grid's axes, made when they are first asked for.

    Every rank of a group must ask for it, in the same order as for other groups of the same ranks.

    Args:
        grid: the axes.
        rank: this process's place in the grid.
        device: on which collectives work.
        watch: bounds every wait.
    """

    def __init__(self, grid: Grid, rank: int, device: torch.device, watch: Watch) -> None:
        self.grid = grid
        self.rank = rank
        self.device = device
        self.watch = watch
        self.coordinate = grid.coordinate(rank)
        self.counts: dict[tuple[str, tuple[str, ...]], Count] = {}
        self.pretends = False
        """Whether collectives move nothing: see `pretending`."""
        self.pause: Callable[[], None] = _go_on
        """Called between the start of each collective and the wait for it: see `pausing`."""
        self.on_way: dict[int, Pending] = {}
        """What compiled code has started and not waited for yet, by the address of the result."""
        self._deferred: list[Pending] | None = None
        self._made: dict[tuple[str, ...], Axis] = {}
        self._groups: dict[tuple[int, ...], Any] = {}
        self._views: dict[Grid, Axes] = {}

    def __getitem__(self, names: str | tuple[str, ...]) -> Axis:
        """
        Return the place along one axis or several; axes of one device are left out of the names.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        key = tuple(name for name in wanted if self.grid.degree(name) > 1)
        if key not in self._made:
            ranks = self.grid.group_ranks(key, self.rank)
            self._made[key] = Axis(
                self, key, ranks, self.grid.group_index(key, self.rank), self._group(ranks)
            )
        return self._made[key]

    def on(self, grid: Grid) -> Axes:
        """
        Return the places along another grid's axes over the same ranks; groups and counts are
        shared.
        """
        if grid == self.grid:
            return self
        if grid not in self._views:
            if grid.size != self.grid.size:
                raise UsageError(
                    f"({grid}) and ({self.grid}) are of other numbers of ranks", where="Axes"
                )
            view = self._views[grid] = Axes(grid, self.rank, self.device, self.watch)
            view.counts = self.counts
            view._groups = self._groups
            view.on_way = self.on_way
            view.pretends = self.pretends
            view.pause = self.pause
        return self._views[grid]

    def among(self, name: str, places: tuple[int, ...]) -> Axis | None:
        """
        Return the place along an axis among the ranks of some indices; None where this rank is none
        of them.
        """
        axis = self[name]
        if axis.index not in places:
            return None
        ranks = tuple(axis.ranks[place] for place in places)
        return Axis(self, axis.names, ranks, places.index(axis.index), self._group(ranks))

    @contextmanager
    def pretending(self) -> Iterator[None]:
        """
        While this lasts, collectives return tensors of the right shape without moving anything, as
        for fake ones.
        """
        every = [self, *self._views.values()]
        for axes in every:
            axes.pretends = True
        try:
            yield
        finally:
            for axes in every:
                axes.pretends = False

    @contextmanager
    def pausing(self, pause: Callable[[], None]) -> Iterator[None]:
        """
        While this lasts, something else may be done between the start of each collective and the
        wait for it.
        """
        every = [self, *self._views.values()]
        before = self.pause
        for axes in every:
            axes.pause = pause
        try:
            yield
        finally:
            for axes in every:
                axes.pause = before

    def __deepcopy__(self, memo: dict[int, Any]) -> Axes:
        """Return itself: a copy of a model works at the same place."""
        return self

    def _group(self, ranks: tuple[int, ...]) -> Any:
        """Return the process group of some ranks, in that order; None for one rank."""
        if len(ranks) == 1:
            return None
        if list(ranks) == list(range(dist.get_world_size())):
            return dist.group.WORLD
        if ranks not in self._groups:
            # torch sorts the ranks of a group: see Axis._order
            self._groups[ranks] = compat.new_group(sorted(ranks), self.watch.seconds, self)
        return self._groups[ranks]

    @contextmanager
    def deferring(self) -> Iterator[list[Pending]]:
        """
        While this lasts, a collective whose result is whole as it comes is not waited for, but put
        into the list.
        """
        self._deferred = []
        try:
            yield self._deferred
        finally:
            self._deferred = None

    def forget(self) -> None:
        """Set all counts to zero."""
        self.counts.clear()


def _go_on() -> None:
    """Do nothing."""
