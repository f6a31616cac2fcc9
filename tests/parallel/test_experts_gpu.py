"""Experts on NCCL: each case is proven against one process, and trains on."""

from __future__ import annotations

import os
import traceback

import pytest

import pdrun
from tests.lib import moe_models as moe
from tests.lib.moe_models import MoECase

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

BOUND = 300.0
"""Seconds for all cases."""
BIAS, LOSS = pdrun.Balance("bias", 0.05), pdrun.Balance("loss", 0.1)
BF16 = {"precision": "bf16"}
CASES = [
    MoECase({"ep": 2}),
    MoECase({"ep": 2}, model={"shared": 1, "balance": LOSS}, options={"optimizer_level": 3}),
    MoECase({"ep": 2}, options={**BF16, "optimizer_level": 1, "accumulate": 2, "clip": 0.5}),
    MoECase({"ep": 2}, model={"top_k": 1}, steering="one", options={**BF16, "recompute": "full"}),
    MoECase({"ep": 2}, steering="none", options={**BF16, "optimizer_level": 3}),
    MoECase({"ep": 2}, model={"balance": BIAS}, options={**BF16, "copies": 2}, rows=7),
    MoECase({"tp": 2}, "tp", options=BF16, rows=3),
    MoECase({"ep": 2}, options={**BF16, "compile": True}),
    MoECase({"pp": 2}, None, model={"balance": BIAS}, stages=2, options=BF16),
]


def work(cases: list[MoECase]) -> list[str]:
    """Prove and train; return what went wrong."""
    wrong = []
    for case in cases:
        try:
            steps, _ = moe.train_case(case, 2, prove=True)
            assert all(0 < loss < 30 for loss, _, _ in steps), steps
            assert len(steps[-1][2]) == 2, steps
        except Exception:
            wrong.append(f"{case}: {traceback.format_exc()}")
    return wrong


def test_experts_on_two_gpus() -> None:
    have = int(os.environ.get("PDRUN_TEST_GPUS", "0"))
    if have < 2:
        pytest.skip(f"needs 2 GPUs; PDRUN_TEST_GPUS={have}")
    told = pdrun.launch(work, CASES, devices=2, backend="cuda", timeout=BOUND)
    assert "".join(one for rank in told for one in rank) == ""
