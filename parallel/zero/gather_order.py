"""
The order in which units are gathered: one schedule per chunk of a pipeline's stage, the same on
every rank that gathers.

The units that a rank runs, and when, may depend on its data. The gathers that it starts must not. A
schedule has a sequence: the order in which rank 0 first ran the units. A pass follows it, forward,
or backward from its end. A unit that a rank skips is gathered anyway when a later one is run, or
when the pass ends. While a unit computes, the next one is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from pdrun.parallel.comm.sharded import ShardedGroup
from pdrun.parallel.zero.shards import ShardedBucket


class GatherSchedule:
    """
    The units of a chunk, their sequence, and the progress of a pass.

    Args:
        units: the buckets of each unit by its index, in registration order.
        root: the buckets that the chunk uses outside of units.
        on_skipped: called in a backward pass with a unit that this rank did not run forward.
    """

    def __init__(
        self,
        units: Mapping[int, Sequence[ShardedBucket]],
        root: Sequence[ShardedBucket],
        on_skipped: Callable[[int], None],
    ) -> None:
        self.units = {index: list(cuts) for index, cuts in units.items()}
        self.root = list(root)
        self._on_skipped = on_skipped
        self._order = list(self.units)
        self._first_runs: list[int] | None = []
        """Units in the order of their first run; None once the ranks have agreed on an order."""
        self._position = {index: place for place, index in enumerate(self._order)}
        self._next = len(self._order)
        self._backward = self._keep_units = False
        self._reached = -1
        """How far units have gone backward in this pass."""
        self.is_active = False
        """Whether the chunk is between its first forward of a step and its last backward."""
        self.is_resident = False
        """Whether all units have been gathered and stay."""
        self._read_outside: list[int] = []
        """Units of this pass whose weights were read outside of their forward."""

    def position_of(self, unit: int) -> int:
        """
        Return the position of a unit in forward passes, as far as the ranks have agreed on an
        order.
        """
        return self._position[unit]

    def keep_unit(self, unit: int) -> None:
        """
        Gather a unit now, for a read outside of its forward; it stays until the last backward.

        All ranks must call it at the same point of a forward pass. From the next pass on the unit's
        weights are treated like those outside of units.
        """
        self._read_outside.append(unit)
        start_gathers(self.units[unit])
        wait_gathers(self.units[unit])

    def is_kept(self, unit: int) -> bool:
        """Whether a unit was read outside of its forward, in this pass or an earlier one."""
        return unit in self._read_outside or unit not in self.units

    def move_kept_units(self) -> None:
        """At the end of a forward pass, treat units that were read as weights outside of units."""
        for unit in self._read_outside:
            self.root += self.units.pop(unit)
            self._order.remove(unit)
        if self._read_outside:
            self._position = {index: place for place, index in enumerate(self._order)}
            self._next = len(self._order)
        self._read_outside = []

    def begin_pass(self, *, backward: bool, keep_units: bool) -> None:
        """
        Begin a pass.

        Args:
            keep_units: units stay after use. Once all of them are gathered, passes gather nothing.
        """
        self._backward = backward
        self._keep_units = keep_units
        if not backward:
            self._read_outside = []
        self._next = len(self._order) if self.is_resident else 0
        self._reached = -1
        self._prefetch_next()

    def open_unit(self, unit: int, ran: set[int]) -> None:
        """
        Gather a unit's weights, in sequence.

        Args:
            ran: the units that ran in the forward pass of this micro-batch.
        """
        self.note_run(unit)
        place = (
            len(self._order) - 1 - self._position[unit] if self._backward else self._position[unit]
        )
        if self._backward and not self._keep_units:
            self._close_previous(place)
        if place >= self._next:
            self._skip_to(place, ran)
            start_gathers(self.units[unit])
            self._next = place + 1
            self._prefetch_next()
        start_gathers(self.units[unit])
        wait_gathers(self.units[unit])

    def note_run(self, unit: int) -> None:
        """Note the order of the units in the first forward pass."""
        if self._first_runs is not None and not self._backward and unit not in self._first_runs:
            self._first_runs.append(unit)

    def finish_pass(self, ran: set[int]) -> None:
        """Gather the rest of a pass: units that this rank skipped."""
        self._skip_to(len(self._order), ran)

    def all_buckets(self) -> list[ShardedBucket]:
        """Return the buckets of all units, and those outside of units."""
        return [*self.root, *(cut for cuts in self.units.values() for cut in cuts)]

    def close_units(self) -> None:
        """Free the units' memory."""
        for cuts in self.units.values():
            release_buckets(cuts)

    def agree_on_order(self, comm: ShardedGroup) -> None:
        """
        Take the order in which rank 0 ran the units, after the first forward pass.

        A unit that rank 0 skipped follows the unit that was registered before it.
        """
        if self._first_runs is None:
            return
        order = list(self._first_runs)
        registered = list(self.units)
        for place, index in enumerate(registered):
            if index not in order:
                order.insert(order.index(registered[place - 1]) + 1 if place else 0, index)
        indices = torch.tensor(order, dtype=torch.int64, device=comm.device)
        if order:
            comm.broadcast_first(indices, "the order of the units")
        self._order = indices.tolist()
        self._position = {index: place for place, index in enumerate(self._order)}
        self._first_runs = None

    def _close_previous(self, place: int) -> None:
        """
        Continue backward to a unit, and release the one before.

        autograd runs operations in the reverse of their forward order. When it reaches a unit, the
        units that ran later are done, with gradients of their weights (`UnitGatherer.release_unit`)
        or without.
        """
        if place > self._reached:
            if self._reached >= 0:
                self._release_unit(self._unit_at(self._reached))
            self._reached = place

    def _release_unit(self, unit: int) -> None:
        if unit not in self._read_outside:
            release_buckets(self.units[unit])

    def _unit_at(self, place: int) -> int:
        return self._order[-1 - place] if self._backward else self._order[place]

    def _skip_to(self, place: int, ran: set[int]) -> None:
        while self._next < place:
            index = self._unit_at(self._next)
            start_gathers(self.units[index])
            if not self._keep_units:
                self._release_unit(index)
            self._next += 1
            if self._backward and index not in ran:
                # a rank that runs the unit does that too, before its gradients are complete
                self._prefetch_next()
                self._on_skipped(index)

    def _prefetch_next(self) -> None:
        if self._next < len(self._order):
            start_gathers(self.units[self._unit_at(self._next)])


def start_gathers(buckets: Iterable[ShardedBucket]) -> None:
    """Start to gather buckets that are not in memory."""
    for cut in buckets:
        cut.start_gather()


def wait_gathers(buckets: Iterable[ShardedBucket]) -> None:
    """Wait for gathers in progress."""
    for cut in buckets:
        cut.wait_gather()


def release_buckets(buckets: Iterable[ShardedBucket], is_checked: bool = True) -> None:
    """Free the memory of buckets; see `ShardedBucket.release`."""
    for cut in buckets:
        cut.release(is_checked)
