"""
Everything at once: stages, data, sequences and operators, with schedules, levels, recomputation, copies and the rest.

Each case is proven against one process, trains two steps, is saved on its mesh, taken up on another mesh in another
way, and trains on; losses and norms are those of one process all along.
PDRUN_TEST_COMPOSITIONS=400 has more cases than the default, PDRUN_TEST_SEED=7 others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import mixed
from tests.parallel.mixed import Case, Place, Task

pytestmark = pytest.mark.torch

COUNT, SEED = int(os.environ.get("PDRUN_TEST_COMPOSITIONS", "24")), int(os.environ.get("PDRUN_TEST_SEED", "1"))


def tolerance(task: Task, *places: Place) -> float:
    """Return how far losses may be off in a step: narrow types round, and stages add up in another order."""
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
    assert [loss for loss, _ in told[0] + more[0]] == pytest.approx([loss for loss, _ in want], rel=off)
    assert [norm for _, norm in told[0] + more[0]] == pytest.approx([norm for _, norm in want], rel=10 * off)


FOUND = [
    # masks of attention over cut sequences were those of this rank's heads
    (Task(p=0.2, rows=(12, 7, 12, 12)), Place(cp=2, tp=2), Place(cp=2, tp=2, kind="sequence", ulysses=-1)),
    # a second copy took the last step's dropouts for its own, and those of the first were forgotten
    (Task(p=0.2, tied=True, clip=0.3), Place(dp=2, copies=2, more=(("recompute", "selective"),)),
     Place(dp=3, copies=2, more=(("recompute", "full"),))),
]  # fmt: skip
"""What went wrong once."""


@pytest.mark.parametrize("case", FOUND, ids=lambda case: "+".join(map(str, case[1:])))
def test_what_went_wrong_once(case: Case, worlds: Any, tmp_path: Path) -> None:
    check(case, worlds, tmp_path)


@pytest.mark.parametrize("case", mixed.cases(SEED, COUNT), ids=lambda case: "+".join(map(str, case[1:])))
def test_compositions(case: Case, worlds: Any, tmp_path: Path) -> None:
    check(case, worlds, tmp_path)
