"""Batch normalisations: statistics of all ranks or of one, in classes of users, and on one rank."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.comm import watchdog
from pdrun.parallel.model import sync_batchnorm
from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import RankError, Worlds

pytestmark = pytest.mark.torch
ROWS = (8, 6, 3)


class FunctionalNorm(nn.BatchNorm2d):
    """Calls the functional form, then an activation, as timm's BatchNormAct2d does."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return self.act(
            F.batch_norm(
                x,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                self.momentum or 0.0,
                self.eps,
            )
        )


class InheritedNorm(nn.BatchNorm2d):
    """Calls the forward of torch's class, with an argument more."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return F.relu(super().forward(x) * scale)


class SyncedAct(nn.SyncBatchNorm):
    """A user's subclass of torch's synchronised class, as timm's SyncBatchNormAct."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(x))


class OwnStatistics(nn.BatchNorm2d):
    """Computes statistics itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)


class Net(nn.Module):
    """A convolution, a normalisation of some kind, and a head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = kind(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


def loss(out: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(out, batch[1], reduction="sum"), len(batch[1])


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 2, 5, 5, generator=generator), torch.arange(rows) % 3


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.5, momentum=0.9)


def trained(kind: type[nn.Module], sync: bool | str, **options: Any) -> Any:
    model = Net(kind)
    run = parallelize(model, sgd, loss, sync_batchnorm=sync, norm=True, **options)
    report = str(run.verify([batch(ROWS[0])]))
    steps = [run.step(batch(rows)) for rows in ROWS]
    weights = {name: value.tolist() for name, value in run.full_weights().items()}
    buffers = {name: value.tolist() for name, value in model.named_buffers()}
    return (
        [step.loss for step in steps],
        [step.grad_norm for step in steps],
        weights | buffers,
        report,
    )


def plain(kind: type[nn.Module], parts: int = 1) -> Any:
    """Train in one process; the statistics are those of each part of the rows."""
    model = Net(kind)
    optimizer = sgd(model.parameters())
    losses, norms = [], []
    for rows in ROWS:
        x, y = batch(rows)
        optimizer.zero_grad()
        total, buffers = 0.0, None
        first = rows // parts
        pieces = [(x, y)] if parts == 1 else [(x[:first], y[:first]), (x[first:], y[first:])]
        for part, target in pieces:
            value = loss(model(part), (part, target))[0] / rows
            value.backward()
            total += float(value.detach())
            if buffers is None:
                buffers = [buffer.clone() for buffer in model.buffers()]
        for buffer, kept in zip(model.buffers(), buffers or [], strict=True):
            buffer.copy_(kept)  # those of the first part, as DDP keeps those of rank 0
        losses.append(total)
        norms.append(float(torch.nn.utils.get_total_norm(p.grad for p in model.parameters())))
        optimizer.step()
    return losses, norms, {name: value.tolist() for name, value in model.state_dict().items()}


def assert_equal(found: Any, wanted: Any) -> None:
    for mine, want in zip(found[:2], wanted[:2], strict=True):
        assert mine == pytest.approx(want, rel=2e-5)
    for name, want in wanted[2].items():
        torch.testing.assert_close(
            torch.tensor(found[2][name]), torch.tensor(want), rtol=2e-4, atol=2e-5, msg=name
        )


@pytest.mark.parametrize(
    ("kind", "alike", "options"),
    [
        (FunctionalNorm, FunctionalNorm, {}),
        (InheritedNorm, InheritedNorm, {"optimizer_level": 3}),
        (SyncedAct, InheritedNorm, {}),
    ],
)
def test_classes_of_users_are_synchronised(
    worlds: Worlds, kind: type[nn.Module], alike: type[nn.Module], options: dict[str, Any]
) -> None:
    for found in worlds(2).run(trained, kind, True, **options):
        assert_equal(found, plain(alike))


def test_a_class_with_its_own_statistics_is_refused_by_name(worlds: Worlds) -> None:
    kinds = worlds(2).failures(trained, OwnStatistics, True)
    assert all(
        kind == "UsageError" and "OwnStatistics can't be synchronised" in text
        for kind, text in kinds
    )


class LooseNorm(nn.Module):
    """Calls the functional form outside of torch's modules: of rows, of weights, or per row."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.conv = kind, nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.conv.weight
        if self.kind == "weights":  # standardised, as in timm's StdConv2d
            flat = weight.reshape(1, 4, -1)
            weight = F.batch_norm(flat, None, None, training=True).reshape_as(weight)
        y = F.conv2d(x, weight, self.conv.bias)
        if self.kind == "per row":  # an instance norm
            flat = y.reshape(1, -1, *y.shape[2:])
            y = F.batch_norm(flat, None, None, training=True).reshape_as(y)
        if self.kind == "rows":
            y = F.batch_norm(y, None, None, training=True)
        return y.square().mean((2, 3))


def train_loose(kind: str, sync: bool | str) -> list[float]:
    run = parallelize(
        LooseNorm(kind),
        lambda params: torch.optim.SGD(params, 0.1),
        lambda output, batch: ((output - batch[1]).square().sum(), len(output)),
        sync_batchnorm=sync,
    )
    dice = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(rows, 3, 6, 6, generator=dice), torch.rand(rows, 4, generator=dice))
        for rows in ROWS
    ]
    return [run.step(batch).loss for batch in data]


def test_statistics_of_a_function_call_are_refused_by_line(worlds: Worlds) -> None:
    """Calls whose dim 0 is not the rows, and one rank, go on as in torch."""
    for sync in (False, True):
        with pytest.raises(RankError) as refused:
            worlds(2).run(train_loose, "rows", sync)
        assert "test_batch_norms.py:" in str(refused.value)
        assert "calls torch.nn.functional.batch_norm in training" in str(refused.value)
    worlds(2).run(train_loose, "rows", "local")
    worlds(1).run(train_loose, "rows", False)
    for kind in ("weights", "per row"):
        want = worlds(1).run(train_loose, kind, False)[0]
        assert worlds(2).run(train_loose, kind, False)[1] == pytest.approx(want, rel=1e-5)


def test_local_statistics_are_those_of_ddp(worlds: Worlds) -> None:
    found = worlds(2).run(told_and_trained)
    assert_equal(found[0][0], plain(FunctionalNorm, parts=2))
    assert "1 normalisations use the rows of one rank each, as DDP does" in found[0][1]
    assert found[1][1] == ""
    assert "two slices computed as one have another loss" in found[0][0][3]
    with pytest.raises(UsageError, match="must be True, False or 'local'"):
        parallelize(Net(FunctionalNorm), sgd, loss, sync_batchnorm="ddp")


def told_and_trained() -> Any:
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        found = trained(FunctionalNorm, "local")
    return found, text.getvalue()


class Flat(nn.Module):
    """One value per channel and row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(50)
        self.head = nn.Linear(50, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x.flatten(1)))


def step_of_one_row() -> Any:
    run = parallelize(Flat(), sgd, loss, sync_batchnorm=True)
    run.step(batch(2))
    run.step(batch(1))


def test_one_value_per_channel_is_refused(worlds: Worlds) -> None:
    kinds = worlds(2).failures(step_of_one_row)
    assert all(
        kind == "UsageError" and "more than 1 value per channel, got 1" in text
        for kind, text in kinds
    )
    with pytest.raises(RankError, match="more than 1 value per channel"):
        worlds(1).run(step_of_one_row)


def call_on_one_rank() -> str:
    model = Net(nn.BatchNorm2d)
    run = parallelize(model, sgd, loss, sync_batchnorm=True, timeout=4.0)
    watchdog.REPORT_SECONDS = 0.2
    run.step(batch(4))
    run.model(batch(4)[0])  # on every rank
    text = io.StringIO()
    failure = ""
    if dist.get_rank() == 0:
        with contextlib.redirect_stderr(text), pytest.raises(UsageError) as error:
            run.model(batch(4)[0])
        failure = error.value.what
    dist.barrier()
    return text.getvalue() + failure


def test_a_call_on_one_rank_is_reported_and_refused(worlds: Worlds) -> None:
    text = worlds(2).run(call_on_one_rank)[0]
    assert "rank 0 has waited 0.2 s for the other ranks: every rank must do so" in text
    assert "synchronised batch normalisations, but rank 1 did not do so in 3 s" in text


class Amplifying(nn.Module):
    """Normalises small differences of large values: rounding of fp32 is a part of them."""

    def __init__(self, skew: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.skew = skew
        with torch.no_grad():
            self.conv.weight.mul_(0.01)
            self.conv.bias.fill_(30.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.norm(self.conv(x))).mean((2, 3))
        if self.skew and dist.is_initialized() and dist.get_rank() == 1:
            out = out * (1 + self.skew)
        return self.head(out)


def verified(skew: float) -> str:
    run = parallelize(Amplifying(), sgd, loss, sync_batchnorm=True, norm=True)
    run.model.skew = skew
    try:
        return str(run.verify([batch(8)]))
    except ConfigError as error:
        return str(error)


def test_rounding_that_a_model_amplifies_is_no_difference(worlds: Worlds) -> None:
    text = worlds(2).run(verified, 0.0)[0]
    assert "differs" not in text


def test_statistics_are_as_exact_as_those_of_torch() -> None:
    """Sums on CPUs are in fp64: the mean is the fp32 number next to it."""
    values = 100 + torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    norm = nn.BatchNorm1d(8, momentum=1.0)
    assert sync_batchnorm.sync_batchnorms(norm) == 1
    norm(values)
    assert torch.equal(norm.running_mean, values.double().mean(0).float())
