"""
Multiply-copy: ``parallelize(..., copies=2)`` computes two micro-batches side by side.

While one copy waits for a collective of the model axes (tensor, context), the other computes. Each
copy has a thread, and exactly one of these runs (`turn_taking`): it starts a collective, yields its
turn, and waits for the collective when it has the turn again. Collectives start in the same order
on every rank.

    copy 0   compute  start ......................  wait  compute  start ....
    copy 1                  compute  start .......................  wait  compute

Forwards come first, then backwards. Each weight gets one gradient per copy; the engine sums them.
On a CPU a backward runs in the calling thread. On accelerators all backwards of a process run in
one thread of torch. There the copies go backward in one call: torch takes what was computed last
first, and so alternates between the copies as the forwards did. Each copy has a separate stream.

The idea is that of MindSpore's MicroBatchInterleaved. Domino (Wang et al., 2024) describes it for
tensor parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pdrun.parallel.experts.balance import pass_state
from pdrun.parallel.model import sync_batchnorm
from pdrun.parallel.training.driver import MicroBatch, SimpleDriver, StepContext
from pdrun.parallel.training.loss import (
    DetachedLoss,
    check_requires_grad,
    detach_loss,
    stack_losses,
)
from pdrun.parallel.training.turn_taking import TurnTaking

CopyFunction = Callable[[], Any]
"""A copy's forward or backward."""


class InterleavedDriver(SimpleDriver):
    """
    Runs micro-batches ``copies`` at a time.

    Args:
        copies: at least 2.
    """

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self.switches = 0
        """How often one copy has taken over from another."""
        self._streams: list[Any] = []

    def describe(self) -> str:
        """See `Driver.describe`."""
        return f"{self.copies} slices at a time: one computes while another waits for a collective"

    def run_microbatches(self, step: StepContext, micros: Sequence[MicroBatch]) -> torch.Tensor:
        """See `Driver.run_microbatches`."""
        sums: list[DetachedLoss] = []
        for start in range(0, len(micros), self.copies):
            group = micros[start : start + self.copies]
            last = start + len(group) == len(micros)
            with step.compute_context(), step.engine.forward(micro=start):
                losses = self._run_copies(step, [_make_forward(step, micro) for micro in group])
            sums += [detach_loss(*loss) for loss in losses]
            with step.compute_context(), step.engine.backward(micro=start, last=last):
                known = stack_losses(sums) if last else None
                step.engine.begin_gradients(start == 0, last, times=len(group), losses=known)
                self._run_backwards(step, [total for total, _ in losses])
                step.engine.end_gradients()
        return stack_losses(sums)

    def _run_backwards(self, step: StepContext, totals: list[torch.Tensor]) -> None:
        if step.device.type == "cpu":
            self._run_copies(step, [partial(step.run_backward, [total]) for total in totals])
        else:
            step.run_backward(totals)

    def _run_copies(self, step: StepContext, parts: Sequence[CopyFunction]) -> list[Any]:
        """Run the copies' parts in turns, each on its stream if the device has streams."""
        turns = TurnTaking(
            len(parts), lambda: _save_copy_state(step), lambda kept: _restore_copy_state(step, kept)
        )
        with step.axes.overlapping(turns.yield_turn), self._on_streams(step, parts) as found:
            results = turns.run_all(found)
        self.switches += turns.switches
        return results

    @contextmanager
    def _on_streams(
        self, step: StepContext, parts: Sequence[CopyFunction]
    ) -> Iterator[list[CopyFunction]]:
        """
        Yield the parts, each on a separate stream that starts after and ends before the caller's.
        """
        if step.device.type == "cpu":
            yield list(parts)
            return
        module = getattr(torch, step.device.type)
        while len(self._streams) < len(parts):
            self._streams.append(module.Stream(step.device))
        here = module.current_stream(step.device)
        for stream in self._streams:
            stream.wait_stream(here)

        def placed(part: CopyFunction, stream: Any) -> CopyFunction:
            def go() -> Any:
                with module.device(step.device), module.stream(stream):
                    return part()

            return go

        yield [placed(part, stream) for part, stream in zip(parts, self._streams, strict=False)]
        for stream in self._streams:
            here.wait_stream(stream)


def _make_forward(step: StepContext, micro: MicroBatch) -> CopyFunction:
    """Return a function that computes a micro-batch's (sum, count); both are 0 without rows."""

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        with step.forward_context(micro):
            total, count = step.objective(
                step.model, step.prepare_batch(micro.batch), max(len(micro.rows), 1)
            )
        check_requires_grad(total)
        if not micro.weight:
            return total * 0.0, count * 0.0
        return total, count

    return forward


def _save_copy_state(step: StepContext) -> Any:
    """Return the global state of a copy: generators, dropout position, row weights."""
    weight = sync_batchnorm.SyncedBatchNorm.row_weight
    return step.rng.save_state(step.device), weight, replace(pass_state)


def _restore_copy_state(step: StepContext, kept: Any) -> None:
    place, sync_batchnorm.SyncedBatchNorm.row_weight, expert_pass = kept
    pass_state.begin_pass(expert_pass.row_weight, expert_pass.loss_scale)
    step.rng.restore_state(place, step.device)
