"""Losses that compare the rows of a batch: said at the first step, and exact if they gather."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch

SAID = "compares rows, adds a term per call or draws random numbers"
Loss = Callable[[Any, Any], Any]


class TwoTowers(nn.Module):
    """Embeds two views of each row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(x), dim=1), F.normalize(self.right(x), dim=1)


def local_loss(output: tuple[Tensor, Tensor], batch: Tensor) -> tuple[Tensor, int]:
    """Compare the rows of the slice."""
    scores = 5 * output[0] @ output[1].T
    return F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)


def mean_loss(output: tuple[Tensor, Tensor], batch: Tensor) -> Tensor:
    total, count = local_loss(output, batch)
    return total / count


def gathered_loss(output: tuple[Tensor, Tensor], batch: Tensor) -> tuple[Tensor, int]:
    """Compare the rows of the slice with those of all ranks; docs/parallel.md shows it."""
    left, right = output
    everyone = torch.cat(all_gather(right))
    own = dist.get_rank() * len(left) + torch.arange(len(left))
    return F.cross_entropy(5 * left @ everyone.T, own, reduction="sum"), len(left)


def row_loss(output: tuple[Tensor, Tensor], batch: Tensor) -> tuple[Tensor, int]:
    return (output[0] * output[1]).sum(), len(batch)


def narrow_loss(output: tuple[Tensor, Tensor], batch: Tensor) -> tuple[Tensor, int]:
    return (output[0] * output[1]).bfloat16().sum(), len(batch)


LOSSES: dict[str, Loss] = {
    each.__name__: each for each in (local_loss, mean_loss, gathered_loss, row_loss, narrow_loss)
}


def train(name: str) -> tuple[list[float], dict[str, Tensor], str]:
    """Return losses, weights, and what was said."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        run = parallelize(TwoTowers(), lambda params: torch.optim.SGD(params, 0.1), LOSSES[name])
        dice = torch.Generator().manual_seed(0)
        losses = [run.step(torch.randn(8, 6, generator=dice)).loss for _ in range(3)]
    return losses, run.full_weights(), told.getvalue()


@pytest.mark.parametrize("name", ["local_loss", "mean_loss"])
def test_a_loss_that_compares_rows_is_said_once(worlds: Worlds, name: str) -> None:
    """One rank of several says it; in one process there is nothing to say."""
    first, other = worlds(2).run(train, name)
    assert first[2].count(SAID) == 1
    assert "8 rows" not in first[2]  # the slice has 4
    assert SAID not in other[2]
    assert SAID not in worlds(1).run(train, name)[0][2]


@pytest.mark.parametrize("name", ["row_loss", "narrow_loss"])
def test_a_loss_of_rows_is_not_remarked(worlds: Worlds, name: str) -> None:
    assert worlds(2).run(train, name)[0][2] == ""


def test_a_loss_that_gathers_is_that_of_one_process(worlds: Worlds) -> None:
    """The recipe of docs/parallel.md."""
    losses, weights, _ = worlds(1).run(train, "local_loss")[0]
    for found in worlds(2).run(train, "gathered_loss"):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        for key, weight in weights.items():
            assert torch.allclose(found[1][key], weight, atol=1e-6), key
