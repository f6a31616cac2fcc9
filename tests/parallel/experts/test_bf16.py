"""Experts in bf16 on several ranks: as near to one process as bf16 is, and half of the bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import pdrun
from tests.lib import moe_models as moe
from tests.lib import tiers
from tests.lib.moe_models import MoECase
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch

BF16: dict[str, Any] = {"precision": "bf16"}
AUTOCAST: dict[str, Any] = {"precision": pdrun.Precision("bf16", autocast=True)}
BIAS, LOSS = pdrun.Balance("bias", 0.05), pdrun.Balance("loss", 0.1)
TWO = [
    MoECase({"ep": 2}, options=BF16),
    MoECase({"ep": 2}, model={"shared": 1}, options=AUTOCAST),
    MoECase(
        {"ep": 2},
        model={"balance": LOSS},
        options={**BF16, "optimizer_level": 3, "accumulate": 2, "recompute": "full"},
        rows=7,
    ),
    MoECase({"tp": 2}, "tp", model={"balance": BIAS}, options=BF16, rows=3),
    MoECase({"pp": 2}, None, options=BF16, stages=2),
]
FOUR = [
    MoECase({"dp": 2, "ep": 2}, options={**BF16, "optimizer_level": 2, "clip": 0.3}, rows=9),
    MoECase({"ep": 4}, model={"top_k": 1}, steering="one", options={**BF16, "optimizer_level": 1}),
    MoECase({"ep": 2, "tp": 2}, ("ep", "tp"), model={"shared": 1}, options=BF16),
    MoECase({"pp": 2, "ep": 2}, model={"balance": BIAS}, options=BF16, stages=2),
]


def name_of(case: MoECase) -> str:
    words = [f"{axis}{size}" for axis, size in case.mesh.items()]
    kept = [key for key in case.options if key != "precision"]
    is_autocast = case.options["precision"] != "bf16"
    return "-".join([*words, *case.model, *kept, "autocast" * is_autocast]).rstrip("-")


def train_alone(case: MoECase, worlds: Worlds, **options: Any) -> Any:
    """Return what one process computes with the same slices of a batch."""
    slices = case.microbatches if case.stages > 1 else case.options.get("accumulate", 1)
    kept = {key: value for key, value in case.options.items() if key == "clip"}
    options = {**kept, "accumulate": slices, **options}
    alone = replace(case, mesh={"dp": 1}, axis=None, stages=1, options=options)
    return worlds(1).run(moe.train_case, alone, 1)[0]


def check(case: MoECase, worlds: Worlds, world: int) -> None:
    exact, _ = train_alone(case, worlds)
    alone, weights = train_alone(case, worlds, precision=case.options["precision"])
    found = worlds(world).run(moe.train_case, case, world)
    assert all(one == found[0] for one in found)
    steps, mine = found[0]
    assert [loss for loss, _, _ in steps] != [loss for loss, _, _ in exact], "this is fp32"
    for told, told_alone, told_exact in zip(steps, alone, exact, strict=True):
        (loss, norm, loads), (loss_alone, norm_alone, loads_alone) = told, told_alone
        loss_exact, norm_exact, _ = told_exact
        assert loss == pytest.approx(loss_alone, rel=4e-3)
        assert loss == pytest.approx(loss_exact, rel=1e-2)
        assert norm == pytest.approx(norm_alone, rel=3e-2)
        assert norm == pytest.approx(norm_exact, rel=5e-2)
        assert loads.keys() == loads_alone.keys()
        for name, (load_max, dropped) in loads.items():
            # rounding can move a few tokens to an expert that is nearly as good
            assert load_max == pytest.approx(loads_alone[name][0], abs=0.15)
            assert dropped == loads_alone[name][1] == 0
    assert mine.keys() == weights.keys()
    for name, total in mine.items():
        assert total == pytest.approx(weights[name], rel=3e-2, abs=0.3), name


@pytest.mark.parametrize("case", TWO, ids=name_of)
def test_two_ranks(case: MoECase, worlds: Worlds) -> None:
    check(case, worlds, 2)


@pytest.mark.parametrize("case", tiers.mark_all_but(2, FOUR), ids=name_of)
def test_four_ranks(case: MoECase, worlds: Worlds) -> None:
    check(case, worlds, 4)


def look_at_types(case: MoECase, world: int) -> Any:
    """Return the types of weights, of what experts compute with, and the bytes that are sent."""
    run = moe.make_run(case, world)
    layer = run.model.layers[0].moe
    seen = []
    compute = layer.compute_rows

    def record(x: torch.Tensor, rows: Any) -> torch.Tensor:
        out = compute(x, rows)
        seen.append((x.dtype, out.dtype))
        return out

    layer.compute_rows = record
    run.step(moe.batches(case, 1)[0])
    line = next(one for one in run.explain().splitlines() if one.startswith("in the last step"))
    return layer.router.weight.dtype, layer.up.dtype, seen, float(line.split("sent ")[1].split()[0])


@pytest.mark.parametrize("precision", [BF16, AUTOCAST], ids=["weights", "autocast"])
def test_rows_travel_and_are_computed_in_bf16(precision: Any, worlds: Worlds) -> None:
    """The router stays in fp32."""
    case = MoECase({"ep": 2}, rows=64)
    wide = worlds(2).run(look_at_types, case, 2)
    for told, (*_, exact_bytes) in zip(
        worlds(2).run(look_at_types, replace(case, options=precision), 2), wide, strict=True
    ):
        router, experts, seen, sent = told
        assert router == torch.float32
        assert experts == (torch.bfloat16 if precision is BF16 else torch.float32)
        assert seen and set(seen) == {(torch.bfloat16, torch.bfloat16)}
        assert sent == pytest.approx(exact_bytes / 2, rel=0.1)
