"""What loops written for DDP do around a step: refused by name, never without effect."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import RankError, Worlds

pytestmark = pytest.mark.torch


def mean_square(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(output)


def make_run(level: int = 0) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    return parallelize(
        model, lambda params: torch.optim.SGD(params, 0.1), mean_square, optimizer_level=level
    )


def rows(step: int = 0) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def step_by_hand(run: Any) -> None:
    total, count = mean_square(run.model(rows()), rows())
    (total / count).backward()
    run.optimizer.step()


def replace_parameter(run: Any) -> None:
    run.model[0].weight = nn.Parameter(torch.zeros(6, 4))
    run.step(rows())


def replace_module(run: Any) -> None:
    run.model[1] = nn.Linear(6, 2)
    run.step(rows())


def assign_state(run: Any) -> None:
    run.model.load_state_dict(copy.deepcopy(run.model).state_dict(), assign=True)
    run.step(rows())


def clip_in_a_watcher(run: Any) -> None:
    run.watchers.append(lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))
    run.step(rows())


def pickle_run(run: Any) -> None:
    pickle.dumps(run)


def train(habit: Callable[[Any], None], level: int) -> None:
    run = make_run(level)
    run.step(rows())
    habit(run)


@pytest.mark.parametrize(
    ("habit", "level", "text"),
    [
        (step_by_hand, 0, "the optimizer of a run is stepped outside of run.step"),
        (replace_parameter, 0, "0.weight is not the parameter that the model had"),
        (replace_module, 0, "1.weight is not the parameter that the model had"),
        (assign_state, 0, "0.weight is not the parameter that the model had"),
        (pickle_run, 0, "a run cannot be copied or pickled"),
    ],
    ids=["step", "parameter", "module", "assign", "pickle"],
)
def test_habits_are_refused(habit: Callable[[Any], None], level: int, text: str) -> None:
    """They had no effect, or trained by this rank's rows only."""
    with pytest.raises(UsageError, match=text):
        train(habit, level)


@pytest.mark.parametrize("habit", [step_by_hand, clip_in_a_watcher])
def test_habits_that_see_only_shards_are_refused(
    habit: Callable[[Any], None], worlds: Worlds
) -> None:
    with pytest.raises(RankError, match="clip") as told:
        worlds(2).run(train, habit, 1)
    assert told.value.kind == "UsageError"


def test_clipping_of_full_gradients_is_accepted() -> None:
    train(clip_in_a_watcher, 0)


def test_modules_that_come_without_weights_are_accepted() -> None:
    run = make_run()
    run.model.append(nn.Tanh())
    first, second = run.step(rows()).loss, run.step(rows()).loss
    assert second < first
