"""
What `Run.data` yields: the batches of sources, one after the other, and the run's position in its
training data.

A batch of a `Loader` holds this rank's rows only. That is known of the very object that a loop has
yielded last; `Feed.check` refuses another one in a step of that loop, for its rows would be cut a
second time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from pdrun.errors import UsageError
from pdrun.parallel.data.batch_slicing import BatchSlicing
from pdrun.parallel.data.loader import (
    BatchShard,
    Loader,
    Position,
    from_torch,
    read_batches,
    same_source,
)

MAX_NESTED_LOOPS = 4
"""Loops over Loaders that may lie in one another, each with a batch that can still be computed."""
EVALUATE_HINT = (
    "run.data(source, training=False) is for loops that evaluate: they leave the position alone"
)
RUN_DATA = "pdrun.Run.data"


class DataFeed:
    """
    The sources of one run.

    Attributes:
        position: where the run stands in its training data.
        source: the loader that was last given for training.
    """

    def __init__(self) -> None:
        self.position = Position()
        self.source: Loader | None = None
        self._bound_source: Any = None
        """What the position is one of: what was last given for training, as it was given."""
        self._loop: object | None = None
        """The loop over training data that is under way."""
        self._unused_position: Position | None = None
        """
        Where the batch at hand lies, as long as no step has used it: a run that is resumed begins
        with it.
        """
        self._recent_batches: deque[tuple[object, Any, BatchShard]] = deque(maxlen=MAX_NESTED_LOOPS)
        """The last batch of each loop over a Loader, and what of it is this rank's."""

    def iter_epoch(
        self,
        source: Any,
        training: bool,
        seed: int,
        ranks: tuple[int, int],
        accumulate: int,
        strategy: BatchSlicing,
    ) -> Iterator[Any]:
        """
        Yield the batches of one epoch (see `Run.data`).

        Args:
            seed: of the order.
            ranks: how many share the rows of a batch, and which of them this is.
            accumulate: micro-batches of each.
            strategy: how the user's batches are cut.

        Raises:
            UsageError: an epoch of another source is under way, or another loop has gone on with
                this one.
        """
        loader = from_torch(source) if isinstance(source, DataLoader) else source
        if isinstance(loader, Loader) and strategy != BatchSlicing():
            raise UsageError(
                "a Loader cuts along rows: it takes no dataset_strategy", where=RUN_DATA
            )
        batches = source if loader is None else loader
        if not training:
            yield from self._iter_batches(batches, Position(), object(), seed, ranks, accumulate)
            return
        self._bind_source(source, loader)
        loop = self._loop = object()
        try:
            before = replace(self.position)
            for batch in self._iter_batches(batches, self.position, loop, seed, ranks, accumulate):
                self._unused_position = before
                yield batch
                if self._loop is not loop:
                    what = "another loop over training data has begun inside this one, and has moved its position"
                    raise UsageError(what, where=RUN_DATA, hint=EVALUATE_HINT)
                before = replace(self.position)
                self._unused_position = None
        finally:
            if (
                self._loop is loop
            ):  # left with a batch that no step has used: the next loop begins with it
                self._loop = None
                self.position.epoch, self.position.batch = self.next_position()
                self._unused_position = None

    def shard_of(self, batch: Any) -> BatchShard | None:
        """Return which rows a batch has that was read for this rank; None of any other."""
        return next((shard for _, handed, shard in self._recent_batches if handed is batch), None)

    def check_batch(self, batch: Any) -> None:
        """
        Refuse to step on another batch than the one that the loop over a training Loader has just
        yielded.

        Raises:
            UsageError: it was changed, kept for later, or comes from elsewhere.
        """
        if self.shard_of(batch) is None and any(
            loop is self._loop for loop, _, _ in self._recent_batches
        ):
            raise UsageError(
                "this is not the batch that run.data has just yielded: of that one each rank has its own rows, and of "
                "any other they would be cut once more",
                where="pdrun.Run.step",
                hint="give step the very batch; what changes it belongs into the dataset, collate or forward=",
            )

    def mark_used(self) -> None:
        """Note that a step has used the batch at hand."""
        self._unused_position = None

    def set_position(self, epoch: int, batch: int) -> None:
        """Take up a position, of a source that is yet to be given."""
        self.position.epoch = epoch
        self.position.batch = batch
        self._bound_source = self._unused_position = None

    def next_position(self) -> tuple[int, int]:
        """Return epoch and batch of the first batch that no step has used."""
        at = self._unused_position or self.position
        return at.epoch, at.batch

    def _bind_source(self, source: Any, loader: Any) -> None:
        """
        Have the position be one of a source; refuse it while an epoch of another one is under way.
        """
        middle = self.position.batch or self._loop is not None
        if (
            middle
            and self._bound_source is not None
            and not same_source(self._bound_source, source)
        ):
            at = self.position
            what = f"another source's epoch is under way (epoch {at.epoch}, batch {at.batch})"
            hint = f"{EVALUATE_HINT}; run.position.batch = 0 after the loop leaves the rest of that epoch out"
            raise UsageError(what, where=RUN_DATA, hint=hint)
        self._bound_source = source
        if isinstance(loader, Loader):
            self.source = loader

    def _iter_batches(
        self,
        source: Any,
        position: Position,
        loop: object,
        seed: int,
        ranks: tuple[int, int],
        accumulate: int,
    ) -> Iterator[Any]:
        """Yield the batches of one epoch from a position, which moves on."""
        if isinstance(source, Loader):
            for batch, shard in read_batches(source, seed, position, *ranks, accumulate):
                for old in [entry for entry in self._recent_batches if entry[0] is loop]:
                    self._recent_batches.remove(old)
                self._recent_batches.append((loop, batch, shard))
                yield batch
            return
        epoch = position.epoch
        skip = position.batch
        for index, batch in enumerate(source):
            if index >= skip:
                position.epoch = epoch
                position.batch = index + 1
                yield batch
        position.epoch = epoch + 1
        position.batch = 0
