"""Models that change their weights inside a forward, and programs that compile parts of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.errors import UsageError
from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import RankError, Worlds

pytestmark = pytest.mark.torch

STEPS = 3


class Clamped(nn.Linear):
    """Changes its weight in place."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


class Renormed(nn.Linear):
    """Replaces its weight's memory, as networks for EEG do."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.3)
        return super().forward(x)


class CompiledReader(nn.Module):
    """Its compiled forward calls units, and reads a weight outside of its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.out = nn.Linear(6, 3)

    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.out(F.linear(x, self.blocks[0].weight))


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "compiled forward":
        return CompiledReader()
    layer = {"in place": Clamped, "replaced": Renormed}.get(kind, nn.Linear)
    model = nn.Sequential(layer(6, 6), nn.Tanh(), layer(6, 3))
    if kind == "compiled module":
        model[0].compile(backend="eager")
    return model


def rows(step: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step)
    count = (8, 7, 5)[step]
    return torch.randn(count, 6, generator=dice), torch.randn(count, 3, generator=dice)


def square_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), output.numel()


def make_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train(kind: str, level: int, **options: Any) -> list[float]:
    run = parallelize(
        make_model(kind),
        make_sgd,
        square_loss,
        optimizer_level=level,
        accumulate=2,
        **options,
    )
    losses = [run.step(rows(step)).loss for step in range(STEPS)]
    return losses + [float(weight.sum()) for weight in run.full_weights().values()]


def train_plain(kind: str) -> list[float]:
    model = make_model(kind)
    optimizer = make_sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        batch = rows(step)
        total, count = square_loss(model(batch[0]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach() / count))
    return losses + [float(param.detach().sum()) for param in model.parameters()]


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("kind", ["in place", "replaced"])
def test_a_forward_that_changes_weights_is_that_of_one_process(
    kind: str, level: int, worlds: Worlds
) -> None:
    """At levels 1 and 2 a replaced weight had kept its first value for all later steps."""
    want = train_plain(kind)
    for found in worlds(2).run(train, kind, level):
        assert found == pytest.approx(want, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("in place", "0.weight was changed in place while it was gathered"),
        ("replaced", r"0.weight was given other memory \(param.data = ...\) while it was gathered"),
    ],
)
def test_level_3_would_lose_such_a_change(kind: str, text: str, worlds: Worlds) -> None:
    """It had been lost silently."""
    with pytest.raises(RankError, match=text):
        worlds(2).run(train, kind, 3)


def test_a_replaced_weight_beside_a_master_is_refused() -> None:
    """The master would overwrite it."""
    with pytest.raises(UsageError, match=r"0\.weight was given other memory"):
        train("replaced", 0, precision="bf16")


@pytest.mark.parametrize("kind", ["compiled module", "compiled forward"])
def test_a_program_that_compiles_units_itself(kind: str, worlds: Worlds) -> None:
    """The compiler had traced into gathers, without an end."""
    want = train_plain(kind)
    for found in worlds(2).run(train, kind, 3):
        assert found == pytest.approx(want, rel=1e-5, abs=1e-5)
