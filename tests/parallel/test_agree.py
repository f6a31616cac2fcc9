"""Ranks that call `parallelize` with other arguments than rank 0 are told so, by themselves, before anything waits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from pdrun.errors import DeadlineExceeded, UsageError
from pdrun.parallel import agree as module
from pdrun.parallel.mesh import of
from pdrun.parallel.modules import Strategy, col
from pdrun.parallel.parallelize import parallelize
from tests.parallel.worlds import Worlds

pytestmark = pytest.mark.torch


def make(options: list[dict[str, Any]]) -> None:
    mine = dict(options[torch.distributed.get_rank()])
    if "tp" in mine:
        mine = {"mesh": of(tp=mine["tp"]), "strategy": Strategy({"0": col("tp", gather=True)})}
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize(model, lambda params: torch.optim.SGD(params, 0.1), **mine)


@pytest.mark.parametrize(("other", "text"), [
    ({"tp": 2}, r"rank 1 has mesh=mesh\(dp=1, tp=2\), rank 0 has mesh=mesh\(dp=2\)"),
    ({"optimizer_level": 1}, "rank 1 has optimizer_level=1, rank 0 has optimizer_level=0"),
    ({"accumulate": 2}, "rank 1 has accumulate=2, rank 0 has accumulate=1"),
    ({"seed": 3}, "rank 1 has seed=3, rank 0 has seed=0"),
])  # fmt: skip
def test_who_differs_is_told(worlds: Worlds, other: dict[str, Any], text: str) -> None:
    found = worlds(2).failures(make, [{}, other])
    assert found[1][0] == "UsageError"
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(found[1][1])


def test_equal_arguments_are_no_trouble(worlds: Worlds) -> None:
    worlds(2).run(make, [{"optimizer_level": 2, "clip": 1.0}] * 2)


def test_the_first_difference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_calls", itertools.count())
    store = torch.distributed.HashStore()
    store.set("pdrun/agree/0", "mesh=a\nclip=None")
    with pytest.raises(UsageError, match=r"rank 3 has clip=1.0, rank 0 has clip=None"):
        module.agree({"mesh": "a", "clip": 1.0}, 3, store, 5.0)


def test_a_first_rank_that_stays_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_calls", itertools.count())
    with pytest.raises(DeadlineExceeded, match=r"rank 0 has not called parallelize within 0\.2 s of rank 1"):
        module.agree({"mesh": "a"}, 1, torch.distributed.HashStore(), 0.2)
