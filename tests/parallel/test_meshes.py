"""Meshes with tensor axes: what is cut over them, over the data and over micro-batches is what one process computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from pdrun.parallel import mesh
from pdrun.parallel.run import Run
from tests.parallel import zoo
from tests.parallel.cutting import Megatron
from tests.parallel.worlds import Worlds
from tests.parallel.zoo import Case

pytestmark = pytest.mark.torch

MESHES = [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}, {"dp": 4, "tp": 1}, {"dp": 1, "tp": 2}]


def make(case: Case, degrees: dict[str, int], **more: Any) -> Run:
    """Return a case's run on a mesh; ``case.world`` is that of all its ranks."""
    names = [name for name in degrees if name not in ("pp", "dp", "cp")]
    return zoo.make(case, mesh=mesh.of(**degrees), strategy=Megatron(*names), **more)


def proven(case: Case, degrees: dict[str, int]) -> Any:
    """Prove and train; return the proof's words, and losses and norms."""
    run = make(case, degrees)
    report = run.verify([zoo.batch_of(rows, 9) for rows in case.rows])
    told = [run.step(zoo.batch_of(rows, step)) for step, rows in enumerate(case.rows)]
    return str(report), [m.loss for m in told], [m.grad_norm for m in told]


def cases() -> list[Any]:
    found = []
    for place, degrees in enumerate(MESHES):
        for level in range(4):
            turn = place + level
            found.append((Case(
                degrees["dp"] * degrees["tp"], level, 1 + 2 * (turn % 2), "full" if turn % 3 == 0 else None, turn % 2 == 0,
                True, (24, 7, 24), 0.3 if turn % 2 else None,
            ), degrees))  # fmt: skip
    return found


@pytest.mark.parametrize(("case", "degrees"), cases(), ids=str)
def test_tensor_axes_compute_what_one_process_does(case: Case, degrees: Any, worlds: Worlds) -> None:
    found = worlds(case.world).run(proven, case, degrees)
    alone = dataclasses.replace(case, world=1, level=0, recompute=None, accumulate=degrees["dp"] * case.accumulate)
    want = worlds(1).run(zoo.train, alone)[0]
    for _, loss, norm in found:
        assert (loss, norm) == found[0][1:]
        assert loss == pytest.approx(want["loss"], rel=2e-5)
        assert norm == pytest.approx(want["norm"], rel=2e-4)
