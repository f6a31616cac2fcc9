"""
Ranks that call `parallelize` with other arguments than rank 0 are told so, by themselves, before
anything waits.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from pdrun import L, Operators, Pipeline
from pdrun.errors import DeadlineExceeded, UsageError
from pdrun.parallel.comm.mesh import make_mesh
from pdrun.parallel.model.weights import collect_weights
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.tensor import Strategy, col
from pdrun.parallel.training import rank_agreement as module
from pdrun.parallel.training.rank_agreement import (
    RankAgreement,
    describe_batch,
    describe_model,
    describe_optimizer,
    describe_scheduler,
    to_text,
)
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch


def make(options: list[dict[str, Any]]) -> None:
    mine = dict(options[torch.distributed.get_rank()])
    if "tp" in mine:
        mine = {
            "mesh": make_mesh(tp=mine["tp"]),
            "strategy": Strategy({"0": col("tp", gather=True)}),
        }
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize(model, lambda params: torch.optim.SGD(params, 0.1), **mine)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"tp": 2}, r"rank 1 has mesh=mesh\(dp=1, tp=2\), rank 0 has mesh=mesh\(dp=2\)"),
        ({"optimizer_level": 1}, "rank 1 has optimizer_level=1, rank 0 has optimizer_level=0"),
        ({"recompute": "full"}, "rank 1 has recompute=full, rank 0 has recompute=None"),
        (
            {"dataset_strategy": "full_batch"},
            (
                r"rank 1 has dataset_strategy=BatchSlicing\(dims=None, data_parallel=False,"
                r" full_batch=True\)"
            ),
        ),
    ],
)
def test_who_differs_is_reported(worlds: Worlds, other: dict[str, Any], text: str) -> None:
    kind, words = worlds(2).failure(1, make, [{}, other])
    assert kind == "UsageError"
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(words)


def test_equal_arguments_are_no_trouble(worlds: Worlds) -> None:
    worlds(2).run(make, [{"optimizer_level": 2, "clip": 1.0}] * 2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(4, 4)),
    "wide": lambda: nn.Sequential(nn.Linear(4, 8)),
    "deep": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
    "frozen": lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)),
    "double": lambda: nn.Sequential(nn.Linear(4, 4)).double(),
    "counting": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False).eval()),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "slow": lambda params: torch.optim.SGD(params, torch.tensor(0.05)),
    "adam": lambda params: torch.optim.Adam(params, 0.1),
    "groups": lambda params: torch.optim.SGD([{"params": [each]} for each in params], 0.1),
}
SCHEDULERS: dict[str, Callable[[Any], Any] | None] = {
    "none": None,
    "five": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5),
    "six": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 6),
}


def build(choices: list[str]) -> None:
    model, optimizer, scheduler = choices[torch.distributed.get_rank()].split()
    parallelize(MODELS[model](), OPTIMIZERS[optimizer], scheduler=SCHEDULERS[scheduler])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            "deep sgd five",
            "rank 1 has weight 1.weight=4 x 4 float32, rank 0 has no weight 1.weight",
        ),
        ("plain slow five", "rank 1 has lr of the optimizer's group 0=0.05"),
        (
            "plain sgd six",
            "rank 1 has step_size of the scheduler=6, rank 0 has step_size of the scheduler=5",
        ),
    ],
)
def test_other_models_and_optimizers_on_real_ranks(
    worlds: Worlds, other: str, message: str
) -> None:
    kind, words = worlds(2).failure(1, build, ["plain sgd five", other])
    assert (kind, message in words) == ("UsageError", True), words


def check(agreement: RankAgreement, choice: str) -> None:
    model, optimizer, scheduler = choice.split()
    module = MODELS[model]()
    weights = collect_weights(module)
    made = OPTIMIZERS[optimizer]([weight.param for weight in weights if weight.is_trained])
    schedule = SCHEDULERS[scheduler]
    agreement.check_equal(describe_model(module, weights))
    agreement.check_equal(describe_optimizer(made))
    agreement.check_equal(describe_scheduler(schedule(made) if schedule else None))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], RankAgreement]:
    """Make one rank's side of a call, as processes of their own would."""
    store = torch.distributed.HashStore()

    def make(rank: int) -> RankAgreement:
        monkeypatch.setattr(module, "_calls", itertools.count())
        return RankAgreement(rank, store, 0.2)

    return make


def test_the_first_difference_is_named(ranks: Callable[[int], RankAgreement]) -> None:
    ranks(0).check_equal([("mesh", "a"), ("clip", None)])
    ranks(2).check_equal([("mesh", "a"), ("clip", None)])
    with pytest.raises(
        UsageError, match=r"rank 3 has clip=1.0, rank 0 has clip=None; every rank calls it with"
    ):
        ranks(3).check_equal([("mesh", "a"), ("clip", 1.0)])
    with pytest.raises(UsageError, match="rank 4 has clip, mesh, rank 0 has mesh, clip"):
        ranks(4).check_equal([("clip", None), ("mesh", "a")])


@pytest.mark.parametrize(
    ("zero", "one", "message"),
    [
        (
            "plain sgd none",
            "wide sgd none",
            "rank 1 has weight 0.weight=8 x 4 float32, rank 0 has weight 0.weight=4 x 4",
        ),
        (
            "plain sgd none",
            "deep sgd none",
            "rank 1 has weight 1.weight=4 x 4 float32, rank 0 has no weight 1.weight",
        ),
        (
            "deep sgd none",
            "plain sgd none",
            "rank 1 has no weight 1.weight, rank 0 has weight 1.weight=4 x 4 float32",
        ),
        (
            "deep sgd none",
            "frozen sgd none",
            "rank 1 has weight 0.weight=4 x 4 float32, frozen, rank 0 has weight 0",
        ),
        ("plain sgd none", "double sgd none", "rank 1 has weight 0.weight=4 x 4 float64"),
        (
            "plain sgd none",
            "counting sgd none",
            "rank 1 has buffer 1.running_mean=4 float32, rank 0 has no buffer 1.runn",
        ),
        (
            "plain sgd none",
            "plain adam none",
            "rank 1 has optimizer=Adam, rank 0 has optimizer=SGD",
        ),
        ("plain sgd none", "plain slow none", "rank 1 has lr of the optimizer's group 0=0.05"),
        (
            "plain sgd none",
            "plain groups none",
            "rank 1 has weights of the optimizer's group 0=1, rank 0 has weights",
        ),
        (
            "plain sgd five",
            "plain sgd six",
            "rank 1 has step_size of the scheduler=6, rank 0 has step_size",
        ),
        (
            "plain sgd five",
            "plain sgd none",
            "rank 1 has scheduler=None, rank 0 has scheduler=StepLR",
        ),
    ],
)
def test_other_models_and_optimizers(
    ranks: Callable[[int], RankAgreement], zero: str, one: str, message: str
) -> None:
    check(ranks(0), zero)
    check(ranks(2), zero)
    with pytest.raises(UsageError) as caught:
        check(ranks(1), one)
    assert message in str(caught.value)


def test_what_a_rank_keeps_to_itself_is_its_own(ranks: Callable[[int], RankAgreement]) -> None:
    for rank, name in enumerate(("plain", "wide")):
        module = MODELS[name]()
        ranks(rank).check_equal(describe_model(module, collect_weights(module, ["0.*"])))


def test_each_check_meets_its_own(ranks: Callable[[int], RankAgreement]) -> None:
    zero, one = ranks(0), ranks(1)
    for value in (1, 2):
        zero.check_equal([("a", value)])
    one.check_equal([("a", 1)])
    with pytest.raises(UsageError, match="rank 1 has a=1, rank 0 has a=2"):
        one.check_equal([("a", 1)])


def test_a_first_rank_that_stays_away_is_reported(ranks: Callable[[int], RankAgreement]) -> None:
    with pytest.raises(
        DeadlineExceeded, match=r"rank 0 did not arrive here within 0\.2 s of rank 1"
    ):
        ranks(1).check_equal([("mesh", "a")])


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None"),
        (True, "True"),
        (0.1, "0.1"),
        ("a b", "a b"),
        ("a\nb", r"'a\nb'"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cpu", 0), "cpu"),
        ({"b": 1, "a": (2,)}, "{b: 1, a: (2)}"),
        ({8, 1}, "{1, 8}"),  # a set has 8 first, whatever the hash seed
        (["a", 1], "(a, 1)"),
        (Colour.RED, "RED"),
        (len, "len"),
        (print, "print"),
        (make, "make"),
        (object(), "object"),
        (nn.Linear, "Linear"),
        (
            Pipeline(4, stages={"a*": 0}),
            (
                "Pipeline(microbatches=4, schedule=1f1b, stages={a*: 0}, chunks=None, "
                "balance=layers, shared=(), dynamic=False, slices=None)"
            ),
        ),
    ],
)
def test_what_is_compared(value: Any, shown: str) -> None:
    assert to_text(value) == shown


def test_strategies_are_compared_by_what_they_say() -> None:
    shown = [to_text(Strategy({"0": col("tp", gather=gather)})) for gather in (True, True, False)]
    assert shown[0] == shown[1] != shown[2] and " at 0x" not in shown[0]
    assert to_text(Operators({"fc": L("tp", None)})) != to_text(Operators({"fc": L(None, "tp")}))


def train(options: list[tuple[str, dict[str, Any]]]) -> None:
    rank = torch.distributed.get_rank()
    how, more = options[rank]
    model = nn.Sequential(nn.Linear(4, 4))
    run = parallelize(
        model, OPTIMIZERS["sgd"], lambda output, batch: (output.sum(), len(output)), **more
    )
    x, y = torch.arange(32.0).reshape(8, 4), torch.zeros(8)
    batches: dict[str, Any] = {
        "plain": (x, y),
        "few": (x[:6], y[:6]),
        "other": (x + 1, y),
        "named": {"x": x, "y": y},
        "more": (x, y, y),
    }
    run.step(batches[how])
    run.step(batches["plain"])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            "few",
            (
                "rank 1 has batch[0]=6 x 4 float32, rank 0 has batch[0]=8 x 4 float32; step takes a"
                " global batch"
            ),
        ),
        ("other", "rank 1 has contents of batch[0]="),
    ],
)
def test_a_first_batch_that_ranks_do_not_share(worlds: Worlds, other: str, message: str) -> None:
    kind, words = worlds(2).failure(1, train, [("plain", {}), (other, {})])
    assert (kind, message in words) == ("UsageError", True), words


def test_ranks_that_have_rows_of_their_own(worlds: Worlds) -> None:
    worlds(2).run(
        train, [(how, {"dataset_strategy": "data_parallel"}) for how in ("plain", "other")]
    )


def test_what_of_a_batch_is_compared(ranks: Callable[[int], RankAgreement]) -> None:
    wide = torch.arange(24.0).reshape(4, 6)
    batch = {
        "a": wide,
        "b": (wide.T, wide.bfloat16()),
        "none": None,
        "zero": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "mask": wide > 3,
        "complex": wide.to(torch.complex64),
        "meta": torch.empty(3, device="meta"),
        "name": "x",
        "array": wide.numpy(),
        "words": numpy.array(["a", "b"]),
        "sparse": wide.to_sparse(),
        "grad": wide.clone().requires_grad_(),
    }
    ranks(0).check_equal(describe_batch(batch))
    ranks(1).check_equal(describe_batch({**batch, "a": wide.T.contiguous().T}))
    for name, value, message in (
        ("a", -wide, "rank 1 has contents of batch['a']="),
        (
            "b",
            (wide.T, wide.half()),
            "rank 1 has batch['b'][1]=4 x 6 float16, rank 0 has batch['b'][1]=4 x 6 bfloat16",
        ),
        ("zero", torch.tensor(4), "rank 1 has contents of batch['zero']="),
        ("name", "y", "rank 1 has batch['name']=y, rank 0 has batch['name']=x"),
        ("array", wide.numpy() + 1, "rank 1 has contents of batch['array']="),
        (
            "array",
            wide.numpy()[:2],
            "rank 1 has batch['array']=2 x 6 float32, rank 0 has batch['array']=4 x 6 float32",
        ),
        ("late", 1, "rank 1 has batch['late']=1, rank 0 has no batch['late']"),
    ):
        with pytest.raises(UsageError) as caught:
            ranks(1).check_equal(describe_batch({**batch, name: value}))
        assert message in str(caught.value)


def test_a_large_batch_is_looked_at_here_and_there() -> None:
    large = torch.zeros(module.MAX_HASHED_ELEMENTS * 3 + 5)
    (shown,) = (value for name, value in describe_batch(large) if name.startswith("contents"))
    large[-3 * 7 :] = 1.0
    (other,) = (value for name, value in describe_batch(large) if name.startswith("contents"))
    assert shown != other
