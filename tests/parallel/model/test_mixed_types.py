"""fp32 buffers beside weights of 16 bits: the error names them, and what to do works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pdrun.parallel.model.mixed_types import find_wide_buffers
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.zero.precision import Precision
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch


class Masked(nn.Module):
    """Adds an fp32 table to activations, as the windows of a Swin transformer do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("attn_mask", torch.linspace(-1, 1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.fc(x)) + self.attn_mask)


class Widened(Masked):
    """Computes a weight in fp32, as a dequantised one is."""

    def __init__(self) -> None:
        super().__init__()
        del self.attn_mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.nn.functional.linear(x, self.fc.weight.float()))


class Broken(Masked):
    """Another mistake."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x[:, :2])


def stepped(kind: type[nn.Module], precision: Any, level: int) -> float:
    run = parallelize(
        kind(),
        lambda params: torch.optim.SGD(params, 0.1),
        lambda out, batch: (out.float().pow(2).sum(), len(out)),
        precision=precision,
        optimizer_level=level,
        sync_batchnorm=True,
    )
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    return run.step((data,)).loss


@pytest.mark.parametrize("level", [0, 3])
def test_fp32_buffers_are_named_and_autocast_works(worlds: Worlds, level: int) -> None:
    for kind, text in worlds(2).failures(stepped, Masked, "bf16", level):
        assert kind == "UsageError", text
        assert "buffers attn_mask are in fp32" in text and "autocast=True" in text
    found = worlds(2).run(stepped, Masked, Precision("bf16", autocast=True), level)[0]
    assert found == pytest.approx(worlds(2).run(stepped, Masked, None, level)[0], rel=3e-2)


def test_other_errors_stay() -> None:
    names = list(find_wide_buffers(Masked().to(torch.bfloat16)))
    assert names == []
    half = Masked()
    for param in half.parameters():
        param.data = param.data.half()
    assert list(find_wide_buffers(half)) == ["attn_mask"]
    assert list(find_wide_buffers(Masked())) == []


def test_values_that_forward_makes_are_told_too(worlds: Worlds) -> None:
    for kind, text in worlds(1).failures(stepped, Widened, "bf16", 0):
        assert kind == "UsageError", text
        assert "forward makes values of another type" in text and "autocast=True" in text
    found = worlds(1).run(stepped, Widened, Precision("bf16", autocast=True), 0)[0]
    assert found == pytest.approx(worlds(1).run(stepped, Widened, None, 0)[0], rel=3e-2)


def test_an_error_without_such_buffers_is_torchs(worlds: Worlds) -> None:
    for kind, text in worlds(1).failures(stepped, Broken, None, 0):
        assert kind == "RuntimeError" and "shapes cannot be multiplied" in text
