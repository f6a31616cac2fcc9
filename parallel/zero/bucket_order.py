"""
The order in which the gradient sums of a micro-batch start: the same on every rank.

Gradients arrive in an order that may differ from rank to rank. Collectives must not: a bucket whose
gradients are complete waits here until all buckets before it have started.

The losses of a step travel in the last sum of gradients: a step of a small model is one message.

The sum's buffer has spare elements: for each rank the bytes of its losses, and for each weight how
many ranks had a gradient. A byte is an element, 0 to 255, which every type of a gradient holds
exactly. A rank writes its own bytes only and zeros elsewhere, so the sum has the bytes of all.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

import torch

from pdrun.errors import UsageError
from pdrun.parallel.comm.rank_groups import RankGroups
from pdrun.parallel.zero.gatherer import UnitGatherer
from pdrun.parallel.zero.gradients import GradientBucket

MAX_SUMS_IN_FLIGHT = 2
"""Flat buffers of sharded buckets on the network; more would take memory without being faster."""

NUMBER_BYTES = 8
"""Bytes of a sum or a count (fp64)."""
MAX_SPARE_ELEMENTS = 1 << 14
"""More would cost more than a message of their own."""


class LossRider:
    """
    The losses and used weights of every rank in the sum of a bucket.

    Args:
        buckets: all gradient buckets of this rank; the sum of the last one starts last.
        weights: number of weights of the full model.
        accumulate: micro-batches per step.
    """

    def __init__(
        self, buckets: Sequence[GradientBucket], place: RankGroups, weights: int, accumulate: int
    ) -> None:
        self._buckets = buckets
        self._world, self._rank = place.job.world, place.job.rank
        self._weights = weights
        self._slot_bytes = 2 * NUMBER_BYTES * accumulate
        self._losses: torch.Tensor | None = None
        self._is_aboard = False
        self.has_changes = False
        """Whether this rank's program has changed weights since the step before."""
        buckets[-1].add_spare(self.count_elements(self._world, weights, accumulate))

    @staticmethod
    def count_elements(world: int, weights: int, accumulate: int) -> int:
        """Return the number of spare elements."""
        return 2 * NUMBER_BYTES * accumulate * world + weights + 1

    @classmethod
    def fits(
        cls, buckets: Sequence[GradientBucket], place: RankGroups, weights: int, accumulate: int
    ) -> bool:
        """
        Whether the last bucket's sum is over all ranks, once per step, in full.

        On an accelerator losses are not read in a step: there they travel apart, beside the device.
        """
        return (
            bool(buckets)
            and place.job is place.data is buckets[-1].comm
            and place.job.device.type == "cpu"
            and buckets[-1].can_add_spare
            and cls.count_elements(place.job.world, weights, accumulate) <= MAX_SPARE_ELEMENTS
        )

    def take_losses(self, losses: torch.Tensor | None) -> None:
        """Note ``[accumulate, 2]``, the losses of the step; None: they are not known yet."""
        self._losses, self._is_aboard = losses, False

    def board(self) -> None:
        """Write into the spare elements, before the last sum starts."""
        if self._losses is None:
            return
        flags = [*used_flags(self._buckets, self._weights), self.has_changes]
        content = bytearray(self._world * self._slot_bytes + len(flags))
        own = self._rank * self._slot_bytes
        numbers = chain.from_iterable(self._losses.tolist())
        content[own : own + self._slot_bytes] = array("d", numbers).tobytes()
        content[self._world * self._slot_bytes :] = bytes(flags)
        self._buckets[-1].spare.copy_(torch.frombuffer(content, dtype=torch.uint8))
        self._losses, self._is_aboard = None, True

    def leave(self) -> tuple[torch.Tensor, list[bool]] | None:
        """
        Return ``[world, accumulate, 2]``, and which weights had a gradient on any rank and whether
        one of them has changed weights, after the sum; None if nothing has travelled in it.
        """
        if not self._is_aboard:
            return None
        self._is_aboard = False
        found = self._buckets[-1].spare.tolist()
        end = self._world * self._slot_bytes
        losses = bytearray(map(int, found[:end]))
        by_rank = torch.frombuffer(losses, dtype=torch.float64).view(self._world, -1, 2)
        return by_rank, list(map(bool, found[end:]))


def used_flags(buckets: Sequence[GradientBucket], weights: int) -> list[bool]:
    """Return for each weight of the full model whether it had a gradient in this step, here."""
    flags = [False] * weights
    for part in buckets:
        for weight, is_used in zip(part.weights, part.used_weights, strict=True):
            flags[weight.index] = is_used
    return flags


class BucketOrder:
    """
    Counts the gradients of each bucket, and starts sums in order.

    Args:
        buckets: all gradient buckets of this rank.
        unit_of: index of each bucket's unit; -1 if it has none.
        gatherer: gathers and releases the units' weights; None below level 3.
        may_wait: whether a sum may be waited for in the middle of a backward pass.
        rider: travels in the last sum of a step; None: nothing does.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        unit_of: Sequence[int],
        gatherer: UnitGatherer | None,
        may_wait: bool,
        rider: LossRider | None = None,
    ) -> None:
        self._buckets = buckets
        self._rider = rider
        self._unit_of = unit_of
        self._gatherer = gatherer
        self._may_wait = may_wait
        units = max(unit_of, default=-1) + 1
        self._buckets_per_unit = [unit_of.count(unit) for unit in range(units)]
        self._chunks = [bucket.weights[0].chunk for bucket in buckets]
        self._order = list(range(len(buckets)))
        """Buckets of this micro-batch in the order in which their sums start."""
        self._next = 0
        """Position in the order of the first bucket whose sum has not started."""
        self._is_complete = [False] * len(buckets)
        self._missing_in_unit: list[int] = []
        """Buckets of each unit that are not complete."""
        self._first = True
        self._last = True

    def begin(self, first: bool, last: bool, chunk: int | None, times: int) -> None:
        """Prepare for the gradients of a micro-batch; see `Engine.begin`."""
        self._first = first
        self._last = last
        mine = [index for index, its in enumerate(self._chunks) if chunk is None or its == chunk]
        self._order = sorted(mine, key=self._expected_at)
        self._next = 0
        self._is_complete = [False] * len(self._buckets)
        self._missing_in_unit = list(self._buckets_per_unit)
        for index in self._order:
            self._buckets[index].begin_microbatch(first, times)

    def count_gradient(self, index: int) -> None:
        """Count a gradient of a bucket; the last one completes the bucket."""
        bucket = self._buckets[index]
        bucket.missing_grads -= 1
        if bucket.missing_grads == 0:
            self._complete(index)

    def add_products(
        self, index: int, place: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Add matrix products to a weight's gradient, and count it."""
        self._buckets[index].add_products(place, pairs, self._first)
        self.count_gradient(index)

    def complete_unit(self, unit: int) -> None:
        """Count the gradients of a unit that took no part in this rank's forward pass as zero."""
        for index, its in enumerate(self._unit_of):
            if its == unit and not self._is_complete[index]:
                self._complete(index)

    def complete_all(self) -> None:
        """
        Count the gradients of all weights that took no part as zero.

        Raises:
            UsageError: a weight got a second gradient after its first had been sent.
        """
        for index in self._order:
            if not self._is_complete[index]:
                self._complete(index)
        for index in self._order:
            for weight in self._buckets[index].weights:
                if weight.param.grad is not None:
                    raise UsageError(
                        f"{weight.name} got two gradients in one backward pass",
                        where="pdrun.Run.step",
                        hint="use checkpoint(..., use_reentrant=False) or recompute=",
                    )

    def _expected_at(self, index: int) -> tuple[int, int]:
        """Return a sort key: buckets of the last unit first, those outside of units last."""
        unit = self._unit_of[index]
        if self._gatherer is None or unit < 0 or self._gatherer.is_root(unit):
            return 1, index
        return -self._gatherer.position_of(unit), index

    def _complete(self, index: int) -> None:
        """Take the gradients of a bucket, and start sums as far as the order allows."""
        self._buckets[index].take_grads(self._first)
        self._is_complete[index] = True
        unit = self._unit_of[index]
        if unit >= 0 and self._gatherer is not None:
            self._missing_in_unit[unit] -= 1
            if self._missing_in_unit[unit] == 0:
                self._gatherer.release_unit(unit)
        while self._next < len(self._order) and self._is_complete[self._order[self._next]]:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._order[self._next]]
        if self._last or bucket.reduces_each:
            if self._next >= MAX_SUMS_IN_FLIGHT and bucket.comm.shards > 1 and self._may_wait:
                self._buckets[self._order[self._next - MAX_SUMS_IN_FLIGHT]].wait_sum()
            if self._rider is not None and self._last and bucket is self._buckets[-1]:
                self._rider.board()
            bucket.start_sum()
        self._next += 1
