"""
`run.verify()`: computes the same batches in one process and compares.

Each rank makes a copy of the full model. It computes every slice of the global batch in order, in
plain torch (no hooks, no shards, no recomputation), and compares loss, norm and every full gradient
with those of the run. Weights and optimizer do not change. The run continues as if nothing had
happened.

A run and one process with the same slices also agree if a loss looks across rows, as a contrastive
loss does, or has a weight penalty that each slice adds. With another number of ranks the result
would differ. Therefore two slices are also computed as one; the report shows if that changes the
loss. If `dataset_strategy` slices another dim than 0, the whole batch is computed as well, and
another loss is an error: the slices are not rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.data.batch_slicing import (
    count_rows,
    slice_rows,
    take_rows,
    to_device,
)
from pdrun.parallel.data.loader import Loader
from pdrun.parallel.data.torch_loaders import from_torch
from pdrun.parallel.model import sync_batchnorm
from pdrun.parallel.report.model_copies import reference_copy
from pdrun.parallel.training.step import probe_gradients
from pdrun.parallel.zero.grad_norm import square_sum

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState

FP32_TOLERANCE = 1e-5
LOW_PRECISION_TOLERANCE = 3e-2
FP8_TOLERANCE = 1e-1
"""Largest relative difference of a gradient in fp32 and fp64, and in narrower types."""
ROW_DEPENDENCE_TOLERANCE = 1e-4
"""Relative difference of the loss above which two slices as one count as another loss."""
GRADIENT_SLACK = 10.0
"""How much more than the loss gradients may differ there."""
ROUNDING_FACTOR = 8.0
"""How much further than one process in fp32 a run can be from fp64, if it differs by rounding."""
ROUNDING_SAMPLES = 4
"""One process is computed as often with other last bits, until they explain a run."""
MAX_ROUNDING = 1e-2
"""Relative difference of one process in fp32 from fp64 above which nothing can be said."""
TENSOR_PARALLEL_TOLERANCE = 1e-6
PIPELINE_TOLERANCE = 2e-6
"""Largest relative difference of a loss with sharded operators, and with stages."""


@dataclass(frozen=True)
class StepComparison:
    """One step of the run, and the same step in one process."""

    loss: float
    reference_loss: float
    norm: float
    reference_norm: float
    max_difference: float
    """
    Largest relative difference of a weight's gradient: the norm of the difference divided by its
    norm plus a hundredth of the model's.
    """
    worst_weight: str
    """The weight with that difference."""
    row_dependence: float = 0.0
    """
    Relative difference, in one process, between two slices as one and separately: of the loss, or a
    tenth of that of the gradients.
    """
    rounding: tuple[float, float] | None = None
    """
    The largest relative differences from gradients in fp64, of one process in fp32 and of the run,
    if the run differs from one process by rounding that the model amplifies.
    """

    @property
    def same_bits(self) -> bool:
        """Whether the loss and all gradients agree to the last bit."""
        return self.loss == self.reference_loss and self.max_difference == 0

    def __str__(self) -> str:
        bits = "the same bits"
        if not self.same_bits:
            bits = f"gradients within {self.max_difference:.1e} ({self.worst_weight})"
        if self.rounding is not None:
            bits += (
                "; the model amplifies rounding: one process in fp32 is within"
                f" {self.rounding[0]:.1e} of fp64, the run within {self.rounding[1]:.1e}"
            )
        norms = f"norm {self.norm:.9g} and {self.reference_norm:.9g}"
        return f"loss {self.loss:.9g} and {self.reference_loss:.9g} in one process, {norms}, {bits}"


@dataclass(frozen=True)
class VerifyReport:
    """The result of `Run.verify`."""

    steps: tuple[StepComparison, ...]
    row_dependence: float = 0.0
    """
    How much two slices depend on whether they are computed as one (`StepComparison`); 0 for a model
    and a loss that compute each row separately.
    """

    @property
    def same_bits(self) -> bool:
        """Whether losses and all gradients agree to the last bit."""
        return all(step.same_bits for step in self.steps)

    def __str__(self) -> str:
        lines = [f"step {place}: {step}" for place, step in enumerate(self.steps, 1)]
        if self.row_dependence:
            lines.append(
                "two slices computed as one have another loss or other gradients (by"
                f" {self.row_dependence:.1e}): the model or the loss looks across rows, adds a term"
                " per slice or draws random numbers; it depends on the number of slices (ranks x"
                " accumulate)"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class _Reference:
    """A batch as one process computes it; see `StepComparison`."""

    loss: float
    norm: float
    grads: dict[str, torch.Tensor]
    row_dependence: float


def verify_run(state: RunState, source: Iterable[Any] | None, steps: int) -> VerifyReport:
    """
    Compare the run with one process on some global batches.

    Raises:
        ConfigError: they differ by more than rounding; names the batch and the weight.
        UsageError: there is no batch to compare.
    """
    if state.served is not None:
        state.served.check_equal_to_one_process()
    found = []
    buffers = [buffer.clone() for buffer in state.model.buffers()]
    for batch in _iter_batches(state, source, steps):
        state.steps += 1  # random numbers depend on it
        try:
            with state.rng.isolate_generators(state.device):
                numbers, norm, grads = _probe_run(state, batch)
            _restore_buffers(state, buffers)
            with state.engine.paused(), state.rng.isolate_generators(state.device):
                want = _compute_reference(state, batch)
                step = _compare_results(numbers, norm, grads, want)
                if _is_fp32(state) and not _is_close(step, *_tolerances(state)):
                    _restore_buffers(state, buffers)
                    step = _compare_rounding(state, batch, step, grads, want)
                found.append(step)
        finally:
            state.steps -= 1
            _restore_buffers(state, buffers)
    if not found:
        raise UsageError("there is no batch to compare", where="pdrun.Run.verify")
    grad_tolerance, loss_tolerance = _tolerances(state)
    row_tolerance = ROW_DEPENDENCE_TOLERANCE
    if grad_tolerance >= LOW_PRECISION_TOLERANCE:
        row_tolerance = LOW_PRECISION_TOLERANCE
    row_dependence = max(step.row_dependence for step in found)
    if row_dependence <= row_tolerance:
        row_dependence = 0.0
    for place, step in enumerate(found, 1):
        if not _is_close(step, grad_tolerance, loss_tolerance):
            raise ConfigError(
                f"batch {place} differs from one process: {step}",
                where="pdrun.Run.verify",
                hint="look for code that depends on the rank, or on other rows of the batch",
            )
    return VerifyReport(tuple(found), row_dependence)


def _is_fp32(state: RunState) -> bool:
    """Whether the run computes and communicates in fp32."""
    return (
        not state.settings.precision.compute
        and not state.settings.wire_dtype
        and all(weight.dtype != torch.float64 for weight in state.engine.weights)
    )


def _compare_rounding(
    state: RunState,
    batch: Any,
    step: StepComparison,
    grads: dict[str, torch.Tensor],
    want: _Reference,
) -> StepComparison:
    """
    Compare a step that differs from one process with fp64; note it if both differ alike.

    One process can be close to fp64 by chance: an activation near 0 has another sign in the run
    only. How far rounding carries is the most of several processes, whose weights differ by their
    last bits.

    Args:
        grads: of the run.
        want: one process in fp32.
    """
    try:
        exact = _compute_reference(state, batch, in_fp64=True)
    except RuntimeError:  # a loss or model with tables of another type
        return step
    mine = _relative_differences(grads, exact)
    own = _relative_differences(want.grads, exact)
    if not set(own) == set(mine) == set(exact.grads):
        return step
    loss_rounding = abs(want.loss - exact.loss)
    for seed in range(ROUNDING_SAMPLES + 1):
        if seed:
            other = _compute_reference(state, batch, noise_seed=seed)
            loss_rounding = max(loss_rounding, abs(other.loss - exact.loss))
            differences = _relative_differences(other.grads, exact)
            own = {name: max(own[name], differences[name]) for name in own}
        largest = max(own.values(), default=math.inf)
        if largest > MAX_ROUNDING or loss_rounding > MAX_ROUNDING * abs(exact.loss):
            return step
        loss_limit = ROUNDING_FACTOR * loss_rounding + 1e-6 * abs(exact.loss)
        if abs(step.loss - exact.loss) <= loss_limit and all(
            mine[name] <= ROUNDING_FACTOR * own[name] + largest for name in own
        ):
            return replace(step, rounding=(largest, max(mine.values())))
    return step


def _relative_differences(grads: dict[str, torch.Tensor], want: _Reference) -> dict[str, float]:
    """Return how much each gradient differs; see `StepComparison.max_difference`."""
    return {
        name: _relative_difference(grads[name], expected, want.norm)
        for name, expected in want.grads.items()
        if name in grads
    }


def _relative_difference(mine: torch.Tensor, expected: torch.Tensor, norm: float) -> float:
    # a gradient that should vanish is only rounding: compare it with the model's norm too
    size = float(expected.double().norm()) + 1e-2 * norm
    return float((mine.double() - expected.double()).norm()) / max(size, 1e-12)


def _is_close(step: StepComparison, grad_tolerance: float, loss_tolerance: float) -> bool:
    """Whether a step of the run agrees with one process, or differs by amplified rounding."""
    if step.rounding is not None:
        return True
    loss_limit = loss_tolerance * max(abs(step.reference_loss), 1e-6)
    # every weight is within its tolerance plus a hundredth of the norm, so the norm is within two
    norm_limit = 2 * grad_tolerance * step.reference_norm
    return (
        step.max_difference <= grad_tolerance
        and abs(step.loss - step.reference_loss) <= loss_limit
        and abs(step.norm - step.reference_norm) <= norm_limit
    )


def _tolerances(state: RunState) -> tuple[float, float]:
    """Return the largest relative differences of gradients and of losses."""
    if state.settings.precision.fp8 is not None:
        return FP8_TOLERANCE, LOW_PRECISION_TOLERANCE
    if state.settings.precision.compute or state.settings.wire_dtype:
        return LOW_PRECISION_TOLERANCE, LOW_PRECISION_TOLERANCE
    if state.mesh.pp > 1:
        return FP32_TOLERANCE, PIPELINE_TOLERANCE
    if state.mesh.size > state.mesh.dp:
        return FP32_TOLERANCE, TENSOR_PARALLEL_TOLERANCE
    return FP32_TOLERANCE, FP32_TOLERANCE


def _probe_run(
    state: RunState, batch: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the result of `probe_gradients`; in fp16 with a loss scale that does not overflow."""
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
    if isinstance(source, DataLoader):
        source = from_torch(source) or source
    if isinstance(source, Loader):
        for rows in source.batches(state.seed, state.feed.position.epoch)[:steps]:
            yield source.collate([source.dataset[index] for index in rows])
        return
    if source is None or state.batch_slicing.data_parallel:
        raise UsageError(
            "verify needs global batches", where="pdrun.Run.verify", hint="run.verify([batch, ...])"
        )
    for _, batch in zip(range(steps), source, strict=False):
        yield batch


def _restore_buffers(state: RunState, buffers: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, old in zip(state.model.buffers(), buffers, strict=True):
            buffer.copy_(old)


def _compute_reference(
    state: RunState, batch: Any, in_fp64: bool = False, noise_seed: int = 0
) -> _Reference:
    """
    Compute a batch slice by slice in this process.

    Args:
        noise_seed: of noise like rounding on the weights; 0: none.
    """
    model = reference_copy(state)
    if noise_seed:
        _add_rounding(model, noise_seed)
    is_checked = not in_fp64 and not noise_seed
    if in_fp64:
        model = model.double()
    slicing = state.batch_slicing.for_rows()
    is_joined = any(isinstance(part, sync_batchnorm.SyncedBatchNorm) for part in model.modules())

    def load_rows(rows: range) -> Any:
        dtype = torch.float64 if in_fp64 else state.settings.precision.input_dtype
        return to_device(take_rows(batch, rows, slicing), state.device, dtype)

    totals = []
    counts = []
    slices = []
    row_dependence = 0.0
    with sync_batchnorm.local_statistics():
        for index, rows in _order_slices(state, count_rows(batch, slicing), is_joined):
            if len(rows):
                total, count = state.compute_objective(model, load_rows(rows), rows, index)
                total.backward()
                totals.append(float(total.detach()))
                counts.append(float(count))
                slices.append(rows)
                if len(slices) == 2 and not is_joined and is_checked:
                    row_dependence = _compare_joined(state, model, slices, load_rows, sum(totals))
        if any(slicing.dims or ()) and is_checked:
            _check_slices_are_rows(state, model, slices, load_rows)
    grads, norm = _divide_and_clip(state, model, sum(counts))
    return _Reference(sum(totals) / sum(counts), norm, grads, row_dependence)


def _add_rounding(model: nn.Module, seed: int) -> None:
    """Multiply each weight by 1 plus noise: rounding of 1 last bit for seed 1, 8 for seed 4."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                noise = torch.randn(param.shape, generator=generator).to(param)
                param.mul_(1 + 2.0 ** (seed - 1) * torch.finfo(param.dtype).eps * noise)


def _compare_joined(
    state: RunState,
    model: nn.Module,
    slices: list[range],
    load_rows: Callable[[range], Any],
    separate: float,
) -> float:
    """Return the row dependence of two slices; the model has the gradients of both."""
    kept = [(param, param.grad) for param in model.parameters() if param.grad is not None]
    model.zero_grad(set_to_none=True)
    both = _join_ranges(slices)
    total = state.compute_objective(model, load_rows(both), both, 0)[0]
    total.backward()
    difference = size = 0.0
    for param, grad in kept:
        mine = torch.zeros_like(grad) if param.grad is None else param.grad
        difference += float((mine.double() - grad.double()).norm()) ** 2
        size += float(grad.double().norm()) ** 2
    model.zero_grad(set_to_none=True)
    for param, grad in kept:
        param.grad = grad
    by_loss = abs(float(total.detach()) - separate) / max(abs(separate), 1e-6)
    return max(by_loss, math.sqrt(difference / max(size, 1e-24)) / GRADIENT_SLACK)


def _without_backward(state: RunState) -> AbstractContextManager[Any]:
    """Return the context manager of a loss alone; that of a model has its count in its graph."""
    context: AbstractContextManager[Any] = torch.set_grad_enabled(
        state.objective.own_loss is not None
    )
    return context


def _check_slices_are_rows(
    state: RunState, model: nn.Module, slices: list[range], load_rows: Callable[[range], Any]
) -> None:
    """
    Compare the loss of the whole batch with that of its slices, without random numbers.

    Raises:
        ConfigError: they differ: the batch is sliced along a dim that has no rows.
    """
    was_training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        with _without_backward(state):
            whole = _join_ranges(slices)
            sums = [
                [
                    float(each.detach())
                    for each in state.compute_objective(model, load_rows(rows), rows, 0)
                ]
                for rows in (whole, *slices)
            ]
    finally:
        for part in was_training:
            part.training = True
    whole_loss = sums[0][0] / sums[0][1]
    loss = sum(total for total, _ in sums[1:]) / sum(count for _, count in sums[1:])
    tolerance = max(_tolerances(state)[1], ROW_DEPENDENCE_TOLERANCE)
    if not abs(loss - whole_loss) <= tolerance * max(abs(whole_loss), 1e-6):
        raise ConfigError(
            f"the slices of a batch have loss {loss:.9g}, the whole batch has {whole_loss:.9g}: "
            f"they are sliced along dims {state.batch_slicing.dims}, which are not all rows",
            where="pdrun.Run.verify",
            hint="name the dims of the rows in dataset_strategy",
        )


def _order_slices(state: RunState, rows: int, is_joined: bool) -> list[tuple[int, range]]:
    """
    Return the index and rows of each slice, in the order of one process.

    Args:
        rows: of the batch.
        is_joined: whether the slices of all ranks are one, as for synchronised batch norms.
    """
    world = state.row_axis.size
    times = state.settings.accumulate
    if state.batch_slicing.full_batch:
        pieces = [slice_rows(rows, 1, times)[0]] * world
    else:
        pieces = slice_rows(rows, world, times)
    order = []
    for position in range(times):
        if is_joined:
            order.append(
                (position, _join_ranges([pieces[rank][position] for rank in range(world)]))
            )
        else:
            for rank in range(world):
                order.append((position * world + rank, pieces[rank][position]))
    return order


def _divide_and_clip(
    state: RunState, model: nn.Module, count: float
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradients as the engine would return them, and their norm before clipping."""
    divisor = count / state.settings.gradient_factor if state.settings.mean else 1.0
    grads = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            grad = param.grad
            if grad.dtype.itemsize < 4:
                grad = grad.float()
            grads[name] = grad.div_(divisor)
    norm = float(square_sum(list(grads.values()), exact=True).sqrt())
    if state.settings.clip:
        for grad in grads.values():
            grad.mul_(min(1.0, state.settings.clip / (norm + 1e-6)))
    return grads, norm


def _join_ranges(ranges: list[range]) -> range:
    return range(min(part.start for part in ranges), max(part.stop for part in ranges))


def _compare_results(
    numbers: torch.Tensor, norm: torch.Tensor, grads: dict[str, torch.Tensor], want: _Reference
) -> StepComparison:
    """
    Compare a step of the run with the reference.

    Args:
        numbers: sum and count of the run's loss.
        norm, grads: of the run's gradients.
    """
    max_difference = 0.0
    worst_weight = ""
    for name, expected in want.grads.items():
        mine = grads.get(name)
        difference = math.inf
        if mine is not None:
            difference = _relative_difference(mine, expected, want.norm)
        if not difference <= max_difference:
            max_difference = difference
            worst_weight = name
    for name in set(grads) - set(want.grads):
        max_difference = math.inf
        worst_weight = name
    total, count = numbers.tolist()
    return StepComparison(
        total / count,
        want.loss,
        float(norm),
        want.norm,
        max_difference,
        worst_weight,
        want.row_dependence,
    )
