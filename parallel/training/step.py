"""
One training step: slice the batch, run the driver, reduce the gradients, step the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.comm.mesh import ROW_AXES
from pdrun.parallel.data.batch_slicing import (
    BatchSlicing,
    FlatBatch,
    ranges_of_sizes,
    slice_rows,
    take_rows,
)
from pdrun.parallel.data.batch_structure import count_plain_rows
from pdrun.parallel.data.loader import BatchShard
from pdrun.parallel.data.seeded import SlicedBatch
from pdrun.parallel.rng.step_rng import NO_CONTEXT
from pdrun.parallel.training.driver import MicroBatch
from pdrun.parallel.training.guard import refuse_clipping
from pdrun.parallel.training.metrics import Metrics
from pdrun.parallel.training.nonfinite import report_nonfinite
from pdrun.parallel.training.rank_agreement import describe_batch
from pdrun.parallel.training.state import RunState
from pdrun.parallel.zero import full_tensors
from pdrun.parallel.zero.grad_norm import square_sum
from pdrun.parallel.zero.offload import move_state_to_files


def train_batch(state: RunState, batch: Any, on_gradients: Callable[[], None]) -> Metrics:
    """
    Train on a batch: forward, backward, one step of the optimizer; see `Run.step`.

    Args:
        on_gradients: called when the gradients are reduced and clipped, before they are used.
    """
    state.guard.check_unchanged()
    state.feed.check_batch(batch)
    _compare_first_batch(state, batch)
    state.steps += 1
    watch = state.data_group.watchdog
    watch.enter_phase(f"step {state.steps}")
    state.buffers.begin_step()
    with state.rng.isolate_generators(state.device):
        sums = compute_gradients(state, batch)
    metrics = _apply_gradients(state, batch, sums, on_gradients)
    state.feed.mark_used()
    watch.leave_phase()
    state.guard.remember_state()
    return metrics


def compute_gradients(state: RunState, batch: Any) -> torch.Tensor:
    """
    Go forward and backward through this rank's micro-batches; gradients are left in the engine.

    Returns:
        ``[accumulate, 2]``: sum and count of the loss of each micro-batch.
    """
    if not torch.is_grad_enabled():
        raise UsageError(
            "gradients are turned off: step is called in torch.no_grad() or torch.inference_mode()",
            where="pdrun.Run.step",
            hint="call it outside; use run.evaluate(batch) for a forward only",
        )
    state.engine.begin_step()
    state.experts.begin_step()
    if state.served is not None:
        state.served.begin_step()
    state.objective.begin_step(batch)
    try:
        with state.rng.patched_dropout(), state.checked_norms():
            sums = state.driver.run_microbatches(state, slice_batch(state, batch))
    finally:
        state.objective.end_step()
    state.engine.take_in_replaced()
    state.guard.check_forwards()
    check_mean_over_parts(state, "pdrun.Run.step")
    return sums


def check_mean_over_parts(state: RunState, where: str) -> None:
    """Refuse a loss that is a mean if sequences are sharded."""
    if state.objective.is_mean and state.mesh.cp > 1:
        raise UsageError(
            "with cp, loss must return (sum, count): means of sequence parts cannot be added",
            where=where,
            hint="loss(output, batch) -> (sum, count)",
        )


def evaluate_batch(state: RunState, batch: Any) -> list[Any]:
    """Return the model's outputs on this rank's micro-batches; see `Run.evaluate`."""
    state.engine.release_weights()
    with state.rng.isolate_generators(state.device):
        return state.driver.evaluate_microbatches(state, slice_batch(state, batch))


def probe_gradients(
    state: RunState, batch: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return (sum, count), norm and full gradients of a global batch; nothing is trained."""
    sums = compute_gradients(state, batch)
    numbers, norm = state.engine.finish_gradients(sums, _scale_of(state))
    grads = full_gradients(state)
    if norm is None:
        norm = square_sum(list(grads.values()), exact=True).sqrt()
    state.engine.end_step()
    return numbers, norm, grads


def full_gradients(state: RunState) -> dict[str, torch.Tensor]:
    """Return copies of the full gradients by name; every rank must call this."""
    return {
        name: grad.clone()
        for name, grad in full_tensors.iter_full_gradients(state.engine)
        if grad is not None
    }


def slice_batch(state: RunState, batch: Any) -> list[MicroBatch]:
    """
    Return this rank's micro-batches: its rows along dp, cut into ``accumulate`` slices.

    Raises:
        UsageError: the batch has no rows.
    """
    world = state.row_axis.size
    rank = state.row_axis.index
    times = state.settings.accumulate
    slicing = state.batch_slicing
    shard = state.feed.shard_of(batch)
    if shard is None and times == 1 and slicing.data_parallel:
        mine = count_plain_rows(batch, slicing.forward)
        if mine:
            return [MicroBatch(batch, range(rank * mine, (rank + 1) * mine), 1.0, rank, 0)]
    if shard is not None and isinstance(batch, SlicedBatch):
        return _take_collated(batch, shard, slicing, world, rank, times)
    if shard is not None:
        pieces = slice_rows(shard.rows, world, times)[rank]
        local = ranges_of_sizes(shard.sizes)
        known = sum(shard.sizes) or None
        slicing = BatchSlicing(dims=slicing.dims, forward=slicing.forward, rows=known)
        flat = FlatBatch(batch, slicing)
    elif slicing.data_parallel or slicing.full_batch:
        flat = FlatBatch(batch, slicing)
        local = slice_rows(flat.rows, 1, times)[0]
        offset = rank * flat.rows if slicing.data_parallel else 0
        if slicing.full_batch:
            flat = FlatBatch(batch, slicing.for_rows())
        pieces = [range(piece.start + offset, piece.stop + offset) for piece in local]
    else:
        flat = FlatBatch(batch, slicing)
        local = pieces = slice_rows(flat.rows, world, times)[rank]
    if flat.rows == 0:
        raise UsageError("the batch has no rows", where="pdrun.Run.step")
    found = []
    for place, (piece, where) in enumerate(zip(pieces, local, strict=True)):
        part = flat.take_rows(where if len(where) else range(1))
        found.append(
            MicroBatch(part, piece, 1.0 if len(where) else 0.0, place * world + rank, place)
        )
    return found


def _take_collated(
    batch: SlicedBatch, shard: BatchShard, slicing: BatchSlicing, world: int, rank: int, times: int
) -> list[MicroBatch]:
    """Return micro-batches that were collated separately; ones without rows get any of them."""
    parts = iter(batch)
    found = []
    pieces = slice_rows(shard.rows, world, times)[rank]
    first = next((len(piece) for piece in pieces if len(piece)), 1)
    for place, piece in enumerate(pieces):
        part = next(parts) if len(piece) else batch[0]
        rows = len(piece) or first
        # lists of samples are marked as such
        part = take_rows(part, range(rows), replace(slicing, rows=rows))
        weight = 1.0 if len(piece) else 0.0
        found.append(MicroBatch(part, piece, weight, place * world + rank, place))
    return found


def _compare_first_batch(state: RunState, batch: Any) -> None:
    """Refuse a first batch that differs from that of ranks which must share it."""
    agreement = state.agreement
    state.agreement = None
    if agreement is None or state.feed.shard_of(batch) is not None:
        return
    grid = state.mesh.grid
    rank = state.context.rank
    if state.batch_slicing.data_parallel:
        alike = grid.group_ranks(tuple(name for name in grid.names if name not in ROW_AXES), rank)
        hint = "ranks with the same coordinate on dp and ep take the same rows"
    else:
        alike = grid.group_ranks(grid.names, rank)
        hint = "step takes a global batch, the same on every rank; "
        hint += 'use dataset_strategy="data_parallel" if each rank has other rows; '
        hint += "with run.data(pdrun.Loader(...)) pass the batch that was yielded last"
    if len(alike) > 1:
        agreement.check_equal(describe_batch(batch), alike[0], "pdrun.Run.step", hint)


def _apply_gradients(
    state: RunState,
    batch: Any,
    sums: torch.Tensor,
    on_gradients: Callable[[], None],
) -> Metrics:
    """
    Reduce and clip the gradients, step the optimizer and the scheduler, publish the weights.

    Args:
        sums: of `compute_gradients`.
    """
    numbers, norm = state.engine.finish_gradients(sums, _scale_of(state))
    state.guard.compare_ranks()
    report_nonfinite(state, lambda: slice_batch(state, batch), sums, numbers)
    skipped = state.loss_scale is not None and norm is not None and not bool(torch.isfinite(norm))
    with refuse_clipping() if state.engine.is_retargeted else NO_CONTEXT:
        on_gradients()
    if not skipped:
        state.step_optimizer()
        if state.offload.disk is not None:
            move_state_to_files(
                state.optimizer, Path(state.offload.disk) / f"rank-{state.context.rank}"
            )
    staleness = 0
    if state.served is not None:
        count = float(numbers[1])
        staleness = state.served.end_step(count if state.settings.mean else 1.0)
    if state.loss_scale is not None:
        state.loss_scale.record_step(not skipped)
    state.engine.end_step()
    state.buffers.end_step()
    loads = state.experts.end_step(skipped)
    return Metrics(state.steps, numbers, norm, skipped, staleness, loads)


def _scale_of(state: RunState) -> float:
    return state.loss_scale.value if state.loss_scale else 1.0
