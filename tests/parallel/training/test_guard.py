"""What a program may not change between two steps, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.checkpoint import compatibility
from pdrun.parallel.training.guard import ConsistencyGuard

pytestmark = pytest.mark.torch


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(2, 2)


@pytest.fixture
def optimizer(model: nn.Linear) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def guard(model: nn.Linear, optimizer: torch.optim.Optimizer) -> ConsistencyGuard:
    copied = [SimpleNamespace(name="weight", param=model.weight)]
    engine: Any = SimpleNamespace(
        weights=[],
        copied_weights=copied,
        fixed_weights=copied,
        is_retargeted=True,
        resident_weights=copied,
        take_in_replaced=lambda: None,
        note_changes=lambda has_changes: None,
    )
    return ConsistencyGuard(engine, optimizer, model, ranks=1)


def test_a_weight_that_is_a_copy_may_not_change(guard: ConsistencyGuard, model: nn.Linear) -> None:
    guard.check_unchanged()
    with torch.no_grad():
        model.weight.add_(1.0)
    with pytest.raises(UsageError, match="weight was changed in place"):
        guard.check_unchanged()
    guard.remember_state()
    guard.check_unchanged()


def test_a_write_through_data_that_comes_back_is_refused(
    guard: ConsistencyGuard, model: nn.Linear
) -> None:
    """It has no version: the values are compared after steps 1, 2, 4, 8 and so on."""
    guard.check_unchanged()
    guard.remember_state()
    model.weight.data.mul_(2.0)
    with pytest.raises(UsageError, match="weight was changed in place"):
        guard.check_unchanged()
    guard.remember_state()
    guard.check_unchanged()


def test_a_weight_may_not_be_given_other_memory(guard: ConsistencyGuard, model: nn.Linear) -> None:
    model.weight.data = model.weight.data.clone()
    with pytest.raises(UsageError, match=r"weight was given other memory \(param.data = ...\)"):
        guard.check_unchanged()
    guard.remember_state()
    guard.check_unchanged()


def test_a_group_that_comes_late_is_refused(
    guard: ConsistencyGuard, optimizer: torch.optim.Optimizer
) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(UsageError, match="3 tensors in 2 groups, it had 2 in 1"):
        guard.check_unchanged()


def test_what_was_loaded_in_part_is_not_trained(guard: ConsistencyGuard) -> None:
    guard.torn_checkpoint = "step-00000007"
    with pytest.raises(UsageError, match="step-00000007 was loaded in part"):
        guard.check_unchanged()
    guard.remember_state()
    guard.check_unchanged()


def test_a_checkpoint_of_another_optimizer_is_told(optimizer: torch.optim.Optimizer) -> None:
    state: Any = SimpleNamespace(optimizer=optimizer, scheduler=None, group_members=[["weight"]])
    same, other = ({"optimizer": kind, "scheduler": None} for kind in ("SGD", "AdamW"))
    assert list(compatibility._compare_kinds(state, same)) == []
    (found,) = compatibility._compare_kinds(state, other)
    assert found == "was saved with the optimizer AdamW, this run has the optimizer SGD"
