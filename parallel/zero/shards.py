"""
The weights of one bucket under optimizer parallelism: the model's copy, the trained shard, and the
transfer between them.

    master   this rank's shard, in the optimizer's type
    full     every weight of the bucket, in the model's type; the model's parameters are views of it

At levels 1 and 2 ``full`` stays, and the ranks' shards are gathered into it after each optimizer
step. If both types are equal the master is a part of ``full`` and needs no memory. At level 3
``full`` has memory only while it is needed (see `gatherer`). Its storage is freed and allocated
again under the tensors that autograd has saved: a backward pass finds the weights in place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm.sharded import PendingResult, ShardedGroup
from pdrun.parallel.model.digest import SAMPLE_ELEMENTS, digest_values
from pdrun.parallel.model.released import mark_gathered, mark_released, refuse_read
from pdrun.parallel.model.weights import Weight
from pdrun.parallel.zero.flat_layout import FlatLayout, FlatSegment, make_flat_layout


class ShardedBucket:
    """
    Sharded weights.

    Args:
        weights: of one type, all or none of them trained.
        comm: the group, with as many shards as the bucket is cut into.
        compute_dtype: type in which the model computes with them.
        master_dtype: type of the master.
        frees_full: whether ``full`` has memory only while it is needed (level 3).
        master_device: the device of the group, or the host.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        comm: ShardedGroup,
        *,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        frees_full: bool,
        master_device: torch.device,
        label: str,
    ) -> None:
        self.weights = list(weights)
        self.comm = comm
        self.compute_dtype = compute_dtype
        self.frees_full = frees_full
        self.label = label
        self.chunks = tuple(sorted({chunk for weight in weights for chunk in weight.chunks}))
        """The chunks of a pipeline's stage that compute with any of them."""
        self.layout: FlatLayout = make_flat_layout(
            [(w.name, w.shape) for w in weights], comm.shards, comm.world
        )
        self.segments: list[FlatSegment] = self.layout.segments_of(comm.shard)
        self.master_device = master_device
        self._pending: PendingResult | None = None
        self.full = torch.zeros(self.layout.numel, dtype=compute_dtype, device=comm.device)
        self._own = self.full.narrow(
            0, comm.shard * self.layout.shard_numel, self.layout.shard_numel
        )
        self.is_master_in_full = (
            compute_dtype == master_dtype and not frees_full and master_device == comm.device
        )
        """Whether the master is a part of ``full``."""
        self.master = (
            self._own
            if self.is_master_in_full
            else torch.zeros(self.layout.shard_numel, dtype=master_dtype, device=master_device)
        )
        self._views = self._fill_shard()
        self.parts = [
            nn.Parameter(self._master_segment(segment), weights[segment.slot].is_trained)
            for segment in self.segments
        ]
        """What the optimizer trains: one parameter per segment."""
        self.on_read: Callable[[ShardedBucket, str], None] = _refuse_read
        """Called before the values of a released weight are read; gathers it or raises."""
        self._unreadable = _make_unreadable(compute_dtype, comm.device)
        self._gathers = 0
        self._digests: list[int] = []
        """Of the first elements of each gathered weight, after some gathers."""
        self.is_open = True
        """Whether ``full`` has memory."""
        if frees_full:
            self.release()

    def _fill_shard(self) -> list[torch.Tensor]:
        """
        Copy the weights into the buffers and make the model's parameters views; return the views.
        """
        views = [
            self.full.narrow(0, slot.start, slot.numel).view(slot.shape)
            for slot in self.layout.slots
        ]
        with torch.no_grad():
            if not self.is_master_in_full:
                for segment in self.segments:
                    whole = self.weights[segment.slot].param.detach().reshape(-1)
                    part = whole.narrow(0, segment.start, segment.numel)
                    self.master.narrow(0, segment.offset, segment.numel).copy_(part)
            for weight, view in zip(self.weights, views, strict=True):
                view.copy_(weight.param.detach())
                weight.param.data = view
        return views

    def _master_segment(self, segment: FlatSegment) -> torch.Tensor:
        """Return a segment of the master; a full weight has its shape."""
        slot = self.layout.slots[segment.slot]
        piece = self.master.narrow(0, segment.offset, segment.numel)
        return piece.view(slot.shape) if segment.numel == slot.numel else piece

    def take_in_replaced(self) -> None:
        """
        Copy weights whose memory was replaced (``param.data = ...``) to where the optimizer trains
        them, if it trains the model's own (levels 1 and 2).
        """
        if not self.is_master_in_full:
            return
        for weight, view in zip(self.weights, self._views, strict=True):
            if weight.param.data_ptr() != view.data_ptr() and weight.param.shape == view.shape:
                view.copy_(weight.param.data)
                weight.param.data = view

    def keep_changes(self, slots: Container[int]) -> None:
        """Copy this rank's part of gathered weights to the master; ``slots``: their indices."""
        with torch.no_grad():
            for segment in self.segments:
                if segment.slot in slots:
                    whole = self.weights[segment.slot].param.detach().reshape(-1)
                    part = whole.narrow(0, segment.start, segment.numel)
                    self.master.narrow(0, segment.offset, segment.numel).copy_(part)

    # ---- from the masters to the model --------------------------------------

    def start_publish(self) -> None:
        """
        Start to give every rank of the shard group the new weights, after an optimizer step (levels
        1 and 2).
        """
        if not self.frees_full:
            self._gather_shards()

    def start_gather(self) -> None:
        """Start to gather the weights of a unit that is about to compute (level 3)."""
        if not self.is_open and self._pending is None:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            self._gather_shards()

    def wait_gather(self) -> None:
        """Wait until the model's parameters have the weights."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            if not self.is_open:
                self.is_open = True
                for weight, view in zip(self.weights, self._views, strict=True):
                    mark_gathered(weight.param)
                    weight.param.data = view
                self._gathers += 1
                if self._gathers & (self._gathers - 1) == 0:
                    self._digests = self._digest_weights()

    def _digest_weights(self) -> list[int]:
        return digest_values([view.reshape(-1)[:SAMPLE_ELEMENTS] for view in self._views])

    def _check_unchanged(self) -> None:
        """
        Compare the gathered weights with what was gathered: each forward has other copies, so that
        a change would be lost.

        Raises:
            UsageError: code of the model has changed a weight or replaced its memory.
        """
        found = self._digest_weights() if self._digests else []
        for index, (weight, view) in enumerate(zip(self.weights, self._views, strict=True)):
            if weight.param.data_ptr() != view.data_ptr():
                what = "was given other memory (param.data = ...)"
            elif found and found[index] != self._digests[index]:
                what = "was changed in place"
            else:
                continue
            raise UsageError(
                f"{weight.name} {what} while it was gathered: level 3 would lose the change",
                where="pdrun.Run.step",
                hint="compute with a changed tensor (F.linear(x, self.weight.clamp(-1, 1))), or use"
                " optimizer_level=2",
            )

    def release(self, is_checked: bool = True) -> None:
        """
        Free the memory of ``full``. The model's parameters keep their shapes; a read of their
        values calls ``on_read``.

        Args:
            is_checked: refuse changes that were made since the gather, unless an error is on its
                way.
        """
        if self._pending is not None:
            self.wait_gather()
        if not self.is_open:
            return
        try:
            if is_checked and self._gathers and sys.exc_info()[0] is None:
                self._check_unchanged()
        finally:
            self.is_open = False
            self._digests = []
            for weight in self.weights:
                weight.param.data = self._unreadable.expand(weight.shape)
                mark_released(weight.param, weight.name, self._notice_read)
            self.full.untyped_storage().resize_(0)

    def _notice_read(self, name: str) -> None:
        self.on_read(self, name)

    def _gather_shards(self) -> None:
        with torch.no_grad():
            shard = self.master
            if shard.device != self.comm.device or shard.dtype != self.compute_dtype:
                shard = shard.to(
                    device=self.comm.device, dtype=self.compute_dtype, non_blocking=True
                )
            if self.comm.shards == 1 or not self.frees_full:  # gathered in place
                if shard.data_ptr() != self._own.data_ptr():
                    self._own.copy_(shard)
                shard = self._own
            self._pending = self.comm.gather_shards(self.full, shard, self.label)


def _make_unreadable(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the value of a released weight: one that shows where it was read all the same."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), float("nan"), device=device).to(dtype)
    if dtype == torch.bool:
        return torch.ones((), dtype=dtype, device=device)
    return torch.full((), torch.iinfo(dtype).max, dtype=dtype, device=device)


def _refuse_read(bucket: ShardedBucket, name: str) -> None:
    raise refuse_read(name)
