"""
A graph is traced on the device of the run, for the call that the run makes, and compared with the
model before anything is sharded.
"""

from __future__ import annotations

import random
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pdrun.errors import UsageError
from pdrun.parallel.comm import mesh
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.fake_model import FakeModel, find_device
from pdrun.parallel.operators.graph.trace_check import check_trace
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.parallelize import parallelize

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
ENTRIES = {"a.weight": L("tp", None)}


class ByDevice(nn.Module):
    """Another branch by device, as many libraries have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 3)
        self.drop = nn.Dropout(0.5)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() if x.device.type == "cpu" else x.sin()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.b(self.drop(self.act(self.a(x))) * scale)


class WhileExporting(ByDevice):
    """Computes something else while it is exported."""

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() if torch.compiler.is_exporting() else x.tanh()


class LayerDrop(ByDevice):
    """Skips an operator by Python's generator."""

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x if random.random() < 0.5 else x.tanh()


class Counting(ByDevice):
    """Depends on earlier calls."""

    calls = 0

    def act(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return x.sin() if type(self).calls == 2 else x.tanh()


class Checked(ByDevice):
    """Checks a number that it counts in its input, as models with pictures and texts do."""

    def act(self, x: torch.Tensor) -> torch.Tensor:
        torch._check((x > -1e9).sum().item() == x.numel())
        return x.tanh()


class Cache:
    """Keys and values of one forward; no type that an export knows."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def update(self, x: torch.Tensor) -> None:
        self.kept.append(x)

    def get_seq_length(self) -> int:
        return len(self.kept)


class Caching(ByDevice):
    """Returns a cache unless its config says no, as models of the transformers library do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(use_cache=True)

    def forward(self, x: torch.Tensor, use_cache: bool | None = None) -> Any:
        out = super().forward(x)
        if self.config.use_cache if use_cache is None else use_cache:
            cache = Cache()
            cache.update(out)
            return {"logits": out, "cache": cache}
        return {"logits": out}


def exported(model: nn.Module, x: torch.Tensor) -> Any:
    return FakeModel(model, CPU).export((x,))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, generator=generator), torch.arange(4) % 3


def summed(out: Any, batch: Any) -> tuple[torch.Tensor, int]:
    logits = out["logits"] if isinstance(out, dict) else out
    return F.cross_entropy(logits, batch[1], reduction="sum"), len(batch[1])


def test_the_graph_is_that_of_the_runs_device() -> None:
    kinds = [operator.kind for operator in exported(ByDevice().to("meta"), batch()[0]).operators]
    assert "tanh" in kinds and "sin" not in kinds
    assert find_device(ByDevice().to("meta"), (batch()[0],)) == CPU
    assert find_device(nn.Linear(2, 2), ()) == CPU
    plan = Operators(ENTRIES).plan(ByDevice(), Grid(("tp",), (2,)), (batch()[0],))
    assert "tanh" in [operator.kind for operator in plan.graph.operators]


def trained(kind: type[nn.Module], steps: int = 1, **options: Any) -> tuple[float, list[float]]:
    """Train one model with operators and in plain torch; return the worst difference, losses."""
    model, plain = kind(), kind()
    frozen = options.pop("frozen", ())
    for each in (model, plain):
        for name in frozen:
            each.get_submodule(name).eval()
    forward = options.get("forward")
    run = parallelize(
        model,
        lambda params: torch.optim.SGD(params, 0.1),
        summed,
        mesh=mesh.make_mesh(tp=2),
        strategy=Operators(ENTRIES),
        sample=batch(),
        **options,
    )
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    losses = []
    for rows in (4, 3, 2)[:steps]:
        part = tuple(x[:rows] for x in batch())
        out = forward(plain, part) if forward else plain(part[0])
        loss = summed(out, part)[0] / rows
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(abs(run.step(part).loss - float(loss.detach())))
    weights = run.full_weights()
    worst = max(float((weights[k] - v).abs().max()) for k, v in plain.state_dict().items())
    return worst, losses


class Undropped(ByDevice):
    """Without dropout, to compare with plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


class CachingUndropped(Caching):
    """The same."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0] * 2, scale=0.5) if len(batch) > 1 else model(batch[0])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Undropped, {}),
        (Undropped, {"forward": scaled}),
        (ByDevice, {"frozen": ("drop",)}),
        (Checked, {"frozen": ("drop",)}),
        (CachingUndropped, {}),
    ],
)
def test_branches_forwards_frozen_modules_and_caches(
    worlds: Any, kind: type[nn.Module], options: dict[str, Any]
) -> None:
    worst, losses = worlds(2).run(trained, kind, 3, **options)[0]
    assert worst < 1e-6 and max(losses) < 1e-6


def test_a_trace_with_dropout_is_the_model() -> None:
    model, (x, _) = ByDevice(), batch()
    graph = exported(model, x)
    state = torch.get_rng_state()
    check_trace(graph, model, (x,), {}, CPU)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("kind", [WhileExporting, Counting])
def test_a_trace_that_differs_names_the_operator_and_what_the_model_computes(
    kind: type[ByDevice],
) -> None:
    model, (x, _) = kind(), batch()
    if kind is Counting:
        Counting.calls = 1
    graph = exported(model, x)
    with pytest.raises(UsageError) as error:
        check_trace(graph, model, (x,), {}, CPU)
    assert "computes something else than its trace on the sample: result 0" in error.value.what
    assert "They part at sin at" in error.value.what and "test_trace.py" in error.value.what
    assert "where the model computes tanh" in error.value.what


def test_pythons_generator_is_not_a_reason_to_differ_unless_it_decides() -> None:
    model, (x, _) = LayerDrop(), batch()
    random.seed(3)
    state = random.getstate()
    graph = exported(model, x)
    outcomes = set()
    for seed in range(6):
        random.seed(seed)
        try:
            check_trace(graph, model, (x,), {}, CPU)
            outcomes.add("equal")
        except UsageError:
            outcomes.add("differs")
    assert outcomes == {"equal", "differs"}
    random.setstate(state)


def test_a_forward_that_calls_another_method_is_refused(worlds: Any) -> None:
    with pytest.raises(Exception, match="forward= did not call the model on the sample"):
        worlds(2).run(trained, Undropped, forward=by_method)


def by_method(model: Any, batch: Any) -> torch.Tensor:
    return model.act(batch[0])


def test_a_cache_that_the_batch_asks_for_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="does not export") as error:
        FakeModel(Caching(), CPU).export((batch()[0],), {"use_cache": True})
    assert "use_cache=False" in error.value.hint
    model = Caching()
    FakeModel(model, CPU)
    assert model.config.use_cache, "the user's model has changed"


def test_masks_with_gradients_only_do_not_raise() -> None:
    """Without gradients torch's encoder layer has another implementation in evaluation mode."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 4, 8)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    graph = FakeModel(model, CPU).export((x,), {"src_key_padding_mask": padding})
    check_trace(graph, model, (x,), {"src_key_padding_mask": padding}, CPU)
