"""
What is given to `parallelize` and its helpers as something else is refused in words, before
anything runs.
"""

from typing import Any

import pytest
import torch
from torch import nn

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.layouts.device_matrix import layout_from_counts
from pdrun.parallel.layouts.grid import Grid

L = pdrun.L


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return output.sum(), len(output)


@pytest.mark.parametrize(
    "given, told",
    [
        ({"mesh": {"tp": 2}}, "mesh must be a pdrun.Mesh, got {'tp': 2}"),
        ({"mesh": ()}, "mesh must be a pdrun.Mesh, got ()"),
        ({"strategy": {"a": pdrun.col("tp")}}, "strategy must be an object with apply()"),
        ({"strategy": pdrun.Strategy}, "strategy must be an object with apply()"),
        ({"pipeline": "1f1b"}, "pipeline must be an object with apply(), got '1f1b'"),
        ({"context": True}, "context must be an object with apply() and part(), got True"),
        ({"copies": "2"}, "copies must be an integer of at least 1, got '2'"),
        (
            {"units": "blocks.*", "optimizer_level": 3},
            "units must be a list of globs, got 'blocks.*'",
        ),
        ({"units": [3], "optimizer_level": 3}, "units must be a list of globs, got [3]"),
        ({"layerwise": 3}, "layerwise must be a list of globs, got 3"),
        ({"seed": "x"}, "seed must be an integer of at least 0, got 'x'"),
        (
            {"scheduler": "cosine"},
            "scheduler must be an object with step() and state_dict(), got 'cosine'",
        ),
        ({"forward": 3}, "forward must be a function, got 3"),
        ({"loss": "mse"}, "loss must be a function, got 'mse'"),
        ({"optimizer": None}, "or a function that returns one, got None"),
        (
            {"strategy": pdrun.Operators({}), "sample": ()},
            "sample must be a batch, got an empty tuple",
        ),
        (
            {"context": pdrun.ContextParallel(tables={"weight": 7})},
            "weight, [8, 8], are not along dim 7",
        ),
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
        (lambda: layout_from_counts("22", 8), "is not a count"),
        (lambda: pdrun.Strategy([pdrun.col("tp")]), "must be a dict of styles"),
        (lambda: pdrun.Strategy({3: pdrun.col("tp")}), "must be a dict of styles"),
        (lambda: pdrun.Operators([1]), "must be a dict of layouts"),
        (lambda: pdrun.OpLayout(in_=L("tp", None)), "in_ must be a tuple"),
        (lambda: pdrun.constrain(3, L("tp")), "x must be a tensor, got int"),
        (lambda: pdrun.shard(nn.Linear(2, 2), weight="tp"), "weight must be a layout, got 'tp'"),
        (lambda: pdrun.shard(None), "must be a module or a function"),
        (lambda: pdrun.Pipeline(2, schedule=3), "schedule must be"),
        (lambda: pdrun.Pipeline(2, stages=3), "stages must be a dict, got 3"),
        (lambda: pdrun.Pipeline(2, balance={"a": -1}), "the cost of 'a' is -1"),
        (lambda: pdrun.Pipeline(2, shared=3), "shared must be a list or dict, got 3"),
        (lambda: pdrun.ContextParallel(ulysses="x"), "ulysses='x'"),
        (lambda: pdrun.ContextParallel(tables=["a"]), "is no dict"),
    ],
)
def test_what_no_layout_strategy_or_pipeline_can_be(make: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert told in str(caught.value)


def made(**given: Any) -> pdrun.Run:
    model = given.pop("model", None) or nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1)
    )
    return pdrun.parallelize(model, **{"optimizer": sgd, "loss": loss, **given})


@pytest.mark.parametrize("given", [True, False])
def test_a_scheduler_that_wants_a_number_is_refused(given: bool) -> None:
    model = nn.Linear(4, 1)
    optimizer = sgd(model.parameters())
    kind = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(
        UsageError, match=r"ReduceLROnPlateau.step needs metrics.*schedule.step\(metrics.loss\)"
    ):
        made(model=model, optimizer=optimizer, scheduler=kind(optimizer) if given else kind)


def test_such_a_scheduler_is_called_by_the_loop() -> None:
    run = made()
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=0, factor=0.5)
    for value in (1.0, 2.0, 3.0):
        run.step(torch.ones(4, 4))
        schedule.step(value)
    assert run.optimizer.param_groups[0]["lr"] == 0.025


class FullyShardedDataParallel(nn.Module):
    """Named as torch's, which wants a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 1)


@pytest.mark.parametrize(
    "model, told",
    [
        (nn.DataParallel(nn.Linear(4, 1)), "model is in a DataParallel"),
        (
            nn.Sequential(FullyShardedDataParallel(), nn.Linear(1, 1)),
            "0 is in a FullyShardedDataParallel",
        ),
    ],
)
def test_a_model_that_is_parallel_already_is_refused(model: nn.Module, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        made(model=model)


class Told(dict[str, Any]):
    """What models of Hugging Face return."""

    @property
    def loss(self) -> Any:
        return self.get("loss")


class Telling(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return Told(loss=super().forward(x).mean())


@pytest.mark.parametrize(
    "given, told",
    [
        (
            {"loss": lambda out, batch: (out.sum().item(), 3)},
            "the loss's sum must be a tensor with a gradient, got float",
        ),
        ({"loss": lambda out, batch: (out.detach().sum(), 3)}, "torch.no_grad()"),
        ({"loss": lambda out, batch: "x"}, "loss must return (sum, count), got str"),
        ({"loss": None, "model": Telling(4, 1)}, "loss=lambda out, batch: out.loss"),
        (
            {"loss": None, "forward": lambda model, batch: {"y": model(batch)}},
            "the model returned dict; loss(output",
        ),
    ],
)
def test_what_no_loss_can_be(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        made(**given).step(torch.ones(4, 4))
    assert told in str(caught.value)


def test_the_loss_of_an_output_that_has_one() -> None:
    assert isinstance(
        made(model=Telling(4, 1), loss=lambda out, batch: out.loss).step(torch.ones(4, 4)).loss,
        float,
    )


def test_a_step_inside_no_grad_is_refused() -> None:
    run = made()
    with torch.no_grad(), pytest.raises(UsageError, match=r"torch.no_grad\(\)"):
        run.step(torch.ones(4, 4))
    run.step(torch.ones(4, 4))


@pytest.mark.parametrize("level", [0, 3])
def test_weights_that_thaw_after_the_run_was_made_are_refused(level: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    run = made(model=model, optimizer_level=level)
    model[0].bias.requires_grad_(True)
    with pytest.raises(UsageError, match=r"0\.bias requires a gradient now"):
        run.step(torch.ones(4, 4))
    model[0].bias.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in run.full_weights().items()}
    run.step(torch.ones(4, 4))
    moved = {
        name for name, value in run.full_weights().items() if not torch.equal(value, before[name])
    }
    assert moved == {"1.weight"}


def penalised(model: nn.Module, batch: torch.Tensor) -> Any:
    x = batch.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output, slope


def test_a_gradient_of_gradients_wants_weights_that_stay() -> None:
    def both(output: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return output[0].sum() + output[1].norm(), len(batch)

    found = {}
    for gather in (None, "pass", "step"):
        torch.manual_seed(0)
        run = made(
            loss=both,
            forward=penalised,
            accumulate=2,
            optimizer_level=3 if gather else 0,
            gather=gather,
        )
        if gather == "pass":
            with pytest.raises(UsageError, match='gather="step"'):
                run.step(torch.ones(4, 4))
        else:
            found[gather] = [run.step(torch.ones(4, 4)).loss for _ in range(2)]
    assert found[None] == found["step"]
