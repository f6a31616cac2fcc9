"""
Drivers run the micro-batches of a step. `SimpleDriver` is a loop; `pipeline.Runner` follows a
schedule.

A driver computes; the engine handles weights and gradients. A forward of a micro-batch (of each
chunk, if a stage has several) is inside ``with engine.forward(chunk, micro)``, its backward inside
``with engine.backward(chunk, micro, last)``: level 3 has the weights gathered there. Around code
that gives weights their gradients it calls ``engine.begin_gradients(first, last, chunk)`` and
``engine.end_gradients()``. If gradients of weights follow after a backward for the input, that pair
comes without the weights. No two of these overlap. They can be in any order, as in 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from pdrun.parallel.training.loss import (
    DetachedLoss,
    check_requires_grad,
    detach_loss,
    stack_losses,
)

if TYPE_CHECKING:
    from pdrun.parallel.comm.groups import MeshGroups
    from pdrun.parallel.rng.step_rng import StepRNG
    from pdrun.parallel.training.loss import Objective
    from pdrun.parallel.zero.engine import Engine
    from pdrun.parallel.zero.precision import LossScale


@dataclass(frozen=True)
class MicroBatch:
    """
    One rank's part of a step.

    Attributes:
        batch: its rows, in the form of the user's batch; ``step.prepare_batch(micro.batch)`` moves
            them to this rank's device, in the policy's type. If ``weight`` is 0 it is one row that
            is not part of the step.
        rows: its rows in the global batch.
        weight: 1.0, or 0.0 without rows: the loss's sum and count are multiplied by it.
        slice_index: counted over all ranks of dp and all micro-batches; random numbers depend on
            it.
        position: 0 to ``accumulate - 1``.
    """

    batch: Any
    rows: range
    weight: float
    slice_index: int
    position: int


KeepFunction = Callable[[Any, Any, MicroBatch], Any]
"""``keep(output, batch, micro)``: what an evaluation keeps of a model's output."""


class StepContext(Protocol):
    """The model, the engine, and the context managers of a pass, for drivers."""

    steps: int
    """Number of the current step, from 1."""

    @property
    def model(self) -> nn.Module:
        """What this rank runs."""
        ...

    @property
    def engine(self) -> Engine:
        """Gathers weights and sums gradients around the passes."""
        ...

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        ...

    @property
    def axes(self) -> MeshGroups:
        """This rank's position along each axis of the mesh."""
        ...

    @property
    def objective(self) -> Objective:
        """
        ``objective.output(model, batch)`` calls the first stage on a batch as the user said.
        ``objective.judge(output, batch, rows)`` is the loss's (sum, count).
        """
        ...

    @property
    def rng(self) -> StepRNG:
        """
        Random numbers. ``rng.calls`` after a forward is the number of dropouts so far in the full
        model's forward; it travels to the next stage with the activations.
        """
        ...

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale; None unless the model computes in fp16."""
        ...

    def prepare_batch(self, batch: Any) -> Any:
        """
        Return a micro-batch as the model gets it: on this rank's device, in the policy's type.
        """
        ...

    def forward_context(
        self, micro: MicroBatch, part: int = 0, calls: int = 0
    ) -> AbstractContextManager[None]:
        """
        Return the context manager of a forward: random numbers, autocast, offloaded activations.

        Args:
            part: the chunk of the model, if several chunks of one rank compute the micro-batch.
            calls: dropouts before this one in the full model's forward.
        """
        ...

    def compute_context(self) -> AbstractContextManager[None]:
        """
        Return the context manager of forwards and backwards: it replaces torch's dropout and
        attention functions.
        """
        ...

    def run_backward(
        self,
        tensors: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None] | None = None,
        **options: Any,
    ) -> None:
        """
        Go backward, as `torch.autograd.backward` does. Losses (tensors without a gradient) are
        multiplied by the loss scale.

        Args:
            tensors: the roots.
            grads: their gradients; None for losses.
            options: of `torch.autograd.backward`, such as ``inputs`` or ``retain_graph``.
        """
        ...


class Driver(Protocol):
    """Runs the forwards and backwards of a step's micro-batches."""

    @property
    def splits_backward(self) -> bool:
        """Whether backwards defer gradients of weights."""
        ...

    def run_microbatches(self, step: StepContext, micros: Sequence[MicroBatch]) -> torch.Tensor:
        """
        Run all forwards and backwards of a step.

        Returns:
            ``[accumulate, 2]`` in `widest_float`: sum and count of the loss of each micro-batch,
                multiplied by its weight; zeros on all stages but the last. The engine distributes
                them.
        """
        ...

    def evaluate_microbatches(
        self, step: StepContext, micros: Sequence[MicroBatch], keep: KeepFunction | None = None
    ) -> list[Any]:
        """
        Return the model's outputs on micro-batches, forward only; None on ranks without the last
        stage, and for micro-batches without rows.

        Args:
            keep: called with each output, the batch that the model got and the micro-batch, where
                a loss would be computed; its result is returned in place of the output.
        """
        ...

    def describe(self) -> str:
        """Return a line for `Run.explain`; may be empty."""
        ...

    def chunk_of(self, name: str) -> int:
        """
        Return the chunk of this rank's stage that a weight belongs to; 0 if a stage is one chunk.

        A weight that several chunks of one rank use belongs to the chunk whose backwards end last.
        """
        ...

    def chunks_using(self, name: str) -> tuple[int, ...]:
        """
        Return the chunks of this rank's stage that compute with a weight of this rank; at least
        one.
        """
        ...

    def check_units(self, names: Sequence[str]) -> None:
        """
        Refuse modules of the full model whose weights cannot be gathered together.

        Raises:
            UsageError: a module is on several stages.
        """
        ...


class SimpleDriver:
    """Runs one micro-batch after the other through the full model."""

    splits_backward = False

    def chunk_of(self, name: str) -> int:
        """See `Driver.chunk_of`."""
        return 0

    def chunks_using(self, name: str) -> tuple[int, ...]:
        """See `Driver.chunks_using`."""
        return (0,)

    def check_units(self, names: Sequence[str]) -> None:
        """See `Driver.check_units`; there are no stages."""

    def describe(self) -> str:
        """See `Driver.describe`."""
        return ""

    def evaluate_microbatches(
        self, step: StepContext, micros: Sequence[MicroBatch], keep: KeepFunction | None = None
    ) -> list[Any]:
        """See `Driver.evaluate_microbatches`."""
        outputs: list[Any] = []
        for micro in micros:
            with (
                torch.set_grad_enabled(step.objective.reads_graph and keep is not None),
                step.engine.forward(micro=micro.position),
                step.forward_context(micro),
            ):
                batch = step.prepare_batch(micro.batch)
                output = step.objective.compute_output(step.model, batch)
                if keep is not None and micro.weight:
                    output = keep(output, batch, micro)
            outputs.append(output if micro.weight else None)
        step.engine.end_evaluation()
        return outputs

    def run_microbatches(self, step: StepContext, micros: Sequence[MicroBatch]) -> torch.Tensor:
        """See `Driver.run_microbatches`."""
        sums: list[DetachedLoss] = []
        losses: torch.Tensor | None = None
        for micro in micros:
            first = micro.position == 0
            last = micro.position == len(micros) - 1
            with step.engine.forward(micro=micro.position), step.forward_context(micro):
                total, count = step.objective(
                    step.model, step.prepare_batch(micro.batch), max(len(micro.rows), 1)
                )
            check_requires_grad(total)
            if not micro.weight:
                total = total * 0.0
                count = count * 0.0
            sums.append(detach_loss(total, count))
            with step.engine.backward(micro=micro.position, last=last):
                losses = stack_losses(sums) if last else None
                step.engine.begin_gradients(first, last, losses=losses)
                step.run_backward([total])
                step.engine.end_gradients()
        assert losses is not None  # of the last one
        return losses
