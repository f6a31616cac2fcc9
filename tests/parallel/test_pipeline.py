"""Pipelines on real ranks: every schedule, every kind of model, against one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parallel import piped
from tests.parallel.piped import Case

pytestmark = pytest.mark.torch


def check(worlds: Any, case: Case) -> list[piped.Result]:
    """Compare losses, norms and gradients with those of one process."""
    found, want = worlds(case.pp * case.dp).run(piped.train, case), worlds(1).run(piped.alone, case)[0]
    for mine in found:
        tight = 1e-12 if case.double else 2e-6
        np.testing.assert_allclose(mine["loss"], want["loss"], rtol=0, atol=tight)
        np.testing.assert_allclose(mine["norm"], want["norm"], rtol=tight * 5)
        assert set(mine["grads"]) == set(want["grads"])
        for name, grad in want["grads"].items():
            scale = float(np.abs(grad).max()) or 1.0
            np.testing.assert_allclose(
                mine["grads"][name], grad, rtol=1e-10 if case.double else 1e-5, atol=scale * (1e-12 if case.double else
                2e-6), err_msg=name,
            )  # fmt: skip
    return found


SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_equals_one_process(worlds: Any, schedule: str) -> None:
    check(worlds, Case(double=True, more=(("schedule", schedule),)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["tied", "dropout", "masked", "row", "loose"])
def test_every_kind_of_model_equals_one_process(worlds: Any, model: str, schedule: str) -> None:
    shared = (("shared", ["bytes.weight"]),) if model == "loose" else ()
    check(worlds, Case(model, rows=(16, 13), more=(("schedule", schedule), *shared)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_stages_with_uneven_micro_batches(worlds: Any, schedule: str) -> None:
    check(worlds, Case("deep", pp=4, microbatches=5, rows=(13, 4, 17), more=(("schedule", schedule),)))
