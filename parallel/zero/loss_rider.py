"""
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

from pdrun.parallel.comm.rank_groups import RankGroups
from pdrun.parallel.zero.gradients import GradientBucket

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
        buckets[-1].add_spare(self.count_elements(self._world, weights, accumulate))

    @staticmethod
    def count_elements(world: int, weights: int, accumulate: int) -> int:
        """Return the number of spare elements."""
        return 2 * NUMBER_BYTES * accumulate * world + weights

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
        content = bytearray(self._world * self._slot_bytes + self._weights)
        own = self._rank * self._slot_bytes
        numbers = chain.from_iterable(self._losses.tolist())
        content[own : own + self._slot_bytes] = array("d", numbers).tobytes()
        content[self._world * self._slot_bytes :] = bytes(used_flags(self._buckets, self._weights))
        self._buckets[-1].spare.copy_(torch.frombuffer(content, dtype=torch.uint8))
        self._losses, self._is_aboard = None, True

    def leave(self) -> tuple[torch.Tensor, list[bool]] | None:
        """
        Return ``[world, accumulate, 2]`` and which weights had a gradient on any rank, after the
        sum; None if nothing has travelled in it.
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
