"""Loaders of torch, taken apart: dataset, order, rows per batch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from pdrun.parallel.data.loader import Loader
from pdrun.parallel.data.samplers import is_distributed

TORCH_OPTIONS = ("worker_init_fn", "timeout", "prefetch_factor", "multiprocessing_context")
"""Arguments of torch's DataLoader that a Loader passes on."""


def from_torch(loader: DataLoader[Any]) -> Loader | None:
    """
    Return the Loader that does what torch's DataLoader does; None for an IterableDataset and for
    ``batch_size=None``, which are read unchanged.

    A DistributedSampler is taken apart: its replicas' batches are one batch, and each row comes
    once.
    """
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return None
    batches: Any = loader.batch_sampler
    sampler: Any = batches
    size = None
    if type(batches) is BatchSampler:
        sampler = batches.sampler
        size = batches.batch_size
        if is_distributed(sampler):
            size *= sampler.num_replicas
    is_shuffled = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and len(sampler) == len(loader.dataset)
    )
    return Loader(
        loader.dataset,
        size,
        is_shuffled,
        loader.drop_last if size is None else batches.drop_last,
        loader.collate_fn,
        loader.num_workers,
        loader.pin_memory,
        sampler=None if is_shuffled or type(sampler) is SequentialSampler else sampler,
        options={
            name: value
            for name in TORCH_OPTIONS
            if (value := getattr(loader, name, None)) is not None and loader.num_workers
        },
    )


def describe_loader(loader: DataLoader[Any], made: Loader | None, ranks: int, own: bool) -> str:
    """
    Return a line that says how many rows of a step a DataLoader's ``batch_size`` means.

    Args:
        made: the Loader that replaces it.
        ranks: that share the rows of a batch.
        own: whether its batches are a rank's own rows.
    """
    sampler: Any = getattr(loader.batch_sampler, "sampler", None)
    size = getattr(loader.batch_sampler, "batch_size", None)
    text = f"DataLoader(batch_size={size})"
    if own:
        return f"{text}: batches are each rank's own rows, a step has those of {ranks} ranks"
    if made is not None and made.batch is None:
        kind = type(loader.batch_sampler).__name__
        return f"DataLoader with a {kind}: one of its batches per step over {ranks} ranks"
    if made is not None and is_distributed(sampler):
        return (
            f"{text} with a DistributedSampler of {sampler.num_replicas} replicas: "
            f"{made.batch} rows per step over {ranks} ranks, each row once"
        )
    if made is None:
        rows = "one batch" if size is None else f"{size} rows"
        return f"{text}: {rows} per step over {ranks} ranks; every rank reads all of the stream"
    return f"{text}: {size} rows per step over {ranks} ranks"


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
        kinds = [type(source.sampler) for source in loaders]
        return alike[0] == alike[1] and kinds[0] is kinds[1]
    codes = [getattr(source, "gi_code", None) for source in (one, other)]
    return codes[0] is not None and codes[0] is codes[1]
