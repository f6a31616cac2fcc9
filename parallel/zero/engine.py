"""
The engine: weights, gradients and optimizer around the forward and backward passes of one step.

    begin_step                                                                once
    with forward(chunk, micro):                weights are gathered           per micro-batch
        ...
    with backward(chunk, micro, last):         weights are gathered again     per micro-batch
        begin_gradients(first, last)           gradients are collected and    per micro-batch
        ...                                    summed
        end_gradients()
    finish_gradients(sums) -> optimizer.step -> end_step                      once

Below level 3 the weights are always in memory, and `forward` and `backward` do nothing.

At level 0 a weight is trained in place. At levels 1 to 3 each rank trains its segments of the
weights that it shards with its group (`shards`). At level 3 `gatherer` also keeps the weights in
memory only while they are needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm.rank_groups import RankGroups
from pdrun.parallel.model.shard_map import ShardMap, WeightCatalogue
from pdrun.parallel.model.weights import Weight
from pdrun.parallel.zero.bucket_order import BucketOrder, LossRider, used_flags
from pdrun.parallel.zero.gatherer import UnitGatherer
from pdrun.parallel.zero.grad_norm import clip_factor, global_norm
from pdrun.parallel.zero.settings import Settings
from pdrun.parallel.zero.weight_buckets import WeightBuckets

NO_CONTEXT = nullcontext()


PRODUCT_DEVICES = {"cuda"}
"""Devices on which a product is added to a sum by the product's kernel."""


class Engine(WeightBuckets):
    """
    The weights of a model on the data axes, and the sums of their gradients.

    Args:
        model: what this rank runs.
        weights: its weights, with their shards.
        place: this rank's groups.
        holders: the shards of all ranks along the model axes.
        catalogue: the weights of the full model.
        units: names of the modules whose weights are gathered together (level 3).
        fill: gives weights without memory their first values.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: list[Weight],
        place: RankGroups,
        holders: ShardMap,
        catalogue: WeightCatalogue,
        settings: Settings,
        units: Sequence[str] = (),
        fill: Callable[[Sequence[Weight]], None] = lambda weights: None,
    ) -> None:
        super().__init__(model, weights, place, settings, units, fill, self._skip_unit)
        self.holders = holders
        self.catalogue = catalogue
        self.unsynced_weights = [
            weight for weight in weights if weight.unsynced and weight.is_trained
        ]
        for index, part in enumerate(self.gradient_buckets):
            for weight in part.weights:
                weight.param.register_post_accumulate_grad_hook(self._make_grad_hook(index))
        self._targets = [self._trained_params(index) for index in range(len(self.gradient_buckets))]
        self._is_paused = False
        # if gathers run in parallel with sums, a process that waits for a sum could block the
        # gather that other processes need
        may_wait = (
            self.gatherer is None or settings.keep_for_step or self.data_group.device.type != "cpu"
        )
        travel = self.gradient_buckets, place, len(catalogue.weights), settings.accumulate
        has_rider = self.gatherer is None and LossRider.fits(*travel)
        self._rider = LossRider(*travel) if has_rider else None
        self._order = BucketOrder(
            self.gradient_buckets, self._unit_indices(), self.gatherer, may_wait, self._rider
        )
        only = len(place.loss_ranks) < place.job.world
        self._loss_ranks = (
            torch.tensor(place.loss_ranks, device=self.data_group.device) if only else None
        )
        self.used_weights = [False] * len(catalogue.weights)
        """Which weights of the full model had a gradient in the last step, on any rank."""
        self.has_changes = False
        """
        Whether the program has changed weights since the step before: of this rank, then of any.
        """

    # ---- a micro-batch ------------------------------------------------------

    def release_weights(self) -> None:
        """Release weights that an incomplete pass has left in memory."""
        if self.gatherer is not None:
            self.gatherer.release_chunk()

    def begin_step(self) -> None:
        """Begin a step: discard what an incomplete step has left, whose error the user caught."""
        self.release_weights()
        for part in self.gradient_buckets:
            part.abort_step()
        for weight in self.weights:
            weight.param.grad = None
            if weight.param.requires_grad and not weight.is_trained:
                what = f"{weight.name} requires a gradient now but did not in parallelize: "
                what += "it is not trained"
                hint = "set requires_grad before pdrun.parallelize; freeze the weight afterwards"
                raise UsageError(what, where="pdrun.Run.step", hint=hint)

    def forward(self, chunk: int = 0, micro: int = 0) -> AbstractContextManager[None]:
        """
        Return the context manager of a forward pass: weights are gathered.

        Args:
            chunk: the part of the model that computes.
            micro: position of its micro-batch; of the first one, if several compute side by side.
        """
        return (
            NO_CONTEXT if self.gatherer is None else _gathered_forward(self.gatherer, chunk, micro)
        )

    def backward(
        self, chunk: int = 0, micro: int = 0, last: bool = True, for_input: bool = False
    ) -> AbstractContextManager[None]:
        """
        Return the context manager of the backward pass that belongs to a forward pass.

        Args:
            chunk, micro: of the forward pass.
            last: whether it is the chunk's last one of the step, after which its weights are
                released.
            for_input: whether gradients of weights follow later.
        """
        if self.gatherer is None:
            return NO_CONTEXT
        return _gathered_backward(self.gatherer, chunk, micro, last, for_input)

    def end_evaluation(self, chunk: int = 0) -> None:
        """Release the weights of a chunk that ran forward only."""
        if self.gatherer is not None:
            self.gatherer.release_chunk(chunk)

    def begin_gradients(
        self,
        first: bool,
        last: bool,
        chunk: int | None = None,
        times: int = 1,
        losses: torch.Tensor | None = None,
    ) -> None:
        """
        Prepare for the gradients of a micro-batch, after its forward pass.

        Args:
            first, last: whether it is the step's first or last one.
            chunk: the part of the model that goes backward; None: all of it.
            times: gradients per weight, of copies that compute side by side; they are summed.
            losses: of all micro-batches of the step, ``[accumulate, 2]``, if they are known before
                the last backward, on every rank: they may then travel with the gradients.
        """
        if self._rider is not None:
            self._rider.take_losses(losses if last else None)
        self._order.begin(first, last, chunk, times)

    def _skip_unit(self, unit: int) -> None:
        """Count a unit that took no part in this rank's forward pass as zero."""
        self._order.complete_unit(unit)

    def _make_grad_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # torch's garbage collector does not see hooks of tensors: a hook with a reference to the
        # engine would keep a run, and all that it trains, until the process ends
        me = weakref.ref(self)

        def arrived(param: torch.Tensor) -> None:
            engine = me()
            if engine is not None and not engine._is_paused:
                engine._order.count_gradient(index)

        return arrived

    @cached_property
    def _gradient_places(self) -> dict[nn.Parameter, tuple[int, int]]:
        """The bucket of each weight's gradient, and its place there."""
        return {
            weight.param: (index, place)
            for index, part in enumerate(self.gradient_buckets)
            for place, weight in enumerate(part.weights)
        }

    def add_products(
        self, param: nn.Parameter, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> bool:
        """
        Add matrix products (left, right) to the sum of a weight's gradients, without a gradient of
        this micro-batch in memory; it counts as arrived.

        Returns:
            False if the gradient is needed: hooks see it, or sums must have the bits of autograd's.
        """
        found = self._gradient_places.get(param)
        if found is None or param._backward_hooks or param.device.type not in PRODUCT_DEVICES:
            return False
        index, place = found
        self._order.add_products(index, place, pairs)
        return True

    def end_gradients(self) -> None:
        """
        End a micro-batch: weights without a gradient count as zero.

        Raises:
            UsageError: a weight got a second gradient after its first had been sent.
        """
        if self.gatherer is not None:
            self.gatherer.gather_rest()
        self._order.complete_all()

    # ---- the step -----------------------------------------------------------

    def finish_gradients(
        self, sums: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Finish all sums over the ranks, divide and clip.

        Args:
            sums: ``[accumulate, 2]``: sum and count of the loss of each of this rank's
                micro-batches.
            scale: the loss scale.

        Returns:
            the global (sum, count), and the norm if it is asked for.

        Raises:
            UsageError: the counts add up to 0.
        """
        by_rank, (*self.used_weights, self.has_changes) = self._exchange_losses(sums)
        by_slice = (
            by_rank if self._loss_ranks is None else by_rank.index_select(0, self._loss_ranks)
        )
        if by_slice.shape[1] > 1:
            by_slice = by_slice.transpose(0, 1)
        numbers = by_slice.reshape(-1, 2).sum(0)
        divisor = self._find_divisor(numbers, scale)
        totals = self._sum_totals()
        loose = [
            grad for weight in self.unsynced_weights if (grad := weight.param.grad) is not None
        ]
        for tensor in [*totals, *loose]:
            tensor.div_(_move_value(divisor, tensor))
        norm = None
        if self.settings.clip or self.settings.norm:
            pairs = list(zip(self.gradient_buckets, totals, strict=True))
            norm = global_norm(pairs, self.unsynced_weights, self.place, self.settings.exact)
        if self.settings.clip and norm is not None:
            factor = clip_factor(norm, self.settings.clip)
            if factor.device.type != "cpu" or not bool(factor == 1):
                for tensor in [*totals, *loose]:
                    tensor.mul_(factor.to(device=tensor.device, dtype=tensor.dtype))
                if factor.device.type != "cpu" or not bool(torch.isfinite(factor)):
                    # 0 times nan would stay and make every later norm nan
                    for part in self.gradient_buckets:
                        part.clear_padding()
        self._assign_grads()
        return numbers, norm

    def _find_divisor(self, numbers: torch.Tensor, scale: float) -> torch.Tensor | float:
        """Return what the gradients of the sum are divided by; on an accelerator it is not read."""
        count: Any = numbers[1] if numbers.device.type != "cpu" else numbers.tolist()[1]
        if isinstance(count, float) and not count > 0:
            raise UsageError(
                f"the sum of the loss's counts must be above 0, got {count:g}",
                where="pdrun.Run.step",
            )
        return count * (scale / self.settings.gradient_factor) if self.settings.mean else scale

    def _exchange_losses(self, sums: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
        """
        Return every rank's losses, which weights had a gradient on any rank and whether a rank has
        changed weights; the buckets' sums have ended, and what joins their parts has started.
        """
        found = None
        if self._rider is not None:
            self.gradient_buckets[-1].wait_sum()
            found = self._rider.leave()
        if found is None:
            flags = used_flags(self.gradient_buckets, len(self.used_weights))
            flags.append(self.has_changes)
            exchange = self.place.job.exchange_numbers(sums, flags, "the losses")
        for part in self.gradient_buckets:
            part.start_join()
        return exchange.wait() if found is None else found

    def _sum_totals(self) -> list[torch.Tensor]:
        """Return each bucket's total over the data axes and over its weights' further axes."""
        for place in range(
            max((len(part.extra_groups) for part in self.gradient_buckets), default=0)
        ):
            for part in self.gradient_buckets:
                if place < len(part.extra_groups):
                    part.reduce_over(place)
        return [part.finish_total() for part in self.gradient_buckets]

    def _assign_grads(self) -> None:
        """Give the optimizer's tensors their gradients; None for weights that no rank used."""
        for index, part in enumerate(self.gradient_buckets):
            part.used_weights = [self.used_weights[weight.index] for weight in part.weights]
            all_used = all(part.used_weights)
            for target, segment, piece in zip(
                self._targets[index], part.segments, part.total_segments(), strict=True
            ):
                if all_used or part.used_weights[segment.slot]:
                    target.grad = (
                        piece
                        if self.settings.master_device is None and piece.dtype == target.dtype
                        else _cast_like(piece, target)
                    )
                else:
                    target.grad = None
        for weight in self.unsynced_weights:
            master = self.masters.get(weight.index)
            if master is not None and weight.param.grad is not None:
                master.grad = _cast_like(weight.param.grad, master)
                weight.param.grad = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """
        Return a context manager in which a copy of the model can run: nothing is gathered or
        summed.

        Raises:
            UsageError: the model's own weights got gradients.
        """
        self._is_paused = True
        if self.gatherer is not None:
            self.gatherer.is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            if self.gatherer is not None:
                self.gatherer.is_paused = False
        found = [weight for weight in self.weights if weight.param.grad is not None]
        for weight in found:
            weight.param.grad = None
        if found:
            what = (
                f"loss= or forward= uses {found[0].name} of the run's model instead of its argument"
            )
            hint = "use the model of forward=lambda model, batch: ...; loss gets its result"
            raise UsageError(what, where="pdrun.Run.verify", hint=hint)

    def wait_idle(self) -> None:
        """Finish all gathers, before weights are changed from outside."""
        self.release_weights()
        for bucket in self.sharded_buckets:
            if bucket.frees_full:
                bucket.release()
            else:
                bucket.wait_gather()

    def publish_weights(self) -> None:
        """
        Give the model the weights of the trained parts, after these were changed from outside.
        """
        for bucket in self.sharded_buckets:
            bucket.start_publish()
        self.refresh_weights()

    def end_step(self) -> None:
        """After the optimizer's step: drop the gradients and give the model its new weights."""
        for index, part in enumerate(self.gradient_buckets):
            part.drop_total()
            for target in self._targets[index]:
                target.grad = None
            if index in self.sharded_bucket_of:
                self.sharded_bucket_of[index].start_publish()
        for weight in self.unsynced_weights:
            self.masters.get(weight.index, weight.param).grad = weight.param.grad = None
        self.refresh_weights()

    @cached_property
    def copied_weights(self) -> list[Weight]:
        """
        Weights that are, between steps, copies of what the optimizer trains, in another type or
        place.
        """
        copied = set(self.masters)
        for bucket in self.sharded_buckets:
            if not bucket.frees_full and not bucket.is_master_in_full:
                copied |= {weight.index for weight in bucket.weights if weight.is_trained}
        return [weight for weight in self.weights if weight.index in copied]

    @cached_property
    def resident_weights(self) -> list[Weight]:
        """Weights that are in memory between steps, the same on every rank of the data axes."""
        released = {
            weight.index
            for bucket in self.sharded_buckets
            if bucket.frees_full
            for weight in bucket.weights
        }
        return [
            weight
            for weight in self.weights
            if weight.index not in released and not weight.unsynced and not weight.param.is_meta
        ]

    @cached_property
    def fixed_weights(self) -> list[Weight]:
        """Weights that must keep their memory between steps: it is written after each step."""
        buckets = [bucket for bucket in self.sharded_buckets if not bucket.frees_full]
        fixed = {weight.index for bucket in buckets for weight in bucket.weights}
        return [weight for weight in self.weights if weight.index in fixed | set(self.masters)]

    def note_changes(self, has_changes: bool) -> None:
        """Note, before a step, whether the program of this rank has changed weights."""
        self.has_changes = has_changes
        if self._rider is not None:
            self._rider.has_changes = has_changes

    def take_in_replaced(self) -> None:
        """See `ShardedBucket.take_in_replaced`."""
        for bucket in self.sharded_buckets:
            bucket.take_in_replaced()

    @property
    def is_retargeted(self) -> bool:
        """Whether the optimizer trains other tensors than the model's parameters."""
        return bool(self.sharded_bucket_of or self.masters)

    def refresh_weights(self) -> None:
        """Copy unsharded masters to the model's parameters, and finish gathers that publish."""
        if self.masters:
            pairs = [
                (weight.param.data, self.masters[weight.index].detach())
                for weight in self.weights
                if weight.index in self.masters
            ]
            with torch.no_grad():
                torch._foreach_copy_([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        for bucket in self.sharded_buckets:
            if not bucket.frees_full:
                bucket.wait_gather()


@contextmanager
def _gathered_forward(gatherer: UnitGatherer, chunk: int, micro: int) -> Iterator[None]:
    gatherer.begin_forward(chunk, micro)
    yield
    gatherer.end_forward()


@contextmanager
def _gathered_backward(
    gatherer: UnitGatherer, chunk: int, micro: int, last: bool, for_input: bool
) -> Iterator[None]:
    gatherer.begin_backward(chunk, micro, last, for_input)
    yield
    gatherer.end_backward()


def _move_value(value: torch.Tensor | float, tensor: torch.Tensor) -> torch.Tensor | float:
    """Return a value on the device of a tensor."""
    return value.to(tensor.device) if isinstance(value, torch.Tensor) else value


def _cast_like(grad: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the type and on the device of the tensor that it trains."""
    return grad.to(device=target.device, dtype=target.dtype)
