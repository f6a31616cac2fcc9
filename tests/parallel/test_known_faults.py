"""Faults that other systems have had, each with the behaviour that is right."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.zero.precision import Precision
from tests.lib import small_models as zoo
from tests.lib.rank_pool import Worlds
from tests.lib.small_models import Case
from tests.parallel.test_transparency import check

pytestmark = pytest.mark.torch

LEVELS = pytest.mark.parametrize("level", [0, 1, 2, 3])


def square_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """A loss whose count is the rows."""
    return (output - batch[1]).square().sum(), len(batch[1])


def pair(rows: int, wide: int = 6, step: int = 0) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step)
    return torch.randn(rows, wide, generator=dice), torch.randn(rows, 1, generator=dice)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Branching(nn.Module):
    """Which half computes depends on the data, so ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6)) for _ in range(3)
        )
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for place, half in enumerate(self.halves):
            if (x[0, 0] > 0) == bool(place % 2):
                x = x + half(x)
        return self.out(x)


def branch(level: int, times: int) -> Any:
    run = parallelize(
        Branching(), sgd, square_loss, optimizer_level=level, accumulate=times, norm=True
    )
    told = [run.step(pair(8, step=step)) for step in range(4)]
    return [m.loss for m in told], [w.tolist() for w in run.full_weights().values()]


@LEVELS
def test_conditional_modules_neither_hang_nor_differ(level: int, worlds: Worlds) -> None:
    """pytorch#158719, torchtitan#4777: ranks that leave a module out take part with zeros."""
    want = worlds(1).run(branch, 0, 4)[0]
    assert all(told == want for told in worlds(4).run(branch, level, 1))


@LEVELS
def test_every_level_agrees_bit_for_bit_under_accumulation(level: int, worlds: Worlds) -> None:
    """deepspeed#966, #1488: stages that gave different losses."""
    check(
        Case(3, level, accumulate=3, tied=True, clip=0.3, rows=(20, 19, 18), shard_group=None),
        worlds,
    )


@LEVELS
def test_an_empty_share_counts_for_nothing(level: int, worlds: Worlds) -> None:
    """pytorch#126600, deepspeed#3045: the last batch has fewer rows than there are slices."""
    check(Case(4, level, accumulate=3, rows=(2, 1, 5)), worlds)


def weighting() -> Any:
    run = parallelize(zoo.build(), sgd, zoo.token_loss, norm=True)
    m = run.step(zoo.batch_of(7, 1))
    return m.loss, m.tokens


def test_tokens_are_weighted_and_counted_once(worlds: Worlds) -> None:
    """
    prime-rl#1957, transformers#34242, trl#7100: means of means, and tokens counted by every rank.
    """
    words, targets = zoo.batch_of(7, 1)
    model = zoo.build()
    want = F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss, tokens = worlds(3).run(weighting)[2]
    assert tokens == int((targets != -100).sum())
    assert loss == pytest.approx(float(want.detach()), rel=1e-6)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.never = nn.Linear(6, 1), nn.Linear(6, 1)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.frozen(x))


def decay(level: int) -> Any:
    run = parallelize(
        Unused(),
        lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.5),
        square_loss,
        optimizer_level=level,
    )
    before = {name: w.clone() for name, w in run.full_weights().items()}
    run.step(pair(6))
    return {name: bool(torch.equal(w, before[name])) for name, w in run.full_weights().items()}


@LEVELS
def test_weights_that_nobody_uses_do_not_even_decay(level: int, worlds: Worlds) -> None:
    told = worlds(3).run(decay, level)[1]
    assert told == {
        "used.weight": False,
        "used.bias": False,
        "never.weight": True,
        "never.bias": True,
        "frozen.weight": True,
        "frozen.bias": True,
    }


class Lora(nn.Module):
    """A unit whose frozen weight is needed after the gradients of its trained ones are complete."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=False)]) for _ in range(3)
        )
        self.blocks = nn.ModuleList(_Adapted() for _ in range(3))
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class _Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.more = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.more(torch.tanh(self.base(x)))


def adapt(level: int, times: int) -> Any:
    run = parallelize(Lora(), sgd, square_loss, optimizer_level=level, accumulate=times)
    return [run.step(pair(12, step=step)).loss for step in range(4)]


@LEVELS
def test_frozen_weights_inside_a_unit(level: int, worlds: Worlds) -> None:
    assert worlds(3).run(adapt, level, 1)[0] == worlds(1).run(adapt, 0, 3)[0]


class Users(nn.Module):
    """A model with torch's own checkpoint inside, around dropout."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first, self.second, self.out = nn.Linear(6, 40), nn.Linear(40, 6), nn.Linear(6, 1)

    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(
            self.second(F.dropout(F.relu(self.first(x)), 0.3, self.training)), 0.3, self.training
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x.requires_grad_(), 0.1, self.training)
        x = (
            checkpoint(self.inner, x, use_reentrant=self.reentrant)
            if self.training and self.reentrant is not None
            else self.inner(x)
        )
        return self.out(x)


def dropped(reentrant: Any, times: int) -> Any:
    run = parallelize(Users(reentrant), sgd, square_loss, accumulate=times)
    return [run.step(pair(12, step=step)).loss for step in range(4)]


def test_recomputed_dropout_finds_its_masks(worlds: Worlds) -> None:
    """OLMo-core#828: recomputation with other masks than the forward had."""
    want = worlds(1).run(dropped, None, 3)[0]
    assert worlds(1).run(dropped, False, 3)[0] == want
    assert worlds(3).run(dropped, False, 1)[0] == want
    assert len(set(want)) == 4


def reentrant() -> Any:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 6)
            self.out = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.one, x.requires_grad_(), use_reentrant=True)
            return self.out(checkpoint(self.one, x, use_reentrant=True))

    run = parallelize(Twice(), sgd, square_loss)
    run.step(pair(6))


def test_reentrant_checkpoints_that_give_a_weight_two_gradients_are_refused(worlds: Worlds) -> None:
    kinds = worlds(2).failures(reentrant)
    assert all(kind == "UsageError" and "use_reentrant=False" in text for kind, text in kinds)


def normed(sync: bool, times: int, rows: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    run = parallelize(model, sgd, square_loss, sync_batchnorm=sync, accumulate=times)
    losses = [run.step(pair(rows, step=step)).loss for step in range(4)]
    return losses, [buffer.tolist() for buffer in model.buffers()]


def plain_norm(rows: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(4):
        batch = pair(rows, step=step)
        loss = square_loss(model(batch[0]), batch)[0] / rows
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, [buffer.tolist() for buffer in model.buffers()]


@pytest.mark.parametrize("rows", [12, 5, 2])
def test_batch_norm_is_synchronised_or_refused(rows: int, worlds: Worlds) -> None:
    """With 2 rows a third rank has none, and its stand-in must not enter the statistics."""
    losses, buffers = plain_norm(rows)
    for told in worlds(3).run(normed, True, 1, rows):
        assert told[0] == pytest.approx(losses, rel=1e-4)
        for mine, want in zip(told[1][:2], buffers[:2], strict=True):
            assert mine == pytest.approx(want, rel=1e-4, abs=1e-6)
    kinds = worlds(3).failures(normed, False, 1, rows)
    assert all(
        kind == "UsageError" and "1 normalises with each rank's own rows" in text
        for kind, text in kinds
    )


def normed_low(level: int, precision: str, sync: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 1)
    )
    if not sync:
        model[1].eval()
    policy = Precision(precision, scale=64.0)
    run = parallelize(
        model, sgd, square_loss, sync_batchnorm=sync, optimizer_level=level, precision=policy
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [run.step(pair(12, step=step)).loss for step in range(4)]
    model.eval()
    run.evaluate(pair(12))
    run.verify([pair(12)])
    report = run.explain(pair(12))
    return (
        losses,
        {name: str(param.dtype)[6:] for name, param in model.named_parameters()},
        bool(report),
    )


@pytest.mark.parametrize(("level", "precision"), [(0, "bf16"), (1, "fp16"), (3, "bf16")])
@pytest.mark.parametrize("sync", [True, False])
def test_batch_norm_keeps_its_type_beside_a_lower_one(
    level: int, precision: str, sync: bool, worlds: Worlds
) -> None:
    losses, types, _ = worlds(2).run(normed_low, level, precision, sync)[0]
    low = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    assert types == {
        "0.weight": low,
        "0.bias": low,
        "1.weight": "float32",
        "1.bias": "float32",
        "3.weight": low,
        "3.bias": low,
    }
    if sync:
        assert losses == pytest.approx(plain_norm(12)[0], rel=3e-2)


def layerwise(level: int) -> Any:
    torch.manual_seed(torch.distributed.get_rank())  # different starts
    run = parallelize(
        zoo.Tiny(), sgd, zoo.token_loss, optimizer_level=level, layerwise=["head.*"], norm=True
    )
    m = [run.step(zoo.batch_of(12, step)) for step in range(2)]
    weights = run.full_weights()
    return weights["head.weight"].tolist(), weights["emb.weight"].tolist(), m[-1].grad_norm


@LEVELS
def test_layerwise_weights_stay_each_rank_s_own(level: int, worlds: Worlds) -> None:
    one, two = worlds(2).run(layerwise, level)
    assert one[0] != two[0]
    assert one[1] == two[1]
    assert one[2] == pytest.approx(two[2], rel=1e-14)


def mixed(level: int, times: int) -> Any:
    model = zoo.build()
    model.blocks[1].double()
    inner = model.blocks[1].forward
    model.blocks[1].forward = lambda x: inner(x.double()).float()  # type: ignore[method-assign]
    run = parallelize(model, sgd, zoo.token_loss, optimizer_level=level, accumulate=times, clip=0.3)
    return [run.step(zoo.batch_of(12, step)).loss for step in range(3)]


@LEVELS
def test_mixed_types(level: int, worlds: Worlds) -> None:
    assert worlds(2).run(mixed, level, 1)[0] == worlds(1).run(mixed, 0, 2)[0]


def low(level: int, world: int, precision: str, more: dict[str, Any]) -> Any:
    run = zoo.make(Case(world, level), precision=precision, **more)
    told = [run.step(zoo.batch_of(24, step)) for step in range(3)]
    types = (
        {p.dtype for p in run.model.parameters()},
        {p.dtype for g in run.optimizer.param_groups for p in g["params"]},
    )
    return [m.loss for m in told], types, [m.skipped for m in told]


@LEVELS
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_stay_wide(level: int, precision: str, worlds: Worlds) -> None:
    losses, (model, masters), skipped = worlds(2).run(low, level, 2, precision, {})[0]
    want = worlds(1).run(zoo.plain, Case(2).alone())[0]
    assert losses == pytest.approx(want["loss"], rel=2e-2)
    assert model == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert masters == {torch.float32}
    if precision == "bf16":
        assert losses == worlds(2).run(low, 0, 2, precision, {})[0][0]
        assert not any(skipped)


@LEVELS
def test_compressed_gradients(level: int, worlds: Worlds) -> None:
    losses = worlds(3).run(compressed, level)[0]
    want = worlds(1).run(zoo.plain, Case(3).alone())[0]["loss"]
    assert losses != want
    assert losses == pytest.approx(want, rel=1e-2)


def compressed(level: int) -> Any:
    run = zoo.make(Case(3, level), compress="bf16")
    return [run.step(zoo.batch_of(24, step)).loss for step in range(3)]


def counted(level: int, times: int, more: dict[str, Any]) -> dict[str, int]:
    run = zoo.make(dataclasses.replace(Case(4, level), accumulate=times), comm_fusion=1000, **more)
    run.step(zoo.batch_of(24, 0))
    run.state.data_group.calls.clear()
    run.state.engine.place.dense.sharded.calls.clear()
    run.step(zoo.batch_of(24, 1))
    return {**run.state.data_group.calls, **run.state.engine.place.dense.sharded.calls}


def test_no_needless_collectives(worlds: Worlds) -> None:
    """
    Micro-batches are added up locally; what goes over the network a step is one sum, in which the
    losses travel, or a sum and an exchange of numbers.
    """
    fast = {"exact": False}
    assert worlds(4).run(counted, 0, 3, fast)[0] == {"all_reduce": 1}
    assert worlds(4).run(counted, 1, 3, fast)[0] == {
        "reduce_scatter": 1,
        "all_gather": 1,
        "sum_small": 1,
        "exchange": 1,
    }
    assert worlds(4).run(counted, 2, 3, fast)[0]["reduce_scatter"] == 3
    assert worlds(4).run(counted, 0, 3, {})[0] == {"all_to_all": 3, "join": 1, "exchange": 1}


def degree_one(level: int) -> Any:
    return [zoo.make(Case(1, level, recompute="full", clip=0.3)).step(zoo.batch_of(9, 0)).loss]


@LEVELS
def test_degree_one_goes_through_the_same_code(level: int, worlds: Worlds) -> None:
    """ColossalAI#3964, hyper-parallel#306."""
    check(Case(1, level, accumulate=3, tied=True, recompute="full", clip=0.3), worlds)


def outside(level: int) -> Any:
    """Use the model between steps: at level 3 by calling it; a read of a weight is refused."""
    run = zoo.make(Case(2, level))
    run.step(zoo.batch_of(8, 0))
    words = zoo.batch_of(8, 1)[0]
    with torch.no_grad():
        first = run.model(words)
        second = run.model(words)
    weight = run.model.blocks[0].up.weight
    try:
        refused = "" if float(weight.sum()) else "zero"
    except UsageError as error:
        refused = str(error)
    run.step(zoo.batch_of(8, 2))
    return first.tolist(), bool(torch.equal(first, second)), tuple(weight.shape), refused


def test_the_model_can_be_called_between_steps(worlds: Worlds) -> None:
    told = [worlds(2).run(outside, level)[0] for level in (0, 3)]
    assert told[0][:3] == told[1][:3]
    assert told[0][1:] == (True, (50, zoo.WIDTH), "")
    assert "blocks.0.up.weight is read outside of a forward pass" in told[1][3]
    assert "run.gathered_weights()" in told[1][3]


def twice() -> None:
    model = zoo.build()
    parallelize(model, sgd, zoo.token_loss)
    parallelize(model, sgd, zoo.token_loss)


def test_a_model_belongs_to_one_run(worlds: Worlds) -> None:
    assert "already belongs to a run" in worlds(1).failures(twice)[0][1]


def after_an_error() -> str:
    """A call whose optimizer fails, the same model again, then a call that fails later."""
    model = zoo.build()

    def broken(params: Any) -> Any:
        raise ValueError("no such optimizer")

    with pytest.raises(ValueError, match="no such optimizer"):
        parallelize(model, broken, zoo.token_loss)
    parallelize(model, sgd, zoo.token_loss).step(zoo.batch_of(4, 0))
    other = zoo.build()
    strategy = pdrun.Strategy({"blocks.*.nothing": pdrun.col("tp")})
    with pytest.raises(UsageError):
        parallelize(other, sgd, zoo.token_loss, strategy=strategy)
    with pytest.raises(UsageError) as caught:
        parallelize(other, sgd, zoo.token_loss)
    return str(caught.value)


def test_a_model_whose_preparation_failed_can_be_used_again(worlds: Worlds) -> None:
    assert "an earlier call has failed while it partitioned" in worlds(1).run(after_an_error)[0]


def caught(level: int, fails: bool, more: tuple[tuple[str, Any], ...]) -> list[float]:
    """
    Return the losses of two steps, after one in which the loss of the last micro-batch may have
    raised.
    """
    run = zoo.make(Case(2, level, accumulate=3, more=more))
    judge, calls = run.state.objective.loss, itertools.count(1)

    def loss(output: Any, batch: Any) -> Any:
        if torch.is_grad_enabled() and next(calls) == 3:  # not where its form is checked
            raise ValueError("of the user")
        return judge(output, batch)  # type: ignore[misc]

    if fails:
        run.state.objective.loss = loss
        with pytest.raises(ValueError, match="of the user"):
            run.step(zoo.batch_of(24, 9))
        run.steps = 0
    return [run.step(zoo.batch_of(24, step)).loss for step in range(2)]


@LEVELS
@pytest.mark.parametrize("exact", [True, False])
def test_a_step_whose_error_was_caught_leaves_nothing(
    level: int, exact: bool, worlds: Worlds
) -> None:
    for gather in ((("gather", "step"),), (("gather", "pass"),)) if level == 3 else ((),):
        more = (*gather, ("exact", exact))
        assert worlds(2).run(caught, level, True, more) == worlds(2).run(caught, level, False, more)
