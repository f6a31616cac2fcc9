"""
Evaluation over a source of batches: sums over all rows, and outputs of all rows in their order.

Each row counts once, on every mesh. Ranks compute the slices that they would train on, in eval
mode and without gradients. Sums and outputs of the slices are exchanged once, at the end, and are
added in the order of the slices: every rank has the same result.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from pdrun.errors import UsageError
from pdrun.parallel.data.batch_structure import map_tensors
from pdrun.parallel.data.loader import Loader
from pdrun.parallel.evaluation.outputs import (
    OUTPUTS_HINT,
    RUN_EVALUATE,
    join_outputs,
    take_outputs,
)
from pdrun.parallel.training.driver import MicroBatch
from pdrun.parallel.training.state import RunState
from pdrun.parallel.training.step import check_mean_over_parts, slice_batch

MetricFunction = Callable[[Any, Any], Any]
"""``metric(output, batch) -> sum`` or ``(sum, count)``."""
METRIC_HINT = "a metric returns a number or tensor that is summed, or (sum, count) for a mean"


@dataclass(frozen=True)
class Evaluation:
    """
    The result of `Run.evaluate`, the same on every rank.

    Attributes:
        loss: the sum of all losses over the sum of all counts; None with ``loss=False``.
        rows: number of rows.
        count: the sum of the loss's counts.
        metrics: each metric's sum, or its sum over its count.
        outputs: what ``outputs`` asked for, of all rows in order, on the CPU; else None.
    """

    loss: float | None
    rows: int
    count: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    outputs: Any = None

    def __getitem__(self, name: str) -> Any:
        """Return a metric by name."""
        return self.metrics[name]


def is_source(value: Any) -> bool:
    """Whether a value is a source of batches, and not a batch."""
    return isinstance(value, (Loader, DataLoader, Iterator))


def evaluate_source(
    state: RunState,
    source: Iterable[Any],
    metrics: Mapping[str, MetricFunction] | None,
    outputs: bool | Callable[[Any, Any], Any],
    loss: bool,
) -> Evaluation:
    """Evaluate the model on all rows of a source; see `Run.evaluate`."""
    functions = _check_metrics(metrics)
    _check_source(source)
    if outputs not in (True, False) and not callable(outputs):
        raise UsageError(
            f"outputs must be True, False or a function, got {type(outputs).__name__}",
            where=RUN_EVALUATE,
            hint=OUTPUTS_HINT,
        )
    collector = _SliceCollector(state, functions, outputs, loss)
    ranks = state.row_axis.size, state.row_axis.index
    with evaluation_mode(state.model):
        for batch in state.feed.iter_epoch(
            source, False, state.seed, ranks, state.settings.accumulate, state.batch_slicing
        ):
            collector.add_batch(batch)
    return collector.finish()


def _check_source(source: Any) -> None:
    """Refuse a batch in place of a source of batches."""
    is_batch = isinstance(source, (torch.Tensor, Mapping, tuple)) or (
        isinstance(source, list)
        and all(isinstance(each, torch.Tensor) for each in source)
        and len({(each.dim(), each.dtype) for each in source}) > 1  # columns of a batch
    )
    if is_batch or not (is_source(source) or isinstance(source, Iterable)):
        what = f"source must be a loader or an iterable of batches, got a {type(source).__name__}"
        hint = "[batch] for one batch" if is_batch else "pdrun.Loader, torch's DataLoader or a list"
        raise UsageError(what, where=RUN_EVALUATE, hint=hint)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, all modules are in eval mode; afterwards each has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _check_metrics(metrics: Mapping[str, MetricFunction] | None) -> dict[str, MetricFunction]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise UsageError(
            f"metrics must be a dict of functions, got {type(metrics).__name__}",
            where=RUN_EVALUATE,
            hint='metrics={"right": lambda output, batch: (output.argmax(1) == batch[1]).sum()}',
        )
    for name, function in metrics.items():
        if not callable(function):
            raise UsageError(
                f"the metric {name} must be a function, got {type(function).__name__}",
                where=RUN_EVALUATE,
                hint="metric(output, batch) -> sum or (sum, count)",
            )
    return dict(metrics)


Sums = tuple[torch.Tensor, "torch.Tensor | None"]
"""A sum, and the count of a mean."""


class _SliceCollector:
    """Sums and outputs of this rank's slices, with their places in the order of all slices."""

    def __init__(
        self,
        state: RunState,
        metrics: Mapping[str, MetricFunction],
        outputs: bool | Callable[[Any, Any], Any],
        has_loss: bool,
    ) -> None:
        self._state = state
        self._metrics = metrics
        self._outputs = outputs
        self._has_loss = has_loss
        self._slices: list[dict[str, Any]] = []
        self._batches = 0

    def add_batch(self, batch: Any) -> None:
        """Compute this rank's slices of a batch."""
        state = self._state
        state.engine.release_weights()
        state.objective.step_batch = batch
        # the graph of a model's own mean has the number of labels that it is over
        has_own_loss = self._has_loss and state.objective.own_loss is not None
        state.objective.reads_graph = has_own_loss and state.mesh.pp == 1
        try:
            with state.rng.isolate_generators(state.device):
                state.driver.evaluate_microbatches(state, slice_batch(state, batch), self._keep)
        finally:
            state.objective.step_batch = None
            state.objective.reads_graph = False
        if self._has_loss:
            check_mean_over_parts(state, RUN_EVALUATE)
        self._batches += 1

    def _keep(self, output: Any, batch: Any, micro: MicroBatch) -> None:
        """Reduce the output of a slice to what is wanted of it."""
        state = self._state
        rank = state.row_axis.index
        rows = len(micro.rows)
        loss = None
        if self._has_loss:
            loss = state.objective.compute_loss(output, batch, rows)
            loss = loss[0].detach(), loss[1]
        if state.objective.reads_graph:
            output = map_tensors(output, torch.Tensor.detach)
        with torch.no_grad():
            sums = {name: _read_metric(name, f(output, batch)) for name, f in self._metrics.items()}
        kept = None
        if self._outputs is not False:
            wanted = self._outputs(output, batch) if callable(self._outputs) else output
            kept = take_outputs(wanted, rows, self._join_sequences)
        if state.batch_slicing.full_batch and rank:
            return  # every rank of dp has computed all rows
        place = (micro.rows.start, 0)
        if state.batch_slicing.data_parallel:
            place = (rank, micro.position)
        self._slices.append(
            {"place": (self._batches, *place), "rows": rows, "loss": loss, "sums": sums}
            | {"outputs": kept if state.axes["cp"].index == 0 else None}
        )

    def _join_sequences(self, x: torch.Tensor) -> torch.Tensor:
        """Return an output with all positions of its sequences, on every rank along cp."""
        state = self._state
        if state.mesh.cp == 1:
            return x
        join = getattr(state.sequence_slicer, "join", None)
        if join is None:
            raise UsageError(
                "outputs of sequence parts cannot be joined: context= has no method join",
                where=RUN_EVALUATE,
                hint="outputs=False, and metrics that are sums over positions",
            )
        joined: torch.Tensor = join(x, state.axes)
        return joined

    def finish(self) -> Evaluation:
        """
        Exchange the slices, and add them in order.

        Raises:
            UsageError: the source has no batch.
        """
        place = self._state.engine.place
        mine = self._slices if self._state.context.rank in place.loss_ranks else []
        parts = place.job.gather_bytes(_pack(mine), "the results of evaluate")
        slices = [found for rank in place.loss_ranks for found in _unpack(parts[rank])]
        slices.sort(key=lambda found: found["place"])
        if not slices:
            raise UsageError("the source has no batch", where=RUN_EVALUATE)
        loss, count = None, 0.0
        if self._has_loss:
            total, counted = _add_sums([found["loss"] for found in slices])
            count = float(counted) if counted is not None else 0.0
            loss = float(total) / count if count else math.nan
        metrics = {
            name: _finish_metric(*_add_sums([found["sums"][name] for found in slices]))
            for name in self._metrics
        }
        firsts = {found["place"]: found for found in reversed(slices)}.values()
        rows = sum(found["rows"] for found in firsts)
        outputs = None
        if self._outputs is not False:
            kept = [found["outputs"] for found in slices if found["outputs"] is not None]
            outputs = join_outputs(kept)
        return Evaluation(loss, rows, count, metrics, outputs)


# ---- sums -------------------------------------------------------------------


def _read_metric(name: str, value: Any) -> Sums:
    """
    Return a metric of a slice as (sum, count).

    Raises:
        UsageError: it is neither a number nor a pair of numbers.
    """
    pair = value if isinstance(value, tuple) else (value, None)
    if len(pair) != 2 or not all(
        isinstance(each, (int, float, torch.Tensor)) or (each is None and place == 1)
        for place, each in enumerate(pair)
    ):
        kinds = ", ".join(type(each).__name__ for each in pair)
        raise UsageError(
            f"the metric {name} returned {kinds}", where=RUN_EVALUATE, hint=METRIC_HINT
        )
    total, count = pair
    return _widen(total), None if count is None else _widen(count)


def _widen(value: Any) -> torch.Tensor:
    """Return a sum in a type in which it does not overflow or lose digits, on the CPU."""
    x = torch.as_tensor(value).detach().cpu()
    if x.is_complex():
        return x
    return x.double() if x.is_floating_point() else x.long()


def _add_sums(parts: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    totals = [_widen(total) for total, _ in parts]
    counts = [None if count is None else _widen(count) for _, count in parts]
    total = sum(totals[1:], totals[0])
    if counts[0] is None:
        return total, None
    return total, sum((count for count in counts[1:] if count is not None), counts[0])


def _finish_metric(total: torch.Tensor, count: torch.Tensor | None) -> Any:
    """Return a metric's value: a Python number if it is a scalar."""
    value = total if count is None else total / count
    return value.item() if value.dim() == 0 else value


def gather_rows(state: RunState, values: Any, micro: MicroBatch) -> Any:
    """
    Return the outputs of all ranks on one slice each, rows in order and each once; every rank calls
    this.
    """
    kept = take_outputs(values, len(micro.rows), lambda x: x) if micro.weight else None
    mine = [{"place": micro.rows.start, "outputs": kept}] if micro.weight else []
    place = state.engine.place
    parts = place.job.gather_bytes(_pack(mine), "the rows of gather_for_metrics")
    found = [each for rank in place.loss_ranks for each in _unpack(parts[rank])]
    found.sort(key=lambda each: each["place"])
    return join_outputs([each["outputs"] for each in found])


# ---- the exchange -----------------------------------------------------------


def _pack(slices: Any) -> torch.Tensor:
    """Return slices as bytes: plain containers, numbers, texts and tensors."""
    memory = io.BytesIO()
    torch.save(slices, memory)
    return torch.frombuffer(bytearray(memory.getbuffer()), dtype=torch.uint8)


def _unpack(content: torch.Tensor) -> list[dict[str, Any]]:
    memory = io.BytesIO(content.numpy().tobytes())
    found: list[dict[str, Any]] = torch.load(memory, map_location="cpu", weights_only=True)
    return found
