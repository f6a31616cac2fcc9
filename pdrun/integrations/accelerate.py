"""
A loop written for accelerate, on a run of pdrun: three lines change.

    from pdrun.integrations.accelerate import Accelerator
    accelerator = Accelerator(optimizer_level=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The rest of the loop stays: ``loss = model(**batch).loss``, ``accelerator.backward(loss)``,
``optimizer.step()``. The package accelerate is not needed. Rows are weighted as in `Run.step`, so
that the result is that of one process. A batch is one step: for smaller micro-batches, a pipeline
or sharded sequences, use `pdrun.parallelize` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.evaluation.evaluate import gather_rows
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.run import Run
from pdrun.parallel.startup.init import init
from pdrun.parallel.torch_compat import widest_float
from pdrun.parallel.training.driver import MicroBatch
from pdrun.parallel.training.loss import check_requires_grad
from pdrun.parallel.training.step import slice_batch

WHERE = "pdrun.integrations.accelerate"
REFUSED = {
    "accumulate": "call parallelize(accumulate=...) and run.step",
    "copies": "call parallelize(copies=...) and run.step",
    "pipeline": "call parallelize(pipeline=...) and run.step",
    "context": "call parallelize(context=...) and run.step",
    "loss": "compute the loss in the loop",
    "forward": "call the model in the loop",
    "clip": "call accelerator.clip_grad_norm_",
}


class Accelerator:
    """
    What accelerate's class of this name does, with the options of `pdrun.parallelize`.

    Args:
        options: of `pdrun.parallelize`.
    """

    def __init__(self, **options: Any) -> None:
        for name in REFUSED.keys() & options.keys():
            raise UsageError(f"{name} is not an option here", where=WHERE, hint=REFUSED[name])
        self._options = options
        self._context = init()
        self._run: Run | None = None
        self._micro: MicroBatch | None = None
        self._output: Any = None
        self._batch: Any = None
        self._sums: torch.Tensor | None = None
        self._numbers: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None

    @property
    def run(self) -> Run:
        """
        The run.

        Raises:
            UsageError: `prepare` was not called.
        """
        if self._run is None:
            raise UsageError("prepare(model, optimizer, loader) comes first", where=WHERE)
        return self._run

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return torch.device(self._context.device)

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._context.is_main

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return self._context.world_size

    @property
    def process_index(self) -> int:
        """This rank."""
        return self._context.rank

    def prepare(self, model: nn.Module, optimizer: Any, *loaders: Any) -> tuple[Any, ...]:
        """
        Build the run; return model, optimizer and loaders for the loop.

        Args:
            loaders: sources as for `Run.data`; ``batch_size`` counts the rows of all ranks. While
                the model is in eval mode they are read for evaluation.
        """
        if self._run is not None:
            raise UsageError("prepare was called before", where=WHERE, hint="one per Accelerator")
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise UsageError(
                f"prepare needs the model first, got {kind}", where=WHERE, hint="(model, optimizer)"
            )
        self._run = parallelize(
            model, optimizer, lambda output, batch: None, norm=True, **self._options
        )
        self._run.state.objective.checks_form = False  # the loop computes the loss
        return (
            PreparedCall(self),
            PreparedOptimizer(self),
            *(PreparedLoader(self, loader) for loader in loaders),
        )

    def backward(self, loss: torch.Tensor) -> None:
        """
        Go backward from the loss of this rank's rows: a mean over rows, a model's own loss, or a
        pair (sum, count).

        Raises:
            UsageError: the model was not called on the batch, or was called twice.
        """
        state, micro = self.run.state, self._micro
        if self._output is None or micro is None:
            raise UsageError(
                "backward needs the output of one call of the prepared model on a batch of a "
                "prepared loader",
                where=WHERE,
                hint="model(batch), accelerator.backward(loss), optimizer.step() for each batch",
            )
        objective = state.objective
        objective.loss = lambda output, batch: loss
        total, count = objective.compute_loss(self._output, self._batch, max(len(micro.rows), 1))
        self._output = self._batch = None
        check_requires_grad(total)
        total, count = total * micro.weight, count * micro.weight
        wide = widest_float(state.device)
        self._sums = torch.stack([total.detach().to(wide), count.to(wide)]).unsqueeze(0)
        with state.rng.isolate_generators(state.device), state.engine.backward():
            state.engine.begin_gradients(first=True, last=True)
            state.run_backward([total])
            state.engine.end_gradients()
        scale = state.loss_scale.value if state.loss_scale else 1.0
        self._numbers, self._norm = state.engine.finish_gradients(self._sums, scale)

    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> float:
        """Limit the norm of all gradients of the run; return the norm before."""
        if self._norm is None:
            raise UsageError("clip_grad_norm_ comes after backward", where=WHERE)
        norm = float(self._norm)
        if norm > max_norm:
            for group in self.run.optimizer.param_groups:
                for part in group["params"]:
                    if part.grad is not None:
                        part.grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def gather_for_metrics(self, values: Any) -> Any:
        """Return what all ranks computed from a batch of a prepared loader: each row once."""
        if self._micro is None:
            raise UsageError("gather_for_metrics needs a batch of a prepared loader", where=WHERE)
        return gather_rows(self.run.state, values, self._micro)

    def print(self, *values: Any) -> None:
        """Print on rank 0."""
        if self.is_main_process:
            print(*values, flush=True)

    # ---- what the prepared objects call -------------------------------------

    def read_batches(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield this rank's rows of each batch of a source."""
        state = self.run.state
        for batch in self.run.data(source, training=self.run.model.training):
            (self._micro,) = slice_batch(state, batch)
            yield state.prepare_batch(self._micro.batch)
            self._micro = None

    def call_model(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the model on this rank's rows; in training, keep what `backward` needs."""
        state, micro = self.run.state, self._micro
        if micro is None:
            return self.run.model(*args, **options)
        trains = self.run.model.training and torch.is_grad_enabled()
        if trains:
            if self._output is not None or self._sums is not None:
                raise UsageError(
                    "the model was called twice in a step",
                    where=WHERE,
                    hint="accelerator.backward(loss) and optimizer.step() after each call",
                )
            state.guard.check_unchanged()
            state.steps += 1
            state.engine.begin_step()
            state.buffers.begin_step()
        else:
            state.engine.release_weights()
        with ExitStack() as inside:
            inside.enter_context(state.rng.isolate_generators(state.device))
            inside.enter_context(state.engine.forward())
            inside.enter_context(state.forward_context(micro))
            output = self.run.model(*args, **options)
        if trains:
            self._output = output
            self._batch = options if options else args
        else:
            state.engine.end_evaluation()
        return output

    def step_optimizer(self) -> None:
        """Step the optimizer and the scheduler, and publish the weights."""
        state = self.run.state
        if self._sums is None:
            raise UsageError("optimizer.step comes after accelerator.backward", where=WHERE)
        is_finite = self._norm is None or bool(torch.isfinite(self._norm))
        skipped = state.loss_scale is not None and not is_finite
        if not skipped:
            state.step_optimizer()
        if state.loss_scale is not None:
            state.loss_scale.record_step(not skipped)
        state.engine.end_step()
        state.buffers.end_step()
        state.feed.mark_used()
        state.guard.remember_state()
        self._sums = self._norm = None


class PreparedCall:
    """The model in a loop: a call computes this rank's rows; all else is the model's."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the model on the rows of the current batch."""
        return self._accelerator.call_model(args, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator.run.model, name)


class PreparedOptimizer:
    """The optimizer in a loop."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def step(self) -> None:
        """Step after `Accelerator.backward`."""
        self._accelerator.step_optimizer()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a step starts without gradients."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator.run.optimizer, name)


class PreparedLoader:
    """A loader in a loop; yields this rank's rows of each batch."""

    def __init__(self, accelerator: Accelerator, source: Any) -> None:
        self._accelerator = accelerator
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return self._accelerator.read_batches(self.source)

    def __len__(self) -> int:
        return len(self.source)
