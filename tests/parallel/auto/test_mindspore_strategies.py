"""MindSpore's files of operator strategies are read, written, and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pdrun
from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.auto.mindspore_strategies import (
    MindSporeOperators,
    is_operator_file,
    write_operator_strategies,
)
from pdrun.parallel.comm.mesh import make_mesh
from pdrun.parallel.layouts.device_matrix import Layout
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.operators.strategy import OpLayout
from pdrun.parallel.parallelize import parallelize

pytestmark = pytest.mark.torch

X = torch.zeros(8, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def item(*counts: list[int]) -> dict[str, Any]:
    return {"stage": 0, "parallel_strategy": list(counts)}


CELL = "Default/network-WithLossCell/_backbone-Net"
FILE = {
    "parallel_strategy_item": {
        f"{CELL}/blocks-CellList/0-Block/up-Dense/MatMul-op0": item([2, 1], [2, 1]),
        f"{CELL}/blocks-CellList/0-Block/up-Dense/BiasAdd-op0": item([2, 2], [2]),
        f"{CELL}/blocks-CellList/0-Block/GeLU-op0": item([2, 2]),
        f"{CELL}/blocks-CellList/0-Block/down-Dense/MatMul-op3": item([2, 2], [1, 2]),
        f"{CELL}/blocks-CellList/0-Block/Reshape-op7": item([4, 1]),
        f"{CELL}/head-Dense/MatMul-op10": item([4, 1], [1, 1]),
        "Default/network-WithLossCell/_loss_fn-CrossEntropy/LogSoftmax-op1": item([4, 1]),
        "Default/_VirtualDataset-op0": item([4, 1], [4]),
    },
    "parallel_layout_value_item": {
        f"{CELL}/blocks-CellList/1-Block/up-Dense/MatMul-op5": [
            {
                "dev_matrix": [2, 2],
                "alias_name": ["x", "y"],
                "tensor_map": tensor_map,
                "interleaved_parallel": False,
            }
            for tensor_map in ([[1], [-1]], [[0], [-1]])
        ]
    },
    "parallel_out_strategy_item": {
        f"{CELL}/blocks-CellList/0-Block/down-Dense/MatMul-op3": item([2, 1])
    },
}


def layouts_of(plan: OperatorPlan) -> dict[str, list[L]]:
    return {
        operator.name: [
            sharding.input_layout(slot, len(plan.graph.shape_of(index)))
            for slot, index in enumerate(operator.inputs)
        ]
        for operator, sharding in zip(plan.graph.operators, plan.shardings, strict=True)
    }


def test_nodes_are_operators_of_the_same_path() -> None:
    plan = MindSporeOperators(FILE, "ops.json").plan(Net(), make_mesh(x=4).grid, (X,))
    found = layouts_of(plan)
    assert str(plan.grid) == "x_0=2, x_1=2"
    assert found["blocks.0.up.linear"][:2] == [L("x_0", None), L("x_1", None)]
    assert found["blocks.0.gelu"] == [L("x_0", "x_1")]
    assert found["blocks.0.down.linear"][:2] == [L("x_0", "x_1"), L(None, "x_1")]
    assert found["blocks.1.up.linear"][:2] == [L("x_0", None), L("x_1", None)]
    assert found["head.linear"][0] == L(("x_0", "x_1"), None)


PARTS = Layout((2, 2, 2), ("x", "y", "interleaved_parallel"))


def test_a_plan_is_the_same_after_a_file() -> None:
    entries = {
        "blocks.0.up.weight": L("x", None),
        "blocks.1.up": (L("y", None), L("x", None)),
        "blocks.1.down": OpLayout(out=L(("y", "x"), None)),
        "head": (L(None, ("y", "x")), None),
        "blocks.0.down": (PARTS("interleaved_parallel", "None"), PARTS("None", "None")),
    }
    plan = Operators(entries).plan(Net(), make_mesh(x=2, y=2).grid, (X,))
    value = json.loads(json.dumps(write_operator_strategies(plan)))
    assert is_operator_file(value)
    again = MindSporeOperators(value, "ops.json").plan(Net(), make_mesh(x=2, y=2).grid, (X,))
    assert layouts_of(again) == layouts_of(plan)
    assert again.out_layouts == plan.out_layouts != {}
    assert again.weights == plan.weights
    assert again.interleaved == plan.interleaved != {}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            {"parallel_strategy_item": {"Default/other-Dense/MatMul-op0": item([2, 1])}},
            "no counter",
        ),
        ({"parallel_strategy_item": {f"{CELL}/head-Dense/Tanh-op0": item([2, 1])}}, "head.linear"),
        (
            {"parallel_strategy_item": {"Default/MatMul-op0": {"stage": 0}}},
            "is no file of operator",
        ),
        ({"parallel_layout_value_item": {"Default/MatMul-op0": [{}]}}, "is no file of operator"),
    ],
)
def test_nodes_without_a_counterpart_are_refused(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MindSporeOperators(value, "ops.json").plan(Net(), make_mesh(x=2).grid, (X,))


def train(path: str, saved: str) -> list[float]:
    torch.manual_seed(2)
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    run = parallelize(
        Net(),
        lambda params: torch.optim.SGD(params, 0.5),
        lambda out, batch: (F.cross_entropy(out, batch[1], reduction="sum"), len(batch[1])),
        strategy=path or None,
        sample=batches[0],
    )
    if saved:
        run.plan.save(saved, form="mindspore")
        with pytest.raises(UsageError, match="form must be"):
            run.plan.save(saved, form="torch")
    return [run.step(batch).loss for batch in batches]


def test_a_file_of_mindspore_runs_and_is_saved(worlds: Any, tmp_path: Path) -> None:
    given = tmp_path / "ops.json"
    given.write_text(json.dumps(FILE))
    (alone,) = worlds(1).run(train, "", "")
    saved = tmp_path / "saved.json"
    for losses in worlds(4).run(train, str(given), str(saved)):
        assert losses == pytest.approx(alone, rel=1e-6)
    for losses in worlds(4).run(train, str(saved), ""):
        assert losses == pytest.approx(alone, rel=1e-6)


def test_a_file_of_operators_is_no_mesh(worlds: Any, tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    path.write_text(json.dumps(FILE))
    with pytest.raises(UsageError, match="has operators, but no mesh"):
        pdrun.parallelize(Net(), lambda params: torch.optim.SGD(params, 0.5), mesh=str(path))
