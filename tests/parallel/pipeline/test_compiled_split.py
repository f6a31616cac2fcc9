"""Deferred gradients of weights in compiled modules."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn

import pdrun
from pdrun.parallel.pipeline import split_backward
from pdrun.parallel.zero import engine

pytestmark = pytest.mark.torch

WIDTH = 8
BOUND = 240.0
KERNELS = [
    pytest.mark.thorough,
    pytest.mark.timeout(2 * BOUND),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch makes kernels with g++"),
]


class Layer(nn.Module):
    """Reads an activation after the product that has it as an input, so that buffers die early."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh().square()).sigmoid()


class Twice(Layer):
    """Uses a weight twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Stack(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(
    layer: type[nn.Module] = Layer, adds: bool = False, **options: Any
) -> list[tuple[float, float]]:
    """Train three steps; with ``adds`` sums of gradients get products, as on GPUs."""
    engine.PRODUCT_DEVICES = {"cpu"} if adds else {"cuda"}
    torch.manual_seed(1)
    if "schedule" in options:
        options["mesh"] = pdrun.mesh(pp=2)
        options["pipeline"] = pdrun.Pipeline(microbatches=4, schedule=options.pop("schedule"))
    run = pdrun.parallelize(
        Stack(layer),
        lambda params: torch.optim.SGD(params, lr=0.5),
        lambda output, batch: (
            nn.functional.cross_entropy(output, batch[1], reduction="sum"),
            len(batch[1]),
        ),
        clip=1e9,
        **options,
    )
    draw = torch.Generator().manual_seed(2)
    batch = torch.randn(8, WIDTH, generator=draw), torch.randint(3, (8,), generator=draw)
    found = [run.step(batch) for _ in range(3)]
    return [(one.loss, float(one.grad_norm or 0)) for one in found]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("zero-bubble", {"adds": True}),
        ("zero-bubble", {"adds": True, "precision": "bf16"}),
        ("zero-bubble-v", {"adds": True, "optimizer_level": 2}),
        ("zero-bubble", {"compile": {"backend": "aot_eager"}, "adds": True}),
        ("zero-bubble", {"compile": {"backend": "aot_eager"}, "recompute": "full"}),
        ("zero-bubble-v", {"compile": {"backend": "aot_eager"}, "optimizer_level": 1}),
        pytest.param("zero-bubble", {"compile": True}, marks=KERNELS),
    ],
)
def test_losses_are_those_of_one_process(worlds: Any, schedule: str, options: Any) -> None:
    want = worlds(1).run(train, precision=options.get("precision"))[0]
    for found in worlds(2).run(train, schedule=schedule, bound=BOUND, **options):
        for mine, theirs in zip(found, want, strict=True):
            assert mine == pytest.approx(theirs, rel=2e-2 if "precision" in options else 1e-5)


def test_a_weight_that_is_used_twice_is_refused() -> None:
    torch._dynamo.reset()
    layer = Twice()
    with split_backward.splitting_backward():
        out = torch.compile(layer, backend="aot_eager")(torch.randn(4, WIDTH)).sum()
    with pytest.raises(pdrun.UsageError, match="is used more than once") as error:
        split_backward.backward_input([out], [None], [], list(layer.parameters()), split=True)
    assert 'schedule="1f1b"' in str(error.value)


def deferred() -> int:
    """Return how many products a compiled backward defers."""
    counts = []
    usual = split_backward.DeferredWeightGrad.compute_grads

    def counting(self: Any, *args: Any) -> Any:
        counts.append(len(self.products))
        return usual(self, *args)

    split_backward.DeferredWeightGrad.compute_grads = counting  # type: ignore[method-assign]
    try:
        train(schedule="zero-bubble", compile={"backend": "aot_eager"})
    finally:
        split_backward.DeferredWeightGrad.compute_grads = usual  # type: ignore[method-assign]
    return min(counts)


def test_products_are_deferred(worlds: Any) -> None:
    assert min(worlds(2).run(deferred)) >= 4
