"""The ranks along some axes of a mesh, and the numbers of axes in compiled graphs."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.startup.group_exit import ClosedGroup, register_holder


class AxisMembers:
    """
    The ranks that differ along some axes of a mesh only, this rank among them.

    Attributes:
        names: the axes, major first.
        ranks: the ranks of the group, in the order of their index.
        index: the index of this rank.
        group: torch's process group; None for a single rank.
        device: device on which collectives work.
        grid, rank: the mesh, and this rank's number in it.
        size: number of ranks.
        is_sorted: whether torch's group has the ranks in the order of ``ranks``.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        ranks: tuple[int, ...],
        index: int,
        group: Any,
        device: torch.device,
        grid: Grid,
        rank: int,
    ) -> None:
        self.names = names
        self.ranks = ranks
        self.index = index
        self.group: Any = group
        self.device = device
        self.grid = grid
        self.rank = rank
        self.size = len(ranks)
        self.is_sorted = sorted(ranks) == list(ranks)
        register_holder(self)

    def drop_groups(self) -> None:
        """Drop the process group: the job is left."""
        if self.group is not None:
            self.group = ClosedGroup()


_counter = itertools.count()
_ids_of: dict[tuple[tuple[str, ...], tuple[int, ...], int], list[int]] = {}
"""The numbers given to axes with these names, ranks and index."""
_axes: weakref.WeakValueDictionary[int, AxisMembers] = weakref.WeakValueDictionary()


def assign_axis_id(axis: AxisMembers) -> int:
    """
    Return the number of an axis in compiled graphs, valid while the axis lives.

    The axis of a later run gets the number of an equal axis that no longer lives: compiled code is
    found in the cache again.
    """
    known = _ids_of.setdefault((axis.names, axis.ranks, axis.index), [])
    axis_id = next((number for number in known if number not in _axes), -1)
    if axis_id < 0:
        # Shapes of results follow from size and index. Both are part of the number, so that the
        # caches of torch on disk tell graphs of other sizes apart.
        axis_id = next(_counter) << 32 | len(axis.ranks) << 16 | axis.index
        known.append(axis_id)
    _axes[axis_id] = axis
    return axis_id


def find_axis(axis_id: int) -> AxisMembers:
    """Return the axis of a number."""
    return _axes[axis_id]


def axis_size_of(axis_id: int) -> int:
    """Return the number of ranks of the axis of a number."""
    return axis_id >> 16 & 0xFFFF
