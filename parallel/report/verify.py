"""
`run.verify()`: the same batches once more in one process, and nothing may differ.

Each rank makes a copy of the whole model, computes every slice of the global batch by itself, in
order, in plain torch (no hooks, no shards, no recomputation), and compares loss, norm and every
whole gradient with what the run computes. Weights and optimizer stay as they are; the run goes on
afterwards as if nothing had happened.

A run and one process that work through the same slices agree also where a loss looks across rows,
as a contrastive one does, or has a penalty of weights that each slice adds: it would be another on
another number of ranks. So two slices are computed as one, too, and the report says where that
makes a difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.data.batch_slicing import (
    BatchSlicing,
    count_rows,
    slice_rows,
    take_rows,
    to_device,
)
from pdrun.parallel.data.loader import Loader
from pdrun.parallel.model import sync_batchnorm
from pdrun.parallel.report.model_copies import reference_copy
from pdrun.parallel.training.step import probe_gradients
from pdrun.parallel.zero.grad_norm import square_sum

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState

FP32_TOLERANCE = 1e-5
LOW_PRECISION_TOLERANCE = 3e-2
"""Largest relative difference of a gradient in fp32 and fp64, and in narrower types."""
ROW_DEPENDENCE_TOLERANCE = 1e-4
"""From which on two slices that are computed at once have another loss than one after the other."""
TENSOR_PARALLEL_TOLERANCE = 1e-6
PIPELINE_TOLERANCE = 2e-6
"""Largest relative difference of a loss where operators are cut, and where there are stages."""


@dataclass(frozen=True)
class StepComparison:
    """One step in both ways."""

    loss: float
    alone: float
    norm: float
    norm_alone: float
    worst: float
    """
    Largest relative difference of a weight's gradient: the norm of the difference over its norm and
    a hundredth of all's.
    """
    name: str
    """The weight that has it."""
    rows: float = 0.0
    """
    Relative difference of the loss of two slices in one process, at once and one after the other.
    """

    def __str__(self) -> str:
        bits = (
            "the same bits"
            if self.loss == self.alone and self.worst == 0
            else f"gradients within {self.worst:.1e} ({self.name})"
        )
        norms = f"norm {self.norm:.9g} and {self.norm_alone:.9g}"
        return f"loss {self.loss:.9g} and {self.alone:.9g} in one process, {norms}, {bits}"


@dataclass(frozen=True)
class VerifyReport:
    """What `Run.verify` has found."""

    steps: tuple[StepComparison, ...]

    @property
    def same_bits(self) -> bool:
        """Whether losses and all gradients agree to the last bit."""
        return all(step.loss == step.alone and step.worst == 0 for step in self.steps)

    across: float = 0.0
    """
    Where rows are not computed each by itself: how much the loss of two slices depends on whether
    they are one.
    """

    def __str__(self) -> str:
        lines = [f"step {place}: {step}" for place, step in enumerate(self.steps, 1)]
        if self.across:
            lines.append(
                f"two slices at once have another loss ({self.across:.1e} of it): something looks across rows, is "
                "added once a slice, or draws random numbers, and depends on the number of slices (ranks x accumulate)"
            )
        return "\n".join(lines)


def verify_run(state: RunState, source: Iterable[Any] | None, steps: int) -> VerifyReport:
    """
    Compare the run with one process on some global batches.

    Raises:
        ConfigError: they differ by more than rounding; names the batch and the weight.
        UsageError: there is no batch to compare on.
    """
    found = []
    buffers = [buffer.clone() for buffer in state.model.buffers()]
    for batch in _iter_batches(state, source, steps):
        state.steps += 1  # for the dice
        try:
            with state.rng.isolate_generators(state.device):
                numbers, norm, grads = _probe_run(state, batch)
            _restore_buffers(state, buffers)
            with state.engine.paused(), state.rng.isolate_generators(state.device):
                found.append(
                    _compare_results(numbers, norm, grads, _compute_reference(state, batch))
                )
        finally:
            state.steps -= 1
            _restore_buffers(state, buffers)
    if not found:
        raise UsageError("there is no batch to compare on", where="pdrun.Run.verify")
    limit, of_loss = _tolerances(state)
    across = max(step.rows for step in found)
    report = VerifyReport(
        tuple(found),
        across
        if across
        > (ROW_DEPENDENCE_TOLERANCE if limit < LOW_PRECISION_TOLERANCE else LOW_PRECISION_TOLERANCE)
        else 0.0,
    )
    for place, step in enumerate(found, 1):
        close = abs(step.loss - step.alone) <= of_loss * max(abs(step.alone), 1e-6)
        # weights are each within the limit, plus a hundredth of the norm for those that vanish: so
        # is the norm, nearly
        if not (
            step.worst <= limit
            and close
            and abs(step.norm - step.norm_alone) <= 2 * limit * step.norm_alone
        ):
            hint = "is there something in the model that depends on which rank it runs on, or on other rows of the batch?"
            raise ConfigError(
                f"batch {place} is not what one process computes: {step}",
                where="pdrun.Run.verify",
                hint=hint,
            )
    return report


def _tolerances(state: RunState) -> tuple[float, float]:
    """Return how far gradients and losses may be off."""
    if state.settings.precision.compute or state.settings.wire_dtype:
        return LOW_PRECISION_TOLERANCE, LOW_PRECISION_TOLERANCE
    if state.mesh.pp > 1:
        return FP32_TOLERANCE, PIPELINE_TOLERANCE
    return (
        FP32_TOLERANCE,
        FP32_TOLERANCE if state.mesh.size == state.mesh.dp else TENSOR_PARALLEL_TOLERANCE,
    )


def _probe_run(
    state: RunState, batch: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """
    Return what `Run.probe` does; in fp16 with a loss scale that does not overflow, as training
    would find it.
    """
    if state.loss_scale is None:
        return probe_gradients(state, batch)
    before = state.loss_scale.value
    try:
        while True:
            found = probe_gradients(state, batch)
            if bool(torch.isfinite(found[1])) or state.loss_scale.value < 1:
                return found
            state.loss_scale.value /= 2
    finally:
        state.loss_scale.value = before


def _iter_batches(state: RunState, source: Any, steps: int) -> Iterable[Any]:
    """Yield global batches."""
    source = state.feed.source if source is None else source
    if isinstance(source, Loader):
        order = source.order(state.seed, state.feed.position.epoch)
        starts = range(0, min(len(source), steps) * source.batch, source.batch)
        for start in starts:
            yield source.collate(
                [source.dataset[index] for index in order[start : start + source.batch]]
            )
        return
    if source is None or state.batch_slicing.data_parallel:
        raise UsageError(
            "no global batches are known", where="pdrun.Run.verify", hint="run.verify([batch, ...])"
        )
    for _, batch in zip(range(steps), source, strict=False):
        yield batch


def _restore_buffers(state: RunState, buffers: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, old in zip(state.model.buffers(), buffers, strict=True):
            buffer.copy_(old)


def _compute_reference(
    state: RunState, batch: Any
) -> tuple[float, float, dict[str, torch.Tensor], float]:
    """
    Return loss, norm and gradients of a batch, computed slice by slice in this process, and how
    much the loss of the first two slices changes where they are one.
    """
    model = reference_copy(state)
    world = state.row_axis.size
    times = state.settings.accumulate
    strategy = BatchSlicing(dims=state.batch_slicing.dims)
    pieces = slice_rows(count_rows(batch, strategy), world, times)
    if state.batch_slicing.full_batch:
        pieces = [slice_rows(count_rows(batch, strategy), 1, times)[0]] * world
    order = [
        (place * world + rank, pieces[rank][place])
        for place in range(times)
        for rank in range(world)
    ]
    joined = any(isinstance(module, sync_batchnorm.SyncedBatchNorm) for module in model.modules())
    if joined:
        order = [
            (place, _join_ranges([pieces[rank][place] for rank in range(world)]))
            for place in range(times)
        ]
    totals = []
    counts = []
    rows_of = []
    with sync_batchnorm.local_statistics():
        for index, rows in order:
            if len(rows):
                part = to_device(
                    take_rows(batch, rows, strategy),
                    state.device,
                    state.settings.precision.input_dtype,
                )
                total, count = state.compute_objective(model, part, rows, index)
                total.backward()
                totals.append(float(total.detach()))
                counts.append(float(count))
                rows_of.append(rows)
        across = 0.0
        if len(rows_of) > 1 and not joined:
            both = _join_ranges(rows_of[:2])
            part = to_device(
                take_rows(batch, both, strategy), state.device, state.settings.precision.input_dtype
            )
            with torch.no_grad():
                at_once = float(state.compute_objective(model, part, both, 0)[0])
                apart = totals[0] + totals[1]
            across = abs(at_once - apart) / max(abs(apart), 1e-6)
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    by = sum(counts) if state.settings.mean else 1.0
    grads = {
        name: grad.float().div_(by) if grad.dtype.itemsize < 4 else grad.div_(by)
        for name, grad in grads.items()
    }
    norm = float(square_sum(list(grads.values()), exact=True).sqrt())
    if state.settings.clip:
        for grad in grads.values():
            grad.mul_(min(1.0, state.settings.clip / (norm + 1e-6)))
    return sum(totals) / sum(counts), norm, grads, across


def _join_ranges(ranges: list[range]) -> range:
    return range(min(part.start for part in ranges), max(part.stop for part in ranges))


def _compare_results(
    numbers: Any, norm: Any, grads: dict[str, torch.Tensor], want: Any
) -> StepComparison:
    worst = 0.0
    name = ""
    for key, expected in want[2].items():
        mine = grads.get(key)
        # a gradient that should vanish is rounding alone: it is held against the whole model's
        size = float(expected.double().norm()) + 1e-2 * want[1]
        off = (
            float("inf")
            if mine is None
            else float((mine.double() - expected.double()).norm()) / max(size, 1e-12)
        )
        if not off <= worst:
            worst = off
            name = key
    for key in set(grads) - set(want[2]):
        worst = float("inf")
        name = key
    total, count = numbers.tolist()
    return StepComparison(total / count, want[0], float(norm), want[1], worst, name, want[3])
