"""Caches of keys and values while layers are recomputed: they are off, or refused by name."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.model.caches import is_cache, turn_off_caches
from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch


class LayerCache:
    """Keys of each layer, appended to by each call, as a DynamicCache."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}

    def update(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        if layer in self.keys:
            keys = torch.cat([self.keys[layer], keys], 1)
        self.keys[layer] = keys
        return keys

    def get_seq_length(self) -> int:
        return len(self.keys)


class Layer(nn.Module):
    """Reads all keys of its cache."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.fc = index, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        keys = self.fc(x)
        if past_key_values is not None:
            keys = past_key_values.update(keys, self.index)
        return x + (x @ keys.transpose(1, 2)).softmax(-1) @ keys


class Cached(nn.Module):
    """Makes a cache unless its config or the call says no."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = types.SimpleNamespace(use_cache=True)
        self.layers = nn.ModuleList(Layer(index) for index in range(2))

    def forward(self, x: torch.Tensor, use_cache: bool | None = None) -> torch.Tensor:
        wanted = self.config.use_cache if use_cache is None else use_cache
        cache = LayerCache() if wanted else None
        for layer in self.layers:
            x = layer(x, past_key_values=cache)
        return x


def data(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 3, 6, generator=torch.Generator().manual_seed(rows))


def square(out: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return out.pow(2).sum(), len(out)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.05)


def losses(recompute: Any, level: int) -> tuple[list[float], list[list[float]]]:
    run = parallelize(Cached(), sgd, square, recompute=recompute, optimizer_level=level)
    found = [run.step((data(rows),)).loss for rows in (4, 3, 1)]
    assert run.recomputed == ["layers.0", "layers.1"]
    return found, [value.flatten().tolist() for value in run.full_weights().values()]


@pytest.mark.parametrize(("recompute", "level"), [("full", 0), ("selective", 3)])
def test_a_model_that_fills_a_cache_is_recomputed(
    worlds: Worlds, recompute: str, level: int
) -> None:
    model = Cached()
    optimizer = sgd(model.parameters())
    wanted = []
    for rows in (4, 3, 1):
        loss = square(model(data(rows)), None)[0] / rows
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    for found, weights in worlds(2).run(losses, recompute, level):
        assert found == pytest.approx(wanted, rel=1e-5)
        for mine, value in zip(weights, model.state_dict().values(), strict=True):
            assert mine == pytest.approx(value.flatten().tolist(), rel=1e-4, abs=1e-6)


def step_with_a_cache(recompute: Any) -> float:
    """Train with a cache that is made whatever the configuration says, as XLM's is."""
    run = parallelize(
        Cached(),
        sgd,
        square,
        recompute=recompute,
        forward=lambda model, batch: model(batch[0], use_cache=True),
    )
    return run.step((data(),)).loss


def test_an_empty_cache_is_left_out() -> None:
    """No layer has filled it: there is nothing to read."""
    assert step_with_a_cache("full") == step_with_a_cache(None)


def test_a_filled_cache_is_refused_by_name() -> None:
    """A layer that is not recomputed has filled it before."""
    with pytest.raises(UsageError, match=r"filled twice.*use_cache=False"):
        step_with_a_cache(["layers.1"])


def test_caches_are_found_by_what_they_do() -> None:
    model = nn.ModuleDict({"inner": Cached(), "other": nn.Linear(2, 2)})
    assert turn_off_caches(model) == ["inner"] and turn_off_caches(model) == []
    assert is_cache(LayerCache()) and not is_cache({}) and not is_cache(torch.zeros(2))
