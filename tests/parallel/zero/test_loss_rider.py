"""The losses of a step travel in the last sum of gradients where that is possible."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch

Found = dict[str, Any]


class Forked(nn.Module):
    """Rows with a positive first number use `right`, others `left`; nothing uses `idle`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.idle = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        used = x[:, 0] > 0
        parts = [
            layer(x[rows]) for layer, rows in ((self.right, used), (self.left, ~used)) if rows.any()
        ]
        return torch.cat(parts)


def train(factor: float, options: dict[str, Any]) -> Found:
    """Make two steps, the first rank with rows of the one kind, the others with the other."""
    run = parallelize(
        Forked(),
        lambda params: torch.optim.AdamW(params, 0.1, weight_decay=0.5),
        lambda output, batch: (output.double().square().sum() * factor, len(output)),
        **options,
    )
    x = torch.rand(8, 4, generator=torch.Generator().manual_seed(1)) + 0.1
    x[:4, 0] *= -1
    steps = [run.step(x), run.step(-x)]
    return {
        "losses": [step.loss for step in steps],
        "tokens": [step.tokens for step in steps],
        "weights": run.full_weights(),
        "calls": dict(run.state.data_group.calls),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2, "exact": False},
        {"compress": "bf16"},
        {"comm_fusion": 0.0001},
    ],
    ids=["plain", "accumulate", "compress", "buckets"],
)
def test_losses_travel_with_the_gradients(worlds: Worlds, options: dict[str, Any]) -> None:
    """The numbers are those of a message of their own, to the last bit, on every rank."""
    found = worlds(2).run(train, 1 / 3, options)
    assert "exchange" not in found[0]["calls"]
    apart = worlds(2).run(train, 1 / 3, {**options, "optimizer_level": 1})
    assert apart[0]["calls"]["exchange"] == 2
    for one in found:
        assert one["losses"] == apart[0]["losses"]
        assert one["tokens"] == [8.0, 8.0]
        for name, weight in one["weights"].items():
            assert torch.equal(weight, apart[0]["weights"][name]), name
    # decay shows that a weight without a gradient on any rank is left alone
    assert torch.equal(found[0]["weights"]["idle.weight"], Forked().idle.weight)
    assert not torch.equal(found[1]["weights"]["left.weight"], Forked().left.weight)


@pytest.mark.parametrize("factor", [1e300, math.inf, math.nan], ids=str)
def test_any_loss_travels(worlds: Worlds, factor: float) -> None:
    """A loss that no gradient's type can hold arrives as it is."""
    found = worlds(2).run(train, factor, {})
    apart = worlds(2).run(train, factor, {"optimizer_level": 1})
    for one in found:
        assert "exchange" not in one["calls"]
        assert repr(one["losses"][0]) == repr(apart[0]["losses"][0])


def train_complex(level: int) -> tuple[list[float], dict[str, int]]:
    """Train a weight of complex numbers."""
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat))
    run = parallelize(
        model,
        lambda params: torch.optim.SGD(params, 0.1),
        lambda output, batch: (output.square().sum(), len(output)),
        forward=lambda model, batch: (batch.to(torch.cfloat) @ model.weight).abs(),
        optimizer_level=level,
    )
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    return [run.step(x).loss for _ in range(2)], run.state.data_group.calls


def test_complex_gradients_carry_nothing(worlds: Worlds) -> None:
    """Losses go by a message of their own."""
    losses, calls = worlds(2).run(train_complex, 0)[1]
    assert calls["exchange"] == 2
    assert losses == worlds(2).run(train_complex, 1)[0][0]


def fail_once(level: int) -> tuple[list[float], dict[str, int]]:
    """Make a step whose forward fails on every rank, between two others."""
    broken: list[bool] = []

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        if broken:
            raise ValueError("the second step fails")
        return output.square().sum(), len(output)

    def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, 0.1)

    run = parallelize(Forked(), sgd, loss, optimizer_level=level)
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    losses = [run.step(x).loss]
    broken.append(True)
    with pytest.raises(ValueError, match="second step"):
        run.step(x)
    broken.clear()
    return [*losses, run.step(x).loss], run.state.data_group.calls


def test_a_failed_step_leaves_nothing_aboard(worlds: Worlds) -> None:
    """The step after a failed one has its own losses."""
    (losses, calls), other = worlds(2).run(fail_once, 0)
    assert "exchange" not in calls
    assert losses == other[0] == worlds(2).run(fail_once, 1)[0][0]
