"""
The order in which units are gathered: one for each chunk of a pipeline's stage, the same on every
rank that gathers.

Which units a rank runs, and when, may depend on its data; which gathers it starts may not. So a
lane has a sequence, the order in which rank 0 first ran the units, and a pass goes over it:
forward, or backward from its end. A unit that a rank leaves out is gathered all the same when a
later one comes, or when the pass ends. While a unit computes, the next one is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from pdrun.parallel.comm.sharded import ShardedGroup
from pdrun.parallel.zero.shards import ShardedBucket


class GatherSchedule:
    """
    The units of a chunk, their sequence, and how far a pass over it has come.

    Args:
        units: the cuts of each unit by its index, in registration order.
        root: the cuts of what the chunk uses outside of units.
        left_out: called in a backward pass with a unit that this rank did not run forward.
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
        """Units in the order of their first run, until the ranks have agreed on one; then None."""
        self._position = {index: place for place, index in enumerate(self._order)}
        self._next = len(self._order)
        self._backward = self._keep_units = False
        self._reached = -1
        """How far units have gone backward in this pass."""
        self.is_active = False
        """Whether the chunk is between its first forward of a step and its last backward."""
        self.is_resident = False
        """Whether all units have been gathered and stay so."""

    def position_of(self, unit: int) -> int:
        """Return the place of a unit in forward passes, as far as the ranks have agreed on one."""
        return self._position[unit]

    def begin_pass(self, *, backward: bool, keep_units: bool) -> None:
        """
        Begin a pass.

        Args:
            keeps: units stay when they are passed; once all of them are there, passes gather
                nothing.
        """
        self._backward = backward
        self._keep_units = keep_units
        self._next = len(self._order) if self.is_resident else 0
        self._reached = -1
        self._prefetch_next()

    def open_unit(self, unit: int, ran: set[int]) -> None:
        """
        Have a unit's weights there, keeping to the sequence.

        Args:
            ran: the units that ran in the forward pass of the micro-batch at hand.
        """
        if self._first_runs is not None and not self._backward and unit not in self._first_runs:
            self._first_runs.append(unit)
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

    def finish_pass(self, ran: set[int]) -> None:
        """Go through what is left of a pass: what this rank has left out."""
        self._skip_to(len(self._order), ran)

    def close_units(self) -> None:
        """Give the units' memory back."""
        for cuts in self.units.values():
            release_buckets(cuts)

    def agree_on_order(self, comm: ShardedGroup) -> None:
        """
        Take over the order in which rank 0 ran the units, after the first forward pass; one that it
        left out follows the unit registered before it.
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
        Go backward on to a unit, and close the one before.

        autograd takes operations in the reverse of the order in which they ran: when it comes to a
        unit, those that ran later are done, whether gradients of their weights have told so
        (`Gatherer.release`) or none will.
        """
        if place > self._reached:
            if self._reached >= 0:
                release_buckets(self.units[self._unit_at(self._reached)])
            self._reached = place

    def _unit_at(self, place: int) -> int:
        return self._order[-1 - place] if self._backward else self._order[place]

    def _skip_to(self, place: int, ran: set[int]) -> None:
        while self._next < place:
            index = self._unit_at(self._next)
            start_gathers(self.units[index])
            if not self._keep_units:
                release_buckets(self.units[index])
            self._next += 1
            if self._backward and index not in ran:
                # as a rank that runs the unit has done before its gradients are complete
                self._prefetch_next()
                self._on_skipped(index)

    def _prefetch_next(self) -> None:
        if self._next < len(self._order):
            start_gathers(self.units[self._unit_at(self._next)])


def start_gathers(buckets: Iterable[ShardedBucket]) -> None:
    """Start gathering what isn't there."""
    for cut in buckets:
        cut.start_gather()


def wait_gathers(buckets: Iterable[ShardedBucket]) -> None:
    """Wait for what is on its way."""
    for cut in buckets:
        cut.wait_gather()


def release_buckets(buckets: Iterable[ShardedBucket]) -> None:
    """Give memory back."""
    for cut in buckets:
        cut.release()
