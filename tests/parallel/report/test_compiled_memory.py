"""What compiled modules keep, and gradients over time, against counts of real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import pdrun
from pdrun.parallel.fp8.modules import use_fp8
from pdrun.parallel.report import compiled_units

pytestmark = pytest.mark.torch

WIDTH, ROWS = 32, 64


class Layer(nn.Module):
    """Keeps less if it is compiled: chains of elementwise operators are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        h = F.silu(self.up(self.norm(x))).exp().sigmoid().square()
        return x + factor * self.down(h)


class Stack(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, factor=0.5)
        return self.head(x)


def kept_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """Return the bytes that a real call keeps for its backward, without weights and input."""
    own = {p.untyped_storage()._cdata for p in [*module.parameters(), x]}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
    assert out.requires_grad
    return sum(kept.values())


def test_what_a_compiled_layer_keeps() -> None:
    torch._dynamo.reset()
    layer = Layer()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    want = kept_bytes(torch.compile(layer, backend="aot_eager_decomp_partition"), x)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        params = dict(layer.named_parameters())
        tensors = [fake.from_tensor(tensor) for tensor in (x, *params.values())]

        def call(x: torch.Tensor, *weights: torch.Tensor) -> Any:
            return torch.func.functional_call(layer, dict(zip(params, weights, strict=True)), (x,))

        graphs = compiled_units.trace_unit(call, tensors, [])
    assert graphs is not None
    assert sum(numel * dtype.itemsize for numel, dtype in graphs.kept) == want
    assert want < 0.6 * kept_bytes(layer, x)
    assert 0 in graphs.kept_inputs
    assert graphs.outputs == ((torch.Size((ROWS, WIDTH)), torch.float32),)


def test_a_compiled_layer_in_fp8_keeps_no_copy_that_it_can_make_again() -> None:
    """Assertions of the trace read the casts; they must not count as something that keeps them."""
    torch._dynamo.reset()
    torch.manual_seed(0)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
            self.down = nn.Linear(64, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    layer = Gated().bfloat16()
    use_fp8(layer, ["up", "gate", "down"], "tensor")
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        x = torch.empty(256, 32, dtype=torch.bfloat16, requires_grad=True)
        params = {name: fake.from_tensor(param) for name, param in layer.named_parameters()}

        def call(x: torch.Tensor, *weights: torch.Tensor) -> Any:
            return torch.func.functional_call(layer, dict(zip(params, weights, strict=True)), (x,))

        graphs = compiled_units.trace_unit(call, [x], [*params.values()])
    assert graphs is not None
    sizes = sorted((numel, dtype) for numel, dtype in graphs.kept if numel > 1)
    narrow = [(256 * 32, torch.float8_e4m3fn)]  # x, which two products share
    assert sizes == [*narrow, *[(256 * 64, torch.bfloat16)] * 2]
    assert set(graphs.kept_inputs) == {1, 2, 3}


def test_a_module_that_cannot_be_traced_is_counted_uncompiled() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum())

    with FakeTensorMode():
        assert compiled_units.trace_unit(call, [torch.randn(3, requires_grad=True)], []) is None


def estimates(**options: Any) -> Any:
    torch.manual_seed(0)
    run = pdrun.parallelize(
        Stack(),
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])),
        **options,
    )
    batch = torch.randn(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)
    found = run.memory(batch)
    assert run.step(batch).loss > 0
    return found


EAGER = {"backend": "aot_eager_decomp_partition"}


def test_compiled_runs_keep_less() -> None:
    eager, compiled = estimates(), estimates(compile=EAGER)
    layer = Layer()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    torch._dynamo.reset()
    less = kept_bytes(layer, x) - kept_bytes(
        torch.compile(layer, backend="aot_eager_decomp_partition"), x
    )
    saved = eager.activations - compiled.activations
    assert 6 * less <= saved <= 8 * less  # and temporaries of the last layer
    assert compiled.weights == eager.weights
    both = estimates(compile=EAGER, recompute="full")
    assert both.activations < compiled.activations


def test_gradients_count_when_they_are_there(worlds: Any) -> None:
    """At level 0 all of them stay; at level 3 few are there when activations are most."""
    whole = sum(p.numel() for p in Stack().parameters()) * 4
    (zero, _), (three, _) = (worlds(2).run(estimates, optimizer_level=level) for level in (0, 3))
    assert whole <= zero.gradients < 1.2 * whole
    assert three.gradients < whole / 2
    (again, _) = worlds(2).run(estimates, optimizer_level=2, accumulate=2)
    assert whole / 2 <= again.gradients < 1.6 * whole
