"""Head and loss in chunks: losses and gradients are those of the plain form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import pdrun
from pdrun.parallel.comm.autograd import copy_to_axis
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import shard_range
from pdrun.parallel.tensor.fused_loss import linear_cross_entropy as fused
from pdrun.parallel.tensor.vocab_cross_entropy import VocabShard
from tests.parallel.comm.test_collectives import axes_of

pytestmark = pytest.mark.torch

ROWS, WIDTH, WORDS = (3, 7), 8, 23


def inputs(kind: torch.dtype, has_bias: bool = True) -> list[Any]:
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(*ROWS, WIDTH, generator=draw, dtype=torch.float64)
    weight = torch.randn(WORDS, WIDTH, generator=draw, dtype=torch.float64)
    bias = torch.randn(WORDS, generator=draw, dtype=torch.float64) if has_bias else None
    targets = torch.randint(WORDS, ROWS, generator=draw)
    targets[0, 2:5] = -100
    leaves = [None if x is None else x.to(kind).requires_grad_() for x in (hidden, weight, bias)]
    return [*leaves, targets]


def plain(hidden: Any, weight: Any, bias: Any, targets: Any, **options: Any) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    loss = F.cross_entropy(
        logits.flatten(0, 1).float() if logits.dtype == torch.bfloat16 else logits.flatten(0, 1),
        targets.flatten(),
        **options,
    )
    return loss.view(targets.shape) if options.get("reduction") == "none" else loss


def grads_of(loss: torch.Tensor, leaves: list[Any]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(9)
    grad = torch.randn(loss.shape, generator=draw, dtype=torch.float64).to(loss.dtype)
    return list(torch.autograd.grad(loss, [x for x in leaves if x is not None], grad))


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_the_plain_form(
    chunk_rows: int, reduction: str, smoothing: float, kind: torch.dtype
) -> None:
    options: Any = {"reduction": reduction, "label_smoothing": smoothing}
    *leaves, targets = inputs(kind, has_bias=chunk_rows > 1)
    want = plain(*leaves, targets, **options)
    hidden, weight, bias = leaves
    found = pdrun.linear_cross_entropy(
        hidden, weight, targets, bias=bias, chunk_rows=chunk_rows, **options
    )
    bounds: Any = {"rtol": 3e-2, "atol": 8e-2} if kind == torch.bfloat16 else {}
    assert found.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
    torch.testing.assert_close(found, want, **bounds)
    for mine, theirs in zip(grads_of(found, leaves), grads_of(want, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, **bounds)


def test_losses_in_half_precision_keep_small_gradients() -> None:
    """Their scale is applied before they are rounded."""
    *leaves, targets = inputs(torch.float16)
    hidden, weight, bias = leaves
    loss = pdrun.linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_rows=5)
    exact = plain(*[x.detach().double().requires_grad_() for x in leaves], targets)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-3, atol=1e-3)
    (grad,) = torch.autograd.grad(loss * 4096, [hidden])
    assert grad.isfinite().all()
    assert (grad[0, 2:5] == 0).all()


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of a tensor that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_logits_are_never_whole(reduction: str) -> None:
    rows, words = 64, 500
    hidden = torch.randn(rows, WIDTH, requires_grad=True)
    weight = torch.randn(words, WIDTH, requires_grad=True)
    with LargestTensor() as seen:
        loss = pdrun.linear_cross_entropy(
            hidden, weight, torch.zeros(rows, dtype=torch.long), reduction=reduction, chunk_rows=8
        )
        loss.sum().backward()
    assert seen.numel == 8 * words


def test_default_chunks() -> None:
    assert fused._default_rows(32000) == 2048
    assert fused._default_rows(256_000) == 256
    assert fused._default_rows(10**9) == 1


def test_autocast_rounds_like_a_linear_layer() -> None:
    *leaves, targets = inputs(torch.float32, has_bias=False)
    hidden, weight, _ = leaves
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = plain(hidden, weight, None, targets)
        found = pdrun.linear_cross_entropy(hidden, weight, targets, chunk_rows=5)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    mine, theirs = (torch.autograd.grad(x, [hidden, weight]) for x in (found, want))
    assert [x.dtype for x in mine] == [torch.float32] * 2
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-3)


def sharded_loss(reduction: str, smoothing: float) -> None:
    axis = axes_of(Grid(("tp",), (torch.distributed.get_world_size(),)))["tp"]
    *leaves, targets = inputs(torch.float64)
    want = plain(*leaves, targets, reduction=reduction, label_smoothing=smoothing)
    low, high = shard_range(WORDS, axis.size, axis.index)
    hidden, weight, bias = leaves
    found = fused.compute_loss(
        copy_to_axis(hidden, axis),
        weight[low:high],
        bias[low:high],
        targets,
        VocabShard(axis, WORDS, low, high),
        smoothing=smoothing,
        reduction=reduction,
        chunk_rows=4,
    )
    torch.testing.assert_close(found, want)
    mine, theirs = grads_of(found, leaves), grads_of(want, leaves)
    torch.testing.assert_close(mine[0], theirs[0])
    for one, other in zip(mine[1:], theirs[1:], strict=True):
        torch.testing.assert_close(one[low:high], other[low:high])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_sharded_vocabulary(worlds: Any, reduction: str, smoothing: float) -> None:
    worlds(2).run(sharded_loss, reduction, smoothing)


class Words(nn.Module):
    """Returns what the head gets."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.emb(ids)
        for block in self.blocks:
            h = h + block(h).tanh()
        return h


def train(sharded: bool = False, **options: Any) -> list[float]:
    if sharded:
        options["mesh"] = pdrun.mesh(tp=2)
        options["strategy"] = pdrun.Strategy({"emb|head": pdrun.vocab("tp", gather=False)})
    torch.manual_seed(3)

    def forward(model: nn.Module, batch: Any) -> Any:
        total = pdrun.linear_cross_entropy(
            model(batch[0]), model.head, batch[1], reduction="sum", chunk_rows=5
        )
        return total, batch[1].numel()

    run = pdrun.parallelize(
        Words(), lambda params: torch.optim.SGD(params, lr=0.5), forward=forward, **options
    )
    ids = torch.randint(WORDS, (8, 6), generator=torch.Generator().manual_seed(4))
    batch = (ids, ids.roll(1, 1))
    assert run.memory(batch).peak > 0
    run.verify([batch])
    return [run.step(batch).loss for _ in range(3)]


@pytest.mark.parametrize("options", [{"optimizer_level": 3}, {"sharded": True}])
def test_runs_are_those_of_one_process(worlds: Any, options: Any) -> None:
    want = worlds(1).run(train)[0]
    for found in worlds(2).run(train, **options):
        assert found == pytest.approx(want, rel=1e-6)
    assert want[2] < want[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h, w, t: pdrun.linear_cross_entropy(h, w.t(), t), "the head's weight"),
        (lambda h, w, t: pdrun.linear_cross_entropy(h, w, t[:1]), "one target for each row"),
        (lambda h, w, t: pdrun.linear_cross_entropy(h, w, t, reduction="x"), "reduction must be"),
        (lambda h, w, t: pdrun.linear_cross_entropy(h, w, t, chunk_rows=0), "at least 1"),
        (lambda h, w, t: pdrun.linear_cross_entropy(h, nn.ReLU(), t), "must be a linear layer"),
        (
            lambda h, w, t: pdrun.linear_cross_entropy(h, nn.Linear(8, 23), t, bias=w[:, 0]),
            "belongs to a head that is a weight",
        ),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    with pytest.raises(pdrun.UsageError, match=message):
        call(hidden, weight, targets)
