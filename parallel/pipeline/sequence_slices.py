"""
The pieces of a step when sequences pass the stages in slices: micro-batches times slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.context_parallel.context import ContextParallel
from pdrun.parallel.context_parallel.slices import SliceCache, SlicedSequences
from pdrun.parallel.pipeline.metadata import API_NAME
from pdrun.parallel.pipeline.p2p import PIPELINE_AXIS
from pdrun.parallel.pipeline.schedules.schedule import StageAction

if TYPE_CHECKING:
    from pdrun.parallel.training.driver import MicroBatch


class SequenceSlices:
    """
    Slices batches, and keeps what the slices of a micro-batch share on this rank.

    Args:
        context: how sequences are sliced.
        axes: this rank's groups.
    """

    def __init__(self, context: ContextParallel, axes: MeshGroups) -> None:
        self._context = context
        self._axes = axes
        sequences = context.sequences(axes)
        assert isinstance(sequences, SlicedSequences)
        self._sequences = sequences
        self.count = sequences.part_count
        self._empty: list[SliceCache] = []
        """An empty cache of each micro-batch."""
        self._caches: dict[tuple[int, int], SliceCache] = {}
        """By stage and micro-batch."""
        self._is_checked = False

    def begin_step(
        self, micros: Sequence[MicroBatch], batches: Sequence[Any]
    ) -> tuple[list[MicroBatch], list[Any]]:
        """Return the pieces and their batches."""
        self._caches.clear()
        self._sequences.begin_step()
        self._empty = []
        pieces: list[MicroBatch] = []
        parts: list[Any] = []
        for micro, batch in zip(micros, batches, strict=True):
            parts += self._context.slice_batch(batch, self._axes)
            self._empty.append(self._sequences.begin_micro_batch())
            pieces += [
                replace(micro, position=micro.position * self.count + index)
                for index in range(self.count)
            ]
        return pieces, parts

    def end_step(self, is_mean: bool) -> None:
        """
        Check a step, before its gradients are used.

        Args:
            is_mean: whether the loss is one value, a mean.

        Raises:
            UsageError: it is, or a mask showed later slices, or no stage called torch's attention.
        """
        if is_mean:
            what = "with slices, loss must return (sum, count): means of slices cannot be added"
            raise UsageError(what, where=API_NAME, hint="loss(output, batch) -> (sum, count)")
        self._sequences.check_masks()
        if self._is_checked:
            return
        self._is_checked = True
        axis = self._axes[PIPELINE_AXIS]
        calls = torch.tensor([self._sequences.calls], device=self._axes.device)
        if axis.size > 1:
            calls = axis.all_gather(calls, 0)
        if not int(calls.sum()):
            what = "the model did not call torch.nn.functional.scaled_dot_product_attention on its"
            what += " sequences: attention that is written out sees one slice only"
            raise UsageError(what, where=API_NAME, hint='schedule="1f1b", which slices nothing')

    @contextmanager
    def computing(self, action: StageAction) -> Iterator[SliceCache]:
        """Inside, attention sees the slices of an action's micro-batch so far."""
        micro, index = divmod(action.micro, self.count)
        key = action.stage, micro
        if action.kind == "F" and index == 0:
            self._caches[key] = SliceCache(self._empty[micro].length, self._empty[micro].tensors)
        cache = self._caches[key]
        with self._sequences.computing(cache, index, backward=action.kind != "F"):
            yield cache
        if action.kind in "BI" and index == 0:
            del self._caches[key]

    def cache_of(self, action: StageAction) -> tuple[SliceCache, int]:
        """Return what the slices of an action's micro-batch share, and the index of its slice."""
        micro, index = divmod(action.micro, self.count)
        return self._caches[action.stage, micro], index
