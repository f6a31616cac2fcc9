"""Options of optimizer parallelism by MindSpore's rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.model.weights import parse_bucket_policy
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.zero.settings import check_mean, parse_threshold
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=dice), torch.randint(3, (8,), generator=dice)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def train(kept: list[str], axes: dict[str, int], **options: Any) -> Any:
    """
    Return the losses, the names of the weights that are sharded, those of each gradient bucket, and
    the numbers of elements that the optimizer trains.
    """
    model = make_model()
    for name, param in model.named_parameters():
        if name in kept:
            param.parallel_optimizer = False
    if "tp" in axes:
        options["strategy"] = pdrun.Strategy({"0": pdrun.col("tp"), "2": pdrun.row("tp")})
    run = parallelize(
        model,
        lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
        loss,
        mesh=pdrun.mesh(**axes),
        norm=True,
        **options,
    )
    losses = []
    for step in range(3):
        metrics = run.step(batch_of(step))
        losses += [float(metrics.loss), float(metrics.grad_norm)]
    engine = run.state.engine
    sharded = [weight.name for bucket in engine.sharded_buckets for weight in bucket.weights]
    buckets = [sorted(w.name for w in bucket.weights) for bucket in engine.gradient_buckets]
    return losses, sorted(sharded), buckets


def in_one_process(factor: float = 1.0) -> list[float]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    found = []
    for step in range(3):
        x, y = batch_of(step)
        mean = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        (mean * factor).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        optimizer.step()
        found += [mean.item(), norm.item()]
    return found


@pytest.mark.parametrize(
    ("level", "axes"), [(1, {"dp": 2}), (3, {"dp": 2}), (2, {"dp": 1, "tp": 2})]
)
def test_a_weight_can_opt_out(level: int, axes: dict[str, int], worlds: Worlds) -> None:
    kept = ["0.weight", "4.bias"]
    for losses, sharded, _ in worlds(2).run(train, kept, axes, optimizer_level=level):
        assert losses == pytest.approx(in_one_process(), rel=1e-5)
        assert not set(kept) & set(sharded)
        assert {"0.bias", "2.weight", "2.bias", "4.weight"} <= set(sharded)


def test_the_threshold_can_have_a_unit(worlds: Worlds) -> None:
    found = worlds(2).run(train, [], {"dp": 2}, optimizer_level=1, threshold="0KB")[0]
    assert len(found[1]) == 6
    found = worlds(2).run(train, [], {"dp": 2}, optimizer_level=1, threshold="200B")[0]
    assert found[1] == ["2.weight"]  # 8 x 8 x 4 bytes
    assert parse_threshold("64KB") == parse_threshold(" 64 kb") == 65536
    assert parse_threshold("1MB") == 1 << 20
    for wrong in ("64", "KB", "-1KB", "64KiB", "1.5MB", -1, 1.5, True, None):
        with pytest.raises(UsageError, match="threshold must be"):
            parse_threshold(wrong)


def test_micro_batches_can_be_added_up(worlds: Worlds) -> None:
    """MindSpore's accumulation: each micro-batch has its own mean, and they are not averaged."""
    options = {"accumulate": 2, "gradients_mean": "accumulated"}
    for losses, _, _ in worlds(2).run(train, [], {"dp": 2}, optimizer_level=2, **options):
        assert losses == pytest.approx(in_one_process(2.0), rel=1e-5)
    for wrong in ("sum", None, 1, 2.0):
        with pytest.raises(UsageError, match="gradients_mean must be"):
            check_mean(wrong)


@pytest.mark.parametrize("level", [0, 2])
def test_modules_with_one_number_share_a_bucket(level: int, worlds: Worlds) -> None:
    fusion = {"0": 1, "[24].bias": 0, "4": 1}
    found = worlds(2).run(train, [], {"dp": 2}, optimizer_level=level, comm_fusion=fusion)[0]
    losses, _, buckets = found
    assert losses == pytest.approx(in_one_process(), rel=1e-5)
    assert sorted(buckets) == [
        ["0.bias", "0.weight", "4.weight"],
        ["2.bias"],
        ["2.weight"],
        ["4.bias"],
    ]


def test_a_module_that_does_not_exist_is_refused(worlds: Worlds) -> None:
    kind, text = worlds(1).failures(train, [], {"dp": 1}, comm_fusion={"5": 1})[0]
    assert kind == "UsageError"
    assert "'5' matches no module with weights" in text
    with pytest.raises(UsageError, match="numbers from 0"):
        parse_bucket_policy({"0": -1}, 0)
