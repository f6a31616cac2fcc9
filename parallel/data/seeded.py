"""
Random numbers of datasets and collate functions, seeded by rows instead of by rank.

A dataset draws with a seed of its sample. A collate function (one that masks words, for example)
draws with a seed of the first sample of its slice: each slice is collated separately, and slices
are the same for any number of ranks.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from pdrun.parallel.rng.hashing import mix_bits

DATASET_STREAM, COLLATE_STREAM = 5, 6
"""Numbers that keep the seeds of datasets and collate functions apart."""


class SeededRow(NamedTuple):
    """A sample on its way to the collate function."""

    row: int
    """The number of the sample that seeds: its index, if it comes once in the epoch."""
    place: int
    """Of its micro-batch."""
    sample: Any


class SlicedBatch(list[Any]):
    """The collated micro-batches of a rank, if they cannot be joined: they have other shapes."""


def read_generators() -> tuple[Any, ...]:
    """Return the states of the generators of torch, Python and numpy."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None


def restore_generators(states: tuple[Any, ...]) -> None:
    """Set the generators to the states of `read_generators`."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy = sys.modules.get("numpy")
    if numpy and states[2] is not None:
        numpy.random.set_state(states[2])


@contextmanager
def seeded_random(seed: int) -> Iterator[Callable[[], bool]]:
    """
    Inside, the generators of torch, Python and numpy are seeded; afterwards they are as before.

    Yields a function that returns whether any of them has been used.
    """

    def is_used() -> bool:
        return _comparable(read_generators()) != _comparable(begin)

    kept = read_generators()
    try:
        torch.random.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy:
            numpy.random.seed(seed % 2**32)
        begin = read_generators()
        yield is_used
    finally:
        restore_generators(kept)


def _comparable(states: tuple[Any, ...]) -> list[Any]:
    """Return states of generators as values that can be compared."""
    of_torch, of_python, of_numpy = states
    return [
        of_torch.tolist(),
        of_python,
        None if of_numpy is None else [*map(_as_list, of_numpy)],
    ]


def _as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


class SeededDataset(Dataset[SeededRow]):
    """A dataset whose random numbers depend on the sample, not on the rank that reads it."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch

    def __getitem__(self, row: tuple[Any, int, int]) -> SeededRow:
        index, place, number = row
        with seeded_random(mix_bits(self._seed, self._epoch, number, DATASET_STREAM)):
            return SeededRow(number, place, self._dataset[index])


class SeededCollate:
    """A collate function whose random numbers depend on the rows of a slice."""

    def __init__(self, collate: Callable[[list[Any]], Any], seed: int, epoch: int) -> None:
        self._collate = collate
        self._seed = seed
        self._epoch = epoch
        self._is_random = True
        """Whether the function is known, or may be expected, to draw random numbers."""

    def __call__(self, rows: Sequence[SeededRow]) -> Any:
        """Collate the rows of a rank: all together, or slice by slice if that draws numbers."""
        slices = [list(found) for _, found in groupby(rows, key=lambda row: row.place)]
        if len(slices) > 1 and not self._is_random:
            whole, self._is_random = self._collate_rows(rows)
            if not self._is_random:
                return whole
        parts = []
        is_random = False
        for part in slices:
            made, has_drawn = self._collate_rows(part)
            parts.append(made)
            is_random = is_random or has_drawn
        self._is_random = is_random
        if len(parts) == 1:
            return parts[0]
        return _join_parts(parts) if is_random else self._collate_rows(rows)[0]

    def _collate_rows(self, rows: Sequence[SeededRow]) -> tuple[Any, bool]:
        """Return the collated rows, and whether random numbers were drawn."""
        seed = mix_bits(self._seed, self._epoch, rows[0].row, COLLATE_STREAM)
        with seeded_random(seed) as is_used:
            made = self._collate([row.sample for row in rows])
            return made, is_used()


def _join_parts(parts: list[Any]) -> Any:
    """Return one batch of micro-batches whose tensors fit together, else the list of them."""
    flat = [pytree.tree_flatten(part) for part in parts]
    if any(form != flat[0][1] for _, form in flat):
        return SlicedBatch(parts)
    joined = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        if not all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves):
            return SlicedBatch(parts)
        if len({(leaf.dtype, leaf.shape[1:]) for leaf in leaves}) > 1:
            return SlicedBatch(parts)
        joined.append(torch.cat(leaves))
    return pytree.tree_unflatten(joined, flat[0][1])
