"""
Batches by global index. The order of samples depends on seed and epoch only, and each rank reads
its own rows of each batch. The position can be saved in the middle of an epoch and loaded by any
number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from pdrun.errors import UsageError
from pdrun.parallel.data.batch_slicing import slice_rows
from pdrun.parallel.data.samplers import (
    RUN_DATA,
    count_repeats,
    draw_epoch,
    is_distributed,
    number_of,
    whole_sampler,
)
from pdrun.parallel.data.seeded import SeededCollate, SeededDataset
from pdrun.parallel.rng.hashing import mix_bits


@dataclass
class Position:
    """A position in the data."""

    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that were handed out."""


@dataclass(frozen=True)
class Loader:
    """
    Batches of a dataset with a length and an index.

    Attributes:
        batch: rows of a global batch: one step's rows over all ranks and micro-batches. None if
            ``sampler`` yields batches.
        shuffle: a new order each epoch, from the run's seed and the epoch.
        drop_last: skip a smaller last batch of an epoch; otherwise it counts by its rows.
        collate: makes a batch of a list of samples; default: torch's.
        workers: processes that read ahead.
        seeded: seed random numbers inside the dataset and ``collate`` (torch, random, numpy) by
            (seed, epoch, index), so that a sample and a slice are the same on any rank.
        sampler: yields indices, or with ``batch=None`` lists of indices, in place of ``shuffle``:
            any sampler of torch, over all rows. It draws from the run's seed and the epoch.
        options: more arguments of torch's DataLoader, which reads the rows.
    """

    dataset: Any
    batch: int | None
    shuffle: bool = False
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 0
    pin: bool = False
    seeded: bool = True
    sampler: Any = None
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        where = "pdrun.Loader"
        if not isinstance(self.dataset, Sized) or not hasattr(self.dataset, "__getitem__"):
            hint = "pass an iterable of batches to run.data instead"
            raise UsageError("dataset must have __len__ and __getitem__", where=where, hint=hint)
        if self.batch is None and self.sampler is None:
            raise UsageError(
                "batch=None needs a sampler that yields batches", where=where, hint="batch=256"
            )
        if self.batch is not None and self.batch < 1:
            raise UsageError(f"batch must be at least 1, got {self.batch}", where=where)
        if self.sampler is not None and self.shuffle:
            hint = "leave shuffle out, or sampler"
            raise UsageError("sampler defines the order, so does shuffle", where=where, hint=hint)
        if self.sampler is not None and not isinstance(self.sampler, Iterable):
            kind = type(self.sampler).__name__
            raise UsageError(f"sampler must be an iterable of indices, got {kind}", where=where)
        if is_distributed(self.sampler):
            object.__setattr__(self, "sampler", whole_sampler(self.sampler))

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        rows = len(self.dataset) if self.sampler is None else len(self.sampler)
        if self.batch is None:
            return rows
        if self.drop_last:
            return rows // self.batch
        return -(-rows // self.batch)

    def order(self, seed: int, epoch: int) -> list[Any]:
        """Return the indices of an epoch in their order; without ``batch`` lists of them."""
        if self.sampler is not None:
            return draw_epoch(self.sampler, seed, epoch)
        if not self.shuffle:
            return list(range(len(self.dataset)))
        generator = torch.Generator().manual_seed(mix_bits(seed, epoch, 3))
        found: list[int] = torch.randperm(len(self.dataset), generator=generator).tolist()
        return found

    def batches(self, seed: int, epoch: int) -> list[list[Any]]:
        """
        Return the indices of each global batch of an epoch.

        Raises:
            UsageError: the sampler does not yield batches, or an empty one.
        """
        order = self.order(seed, epoch)
        if self.batch is None:
            for rows in order:
                if not isinstance(rows, list) or not rows:
                    what = f"the sampler must yield lists of indices, got {rows!r}"
                    raise UsageError(what, where=RUN_DATA, hint="set batch= for single indices")
            return order
        found = [order[at : at + self.batch] for at in range(0, len(order), self.batch)]
        if self.drop_last and found and len(found[-1]) < self.batch:
            found.pop()
        return found


@dataclass
class BatchShard:
    """One rank's rows of a global batch, for `Run.step`."""

    rows: int
    """Rows of the global batch."""
    sizes: list[int]
    """
    Rows of each of this rank's micro-batches. A rank without rows has the batch's first row and all
    zeros.
    """


def read_batches(
    loader: Loader,
    seed: int,
    position: Position,
    world: int,
    rank: int,
    accumulate: int,
    compare: Callable[[Any], None] | None = None,
) -> Iterator[tuple[Any, BatchShard]]:
    """
    Yield this rank's part of each batch, from the position to the end of the epoch; advance the
    position.

    Args:
        compare: called with the batches that a sampler has drawn; refuses those of other ranks.
    """
    epoch = position.epoch
    first = position.batch
    every = loader.batches(seed, epoch)
    if loader.sampler is not None and compare is not None:
        compare(every)
    repeats = count_repeats(every) if loader.sampler is not None else [[0] * len(b) for b in every]
    batches = every[first:]
    cuts = [slice_rows(len(batch), world, accumulate)[rank] for batch in batches]
    mine: list[Any] = [
        [
            (batch[i], place, _seed_number(batch[i], again[i]))
            for place, part in enumerate(cut)
            for i in part
        ]
        or [(batch[0], 0, _seed_number(batch[0], again[0]))]
        for batch, cut, again in zip(batches, cuts, repeats[first:], strict=True)
    ]
    if not mine:
        return
    source: Any = loader.dataset
    collate = loader.collate
    if loader.seeded:
        source = SeededDataset(source, seed, epoch)
        collate = SeededCollate(collate, seed, epoch)
    else:
        mine = [[index for index, _, _ in rows] for rows in mine]
    feed: Iterable[Any] = DataLoader(
        source,
        batch_sampler=mine,
        num_workers=loader.workers,
        collate_fn=collate,
        pin_memory=loader.pin,
        generator=torch.Generator().manual_seed(mix_bits(seed, epoch, 4)),
        **loader.options,
    )
    for done, (batch, indices, cut) in enumerate(zip(feed, batches, cuts, strict=True), first + 1):
        if done < len(every):
            position.epoch = epoch
            position.batch = done
        else:
            position.epoch = epoch + 1
            position.batch = 0
        yield batch, BatchShard(len(indices), [len(part) for part in cut])


def _seed_number(index: Any, repeat: int) -> int:
    """Return the number that seeds a sample; a row that is drawn again has another one."""
    number = number_of(index)
    return mix_bits(number, repeat) if repeat else number
