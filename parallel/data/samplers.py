"""
Indices that a sampler of torch draws for an epoch: the same on every rank, and after a resume.

A sampler draws from generators that hold state. Here it draws each epoch with all generators that
it can use seeded by the run's seed and the epoch. A sampler that keeps other state is refused.
"""

from __future__ import annotations

import copy
import itertools
import operator
import random
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from pdrun.errors import UsageError
from pdrun.parallel.data.seeded import seeded_random
from pdrun.parallel.rng.hashing import mix_bits

RUN_DATA = "pdrun.Run.data"
SAMPLER_STREAM = 7
"""Number that keeps the seeds of samplers apart from those of datasets."""
KNOWN_KINDS = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
"""Samplers without other state than their generator."""
MAX_INDICES = 1 << 24
"""Indices, or batches of them, that a sampler without a length may give."""


def draw_epoch(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """
    Return what a sampler yields in an epoch: indices, or lists of indices.

    Raises:
        UsageError: it does not end, or another pass with the same seeds yields something else.
    """
    found = _draw_once(sampler, seed, epoch)
    is_known = all(type(each) in KNOWN_KINDS for each in _nested_samplers(sampler))
    if not is_known and found != _draw_once(sampler, seed, epoch):
        raise UsageError(
            f"two passes of {type(sampler).__name__} with the same seeds differ: it has other "
            "state, and a resumed run could not draw the same rows",
            where=RUN_DATA,
            hint="draw from torch's, numpy's or random's generators, or seed in set_epoch(epoch)",
        )
    return found


def _draw_once(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    limit = MAX_INDICES
    if isinstance(sampler, Sized):
        try:
            limit = len(sampler)
        except (TypeError, NotImplementedError):
            pass
    set_epoch(sampler, epoch)
    start = mix_bits(seed, epoch, SAMPLER_STREAM)
    with seeded_random(start), seeded_generators(sampler, start):
        found = [_plain_indices(each) for each in itertools.islice(sampler, limit)]
    if limit == MAX_INDICES and len(found) == limit:
        raise UsageError(
            f"{type(sampler).__name__} does not end", where=RUN_DATA, hint="give it a __len__"
        )
    return found


def set_epoch(source: Any, epoch: int) -> None:
    """Tell a source and the samplers and datasets in it which epoch begins."""
    for each in _nested_samplers(source):
        for holder in (each, getattr(each, "dataset", None)):
            method = getattr(holder, "set_epoch", None)
            if callable(method):
                method(epoch)


def _nested_samplers(source: Any) -> Iterator[Any]:
    """Yield a sampler or loader and the samplers that it draws from."""
    seen: list[Any] = []
    waiting = [source]
    while waiting:
        each = waiting.pop()
        if each is None or any(each is other for other in seen):
            continue
        seen.append(each)
        yield each
        waiting += [getattr(each, name, None) for name in ("batch_sampler", "sampler")]


@contextmanager
def seeded_generators(sampler: Any, seed: int) -> Iterator[None]:
    """Inside, the generators that samplers have as attributes are seeded; then as before."""
    numpy = sys.modules.get("numpy")
    kept: list[tuple[Any, Any]] = []
    found = [
        value
        for each in _nested_samplers(sampler)
        for value in getattr(each, "__dict__", {}).values()
    ]
    for value in found:
        if isinstance(value, torch.Generator):
            kept.append((value.set_state, value.get_state()))
            value.manual_seed(seed)
        elif isinstance(value, random.Random):
            kept.append((value.setstate, value.getstate()))
            value.seed(seed)
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            kept.append((value.set_state, value.get_state()))
            value.seed(seed % 2**32)
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            kept.append((lambda state, bits=bits: setattr(bits, "state", state), bits.state))
            bits.state = type(bits)(seed).state
    try:
        yield
    finally:
        for restore, state in reversed(kept):
            restore(state)


def _plain_indices(value: Any) -> Any:
    """Return an index, or a list of indices, with Python's numbers."""
    if isinstance(value, torch.Tensor) and value.dim():
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain_indices(each) for each in value]
    try:
        return operator.index(value)
    except TypeError:
        return value


def whole_sampler(sampler: DistributedSampler[Any]) -> DistributedSampler[Any]:
    """Return a sampler of the rows of all replicas, in the order in which these share them."""
    made: Any = copy.copy(sampler)
    rows = len(sampler.dataset)
    made.total_size = rows
    if sampler.drop_last:
        made.total_size = rows // sampler.num_replicas * sampler.num_replicas
    made.num_samples = made.total_size
    made.num_replicas, made.rank = 1, 0
    whole: DistributedSampler[Any] = made
    return whole


def is_distributed(sampler: Any) -> bool:
    """Whether a sampler gives each rank its rows as torch's DistributedSampler does."""
    return (
        isinstance(sampler, DistributedSampler)
        and type(sampler).__iter__ is DistributedSampler.__iter__
    )


def number_of(index: Any) -> int:
    """Return a number of an index of any type, the same on every rank."""
    if isinstance(index, int):
        return index
    return zlib.crc32(repr(index).encode())


def count_repeats(batches: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Return how often each index has occurred before, so that repeated rows draw other numbers."""
    seen: dict[Any, int] = {}
    found = []
    for batch in batches:
        row = []
        for index in batch:
            key = index if isinstance(index, int) else repr(index)
            row.append(seen.get(key, 0))
            seen[key] = row[-1] + 1
        found.append(row)
    return found
