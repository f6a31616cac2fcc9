"""
Batches by global index. The order of samples depends on seed and epoch only, and each rank reads
its own rows of each batch. The position can be saved in the middle of an epoch and loaded by any
number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from pdrun.errors import UsageError
from pdrun.parallel.data.batch_slicing import slice_rows
from pdrun.parallel.data.seeded import SeededCollate, SeededDataset
from pdrun.parallel.rng.hashing import mix_bits

RUN_DATA = "pdrun.Run.data"


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
        batch: rows of a global batch: one step's rows over all ranks and micro-batches.
        shuffle: a new order each epoch, from the run's seed and the epoch.
        drop_last: skip a smaller last batch of an epoch; otherwise it counts by its rows.
        collate: makes a batch of a list of samples; default: torch's.
        workers: processes that read ahead.
        seeded: seed random numbers inside the dataset and ``collate`` (torch, random, numpy) by
            (seed, epoch, index), so that a sample and a slice are the same on any rank.
    """

    dataset: Any
    batch: int
    shuffle: bool = False
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 0
    pin: bool = False
    seeded: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.dataset, Sized) or not hasattr(self.dataset, "__getitem__"):
            hint = "pass an iterable of batches to run.data instead"
            raise UsageError(
                "dataset must have __len__ and __getitem__", where="pdrun.Loader", hint=hint
            )
        if self.batch < 1:
            raise UsageError(f"batch must be at least 1, got {self.batch}", where="pdrun.Loader")

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        rows = len(self.dataset)
        if self.drop_last:
            return rows // self.batch
        return -(-rows // self.batch)

    def order(self, seed: int, epoch: int) -> list[int]:
        """Return the dataset's indices in the order of an epoch."""
        if not self.shuffle:
            return list(range(len(self.dataset)))
        generator = torch.Generator().manual_seed(mix_bits(seed, epoch, 3))
        found: list[int] = torch.randperm(len(self.dataset), generator=generator).tolist()
        return found


def from_torch(loader: DataLoader[Any]) -> Loader | None:
    """
    Return the Loader that does what torch's DataLoader does; None for an IterableDataset, which is
    read unchanged.

    Raises:
        UsageError: it has a custom sampler: the samples of each rank are unknown.
    """
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler: Any = loader.sampler if loader.batch_size is not None else loader.batch_sampler
    if loader.batch_size is None or type(sampler) not in (RandomSampler, SequentialSampler):
        raise UsageError(
            f"a DataLoader with a {type(sampler).__name__} is not supported",
            where=RUN_DATA,
            hint="use pdrun.Loader(dataset, batch, shuffle=True) or "
            "dataset_strategy='data_parallel'",
        )
    if isinstance(sampler, RandomSampler) and (
        sampler.replacement or len(sampler) != len(loader.dataset)
    ):
        raise UsageError(
            "a RandomSampler that skips or repeats samples is not supported", where=RUN_DATA
        )
    return Loader(
        loader.dataset,
        loader.batch_size,
        isinstance(sampler, RandomSampler),
        loader.drop_last,
        loader.collate_fn,
        loader.num_workers,
        loader.pin_memory,
    )


def same_source(one: Any, other: Any) -> bool:
    """
    Whether two sources of batches are equal: one object, equal loaders, or calls of one generator.
    """
    if one is other:
        return True
    loaders = []
    for source in (one, other):
        if isinstance(source, DataLoader):
            source = from_torch(source)
        if isinstance(source, Loader):
            loaders.append(source)
    if len(loaders) == 2:
        alike = [
            (id(source.dataset), source.batch, source.shuffle, source.drop_last)
            for source in loaders
        ]
        return alike[0] == alike[1]
    codes = [getattr(source, "gi_code", None) for source in (one, other)]
    return codes[0] is not None and codes[0] is codes[1]


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
    loader: Loader, seed: int, position: Position, world: int, rank: int, accumulate: int
) -> Iterator[tuple[Any, BatchShard]]:
    """
    Yield this rank's part of each batch, from the position to the end of the epoch; advance the
    position.
    """
    epoch = position.epoch
    first = position.batch
    order = loader.order(seed, epoch)
    batches = [order[i * loader.batch : (i + 1) * loader.batch] for i in range(len(loader))][first:]
    cuts = [slice_rows(len(batch), world, accumulate)[rank] for batch in batches]
    mine: list[Any] = [
        [(batch[i], place) for place, part in enumerate(cut) for i in part] or [(batch[0], 0)]
        for batch, cut in zip(batches, cuts, strict=True)
    ]
    if not mine:
        return
    source: Any = loader.dataset
    collate = loader.collate
    if loader.seeded:
        source = SeededDataset(source, seed, epoch)
        collate = SeededCollate(collate, seed, epoch)
    else:
        mine = [[index for index, _ in rows] for rows in mine]
    feed: Iterable[Any] = DataLoader(
        source,
        batch_sampler=mine,
        num_workers=loader.workers,
        collate_fn=collate,
        pin_memory=loader.pin,
        generator=torch.Generator().manual_seed(mix_bits(seed, epoch, 4)),
    )
    for done, (batch, indices, cut) in enumerate(zip(feed, batches, cuts, strict=True), first + 1):
        if done < len(loader):
            position.epoch = epoch
            position.batch = done
        else:
            position.epoch = epoch + 1
            position.batch = 0
        yield batch, BatchShard(len(indices), [len(part) for part in cut])
