"""
Who works through a step's micro-batches: the plain loop here, or a pipeline's schedule.

A driver computes; what happens to weights and gradients is the engine's. A forward of a micro-batch
(of each chunk, where a stage has several) lies in ``with engine.forward(chunk, micro)``, its
backward in ``with engine.backward(chunk, micro, last)``: level 3 has the weights there. Around what
brings weights their gradients it calls ``engine.begin(first, last, chunk)`` and
``engine.backward_done()``; where gradients of weights come after a backward for the input, that
pair comes without the weights. No two of these overlap; they may lie in any order, as in 1F1B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from pdrun.parallel.training.loss import check_trains
from pdrun.parallel.zero.grad_norm import wide_type

if TYPE_CHECKING:
    from pdrun.parallel.comm.groups import Axes
    from pdrun.parallel.pipeline.split import Split
    from pdrun.parallel.run import Run


@dataclass(frozen=True)
class MicroBatch:
    """
    One rank's part of a step.

    Attributes:
        batch: its rows, in the form of the user's batch; ``run.here(micro.batch)`` brings them to
            this rank's device,
            in the policy's type. Where ``weight`` is 0 it is one row that stands in for none.
        rows: which rows of the global batch they are.
        weight: 1.0, or 0.0 where there are no rows: the loss's sum and count are then multiplied by
            it.
        index: of the slice, counted over all ranks of dp and all micro-batches: what the randomness
            depends on.
        place: 0 to ``accumulate - 1``.
    """

    batch: Any
    rows: range
    weight: float
    index: int
    place: int


class Driver(Protocol):
    """
    Goes forward and backward through micro-batches.

    What `Run` offers it:

    * ``with run.around(micro, part, calls):`` around a forward: randomness, autocast, offloaded activations. ``part``
      tells the pieces of a model apart that compute the same micro-batch on one rank (chunks), ``calls`` is how many
      dropouts came before in the whole model's forward; ``run.dice.calls`` after the forward is how many there are now,
      which travels with the activations to the next stage.
    * ``run.objective.output(model, batch)`` calls the first stage on a batch as the user said;
      ``run.objective.judge(output, batch, rows)`` is the loss's (sum, count).
    * ``run.backward(tensors, grads)`` instead of ``torch.autograd.backward``: forwards may be computed again in it, and
      losses (tensors without grads) are multiplied by the loss scale.
    """

    @property
    def splits(self) -> bool:
        """Whether backwards leave gradients of weights for later."""
        ...

    def passes(self, run: Run, micros: Sequence[MicroBatch]) -> torch.Tensor:
        """
        Do all forwards and backwards of a step.

        Returns:
            ``[accumulate, 2]`` in `wide_type`: sum and count of the loss of each micro-batch, already multiplied by
            its weight; zeros on all stages but the last. The engine gives them to everybody.
        """
        ...

    def evaluate(self, run: Run, micros: Sequence[MicroBatch]) -> list[Any]:
        """
        Return the model's outputs on micro-batches, forward only; None on ranks that the last stage
        isn't on.
        """
        ...

    def explain(self) -> str:
        """Return in words what `Run.explain` tells of it; may be empty."""
        ...

    def chunk_of(self, name: str) -> int:
        """
        Return in which chunk of this rank's stage a weight is; 0 where a stage is one piece.

        A weight that several chunks of one rank use belongs to the one whose backwards end last.
        """
        ...

    def users_of(self, name: str) -> tuple[int, ...]:
        """
        Return the chunks of this rank's stage that compute with a weight of this rank; at least
        one.
        """
        ...

    def check_units(self, names: Sequence[str]) -> None:
        """
        Refuse modules, of the whole model, whose weights can't be gathered together.

        Raises:
            UsageError: a module that lies on several stages.
        """
        ...


class Pipeline(Protocol):
    """What ``parallelize(pipeline=...)`` takes."""

    @property
    def microbatches(self) -> int:
        """How many a step has."""
        ...

    def apply(self, model: nn.Module, axes: Axes, sample: Any) -> tuple[nn.Module, Driver]:
        """
        Return this rank's stage and what drives it.

        Args:
            model: the whole model, whose weights have been cut over the tensor axes already.
            axes: ``axes["pp"].index`` is the stage.
            sample: a batch, or None where the user gave none.

        The stage's parameters have the names that they have in the whole model; a weight that
        several stages hold (tied ones, under any of its names) is found by the engine: its
        gradients are added up over those stages.
        """
        ...


@runtime_checkable
class Splitting(Protocol):
    """
    A `Pipeline` that can tell before it cuts: a strategy that sees across modules asks for it
    (`StagedCutter`).
    """

    def split(self, model: nn.Module, axes: Axes, sample: Any) -> Split:
        """Return which module of a whole model belongs to which stage."""
        ...


class Plain:
    """One micro-batch after the other, the whole model at once."""

    splits = False

    def chunk_of(self, name: str) -> int:
        """See `Driver.chunk_of`."""
        return 0

    def users_of(self, name: str) -> tuple[int, ...]:
        """See `Driver.users_of`."""
        return (0,)

    def check_units(self, names: Sequence[str]) -> None:
        """See `Driver.check_units`; there are no stages."""

    def explain(self) -> str:
        """See `Driver.explain`."""
        return ""

    def evaluate(self, run: Run, micros: Sequence[MicroBatch]) -> list[Any]:
        """See `Driver.evaluate`; None for a micro-batch without rows."""
        found: list[Any] = []
        for micro in micros:
            with torch.no_grad(), run.engine.forward(micro=micro.place), run.around(micro):
                output = run.objective.output(run.model, run.here(micro.batch))
            found.append(output if micro.weight else None)
        run.engine.evaluated()
        return found

    def passes(self, run: Run, micros: Sequence[MicroBatch]) -> torch.Tensor:
        """See `Driver.passes`."""
        sums: list[torch.Tensor] = []
        wide = wide_type(run.device)
        for micro in micros:
            first = micro.place == 0
            last = micro.place == len(micros) - 1
            with run.engine.forward(micro=micro.place), run.around(micro):
                total, count = run.objective(
                    run.model, run.here(micro.batch), max(len(micro.rows), 1)
                )
            check_trains(total)
            if not micro.weight:
                total = total * 0.0
                count = count * 0.0
            sums.append(torch.stack([total.detach().to(wide), count.to(wide)]))
            with run.engine.backward(micro=micro.place, last=last):
                run.engine.begin(first, last)
                run.backward([total])
                run.engine.backward_done()
        return torch.stack(sums)
