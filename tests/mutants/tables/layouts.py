"""Layouts, redistribution and placements."""

from __future__ import annotations

from tests.mutants.model import Mutant

LAYOUTS = "parallel/layouts/"
RING_AND_ULYSSES = "tests/parallel/context_parallel/test_ring_and_ulysses.py::test_"
DEVICE_MATRIX = "tests/parallel/layouts/test_device_matrix.py::test_"
REDISTRIBUTE = "tests/parallel/layouts/test_redistribute.py::test_"
SHARDS_OF_A_DIM = "tests/parallel/layouts/test_shards_of_a_dim.py::test_"


MUTANTS = (
    Mutant(
        "shards do not cover a dim",
        f"{LAYOUTS}layout.py",
        "low = index * base + min(index, extra)",
        "low = index * base",
        f"{SHARDS_OF_A_DIM}shards_of_an_uneven_dim",
    ),
    Mutant(
        "an axis cuts two dims",
        f"{LAYOUTS}layout.py",
        "            if used.count(axis) > 1:",
        "            if False:",
        f"{DEVICE_MATRIX}wrong_tensor_maps",
    ),
    Mutant(
        "counts that do not divide the devices",
        f"{LAYOUTS}device_matrix.py",
        "    if devices % used:\n",
        "    if False:\n",
        f"{DEVICE_MATRIX}counts_that_do_not_fit_the_devices",
    ),
    Mutant(
        "ambiguous counts are taken",
        f"{LAYOUTS}device_matrix.py",
        "    if len(found) > 1 and not takes_outer:\n        what",
        "    if False:\n        what",
        f"{DEVICE_MATRIX}counts_that_are_ambiguous_or_impossible_say_why",
    ),
    Mutant(
        "a reduce-scatter is taken for a slice",
        f"{LAYOUTS}redistribute.py",
        "            how = REDUCE_SCATTER",
        "            pass",
        f"{REDISTRIBUTE}random_layouts_against_dense_tensors",
    ),
    Mutant(
        "partial sums are dropped",
        f"{LAYOUTS}redistribute.py",
        "            self._add_step(ALL_REDUCE, done)",
        "            pass",
        f"{REDISTRIBUTE}random_layouts_against_dense_tensors",
    ),
    Mutant(
        "another number of elements is redistributed",
        f"{LAYOUTS}redistribute.py",
        "if math.prod(source.shape) != math.prod(target.shape):",
        "if False:",
        f"{REDISTRIBUTE}ends_that_do_not_belong_together_are_refused",
    ),
    Mutant(
        "zigzag gives the last rank most to do",
        f"{LAYOUTS}sequence_order.py",
        "shard_range(length, 2 * parts, 2 * parts - 1 - index)",
        "shard_range(length, 2 * parts, parts + index)",
        f"{RING_AND_ULYSSES}zigzag_gives_every_rank_the_same_to_do",
    ),
    Mutant(
        "a query sees keys of the future",
        f"{LAYOUTS}sequence_order.py",
        "for first, last, place in keys if last <= low]",
        "for first, last, place in keys]",
        f"{RING_AND_ULYSSES}zigzag_gives_every_rank_the_same_to_do",
    ),
)
