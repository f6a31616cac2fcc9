"""
A model on any number of ranks is the same model: losses, gradients and weights have the bits of one
process.

The product of what can be combined is sampled by a seeded generator. ``python -m
tests.lib.transparency_sweep 500`` samples more of it.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.lib import small_models as zoo
from tests.lib import tiers
from tests.lib.rank_pool import Worlds
from tests.lib.small_models import Case

pytestmark = pytest.mark.torch


def sample(count: int, seed: int) -> list[Case]:
    """Return cases of the product, each world and level equally often."""
    dice = random.Random(seed)
    found = []
    for i in range(count):
        world, level = 1 + i % 4, (i // 4) % 4
        groups = [None] + [size for size in (1, 2) if level and world % size == 0]
        found.append(
            Case(
                world,
                level,
                dice.choice([1, 3]),
                dice.choice([None, "full", "selective"]),
                dice.random() < 0.4,
                dice.random() < 0.4,
                dice.choice([(24, 24, 24), (23, 7, 24), (13, 2, 1)]),
                dice.choice([None, 0.3]),
                dice.choice(["AdamW", "SGD", "fused", "foreach"]),
                dice.choice(groups),
            )
        )
    return found


def check(case: Case, worlds: Worlds, folder: Path | None = None) -> None:
    """Run a case on its world and alone; nothing may differ."""
    found = worlds(case.world).run(zoo.train, case, str(folder) if folder else None)
    want = worlds(1).run(zoo.train if case.dropout else zoo.plain, case.alone())[0]
    for told in found:
        same(told, want)


def same(told: dict[str, Any], want: dict[str, Any], steps: int = 0) -> None:
    """
    Compare two results bit for bit, the last steps only where the first of them says so; norms are
    sums in fp64.
    """
    assert told["loss"] == want["loss"][-steps:]
    assert told["count"] == want["count"][-steps:]
    assert told["norm"] == pytest.approx(want["norm"][-steps:], rel=1e-12)
    for kind in ("grads", "weights"):
        assert set(told[kind]) == set(want[kind])
        for name, value in want[kind].items():
            assert numpy.array_equal(told[kind][name], value), f"{kind} of {name}"


def features(case: Case) -> list[Any]:
    """Return what a case combines: the default run has each value and each pair once."""
    return [value for name, value in sorted(vars(case).items()) if name != "more"]


@pytest.mark.parametrize("case", tiers.cover_pairs(sample(40, seed=1), features), ids=str)
def test_sampled_product(case: Case, worlds: Worlds) -> None:
    check(case, worlds)


@pytest.mark.parametrize("case", tiers.mark_all_but(4, sample(16, seed=2)), ids=str)
def test_sampled_product_saved_and_resumed(case: Case, worlds: Worlds, tmp_path: Path) -> None:
    check(case, worlds, tmp_path)


@pytest.mark.parametrize("name", sorted(set(zoo.OPTIMIZERS) - {"AdamW", "SGD"}))
def test_every_elementwise_optimizer(name: str, worlds: Worlds, tmp_path: Path) -> None:
    check(Case(3, 3, optimizer=name, rows=(9, 9, 9)), worlds, tmp_path)


def test_the_whole_batch_at_once_is_the_same_to_rounding(worlds: Worlds) -> None:
    """One process that cuts nothing adds in another order: gradients agree to 1e-5."""
    case = Case(4, 2, accumulate=3, rows=(23, 24, 24))
    told = worlds(4).run(zoo.train, case)[0]
    want = worlds(1).run(zoo.plain, Case(rows=case.rows))[0]
    assert told["loss"] == pytest.approx(want["loss"], rel=1e-5)
    for name, value in want["grads"].items():
        assert numpy.linalg.norm(told["grads"][name] - value) <= 1e-4 * numpy.linalg.norm(value), (
            name
        )


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_the_fast_order_is_the_same_to_rounding(level: int, worlds: Worlds) -> None:
    case = Case(4, level, accumulate=3, clip=0.3, rows=(24, 23, 24), more=(("exact", False),))
    told = worlds(4).run(zoo.train, case)[0]
    want = worlds(1).run(zoo.plain, case.alone())[0]
    assert told["loss"] == pytest.approx(want["loss"], rel=1e-5)
    for name, value in want["grads"].items():
        assert numpy.linalg.norm(told["grads"][name] - value) <= 1e-4 * numpy.linalg.norm(value), (
            name
        )


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 3, accumulate=3, tied=True, dropout=True, clip=0.3, rows=(23, 7, 24)),
        Case(2, 3, accumulate=2, recompute="full"),
        Case(4, 3, accumulate=3, shard_group=2, rows=(13, 2, 1)),
    ],
    ids=str,
)
def test_weights_that_stay_for_a_step(case: Case, worlds: Worlds, tmp_path: Path) -> None:
    check(dataclasses.replace(case, more=(("gather", "step"),)), worlds, tmp_path)
