"""
Multiply-copy: ``parallelize(..., copies=2)`` works on two micro-batches at a time.

Where one copy waits for a collective of the model axes (tensor, context), the other computes. Each
copy has a thread, and exactly one of these runs (`baton`): it starts a collective, hands the baton
on, and waits for the collective when the baton is back. So collectives start in the same order on
every rank.

    copy 0   compute  start ......................  wait  compute  start ....
    copy 1                  compute  start .......................  wait  compute

Forwards come first, then backwards; each weight gets one gradient a copy, and the engine takes
their sum. On a CPU a backward runs in the thread that asks for it. On accelerators all backwards of
a process run in one thread of torch's; there the copies go backward in one call, which takes what
was computed last first and so alternates between them as the forwards did, and each copy has a
stream of its own.

The idea is that of MindSpore's MicroBatchInterleaved; Domino (Wang et al., 2024) describes it for
tensor parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pdrun.parallel.model import sync_batchnorm
from pdrun.parallel.torch_compat import widest_float
from pdrun.parallel.training.driver import MicroBatch, Plain, StepContext
from pdrun.parallel.training.loss import check_trains
from pdrun.parallel.training.turn_taking import Baton

Part = Callable[[], Any]
"""A copy's forward or backward."""


class Interleaved(Plain):
    """
    Works through micro-batches ``copies`` at a time.

    Args:
        copies: how many; at least 2.
    """

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self.turns = 0
        """How often one copy has taken over from another so far."""
        self._streams: list[Any] = []

    def explain(self) -> str:
        """See `Driver.explain`."""
        return f"{self.copies} slices at a time: one computes while another waits for a collective"

    def passes(self, run: StepContext, micros: Sequence[MicroBatch]) -> torch.Tensor:
        """See `Driver.passes`."""
        sums: list[torch.Tensor] = []
        for start in range(0, len(micros), self.copies):
            group = micros[start : start + self.copies]
            last = start + len(group) == len(micros)
            with run.computing(), run.engine.forward(micro=start):
                losses = self._together(run, [_forward(run, micro) for micro in group])
            sums += [
                torch.stack([x.detach().to(widest_float(run.device)) for x in loss])
                for loss in losses
            ]
            with run.computing(), run.engine.backward(micro=start, last=last):
                run.engine.begin(first=start == 0, last=last, times=len(group))
                self._backward(run, [total for total, _ in losses])
                run.engine.backward_done()
        return torch.stack(sums)

    def _backward(self, run: StepContext, totals: list[torch.Tensor]) -> None:
        if run.device.type == "cpu":
            self._together(run, [lambda total=total: run.backward([total]) for total in totals])  # type: ignore[misc]
        else:
            run.backward(totals)

    def _together(self, run: StepContext, parts: Sequence[Part]) -> list[Any]:
        """Run the copies' parts in turns, each on its stream where the device has some."""
        baton = Baton(len(parts), lambda: _leave(run), lambda kept: _enter(run, kept))
        with run.axes.overlapping(baton.pause), self._beside(run, parts) as found:
            results = baton.run(found)
        self.turns += baton.turns
        return results

    @contextmanager
    def _beside(self, run: StepContext, parts: Sequence[Part]) -> Iterator[list[Part]]:
        """
        Yield the parts, each on a stream of its own that begins after and ends before the caller's.
        """
        if run.device.type == "cpu":
            yield list(parts)
            return
        kit = getattr(torch, run.device.type)
        while len(self._streams) < len(parts):
            self._streams.append(kit.Stream(run.device))
        here = kit.current_stream(run.device)
        for stream in self._streams:
            stream.wait_stream(here)

        def placed(part: Part, stream: Any) -> Part:
            def go() -> Any:
                with kit.device(run.device), kit.stream(stream):
                    return part()

            return go

        yield [placed(part, stream) for part, stream in zip(parts, self._streams, strict=False)]
        for stream in self._streams:
            here.wait_stream(stream)


def _forward(run: StepContext, micro: MicroBatch) -> Part:
    """Return what computes a micro-batch's (sum, count), both 0 where it stands in for no rows."""

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        with run.around(micro):
            total, count = run.objective(run.model, run.here(micro.batch), max(len(micro.rows), 1))
        check_trains(total)
        return (total, count) if micro.weight else (total * 0.0, count * 0.0)

    return forward


def _leave(run: StepContext) -> Any:
    """
    Return what a copy needs again when the baton is back: generators, place of its dropouts, weight
    of its rows.
    """
    return run.rng.save_state(run.device), sync_batchnorm.SyncedBatchNorm.weight_of_rows


def _enter(run: StepContext, kept: Any) -> None:
    place, sync_batchnorm.SyncedBatchNorm.weight_of_rows = kept
    run.rng.restore_state(place, run.device)
