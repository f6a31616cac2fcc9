"""The order in which a model calls its modules, read from its source."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pdrun.parallel.pipeline.split import split_model


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(count))


class Rescaled(nn.Module):
    """Reads its layers before it calls the embedding, as RWKV and XMOD do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.emb, self.frozen = linears(2), nn.Embedding(8, 4), nn.Linear(4, 4)

    def rescale(self) -> None:
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.mul_(1.0)

    def forward(self, ids: Tensor) -> Tensor:
        self.rescale()
        count = len(self.layers)
        kind = self.layers[0].weight.dtype if self.layers is not None else None
        x = self.emb(ids).to(kind) / count
        with torch.no_grad():
            x = self.frozen(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Zipped(nn.Module):
    """Calls two lists in turn, one of them of lists, as hierarchical vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linears(2) for _ in range(2))
        self.patches = linears(2)

    def forward(self, x: Tensor) -> Tensor:
        for index, (patch, block) in enumerate(zip(self.patches, self.blocks, strict=True)):
            x = patch(x) + index
            for layer in block:
                x = layer(x)
        return x


class ByIndex(nn.Module):
    """Takes the members of lists by their index, in another order than the lists are defined in."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.mixes, self.other = linears(2), linears(2), linears(1)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = self.norms[i](self.mixes[i](x))
        return self.other[0](x)


class Enumerated(ByIndex):
    """The same with one of the lists iterated."""

    def forward(self, x: Tensor) -> Tensor:
        for i, mix in enumerate(self.mixes):
            x = mix(x) + self.norms[i](x)
        return self.other[0](x)


def test_layers_that_are_read_before_they_are_called() -> None:
    units = list(split_model(Rescaled(), 2).unit_stages)
    assert units == ["emb", "frozen", "layers.0", "layers.1"]


def test_lists_that_are_iterated_together() -> None:
    assert split_model(Zipped(), 2).unit_stages == {
        "patches.0": 0,
        "blocks.0.0": 0,
        "blocks.0.1": 0,
        "patches.1": 1,
        "blocks.1.0": 1,
        "blocks.1.1": 1,
    }


@pytest.mark.parametrize(("kind", "first"), [(ByIndex, "mixes"), (Enumerated, "mixes")])
def test_lists_by_the_index_of_a_loop(kind: type[nn.Module], first: str) -> None:
    units = split_model(kind(), 2).unit_stages
    assert set(list(units)[:2]) == {"norms.0", "mixes.0"}
    assert next(iter(units)) == f"{first}.0"
    assert units == dict(zip(units, (0, 0, 0, 1, 1), strict=True))
