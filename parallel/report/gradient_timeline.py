"""Gradients in memory during a backward pass on fake tensors: when they come, and when they go."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Any

from torch import nn

from pdrun.parallel.zero.bucket_order import MAX_SUMS_IN_FLIGHT

if TYPE_CHECKING:
    from pdrun.parallel.model.weights import Weight
    from pdrun.parallel.report.storage_counter import StorageCounter
    from pdrun.parallel.training.state import RunState
    from pdrun.parallel.zero.gradients import GradientBucket


def is_away(state: RunState, weight: Weight) -> bool:
    """Whether a weight and its gradient are on the host, and not on the device."""
    return weight.is_on_host and state.device.type != "cpu"


def resident_gradient_bytes(state: RunState) -> int:
    """
    Return the bytes of gradients that are there before the last micro-batch's backward: totals that
    keep their memory, and running sums of earlier micro-batches.
    """
    found = 0
    for bucket in state.engine.gradient_buckets:
        if is_away(state, bucket.weights[0]):
            continue
        size = bucket.layout.numel * bucket.dtype.itemsize
        if bucket.comm.shards == 1:
            found += size
        elif state.settings.accumulate > 1:
            found += size // bucket.comm.shards if bucket.reduces_each else size
    return found


class GradientTimeline:
    """
    Counts flat buffers and shards of totals as the gradients of a copy of the model arrive.

    Args:
        model: the copy, with fake weights.
        ledger: counts what operators create; what arrives here is reserved in it.
    """

    def __init__(self, state: RunState, model: nn.Module, ledger: StorageCounter) -> None:
        self._ledger = ledger
        self._accumulates = state.settings.accumulate > 1
        self._on_way: deque[int] = deque()
        names = {id(p): name for name, p in state.model.named_parameters(remove_duplicate=False)}
        copies = dict(model.named_parameters(remove_duplicate=False))
        self._hooked: set[int] = set()
        for bucket in state.engine.gradient_buckets:
            mine = [
                copies[names[id(weight.param)]]
                for weight in bucket.weights
                if id(weight.param) in names
            ]
            missing = [len(mine)]
            for param in mine:
                self._hooked.add(id(param))
                hook = functools.partial(self._on_gradient, bucket, mine, missing)
                param.register_post_accumulate_grad_hook(hook)
        for param in model.parameters():
            if param.requires_grad and id(param) not in self._hooked:
                param.register_post_accumulate_grad_hook(_drop_gradient)

    def _on_gradient(
        self, bucket: GradientBucket, params: list[nn.Parameter], missing: list[int], _: Any
    ) -> None:
        """Count a gradient of a bucket; the last one moves all into the flat buffer."""
        missing[0] -= 1
        if missing[0]:
            return
        size = bucket.layout.numel * bucket.dtype.itemsize
        is_flat_new = bucket.comm.shards > 1 and not (self._accumulates and not bucket.reduces_each)
        if is_flat_new:
            self._ledger.reserve(size)
        for param in params:
            param.grad = None
        if is_flat_new:
            self._ledger.reserve(size // bucket.comm.shards)  # the result of the sum
            self._on_way.append(size)
            while len(self._on_way) > MAX_SUMS_IN_FLIGHT:
                self._ledger.reserve(-self._on_way.popleft())


def _drop_gradient(param: nn.Parameter) -> None:
    param.grad = None
