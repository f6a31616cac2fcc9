"""
Estimates the memory of a step on this rank's device, before the step.

What stays (weights, masters, gradients, optimizer state) follows from the layouts. What is
temporary is measured by running one micro-batch on fake tensors, which have shapes and no data, and
counting the live storages.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from pdrun.parallel.data.batch_slicing import count_rows, slice_rows, take_rows
from pdrun.parallel.model.recompute import apply_recompute
from pdrun.parallel.report.compiled_units import emulate_compiled
from pdrun.parallel.report.gradient_timeline import (
    GradientTimeline,
    is_away,
    resident_gradient_bytes,
)
from pdrun.parallel.report.model_copies import meta_copy
from pdrun.parallel.report.storage_counter import StorageCounter
from pdrun.parallel.zero.offload import PREFETCH_TENSORS
from pdrun.parallel.zero.optimizer import state_bytes_per_element

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState

MIB = 1024 * 1024


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    weights: int
    """What the model computes with; at level 3 the maximum that is gathered at one time."""
    masters: int
    gradients: int
    """Totals, and the flat buffers of running sums; with a batch those in memory at the peak."""
    state: int
    activations: int | None
    """Those in memory at the peak; None without a batch, and for a pipeline's stage."""

    @property
    def peak(self) -> int:
        """The sum of all."""
        return sum(getattr(self, field.name) or 0 for field in fields(self))

    def __str__(self) -> str:
        parts = [
            f"{field.name} {(getattr(self, field.name) or 0) / MIB:,.1f}" for field in fields(self)
        ]
        return f"peak {self.peak / MIB:,.1f} MiB per device: {', '.join(parts)}"


class FakeOffload:
    """
    Replaces `pdrun.parallel.zero.offload.ActivationOffload` for fake tensors: tensors for the host
    are dropped.

    Args:
        least: bytes below which a tensor stays.
    """

    def __init__(self, ledger: StorageCounter, least: int) -> None:
        self._ledger = ledger
        self._least = least
        self._largest = 0

    @property
    def prefetch_bytes(self) -> int:
        """Maximum of bytes that are fetched while one tensor is used."""
        return PREFETCH_TENSORS * self._largest

    def saved_tensors_hooks(self) -> AbstractContextManager[Any]:
        """Return the context manager of the forward pass."""
        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
            self._pack_tensor, self._unpack_tensor
        )
        return hooks

    def _pack_tensor(self, tensor: torch.Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        if size < self._least or not tensor.is_floating_point() or self._ledger.is_existing(tensor):
            return tensor
        self._largest = max(self._largest, size)
        return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device

    @staticmethod
    def _unpack_tensor(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        shape, stride, dtype, device = saved
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def estimate_passes(state: RunState, batch: Any, offloads: bool | None = None) -> int:
    """
    Return the maximum of bytes that passes need, without weights and gradients: those of the
    largest micro-batch times the copies.

    Args:
        offloads: whether tensors that autograd saves leave the device; default: if they are
            offloaded and the device is not the host.
    """
    return _trace_passes(state, batch, offloads, with_gradients=False)[0]


def _trace_passes(
    state: RunState, batch: Any, offloads: bool | None, *, with_gradients: bool
) -> tuple[int, int]:
    """
    Return the bytes of activations and of gradients when both together are most.

    Args:
        with_gradients: count gradients; otherwise each is dropped when it arrives.
    """
    if offloads is None:
        offloads = state.offload.activations and state.device.type != "cpu"
    times = state.settings.accumulate
    rows = count_rows(batch, state.batch_slicing)
    pieces = [
        piece
        for rank in slice_rows(
            rows,
            1
            if state.batch_slicing.full_batch or state.batch_slicing.data_parallel
            else state.row_axis.size,
            times,
        )
        for piece in rank
    ]
    largest = max(pieces, key=len)
    with (
        state.rng.isolate_generators(state.device),
        FakeTensorMode(allow_non_fake_inputs=True) as fake,
    ):
        model = meta_copy(state, fake)
        part = pytree.tree_map(
            lambda leaf: fake.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf,
            take_rows(batch, largest, state.batch_slicing.for_rows()),
        )
        if state.sequence_slicer is not None:
            part = state.sequence_slicer.part(part, state.axes)
        ledger = StorageCounter()
        ledger.ignore_existing(
            [
                *model.parameters(),
                *model.buffers(),
                *(x for x in pytree.tree_leaves(part) if isinstance(x, torch.Tensor)),
            ]
        )
        emulate_compiled(model, ledger.uncounted)
        if state.recompute is not None:
            apply_recompute(model, state.recompute, state.axes)
        timeline = None
        if with_gradients:
            timeline = GradientTimeline(state, model, ledger)
        else:
            for param in model.parameters():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(_drop_grad)
        host = FakeOffload(ledger, state.offload.least) if offloads else None
        with ledger, state.engine.paused(), state.axes.dry_run():
            with state.compute_context():
                with host.saved_tensors_hooks() if host is not None else nullcontext():
                    total, _ = state.compute_objective(model, part, largest, 0)
                total.backward()
        del timeline
        prefetched = host.prefetch_bytes if host is not None else 0
        activations = ledger.peak - ledger.reserved_at_peak + prefetched
        return activations * state.copies, ledger.reserved_at_peak


def _drop_grad(param: torch.Tensor) -> None:
    param.grad = None


def estimate_memory(state: RunState, batch: Any = None) -> MemoryEstimate:
    """Return the estimate of a step; without a batch, only what stays."""
    engine = state.engine
    cut = {weight.name for part in engine.sharded_buckets for weight in part.weights}
    policy = state.settings.precision
    kept = sum(
        w.numel * policy.weight_dtype(w.dtype, w.keep_dtype).itemsize
        for w in engine.weights
        if w.name not in cut and not is_away(state, w)
    )
    resident = [
        part.full.numel() * part.full.element_size()
        for part in engine.sharded_buckets
        if not part.frees_full
    ]
    gathered = _gathered_bytes(state)
    here = state.device.type  # offloaded tensors are on another device
    wide = [part.master for part in engine.sharded_buckets if not part.is_master_in_full] + list(
        engine.masters.values()
    )
    masters = sum(
        master.numel() * master.element_size() for master in wide if master.device.type == here
    )
    params = [param for group in state.optimizer.param_groups for param in group["params"]]
    trained = sum(param.numel() for param in params if param.device.type == here)
    optimizer_state = int(trained * state_bytes_per_element(state.optimizer, state.device))
    gradients, activations = _gradient_bytes(state), None
    if batch is not None and state.mesh.pp == 1:  # a stage's activations depend on others
        activations, on_way = _trace_passes(state, batch, None, with_gradients=True)
        gradients = resident_gradient_bytes(state) + on_way
    return MemoryEstimate(
        kept + sum(resident) + gathered, masters, gradients, optimizer_state, activations
    )


def _gathered_bytes(state: RunState) -> int:
    """
    Return the bytes of weights outside of units and of the two largest units.

    One unit computes while the next is gathered. If units stay for a step, all count.
    """
    sizes: dict[str, int] = {}
    for part in state.engine.sharded_buckets:
        if part.frees_full:
            unit = part.weights[0].unit
            sizes[unit] = sizes.get(unit, 0) + part.full.numel() * part.full.element_size()
    root = sizes.pop("", 0)
    units = sorted(sizes.values())
    return root + sum(units if state.settings.keep_for_step else units[-2:])


def _gradient_bytes(state: RunState) -> int:
    """
    Return the bytes of totals, flat buffers of running sums, and gradients that wait for their
    bucket.
    """
    totals = flats = waiting = 0
    on_way: list[int] = []
    policy = state.settings.precision
    for part in state.engine.gradient_buckets:
        if is_away(state, part.weights[0]):
            continue
        size = part.layout.numel * part.dtype.itemsize
        waiting = max(
            waiting,
            sum(
                w.numel * policy.weight_dtype(w.dtype, w.keep_dtype).itemsize for w in part.weights
            ),
        )
        if part.comm.shards == 1:
            totals += size
            continue
        totals += size // part.comm.shards
        if state.settings.accumulate > 1 and not part.reduces_each:
            flats += size
        else:
            on_way.append(size)
    return totals + flats + sum(sorted(on_way)[-3:]) + waiting
