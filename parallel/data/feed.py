"""
The batches that `Run.data` yields, and the run's position in its training data.

A batch of a `Loader` has this rank's rows only. pdrun recognises it by object identity.
`DataFeed.check_batch` refuses another object in a step of that loop: its rows would be sliced a
second time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from torch.utils.data import DataLoader

from pdrun.errors import UsageError
from pdrun.parallel.data.batch_slicing import BatchSlicing
from pdrun.parallel.data.loader import BatchShard, Loader, Position, read_batches
from pdrun.parallel.data.samplers import set_epoch
from pdrun.parallel.data.streams import OwnRows, SeededStream
from pdrun.parallel.data.torch_loaders import describe_loader, from_torch, same_source
from pdrun.parallel.rng.hashing import mix_bits

MAX_NESTED_LOOPS = 4
"""Nested loops over Loaders; the last batch of each is remembered."""
EVALUATE_HINT = (
    "use run.data(source, training=False) in loops that evaluate: they do not move the position"
)
RUN_DATA = "pdrun.Run.data"


class FeedLink(Protocol):
    """What a feed asks of the other ranks of its run."""

    def compare_order(self, batches: Any) -> None:
        """Refuse indices that differ from those of another rank."""
        ...

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        ...

    def announce(self, text: str) -> None:
        """Print a line once per job."""
        ...


class DataFeed:
    """
    The sources of one run.

    Attributes:
        position: the run's position in its training data.
        source: the last loader of a training loop.
        reads_ahead: whether a training loop over a seeded Loader reads a batch ahead; other sources
            may depend on what a step does.
        current: the batch that such a loop has handed out last.
        upcoming: the one after it, if it is known.

    Args:
        link: how this rank reaches the others; None: it is alone.
    """

    def __init__(self, link: FeedLink | None = None) -> None:
        self.position = Position()
        self._link = link
        self._has_announced = False
        self.reads_ahead = False
        self.current: Any = None
        self.upcoming: Any = None
        self.source: Loader | None = None
        self._bound_source: Any = None
        """The source that the position belongs to: the last one of a training loop."""
        self._loop: object | None = None
        """The current loop over training data."""
        self._unused_position: Position | None = None
        """
        Position of the current batch until a step has used it; a resumed run starts with that
        batch.
        """
        self._recent_batches: deque[tuple[object, Any, BatchShard]] = deque(maxlen=MAX_NESTED_LOOPS)
        """The last batch of each loop over a Loader, and this rank's part of it."""

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
            ranks: number of ranks that share the rows of a batch, and the index of this rank.
            accumulate: micro-batches per batch.
            strategy: how the user's batches are sliced.

        Raises:
            UsageError: an epoch of another source is in progress, or another loop has moved the
                position.
        """
        loader = from_torch(source) if isinstance(source, DataLoader) else source
        if isinstance(loader, Loader) and strategy != BatchSlicing():
            raise UsageError(
                "dataset_strategy is not supported with a Loader, which slices along rows",
                where=RUN_DATA,
                hint="leave dataset_strategy out, or pass an iterable of batches",
            )
        batches = source if loader is None else loader
        if training and isinstance(source, DataLoader) and ranks[0] > 1:
            self._announce(describe_loader(source, loader, ranks[0], strategy.data_parallel))
        own = strategy.data_parallel and ranks[0] > 1
        if not training:
            yield from self._iter_batches(
                batches, Position(), object(), seed, ranks, accumulate, own
            )
            return
        self._bind_source(source, loader)
        loop = self._loop = object()
        try:
            before = replace(self.position)
            for batch in self._iter_batches(
                batches, self.position, loop, seed, ranks, accumulate, own
            ):
                self._unused_position = before
                yield batch
                if self._loop is not loop:
                    what = (
                        "another loop over training data started in this one and moved the position"
                    )
                    raise UsageError(what, where=RUN_DATA, hint=EVALUATE_HINT)
                before = replace(self.position)
                self._unused_position = None
        finally:
            if self._loop is loop:
                # no step has used the current batch: the next loop starts with it
                self._loop = None
                self.position.epoch, self.position.batch = self.next_position()
                self._unused_position = None

    def shard_of(self, batch: Any) -> BatchShard | None:
        """Return the rows of a batch that was read for this rank; None for any other batch."""
        return next((shard for _, handed, shard in self._recent_batches if handed is batch), None)

    def check_batch(self, batch: Any) -> None:
        """
        Refuse another batch than the one that a loop over a training Loader has yielded last.

        Raises:
            UsageError: the batch was changed, kept for later, or has another source.
        """
        if self.shard_of(batch) is None and any(
            loop is self._loop for loop, _, _ in self._recent_batches
        ):
            raise UsageError(
                "step must get the batch that run.data yielded last: each rank has its own rows of "
                "it, another batch would be sliced again",
                where="pdrun.Run.step",
                hint="change batches in the dataset, its collate function or forward=",
            )

    def mark_used(self) -> None:
        """Note that a step has used the current batch."""
        self._unused_position = None

    def set_position(self, epoch: int, batch: int) -> None:
        """Set the position; the next source is bound to it."""
        self.position.epoch = epoch
        self.position.batch = batch
        self._bound_source = self._unused_position = None

    def next_position(self) -> tuple[int, int]:
        """Return epoch and batch of the first batch that no step has used."""
        at = self._unused_position or self.position
        return at.epoch, at.batch

    def _bind_source(self, source: Any, loader: Any) -> None:
        """
        Bind the position to a source.

        Raises:
            UsageError: an epoch of another source is in progress.
        """
        middle = self.position.batch or self._loop is not None
        if (
            middle
            and self._bound_source is not None
            and not same_source(self._bound_source, source)
        ):
            at = self.position
            what = f"an epoch of another source is in progress (epoch {at.epoch}, batch {at.batch})"
            hint = f"{EVALUATE_HINT}; run.position.batch = 0 skips the rest of that epoch"
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
        own: bool,
    ) -> Iterator[Any]:
        """
        Yield the batches of one epoch from a position, and advance the position.

        Args:
            own: whether batches of a source that is not a Loader are this rank's own rows.
        """
        if isinstance(source, Loader):
            compare = self._link.compare_order if self._link is not None else None
            is_ahead = self.reads_ahead and source.seeded and position is self.position
            at = replace(position) if is_ahead else position
            batches = read_batches(source, seed, at, *ranks, accumulate, compare)
            if is_ahead:
                batches = self._read_ahead(batches, at)
            for batch, shard in batches:
                self._remember(loop, batch, shard)
                yield batch
            return
        epoch = position.epoch
        skip = position.batch
        set_epoch(source, epoch)
        if isinstance(source, DataLoader):
            source = SeededStream(source, mix_bits(seed, ranks[1]) if own else seed, epoch)
        if own and self._link is not None:
            source = OwnRows(source, self._link.largest)
        for index, batch in enumerate(source):
            if index >= skip:
                position.epoch = epoch
                position.batch = index + 1
                if isinstance(source, OwnRows) and source.has_ended:
                    self._remember(loop, batch, BatchShard(0, [0] * accumulate))
                yield batch
        position.epoch = epoch + 1
        position.batch = 0

    def _read_ahead(
        self, batches: Iterator[tuple[Any, BatchShard]], at: Position
    ) -> Iterator[tuple[Any, BatchShard]]:
        """Yield batches when the next one is read; ``at`` is the position after that."""
        held: tuple[Any, BatchShard, Position] | None = None
        try:
            for batch, shard in batches:
                if held is not None:
                    yield self._hand_out(held, batch)
                held = batch, shard, replace(at)
            if held is not None:
                yield self._hand_out(held, None)
        finally:
            self.current = self.upcoming = None

    def _hand_out(
        self, held: tuple[Any, BatchShard, Position], upcoming: Any
    ) -> tuple[Any, BatchShard]:
        self.current, shard, at = held
        self.upcoming = upcoming
        self.position.epoch, self.position.batch = at.epoch, at.batch
        return self.current, shard

    def _remember(self, loop: object, batch: Any, shard: BatchShard) -> None:
        """Note the last batch of a loop, which a step will recognise."""
        for old in [entry for entry in self._recent_batches if entry[0] is loop]:
            self._recent_batches.remove(old)
        self._recent_batches.append((loop, batch, shard))

    def _announce(self, text: str) -> None:
        """Say once what the batch size of a DataLoader means."""
        if self._link is not None and not self._has_announced:
            self._has_announced = True
            self._link.announce(text)
