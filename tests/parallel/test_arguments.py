"""What is given to `parallelize` and its helpers as something else is refused in words, before anything runs."""

from typing import Any

import pytest
import torch
from torch import nn

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.layouts.bound import counts
from pdrun.parallel.layouts.grid import Grid

L = pdrun.L


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return output.sum(), len(output)


@pytest.mark.parametrize(
    "given, told",
    [
        ({"mesh": {"tp": 2}}, "mesh={'tp': 2} is none"),
        ({"mesh": ()}, "mesh=() is none"),
        ({"strategy": {"a": pdrun.col("tp")}}, "strategy="),
        ({"strategy": pdrun.Strategy}, "strategy="),
        ({"pipeline": "1f1b"}, "pipeline='1f1b' is none"),
        ({"context": True}, "context=True is none"),
        ({"copies": "2"}, "copies='2' is no whole number"),
        ({"units": "blocks.*", "optimizer_level": 3}, "units='blocks.*' is no list of globs"),
        ({"units": [3], "optimizer_level": 3}, "no list of globs"),
        ({"layerwise": 3}, "layerwise=3 is no list of globs"),
        ({"seed": "x"}, "seed='x' is no whole number"),
        ({"scheduler": "cosine"}, "scheduler='cosine' is none"),
        ({"forward": 3}, "forward=3 is no function"),
        ({"loss": "mse"}, "loss='mse' is no function"),
        ({"optimizer": None}, "the optimizer is a NoneType"),
        ({"strategy": pdrun.Operators({}), "sample": ()}, "the sample is empty"),
        ({"context": pdrun.ContextParallel(tables={"weight": 7})}, "weight, [8, 8], are not along dim 7"),
    ],
)
def test_arguments_of_parallelize(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        pdrun.parallelize(nn.Linear(8, 8), **{"optimizer": sgd, "loss": loss, **given})
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: L(3), "3 is neither an axis"),
        (lambda: L("tp").box(Grid(("tp",), (4,)), (4, 4), 0), "is for 1 dims"),
        (lambda: L("tp").box(Grid(("tp",), (4,)), (4,), 4), "there is no rank 4"),
        (lambda: Grid(("tp",), ("4",)), "not all at least 1"),
        (lambda: counts("22", 8), "is not a count"),
        (lambda: pdrun.Strategy([pdrun.col("tp")]), "no dict of styles"),
        (lambda: pdrun.Strategy({3: pdrun.col("tp")}), "no dict of styles"),
        (lambda: pdrun.Operators([1]), "no dict of layouts"),
        (lambda: pdrun.Cut(in_=L("tp", None)), "no tuple of inputs"),
        (lambda: pdrun.constrain(3, L("tp")), "a int has no layout"),
        (lambda: pdrun.shard(nn.Linear(2, 2), weight="tp"), "weight='tp' is no layout"),
        (lambda: pdrun.shard(None), "neither a module nor a function"),
        (lambda: pdrun.Pipeline(2, schedule=3), "schedule=3"),
        (lambda: pdrun.Pipeline(2, stages=3), "stages=3 is no dict"),
        (lambda: pdrun.Pipeline(2, balance={"a": -1}), "the cost of 'a' is -1"),
        (lambda: pdrun.Pipeline(2, shared=3), "shared=3 is no list"),
        (lambda: pdrun.ContextParallel(ulysses="x"), "ulysses='x'"),
        (lambda: pdrun.ContextParallel(tables=["a"]), "is no dict"),
    ],
)
def test_what_no_layout_strategy_or_pipeline_can_be(make: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert told in str(caught.value)
