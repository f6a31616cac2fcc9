"""Layouts by device matrices and counts on meshes that lack their axes, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pdrun
from pdrun.parallel.comm.mesh import make_mesh
from pdrun.parallel.layouts.device_matrix import Layout
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.constraints import shard
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.operators.strategy import OpLayout
from pdrun.parallel.parallelize import parallelize

pytestmark = pytest.mark.torch

MATRIX = Layout((2, 2), ("a", "b"))
ORDERED = Layout((2, 2), ("a", "b"), rank_list=(0, 2, 1, 3))
DATA = Layout((2, 2), ("dp", "mp"))
CASES: dict[str, tuple[dict[str, int] | None, dict[str, Any], dict[str, Any], str]] = {
    "counts without a mesh": (
        None,
        {"a": ((2, 2), (1, 2))},
        {},
        "mesh(dp=1, tp_0=2, tp_1=2)",
    ),
    "counts of several operators, and a split axis by name": (
        {"x": 4},
        {"a": ((2, 1), (2, 1)), "b.weight": L(None, "x"), "c.weight": (2, 1)},
        {"gather": False},
        "mesh(dp=1, x_0=2, x_1=2)",
    ),
    "a device matrix and a rank list": (
        {"x": 4},
        {"a": (MATRIX("a", "None"), MATRIX("b", "None")), "b": (ORDERED("b", "a"), None)},
        {},
        "mesh(dp=1, x_0=2, x_1=2)",
    ),
    "rows over dp, without a mesh": (
        None,
        {"a": (DATA("dp", "None"), DATA("mp", "None")), "b": OpLayout(out=DATA("dp", "None"))},
        {"optimizer_level": 2},
        "mesh(dp=2, tp=2)",
    ),
}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = (
            nn.Linear(width, out, dtype=torch.float64) for width, out in ((8, 16), (16, 8), (8, 4))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(F.gelu(self.a(x))))


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(8, 8, dtype=torch.float64), torch.randint(0, 4, (8,))) for _ in range(2)]


def summed(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return pdrun.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def train(case: str) -> tuple[list[float], str]:
    """Return the losses of a case, and its mesh; "alone" is one process without a strategy."""
    model = Layers()
    degrees, entries, options, _ = CASES.get(case, ({"dp": 1}, {}, {}, ""))
    options = dict(options)
    strategy = Operators(entries, gather=options.pop("gather", True))
    batches = make_batches()
    run = parallelize(
        model,
        lambda params: torch.optim.SGD(params, 0.5),
        summed,
        mesh=degrees and make_mesh(**degrees),
        strategy=strategy if entries else None,
        sample=batches[0],
        **options,
    )
    return [run.step(batch).loss for batch in batches], str(run.mesh)


@pytest.mark.parametrize("case", CASES)
def test_meshes_get_the_axes_that_layouts_need(worlds: Any, case: str) -> None:
    alone, _ = worlds(1).run(train, "alone")[0]
    for losses, mesh in worlds(4).run(train, case):
        assert losses == pytest.approx(alone, rel=1e-13)
        assert mesh == CASES[case][-1]


def test_plans_without_ranks_get_them_too() -> None:
    x = torch.zeros(8, 8, dtype=torch.float64)
    plan = Operators({"a": ((2, 2), (1, 2))}).plan(Layers(), make_mesh(x=4).grid, (x,))
    assert str(plan.grid) == "x_0=2, x_1=2"
    assert plan.shardings[0].input_layout(0, 2) == L("x_0", "x_1")
    model = Layers()
    shard(model.b, weight=(2, 1))
    plan = Operators({}).plan(model, make_mesh(x=4).grid, (x,))
    assert str(plan.grid) == "x_0=2, x_1=2"
    assert L("x_0", None) in plan.weights.values()


def test_a_device_matrix_of_a_stage() -> None:
    """With pp the devices of a layout are those of one stage, as in MindSpore."""
    x = torch.zeros(8, 8, dtype=torch.float64)
    entries = {"a": (DATA("dp", "None"), DATA("mp", "None"))}
    plan = Operators(entries).plan(Layers(), make_mesh(pp=2, dp=2, tp=2).grid, (x,))
    assert L("tp", None) in plan.weights.values()
