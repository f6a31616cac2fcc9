"""Models for the operator engine, and the comparison of a cut one with itself in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import checkpoint

from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.watchdog import CollectiveWatchdog
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.model.shards import shard_of
from pdrun.parallel.operators.graph.constraints import constrain, shard
from pdrun.parallel.operators.module import Operators
from tests.lib import small_models as zoo
from tests.lib.shared_exports import share_exports


class Tutorial(nn.Module):
    """
    The network of MindSpore's operator-level tutorial: three dense layers, products and activations
    apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.fc1, self.fc2 = (
            nn.Parameter(torch.empty(784, 512)),
            nn.Parameter(torch.empty(512, 512)),
        )
        self.fc3 = nn.Parameter(torch.empty(512, 10))
        for weight in (self.fc1, self.fc2, self.fc3):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.flatten(x)
        x = torch.relu(torch.matmul(x, self.fc1))
        x = torch.relu(torch.matmul(x, self.fc2))
        return torch.matmul(x, self.fc3)


class Feed(nn.Module):
    """Two dense layers, every operator on its own: the network of the propagation golden."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.w1, self.b1 = (
            nn.Parameter(torch.randn(width, 4 * width) * 0.1),
            nn.Parameter(torch.randn(4 * width)),
        )
        self.w2 = nn.Parameter(torch.randn(4 * width, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(torch.relu(torch.matmul(x, self.w1) + self.b1), self.w2)


class Perceptron(nn.Module):
    """Linear layers with biases."""

    def __init__(self, wide: int = 12) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(6, wide), nn.Linear(wide, 5), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Llama(nn.Module):
    """
    A decoder block as Llama has it: rotary positions, grouped heads, a gated perceptron; and a tied
    head.
    """

    def __init__(self, width: int = 16, heads: int = 4, groups: int = 2, words: int = 21) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.emb = nn.Embedding(words, width)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, 24, bias=False), nn.Linear(width, 24, bias=False)
        self.down = nn.Linear(24, width, bias=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.emb.weight
        rates = 100.0 ** (-torch.arange(0, self.size, 2) / self.size)
        self.register_buffer("rates", rates, persistent=False)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = self.size // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        x = self.emb(tokens)
        h = self.norm1(x)
        q = self.q(h).view(rows, length, self.heads, self.size).transpose(1, 2)
        k = self.k(h).view(rows, length, self.groups, self.size).transpose(1, 2)
        v = self.v(h).view(rows, length, self.groups, self.size).transpose(1, 2)
        with torch.no_grad():
            angles = (
                torch.arange(length, device=tokens.device)[:, None].to(self.rates.dtype)
                * self.rates[None]
            )
            angles = torch.cat([angles, angles], -1)
            cos, sin = angles.cos(), angles.sin()
        q, k = self.turn(q, cos, sin), self.turn(k, cos, sin)
        times = self.heads // self.groups
        k = (
            k[:, :, None]
            .expand(rows, self.groups, times, length, self.size)
            .reshape(rows, self.heads, length, -1)
        )
        v = (
            v[:, :, None]
            .expand(rows, self.groups, times, length, self.size)
            .reshape(rows, self.heads, length, -1)
        )
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        scores = (q @ k.transpose(2, 3) / self.size**0.5).masked_fill(~mask, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(rows, length, -1)
        x = x + self.o(mixed)
        h = self.norm2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.head(x)


def _squared(x: Tensor) -> Tensor:
    return torch.square(x)


class Marked(nn.Module):
    """A model that says itself how it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = (
            shard(nn.Linear(6, 8), weight=L("tp", None)),
            shard(nn.Linear(8, 6), in_=L("dp", None)),
        )
        self.squared = shard(_squared, in_=L("tp", None), out=L(None, None))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(constrain(self.fc1(x), L(None, "tp")))
        return x + self.squared(x)


class Conv(nn.Module):
    """Convolutions, grouped ones too, pooling and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3)
        self.groups = nn.Conv2d(4, 8, 1, groups=4)
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.one(x)), 2)
        x = F.gelu(self.groups(self.two(x)))
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))


class Recommender(nn.Module):
    """Embedding tables and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(11, 8), nn.Embedding(7, 8)
        self.tags = nn.EmbeddingBag(9, 8, mode="sum")
        self.fc1, self.fc2 = nn.Linear(24, 12), nn.Linear(12, 1)

    def forward(self, users: Tensor, items: Tensor, tags: Tensor) -> Tensor:
        x = torch.cat([self.users(users), self.items(items), self.tags(tags)], -1)
        return torch.sigmoid(self.fc2(F.relu(self.fc1(x)))).squeeze(-1)


def _rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _words(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(6))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "tutorial": (Tutorial, lambda rows: (_rand(rows, 28, 28),)),
    "feed": (Feed, lambda rows: (_rand(rows, 16),)),
    "perceptron": (Perceptron, lambda rows: (_rand(rows, 6),)),
    "uneven": (lambda: Perceptron(11), lambda rows: (_rand(rows, 6),)),
    "tiny": (zoo.Tiny, lambda rows: (_words(zoo.WORDS, rows, 6),)),
    "dropped": (lambda: zoo.Tiny(p=0.3), lambda rows: (_words(zoo.WORDS, rows, 6),)),
    "marked": (Marked, lambda rows: (_rand(rows, 6),)),
    "llama": (Llama, lambda rows: (_words(21, rows, 6),)),
    "conv": (Conv, lambda rows: (_rand(rows, 3, 10, 10),)),
    "recommender": (
        Recommender,
        lambda rows: (_words(11, rows), _words(7, rows), _words(9, rows, 3)),
    ),
}


def net(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a model with the weights of seed 0."""
    torch.manual_seed(0)
    return share_exports(NETS[name][0]().to(dtype), name)


def inputs(name: str, rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return what a model is called with."""
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in NETS[name][1](rows))


def axes_of(grid: Grid) -> MeshGroups:
    rank = torch.distributed.get_rank()
    return MeshGroups(grid, rank, torch.device("cpu"), CollectiveWatchdog(30.0, rank, grid.size))


def judged(output: Tensor) -> Tensor:
    """Return a loss in which every element of an output counts differently."""
    weight = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)
    return (output * output * weight).sum() / output.numel()


def compare(
    name: str,
    axes: dict[str, int],
    entries: Any,
    rows: tuple[int, ...] = (4,),
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """
    Go forward and backward with a cut model and with the whole one; hold losses and gradients
    against each other.

    Return the plan's text, and the collectives of the first pass.
    """
    torch.use_deterministic_algorithms(False)
    reference, model = net(name, dtype), net(name, dtype)
    places = axes_of(Grid(tuple(axes), tuple(axes.values())))
    sample = inputs(name, rows[0], dtype)
    strategy = entries if isinstance(entries, Operators) else Operators(entries)
    cut = apply(strategy, model, places, sample)
    assert isinstance(cut, type(reference))
    assert list(cut.state_dict()) == list(reference.state_dict())
    tight = (
        {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    )
    counts: dict[str, tuple[int, int]] = {}
    for step, count in enumerate(rows):
        data = inputs(name, count, dtype)
        torch.manual_seed(100 + step)
        wanted = judged(reference(*data))
        torch.manual_seed(100 + step)
        places.reset_counts()
        loss = judged(cut(*data))
        forward = {str(key): (c.calls, c.nbytes) for key, c in places.counts.items()}
        if dtype == torch.float64:
            torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-13)
        else:
            assert abs(float(loss) - float(wanted)) <= 1e-6 * max(1.0, abs(float(wanted)))
        wanted.backward()
        loss.backward()
        if step == 0:
            both = {str(key): (c.calls, c.nbytes) for key, c in places.counts.items()}
            counts = both | {f"forward {key}": value for key, value in forward.items()}
        whole = dict(reference.named_parameters())
        for key, param in cut.named_parameters():
            tile, grad = shard_of(param), param.grad
            if whole[key].grad is None:
                assert grad is None
                continue
            assert grad is not None, key
            for axis in tile.sum_axes:
                grad = places[axis].all_reduce(grad)
            torch.testing.assert_close(
                grad,
                tile.take_from(whole[key].grad),
                msg=lambda told, key=key: f"{key}: {told}",
                **tight,
            )
            param.grad = whole[key].grad = None
    return {"text": cut.explain(), "counts": counts}


def sequence(name: str, axes: dict[str, int], entries: Any, steps: int = 5) -> list[float]:
    """Return the losses of some steps of plain gradient descent; no axes: of the whole model."""
    model, data = net(name), inputs(name, 8)
    places = axes_of(Grid(tuple(axes), tuple(axes.values()))) if axes else None
    if places is not None:
        apply(Operators(entries), model, places, data)
    losses = []
    for _ in range(steps):
        loss = judged(model(*data))
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                for axis in shard_of(param).sum_axes:
                    assert places is not None
                    param.grad = places[axis].all_reduce(param.grad)
                param -= 1.0 * param.grad
                param.grad = None
    return losses


def hooked(axes: dict[str, int], entries: Any) -> list[str]:
    """
    Hold a cut model whose submodules have hooks, or recompute, against the whole one; return who
    was called.
    """
    reference, model = net("tiny"), net("tiny")
    places, (data,) = axes_of(Grid(tuple(axes), tuple(axes.values()))), inputs("tiny", 4)
    apply(Operators(entries), model, places, (data,))
    seen: list[str] = []
    for name in ("blocks.0", "blocks.1", "norm"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    block = model.get_submodule("blocks.2")
    forward = block.forward

    def again(*args: Any) -> Any:
        seen.append("blocks.2")
        return checkpoint.checkpoint(forward, *args, use_reentrant=False)

    block.forward = again
    loss, wanted = judged(model(data)), judged(reference(data))
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-13)
    loss.backward()
    wanted.backward()
    whole = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        if param.grad is not None:
            grad = param.grad
            for axis in shard_of(param).sum_axes:
                grad = places[axis].all_reduce(grad)
            torch.testing.assert_close(
                grad, shard_of(param).take_from(whole[name].grad), rtol=1e-10, atol=1e-12
            )
    return seen


def copied(axes: dict[str, int], entries: Any) -> None:
    """A copy of a cut model has weights of its own, and goes through the same graph."""
    model = net("tiny")
    places, (data,) = axes_of(Grid(tuple(axes), tuple(axes.values()))), inputs("tiny", 4)
    apply(Operators(entries), model, places, (data,))
    other = copy.deepcopy(model)
    torch.testing.assert_close(other(data), model(data))
    with torch.no_grad():
        other.head.weight.zero_()
    assert float(other(data).abs().max()) == 0.0
    assert float(model(data).abs().max()) > 0.0


def apply(
    strategy: Operators, model: nn.Module, places: MeshGroups, sample: tuple[Tensor, ...]
) -> nn.Module:
    """Cut a model for a call with several arguments."""
    return strategy.cut(model, places, sample, {})
