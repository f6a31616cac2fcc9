"""
The zoo's model in stages, all forwards before all backwards: the least that drives the engine as a
pipeline does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.layouts.layout import shard_range
from pdrun.parallel.torch_compat import widest_float
from pdrun.parallel.training.driver import MicroBatch, StepContext
from tests.lib.small_models import WIDTH, Tiny


class Stage(Tiny):
    """Some blocks; the first stage embeds, the last one has the head."""

    first: bool
    last: bool

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x) * self.scale if self.first else x
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)) if self.last else h


class Stages:
    """See `pdrun.parallel.interfaces.Pipeline`."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches

    def apply(self, model: Any, axes: MeshGroups, sample: Any) -> tuple[nn.Module, Fill]:
        """Keep this rank's stage."""
        axis = axes["pp"]
        model.__class__ = Stage
        model.first, model.last = axis.index == 0, axis.index == axis.size - 1
        low, high = shard_range(len(model.blocks), axis.size, axis.index)
        for place in range(len(model.blocks)):
            if not low <= place < high:
                model.blocks[place] = nn.Identity()
        if not model.first:
            model.emb = nn.Identity()
            del model.never
        if not model.last:
            model.head, model.norm = nn.Identity(), nn.Identity()
        return model, Fill()


class Fill:
    """See `pdrun.parallel.training.driver.Driver`."""

    splits_backward = False

    def chunk_of(self, name: str) -> int:
        """A stage is one piece."""
        return 0

    def chunks_using(self, name: str) -> tuple[int, ...]:
        """The same for what uses it."""
        return (0,)

    def check_units(self, names: Sequence[str]) -> None:
        """Blocks lie on one stage."""

    def describe(self) -> str:
        """Nothing to tell."""
        return ""

    def evaluate_microbatches(
        self, step: StepContext, micros: Sequence[MicroBatch], keep: Any = None
    ) -> list[Any]:
        """Forward only, one micro-batch after the other."""
        axis, found = step.axes["pp"], []
        for micro in micros:
            batch = step.prepare_batch(micro.batch)
            x = batch[0]
            with (
                torch.no_grad(),
                step.engine.forward(micro=micro.position),
                step.forward_context(micro),
            ):
                if axis.index > 0:
                    x = torch.empty(*x.shape, WIDTH)
                    dist.recv(x, axis.ranks[axis.index - 1], group=axis.group)
                y = step.model(x)
            if axis.index < axis.size - 1:
                dist.send(y, axis.ranks[axis.index + 1], group=axis.group)
                y = None
            elif keep is not None and micro.weight:
                y = keep(y, batch, micro)
            found.append(y)
        step.engine.end_evaluation()
        return found

    def run_microbatches(self, step: StepContext, micros: Sequence[MicroBatch]) -> Tensor:
        """Fill the pipeline, then drain it."""
        axis = step.axes["pp"]
        first, last = axis.index == 0, axis.index == axis.size - 1
        sums = torch.zeros(len(micros), 2, dtype=widest_float(step.device))
        taken: list[Any] = []
        for micro in micros:
            batch, calls, x = (
                step.prepare_batch(micro.batch),
                torch.zeros((), dtype=torch.int64),
                None,
            )
            if not first:
                x = torch.empty(*batch[0].shape, WIDTH)
                dist.recv(x, axis.ranks[axis.index - 1], group=axis.group)
                dist.recv(calls, axis.ranks[axis.index - 1], group=axis.group)
                x.requires_grad_()
            with (
                step.engine.forward(micro=micro.position),
                step.forward_context(micro, calls=int(calls)),
            ):
                y = step.objective.compute_output(step.model, batch) if x is None else step.model(x)
                if last:
                    y, count = step.objective.compute_loss(y, batch, max(len(micro.rows), 1))
                    y = y * micro.weight
                    sums[micro.position] = torch.stack(
                        [y.detach().double(), count.double() * micro.weight]
                    )
            if not last:
                dist.send(y.detach(), axis.ranks[axis.index + 1], group=axis.group)
                dist.send(
                    torch.tensor(step.rng.dropout_calls),
                    axis.ranks[axis.index + 1],
                    group=axis.group,
                )
            taken.append((x, y))
        for micro, (x, y) in zip(micros, taken, strict=True):
            ends = micro.position == len(micros) - 1
            with step.engine.backward(micro=micro.position, last=ends):
                step.engine.begin_gradients(first=micro.position == 0, last=ends, chunk=0)
                grad = None
                if not last:
                    grad = torch.empty_like(y)
                    dist.recv(grad, axis.ranks[axis.index + 1], group=axis.group)
                step.run_backward([y], [grad])
                if x is not None:
                    dist.send(x.grad, axis.ranks[axis.index - 1], group=axis.group)
                step.engine.end_gradients()
        return sums
