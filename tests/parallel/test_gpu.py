"""
Compositions on NCCL: cases of a kind in one job, each proven against one process, saved and taken
up again.
"""

from __future__ import annotations

import os
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pdrun
from pdrun.parallel.comm import axis_transport, sharded
from pdrun.parallel.comm.p2p import messages
from pdrun.parallel.compiler import matmul_pass
from tests.lib import compositions as mixed
from tests.lib.compositions import Place, Task

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

NARROW = Task(precision="bf16", clip=1.0)
DROPS = Task(p=0.2, tied=True, clip=0.3)
BOUND = 240.0
"""Seconds for all cases of a kind."""


def more(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(options.items())


COMPILED = more(compile=True)
FP8 = Task(precision=pdrun.Fp8(least=0), clip=1.0)
FP8_ROWS = Task(precision=pdrun.Fp8("row", least=0))
ONE = {
    "fp8": [
        (FP8, Place()),
        (replace(FP8, p=0.2), Place(level=3, accumulate=2, more=more(recompute="selective"))),
        (FP8, Place(accumulate=2, more=COMPILED)),
        (FP8_ROWS, Place(level=1)),
        (FP8_ROWS, Place(level=3, more=(*COMPILED, *more(recompute="full")))),
    ],
}
TWO = {
    "data": [
        (Task(optimizer="AdamW"), Place(dp=2)),
        (DROPS, Place(dp=2, level=1, accumulate=2)),
        (DROPS, Place(dp=2, level=2, more=more(recompute="full"))),
        (DROPS, Place(dp=2, level=3, accumulate=2, more=more(recompute="selective"))),
        (Task(), Place(dp=2, level=3, more=more(offload="all"))),
        (NARROW, Place(dp=2, level=2, more=more(compress="bf16"))),
        (FP8, Place(dp=2, level=3, more=COMPILED)),
        (Task(), Place(dp=2, level=3, copies=2)),
    ],
    "tensor": [
        (DROPS, Place(tp=2)),
        (DROPS, Place(tp=2, kind="sequence", accumulate=2)),
        (NARROW, Place(tp=2, kind="sequence")),
        (FP8, Place(tp=2, kind="sequence")),
        (DROPS, Place(tp=2, copies=2)),
        (DROPS, Place(tp=2, kind="operators")),
    ],
    "stages": [
        (DROPS, Place(pp=2, accumulate=4, schedule="gpipe")),
        (DROPS, Place(pp=2, accumulate=4, more=more(recompute="full"))),
        (NARROW, Place(pp=2, accumulate=4, level=1)),
        (Task(layers=4), Place(pp=2, accumulate=4, schedule="interleaved")),
        (DROPS, Place(pp=2, accumulate=4, schedule="zero-bubble")),
        (Task(layers=4), Place(pp=2, accumulate=4, schedule="zero-bubble-v")),
    ],
    "context": [
        (DROPS, Place(cp=2)),
        (NARROW, Place(cp=2)),
        (Task(), Place(cp=2, ulysses=2)),
        (Task(), Place(cp=2, copies=2)),
    ],
    "compiled": [
        (Task(empty=True), Place(dp=2, level=3, more=COMPILED)),
        (Task(), Place(tp=2, kind="sequence", copies=2, more=(*COMPILED, *more(recompute="full")))),
        (Task(), Place(tp=2, kind="operators", more=COMPILED)),
    ],
    "copied": [
        (DROPS, Place(dp=2, accumulate=2)),
        (DROPS, Place(dp=2, level=1)),
        (DROPS, Place(dp=2, level=2, accumulate=2)),
        (DROPS, Place(dp=2, level=3, accumulate=2, more=more(recompute="selective"))),
        (NARROW, Place(dp=2, level=3)),
        (Task(), Place(dp=2, level=3, more=COMPILED)),
        (DROPS, Place(pp=2, accumulate=4)),
        (DROPS, Place(pp=2, accumulate=4, schedule="gpipe")),
        (Task(layers=4), Place(pp=2, accumulate=4, schedule="interleaved")),
        (Task(layers=4), Place(pp=2, accumulate=4, schedule="zero-bubble-v")),
        (NARROW, Place(pp=2, accumulate=4, level=1, more=COMPILED)),
    ],
    "joined": [
        (Task(), Place(tp=2, kind="sequence")),
        (DROPS, Place(tp=2, kind="sequence", accumulate=2, more=COMPILED)),
        (NARROW, Place(tp=2, kind="sequence", more=COMPILED)),
        (Task(), Place(tp=2, kind="sequence", copies=2, more=COMPILED)),
    ],
}
FOUR = {
    "data": [(DROPS, Place(dp=4, level=3, more=more(shard_group=2)))],
    "tensor": [
        (DROPS, Place(dp=2, tp=2, level=3, kind="sequence")),
        (DROPS, Place(tp=4, kind="2d")),
        (DROPS, Place(dp=2, tp=2, level=2, kind="operators")),
    ],
    "stages": [
        (DROPS, Place(pp=2, tp=2, accumulate=4, level=1)),
        (DROPS, Place(pp=2, dp=2, accumulate=4, level=3)),
        (DROPS, Place(pp=2, tp=2, accumulate=4, kind="operators")),
        (DROPS, Place(pp=2, dp=2, accumulate=4, level=2, schedule="zero-bubble")),
        (Task(layers=4), Place(pp=4, accumulate=4)),
    ],
    "context": [
        (DROPS, Place(cp=2, tp=2, kind="sequence")),
        (Task(), Place(cp=4, ulysses=2)),
        (DROPS, Place(pp=2, cp=2, accumulate=2)),
    ],
    "compiled": [(Task(), Place(dp=2, tp=2, level=3, kind="sequence", more=COMPILED))],
}


def work(cases: list[tuple[Task, Place]], folder: str, kind: str) -> list[str]:
    """Prove, train, save, and take up again; return what went wrong."""
    wrong = []
    if kind == "joined":  # however little it is worth with tensors of these sizes
        axis_transport.MIN_SHARD_BYTES = axis_transport.MIN_ROW_BYTES = matmul_pass.MIN_BYTES = 0
    if kind == "copied":
        sharded.MIN_SHARD_BYTES = messages.MIN_MESSAGE_BYTES = 1
    for number, (task, place) in enumerate(cases):
        try:
            before = mixed.first(task, place, f"{folder}/{number}")
            after = mixed.second(task, place, f"{folder}/{number}")
            assert all(0 < loss < 30 for loss, _ in before + after), (before, after)
        except Exception:
            wrong.append(f"{task} {place}: {traceback.format_exc()}")
    return wrong


@pytest.mark.parametrize("kind", ONE)
def test_on_one_gpu(kind: str, tmp_path: Path) -> None:
    if not int(os.environ.get("PDRUN_TEST_GPUS", "0")):
        pytest.skip("needs a GPU; PDRUN_TEST_GPUS=0")
    told = pdrun.launch(
        work, ONE[kind], str(tmp_path), kind, devices=1, backend="cuda", timeout=BOUND
    )
    assert "".join(told[0]) == ""


@pytest.mark.parametrize("kind", TWO)
@pytest.mark.parametrize(("world", "found"), [(2, TWO), (4, FOUR)], ids=["two", "four"])
def test_on_gpus(world: int, found: Any, kind: str, tmp_path: Path) -> None:
    have = int(os.environ.get("PDRUN_TEST_GPUS", "0"))
    if have < world:
        pytest.skip(f"needs {world} GPUs; PDRUN_TEST_GPUS={have}")
    told = pdrun.launch(
        work, found[kind], str(tmp_path), kind, devices=world, backend="cuda", timeout=BOUND
    )
    assert "".join(one for rank in told for one in rank) == ""
