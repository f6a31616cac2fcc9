"""Sources of batches without an index: they are read in order, and again after a resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.data.batch_structure import map_tensors
from pdrun.parallel.data.samplers import SAMPLER_STREAM, seeded_generators
from pdrun.parallel.data.seeded import read_generators, restore_generators, seeded_random
from pdrun.parallel.rng.hashing import mix_bits


class SeededStream:
    """
    A DataLoader without an index, whose random numbers (a shuffle buffer's, for example) depend on
    seed and epoch only.

    Every rank reads the same batches. The program's own generators do not advance.
    """

    def __init__(self, loader: Iterable[Any], seed: int, epoch: int) -> None:
        self._loader = loader
        self._seed = mix_bits(seed, epoch, SAMPLER_STREAM)

    def __iter__(self) -> Iterator[Any]:
        states: Any = None
        with seeded_generators(self._loader, self._seed):
            with seeded_random(self._seed):
                batches = iter(self._loader)
                states = read_generators()
            while True:
                outside = read_generators()
                restore_generators(states)
                try:
                    batch = next(batches, _END)
                    states = read_generators()
                finally:
                    restore_generators(outside)
                if batch is _END:
                    return
                yield batch


_END = object()


class OwnRows:
    """
    Batches of a rank's own rows, of which ranks can have different numbers.

    A rank whose source has ended gets its last batch again, with `has_ended` set, until the sources
    of all ranks have ended: it takes part in their steps without rows.

    Args:
        largest: returns the largest of the ranks' numbers.
    """

    def __init__(self, source: Iterable[Any], largest: Callable[[int], int]) -> None:
        self._source = source
        self._largest = largest
        self.has_ended = False

    def __iter__(self) -> Iterator[Any]:
        length = length_or_none(self._source)
        total = None
        if not self._largest(length is None):
            total = self._largest(length or 0)
        batches = iter(self._source)
        last: Any = _END
        for index in itertools.count():
            batch = _END if self.has_ended else next(batches, _END)
            self.has_ended = batch is _END
            goes_on = index < total if total is not None else self._largest(not self.has_ended)
            if not goes_on:
                return
            if not self.has_ended:
                last = batch
            elif last is _END:
                raise UsageError(
                    "this rank's source has no batch, other ranks have some",
                    where="pdrun.Run.data",
                    hint="give each rank at least one row",
                )
            # a step recognises a batch by its identity: the source may yield this one again
            yield map_tensors(last, torch.Tensor.detach) if self.has_ended else batch


def length_or_none(source: Any) -> int | None:
    """Return the length of a source; None if it has none."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None
