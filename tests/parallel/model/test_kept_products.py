"""Results that `recompute="selective"` keeps: not changed in place, and kept from hooks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdrun.errors import UsageError
from pdrun.parallel.parallelize import parallelize

pytestmark = pytest.mark.torch


class Scaled(nn.Module):
    """Divides the result of a product in place, as the first DeBERTa does."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.fc, self.in_place = nn.Linear(4, 4), in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if self.in_place:
            y /= 2.0
        else:
            y = y / 2.0
        return x + y.tanh()


def train(in_place: bool, recompute: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(in_place), Scaled(False))
    run = parallelize(
        model,
        lambda params: torch.optim.SGD(params, 0.1),
        lambda output, batch: (output.square().sum(), len(output)),
        recompute=recompute,
    )
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(1))
    return [run.step(x).loss for _ in range(2)]


def test_a_kept_result_that_is_changed_in_place_is_refused_by_name() -> None:
    """The message names the module, and what it says to do works."""
    with pytest.raises(UsageError) as refused:
        train(True, "selective")
    assert "0 changes the result of a matrix product" in str(refused.value)
    assert 'recompute="full"' in str(refused.value)
    want = train(True, None)
    assert train(True, "full") == want
    assert train(True, ("1", "selective")) == want
    assert train(False, "selective") == want


def test_kept_results_pass_no_hooks_for_saved_tensors() -> None:
    """With any torch: 2.14 asks, and warns that a later version will change its answer."""

    def count_packed(recompute: Any) -> int:
        packed: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: packed.append(tensor.numel()) or tensor, lambda saved: saved
        )
        with hooks, warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            assert train(False, recompute) == want
        return sum(packed)

    want = train(False, None)
    assert count_packed("selective") == count_packed("full") > 0
