"""A loss that is not finite is reported once, with the step, the rank and the module."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch


class Root(nn.Module):
    """Its output is nan where an input is below -50."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x + 50).sqrt() * self.scale


def train(level: int, where: str) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4), Root(), nn.Linear(4, 4))
    model[0].eval()

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        total = output.square().sum()
        return (total / 0 if where == "loss" else total), len(batch)

    run = parallelize(model, lambda p: torch.optim.SGD(p, 0.0), loss, optimizer_level=level)
    text = io.StringIO()
    losses = []
    with contextlib.redirect_stderr(text):
        for step in range(3):
            batch = torch.ones(4, 4)
            if step > 0 and where == "module":
                batch[3] = 1e4  # a row of rank 1
                batch[3] *= -torch.sign(model_weights(run))
            losses.append(run.step(batch).loss)
    return text.getvalue(), losses


def model_weights(run: Any) -> Tensor:
    """Return the row of the first linear layer, for an input that it makes very negative."""
    return run.full_weights()["1.weight"][0]


@pytest.mark.parametrize("level", [0, 3])
def test_the_first_module_is_named_once(level: int, worlds: Worlds) -> None:
    (first, losses), (second, _) = worlds(2).run(train, level, "module")
    assert math.isfinite(losses[0])
    assert math.isnan(losses[1])
    assert first == ""
    assert second.count("pdrun: ") == 1
    assert "the loss of step 2 is nan: on rank 1 the first output that is not finite" in second
    assert "is that of 2, whose inputs are finite" in second


def test_a_loss_function_is_named(worlds: Worlds) -> None:
    for text, _ in worlds(2).run(train, 0, "loss"):
        assert "the loss of step 1 is inf: on rank" in text
        assert text.count("the loss function produced it") == 1
