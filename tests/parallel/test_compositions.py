"""
Everything at once: stages, data, sequences and operators, with schedules, levels, recomputation,
copies and the rest.

Each case is proven against one process, trains two steps, is saved on its mesh, taken up on another
mesh in another way, and trains on; losses and norms are those of one process all along.
PDRUN_TEST_COMPOSITIONS=400 has more cases than the default, PDRUN_TEST_SEED=7 others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib import compositions as mixed
from tests.lib import tiers
from tests.lib.compositions import Case, Place, Task

pytestmark = pytest.mark.torch

COUNT, SEED = (
    int(os.environ.get("PDRUN_TEST_COMPOSITIONS", tiers.by_tier("5", "96"))),
    int(os.environ.get("PDRUN_TEST_SEED", "1")),
)


def tolerance(task: Task, *places: Place) -> float:
    """
    Return how far losses may be off in a step: narrow types round, and stages add up in another
    order.
    """
    if task.precision or any("compress" in dict(place.more) for place in places):
        return 3e-2
    return 2e-5 if task.optimizer == "AdamW" else 2e-6


def check(case: Case, worlds: Any, folder: Path) -> None:
    """Train as the case says; hold losses and norms against one process."""
    task, before, after = case
    told = worlds(before.world).run(mixed.first, task, before, str(folder))
    assert all(one == told[0] for one in told)
    more = worlds(after.world).run(mixed.second, task, after, str(folder))
    assert all(one == more[0] for one in more)
    want = worlds(1).run(mixed.alone, task, before.slices)[0]
    off = tolerance(task, before, after)
    assert [loss for loss, _ in told[0] + more[0]] == pytest.approx(
        [loss for loss, _ in want], rel=off
    )
    assert [norm for _, norm in told[0] + more[0]] == pytest.approx(
        [norm for _, norm in want], rel=10 * off
    )


EVERYTHING = [
    (
        Task(tied=True, p=0.2, clip=0.3, rows=(12, 7, 12, 12)),
        Place(
            2,
            2,
            1,
            2,
            kind,
            schedule,
            level=3,
            accumulate=3,
            more=(("gather", gather), ("recompute", "full")),
        ),
        after,
    )
    for kind, schedule, gather, after in (
        (
            "sequence",
            "1f1b",
            "step",
            Place(pp=2, cp=2, tp=2, accumulate=2, level=3, more=(("gather", "pass"),)),
        ),
        ("styles", "zero-bubble", "pass", Place(dp=2, tp=2, copies=2, level=3)),
    )
] + [
    (
        Task(empty=True, layers=4, clip=0.3),
        Place(
            2,
            2,
            2,
            schedule=schedule,
            level=3,
            accumulate=2,
            more=(("gather", gather), ("offload", "all")),
        ),
        Place(pp=4, dp=2, accumulate=4, level=3),
    )
    for schedule, gather in (("interleaved", "pass"), ("zero-bubble-v", "step"))
]
"""Weights cut over the data beside stages and everything else."""


@pytest.mark.parametrize(
    "case", tiers.mark_all_but(1, EVERYTHING), ids=lambda case: "+".join(map(str, case[1:]))
)
def test_cut_weights_beside_stages(case: Case, worlds: Any, tmp_path: Path) -> None:
    check(case, worlds, tmp_path)


FOUND = [
    # masks of attention over cut sequences were those of this rank's heads
    (
        Task(p=0.2, rows=(12, 7, 12, 12)),
        Place(cp=2, tp=2),
        Place(cp=2, tp=2, kind="sequence", ulysses=-1),
    ),
    # a second copy took the last step's dropouts for its own, and those of the first were forgotten
    (
        Task(p=0.2, tied=True, clip=0.3),
        Place(dp=2, copies=2, more=(("recompute", "selective"),)),
        Place(dp=3, copies=2, more=(("recompute", "full"),)),
    ),
    # a split backward recomputed attention as that of whole sequences
    (
        Task(),
        Place(pp=2, cp=2, accumulate=2, schedule="zero-bubble", more=(("recompute", "full"),)),
        Place(dp=2),
    ),
    # uneven parts over two axes were dropped as if one axis had cut them
    (Task(p=0.2), Place(tp=4, kind="2d"), Place(dp=2, tp=4, kind="2d", level=1)),
]
"""What went wrong once."""


@pytest.mark.parametrize("case", FOUND, ids=lambda case: "+".join(map(str, case[1:])))
def test_what_went_wrong_once(case: Case, worlds: Any, tmp_path: Path) -> None:
    check(case, worlds, tmp_path)


@pytest.mark.parametrize(
    "case", mixed.cases(SEED, COUNT), ids=lambda case: "+".join(map(str, case[1:]))
)
def test_compositions(case: Case, worlds: Any, tmp_path: Path) -> None:
    check(case, worlds, tmp_path)


REFUSED = [
    (Place(pp=2, accumulate=2, copies=2), {}, "copies=2 is not supported with pipeline="),
    (Place(pp=2, accumulate=2), {"accumulate": 2}, "accumulate=2 is not supported with pipeline="),
    (Place(pp=2, accumulate=1), {}, "microbatches=1 is less than pp=2"),
    (
        Place(pp=2, accumulate=2, schedule="zero-bubble-v"),
        {},
        "2 layers cannot be split into 4 stages",
    ),
    (
        Place(pp=2, accumulate=2),
        {"pipeline": None},
        "pp would compute the same; pass pipeline=",
    ),
    (
        Place(dp=2, copies=2, level=3),
        {"gather": "pass"},
        "gather='pass' is not supported with copies=2",
    ),
    (Place(dp=2, level=2), {"gather": "step"}, "gather='step' requires optimizer_level=3"),
    (
        Place(pp=2, tp=2, accumulate=2, kind="operators"),
        {"sample": None},
        "pdrun.Operators needs its shapes",
    ),
    (
        Place(cp=2, tp=2, kind="operators"),
        {},
        'mesh(..., sp=2), and shard the sequence over it: {"emb": (None',
    ),
    (Place(tp=2, kind="operators"), {"sample": None}, "pdrun.Operators needs its shapes"),
    (Place(tp=2), {"strategy": None}, "tp would compute the same; pass strategy="),
    (
        Place(tp=2),
        {"native_dropout": True},
        "native_dropout=True is not supported on mesh(dp=1, tp=2)",
    ),
    (
        Place(cp=2),
        {"native_dropout": True},
        "native_dropout=True is not supported on mesh(dp=1, cp=2)",
    ),
    (Place(cp=2), {"context": None}, "cp would compute the same; pass context="),
    (Place(cp=2), {"loss": mixed.mean_loss}, "means of sequence parts cannot be added"),
    (Place(cp=3, ulysses=2), {}, "ulysses=2"),
    (Place(cp=2, tp=4, kind="sequence"), {"strategy": mixed.cutter("2d")}, "there is no axis 'y'"),
    (Place(dp=2), {"shard_group": 2}, "shard_group=2 requires optimizer_level"),
    (Place(dp=2, level=1), {"units": ["layers.*"]}, "units= requires optimizer_level=3"),
    (Place(dp=2, tp=2), {"mesh": mixed.Place(dp=2).mesh()}, "needs 2 devices, the job has 4"),
    (
        Place(tp=2),
        {"optimizer": torch.optim.Adafactor},
        "Adafactor cannot be sharded: its update of an element depends on other elements",
    ),
]


@pytest.mark.parametrize(("place", "more", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_what_cannot_be_is_refused_on_every_rank(
    place: Place, more: Any, text: str, worlds: Any
) -> None:
    told = worlds(place.world).run(mixed.refusal, place, **more)
    assert all(text in one for one in told), told
