"""
The gradients of one bucket: collected from autograd, added over micro-batches, summed over ranks.

    autograd's .grad  --take_grads-->  flat  --start_sum-->  network  --wait_sum-->  total

`take_grads` moves a micro-batch's gradients into the flat buffer with one fused call. No gradient
outlives its bucket's backward. If every micro-batch is summed over the ranks (levels 2 and 3, and
`exact`), the flat buffer is needed for that time only, and this rank's part of the total remains.
If level 3 keeps weights for a step, it keeps gradients too: they are added here, and summed over
the ranks after the last micro-batch (see `ReductionPolicy.keep_for_step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pdrun.parallel import torch_compat
from pdrun.parallel.comm.sharded import PendingResult, ShardedGroup
from pdrun.parallel.model.weights import Weight
from pdrun.parallel.zero.flat_layout import FlatLayout, FlatSegment, make_flat_layout


@dataclass(frozen=True)
class ReductionPolicy:
    """How gradients are summed."""

    level: int = 0
    """Optimizer level, 0 to 3."""
    exact: bool = True
    """Add in the order of the slices: no bit depends on the number of ranks or on the level."""
    accumulate: int = 1
    """Micro-batches per step."""
    wire_dtype: torch.dtype | None = None
    """Type on the network; None: the type of the sum."""
    keep_for_step: bool = False
    """Add the micro-batches locally and sum over the ranks once, if that gives the correct bits."""

    @property
    def reduce_each(self) -> bool:
        """Whether every micro-batch is summed over the ranks, not only the last."""
        return self.accumulate > 1 and (self.exact or (self.level >= 2 and not self.keep_for_step))


class BufferPool:
    """
    Unused flat buffers: as many as were ever needed at one time.

    On an accelerator the pool is empty: torch's allocator reuses memory without delay.
    """

    def __init__(self) -> None:
        self._free: dict[
            tuple[int, torch.dtype, torch.device], list[tuple[FlatLayout, torch.Tensor]]
        ] = {}

    def take_buffer(
        self, layout: FlatLayout, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer; its padding is zero, the rest is undefined."""
        waiting = self._free.get((layout.numel, dtype, device))
        if not waiting:
            return torch.zeros(layout.numel, dtype=dtype, device=device)
        used, flat = waiting.pop()
        return (
            flat if used.slot_extents == layout.slot_extents else flat.zero_()
        )  # norms read the padding too

    def return_buffer(self, layout: FlatLayout, flat: torch.Tensor) -> None:
        """Take a buffer back."""
        if flat.device.type == "cpu":
            self._free.setdefault((flat.numel(), flat.dtype, flat.device), []).append(
                (layout, flat)
            )

    def clear(self) -> None:
        """Free the buffers."""
        self._free.clear()


class GradientBucket:
    """
    Gradients of weights that are summed together.

    Args:
        weights: of one type, all trained, in the order in which their gradients are expected.
        comm: the group, with as many shards as the bucket is cut into.
        dtype: type in which gradients are added.
        across: further groups over which the total is summed, one after the other, at the end of
            the step.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        comm: ShardedGroup,
        policy: ReductionPolicy,
        pool: BufferPool,
        dtype: torch.dtype,
        label: str,
        across: Sequence[ShardedGroup] = (),
    ) -> None:
        self.weights = list(weights)
        self.comm = comm
        self.policy = policy
        self.dtype = dtype
        self.label = label
        self.extra_groups = list(across)
        self.layout: FlatLayout = make_flat_layout(
            [(w.name, w.shape) for w in weights], comm.shards, comm.world
        )
        self.segments: list[FlatSegment] = self.layout.segments_of(comm.shard)
        alone = comm.world == 1
        several = policy.accumulate > 1
        self.reduces_each = not alone and policy.reduce_each
        """Whether every micro-batch is summed over the ranks, not only the last."""
        self.is_ordered = (
            not alone and policy.exact and (several or comm.world > 2 or comm.shards > 1)
        )
        """Whether ranks are added in their order; two numbers have one order only."""
        self.missing_grads = 0
        """Gradients of this micro-batch that have not arrived."""
        self.used_weights = [False] * len(self.weights)
        """Which weights had a gradient in this step, on this rank."""
        self._added_places: set[int] = set()
        """Weights to whose gradients products were added in this micro-batch."""
        self._pool = pool
        self._flat: torch.Tensor | None = None
        self._buffer: torch.Tensor | None = None
        """What is sent: the flat buffer, and behind it the spare elements."""
        self._spare_numel = 0
        self._spare: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._pending: PendingResult | None = None
        self._total: torch.Tensor | None = None
        self._keeps_buffer = comm.shards == 1
        """The total is as large as the flat buffer, which then contains it."""
        self._flat_segments: list[torch.Tensor] = []
        """The segments of the flat buffer, if it contains the total."""
        self._padding: torch.Tensor | None = None
        """Indices of the padding, once they were computed."""

    # ---- spare elements -----------------------------------------------------

    @property
    def can_add_spare(self) -> bool:
        """Whether the ranks' buffers are added in full, by one collective per step."""
        return (
            self.comm.world > 1
            and self.comm.shards == 1
            and self.dtype.is_floating_point
            and not (self.is_ordered or self.reduces_each or self.extra_groups)
        )

    def add_spare(self, numel: int) -> None:
        """Sum ``numel`` further elements with the gradients; before the first step."""
        self._spare_numel = numel

    @property
    def spare(self) -> torch.Tensor:
        """The spare elements: to be written before `start_sum`, and summed after `wait_sum`."""
        self._open_buffer()
        assert self._spare is not None
        return self._spare

    # ---- one micro-batch ----------------------------------------------------

    def begin_microbatch(self, first: bool, times: int = 1) -> None:
        """
        Prepare for the backward of a micro-batch.

        Args:
            times: gradients per weight.
        """
        self.missing_grads = len(self.weights) * times
        self._added_places.clear()
        if first:
            self.used_weights = [False] * len(self.weights)
            self._total = None

    def add_products(
        self, place: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], first: bool
    ) -> None:
        """Add matrix products to a weight's gradient in the flat buffer."""
        self.wait_sum()
        self._open_buffer()
        for left, right in pairs:
            fresh = (first or self.reduces_each) and place not in self._added_places
            torch_compat.add_product(self._views[place], left, right, fresh=fresh)
            self._added_places.add(place)
        self.used_weights[place] = True

    def take_grads(self, first: bool) -> None:
        """Move the gradients into the flat buffer; weights without one count as zero."""
        fresh = first or self.reduces_each
        self.wait_sum()
        self._open_buffer()
        came = [weight.param.grad for weight in self.weights]
        here = [i for i, grad in enumerate(came) if grad is not None]
        views = [self._views[i] for i in here]
        grads = [_to_dense(came[i], self.weights[i]) for i in here]
        if grads:
            (torch._foreach_copy_ if fresh else torch._foreach_add_)(views, grads)
        for i, weight in enumerate(self.weights):
            if came[i] is not None:
                weight.param.grad = None
                self.used_weights[i] = True
            elif fresh and i not in self._added_places:
                self._views[i].zero_()

    def start_sum(self) -> None:
        """Start to sum the flat buffer over the ranks."""
        assert self._buffer is not None
        wire = self.policy.wire_dtype
        send = self._buffer if wire is None or self.comm.world == 1 else self._buffer.to(wire)
        if self.is_ordered:
            self._pending = self.comm.sum_parts(send, self.label, self._total, self.dtype)
        else:
            self._pending = self.comm.sum_shards(send, self.label, self._spare_numel)

    def wait_sum(self) -> None:
        """Wait for the sum in progress, if any, and add it to the total."""
        if self._pending is None:
            return
        result: torch.Tensor = self._pending.wait().to(self.dtype)
        self._pending = None
        flat = self._flat
        if self._spare_numel and flat is not None and self._buffer is not None:
            if result is not self._buffer:
                self._buffer.copy_(result)
            result = flat
        aliased = result is flat
        if self.is_ordered:
            self._total = result  # the collective has added it
        elif not self.reduces_each:
            self._total = (
                flat.copy_(result)
                if self._keeps_buffer and flat is not None and result is not flat
                else result
            )
        elif self._total is None:
            self._total = result.clone() if aliased else result
        else:
            self._total.add_(result)
        if not self._keeps_buffer:
            self._close_buffer()

    # ---- the step's end -----------------------------------------------------

    def start_join(self) -> None:
        """Start to join the parts of an ordered sum."""
        self.wait_sum()
        if self.is_ordered:
            assert self._total is not None
            self._pending = self.comm.join_parts(
                self._total, self.label, self._flat if self._keeps_buffer else None
            )

    def finish_total(self) -> torch.Tensor:
        """Return this rank's shard of the total: segments at their offsets, padding zero."""
        if self._pending is not None:
            self._total = self._pending.wait()
            self._pending = None
        assert self._total is not None
        return self._total

    def clear_padding(self) -> None:
        """
        Zero the padding, if the total stays and was multiplied by a number that is not finite.
        """
        if not self._keeps_buffer or self._total is None or not self.layout.padding_extents:
            return
        if self._padding is None:
            places = [
                torch.arange(low, high, device=self._total.device)
                for low, high in self.layout.padding_extents
            ]
            self._padding = torch.cat(places)
        self._total.index_fill_(0, self._padding, 0)

    def reduce_over(self, place: int) -> None:
        """Start to sum the total over one of the further groups; `finish_total` ends it."""
        self._pending = self.extra_groups[place].sum_shards(self.finish_total(), self.label)

    def total_segments(self) -> list[torch.Tensor]:
        """Return the total's segments, flat; a segment that is a full weight has its shape."""
        total = self._total
        assert total is not None
        if total is not self._flat:
            return self._open_segments(total)
        if not self._flat_segments:
            self._flat_segments = self._open_segments(total)
        return self._flat_segments

    def _open_segments(self, total: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for segment in self.segments:
            slot = self.layout.slots[segment.slot]
            piece = total.narrow(0, segment.offset, segment.numel)
            found.append(piece.view(slot.shape) if segment.numel == slot.numel else piece)
        return found

    def abort_step(self) -> None:
        """
        Discard an incomplete step. A sum in progress ends first: other ranks have started it too.
        """
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self.drop_total()

    def drop_total(self) -> None:
        """Drop the total; buffers stay for the next step."""
        self._total = None
        if not self._keeps_buffer:
            self._close_buffer()

    def _open_buffer(self) -> None:
        if self._flat is not None:
            return
        device = self.comm.device
        numel = self.layout.numel
        if self._spare_numel:  # is never returned: it contains the total
            self._buffer = torch.zeros(numel + self._spare_numel, dtype=self.dtype, device=device)
            self._flat, self._spare = self._buffer.split([numel, self._spare_numel])
        else:
            self._flat = self._buffer = self._pool.take_buffer(self.layout, self.dtype, device)
        self._views = [
            self._flat.narrow(0, slot.start, slot.numel).view(slot.shape)
            for slot in self.layout.slots
        ]

    def _close_buffer(self) -> None:
        if self._flat is not None:
            self._pool.return_buffer(self.layout, self._flat)
            self._flat = self._buffer = None
            self._views = []
            self._flat_segments = []


def _to_dense(grad: Any, weight: Weight) -> torch.Tensor:
    """Return a gradient as a dense tensor; an embedding with ``sparse=True`` gives a sparse one."""
    return grad.to_dense() if grad.is_sparse else grad
