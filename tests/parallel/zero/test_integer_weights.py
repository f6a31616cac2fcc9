"""Frozen weights that are no floating point numbers, as in quantised bases, at level 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.errors import UsageError
from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch

WIDTH = 8


class QuantisedLinear(nn.Module):
    """A frozen weight in codes, and a trained update of low rank."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        codes = torch.randint(0, 100, (WIDTH, WIDTH)).to(getattr(torch, kind))
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.01), requires_grad=False)
        self.down = nn.Parameter(0.1 * torch.randn(4, WIDTH))
        self.up = nn.Parameter(0.1 * torch.randn(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.codes.to(x.dtype) - 50) * self.scale
        return F.linear(x, weight) + F.linear(F.linear(x, self.down), self.up)


class Net(nn.Module):
    """Blocks whose weights are gathered together."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(QuantisedLinear(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def batches() -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(0)
    return [
        (torch.randn(6, WIDTH, generator=dice), torch.randint(3, (6,), generator=dice))
        for _ in range(3)
    ]


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def train(kind: str, **options: Any) -> tuple[list[float], str, list[float], str]:
    """Return the losses, the type of the codes, their values and the error of a read."""
    run = parallelize(Net(kind), lambda p: torch.optim.SGD(p, 0.5), loss, **options)
    losses = [float(run.step(batch).loss) for batch in batches()]
    codes = run.model.blocks[0].codes
    try:
        codes.sum()
        error = ""
    except UsageError as refused:
        error = str(refused)
    values = run.full_weights()["blocks.0.codes"].double().flatten().tolist()
    return losses, str(codes.dtype), values, error


def in_one_process(kind: str) -> tuple[list[float], list[float]]:
    model = Net(kind)
    values = model.blocks[0].codes.double().flatten().tolist()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    losses = []
    for batch in batches():
        total, count = loss(model(batch[0]), batch)
        mean = total / count
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    return losses, values


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("uint8", {}),
        ("int16", {"accumulate": 2}),  # a type that gloo does not send
        ("int64", {"recompute": "full", "gather": "step"}),
        ("bool", {}),
        ("float8_e4m3fn", {}),
    ],
)
def test_weights_in_codes_are_gathered(kind: str, options: Any, worlds: Worlds) -> None:
    losses, values = in_one_process(kind)
    for found in worlds(2).run(train, kind, optimizer_level=3, **options):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == f"torch.{kind}"
        assert found[2] == values
        assert "blocks.0.codes is read outside of a forward pass" in found[3]


def test_a_lower_precision_leaves_codes_as_they_are(worlds: Worlds) -> None:
    for kind in ("uint8", "float8_e4m3fn"):
        losses, values = in_one_process(kind)
        found = worlds(2).run(train, kind, optimizer_level=3, precision="bf16")[0]
        assert found[0] == pytest.approx(losses, rel=0.05)
        assert found[1:3] == (f"torch.{kind}", values)
