"""Equal layers are exported once, and the graph is the one that an export of all of them has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.parallel.operators.graph.fake_model import FakeModel
from pdrun.parallel.operators.graph.fold_layers import find_equal_layers, fold_equal_layers
from tests.lib import compositions as mixed
from tests.lib import pipeline_cases as piped
from tests.lib.small_models import Block, Tiny
from tests.lib.tiers import mark_all_but

pytestmark = pytest.mark.torch


class Layer(nn.Module):
    """Takes several tensors and a number; returns a tuple."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.mix, self.scale, self.shape = nn.Linear(4, 4), scale, (4, 4)
        self.inner = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor, *, pair: tuple[Tensor, int]) -> tuple[Tensor, Tensor, int]:
        y = F.dropout(self.mix(x) * self.scale + self.shift, 0.1, self.training)
        for one in self.inner:
            y = one(y) + pair[0]
        return y, pair[0], pair[1]


class Stack(nn.Module):
    """Layers of which each gets what the one before returned, and the mask of all."""

    def __init__(self, scales: tuple[float, ...] = (1.0,) * 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, scales))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float()
        for layer in self.layers:
            x, mask, _ = layer(x, pair=(mask, 3))
        return self.head(x) * mask


class Behind(Stack):
    """Hands each layer an activation by an object that all of them have."""

    class Reader(nn.Module):
        def __init__(self, seen: Any) -> None:
            super().__init__()
            self.mix, self.seen = nn.Sequential(nn.Linear(4, 4)), seen

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x) + self.seen[0]

    class Seen(list[Tensor]):
        """A list that is known by itself, not by what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.Seen()
        self.layers = nn.ModuleList(self.Reader(self.seen) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            self.seen[:] = [x * 2]
            x = layer(x)
        return x


class Written(Tiny):
    """Writes in place what a layer returned."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
            h += 1
        return self.head(self.norm(h))


class Shared:
    """What layers have in common."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.calls = 0
        self.gate: Any = None


class Joined(nn.Module):
    """
    Layers that leave something with a common object, count there, or take from it what the model
    has put there.
    """

    class One(nn.Module):
        def __init__(self, shared: Shared, way: str) -> None:
            super().__init__()
            self.mix, self.shared, self.way = nn.Sequential(nn.Linear(4, 4)), shared, way

        def forward(self, x: Tensor) -> Tensor:
            y = self.mix(x)
            if self.way == "losses":
                self.shared.losses.append(y.mean())
            elif self.way == "calls":
                self.shared.calls += 1
                y = y * (1 / self.shared.calls)
            else:
                y = y * self.shared.gate
            return y + x

    def __init__(self, way: str) -> None:
        super().__init__()
        self.shared, self.way = Shared(), way
        self.layers = nn.ModuleList(self.One(self.shared, way) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        self.shared.losses, self.shared.calls = [], 0
        gates, first = x.unbind(0), x
        for layer, gate in zip(self.layers, gates, strict=True):
            self.shared.gate = gate
            x = layer(x)
        return (x, sum(self.shared.losses)) if self.way == "losses" else x + first


def words() -> Tensor:
    return torch.zeros(2, 6, dtype=torch.long)


MODELS: dict[str, tuple[nn.Module, Tensor, int]] = {
    "decoder": (Tiny(tied=True, p=0.1, layers=5), words(), 5),
    "mixed": (mixed.Model(False, 0.2, 4), torch.zeros(2, 8, dtype=torch.long), 4),
    "several arguments": (Stack(), torch.zeros(2, 4), 4),
    "two kinds": (Stack((1.0, 2.0, 1.0, 2.0, 1.0)), torch.zeros(2, 4), 3),
    "all different": (Stack((1.0, 2.0, 3.0, 4.0)), torch.zeros(2, 4), 0),
    "a sequential": (piped.Loose(), words(), 4),
    "an object of all": (Behind(), torch.zeros(2, 4), 4),
    "in place": (Written(layers=4), words(), 4),
    "auxiliary losses": (Joined("losses"), torch.zeros(4, 4), 4),
    "a counter": (Joined("calls"), torch.zeros(4, 4), 4),
    "a gate of each": (Joined("gate"), torch.zeros(4, 4), 4),
}
"""Model, input, and how many layers are equal."""


@pytest.mark.parametrize("name", mark_all_but(7, list(MODELS)))
def test_a_folded_export_is_the_export(name: str) -> None:
    model, x, count = MODELS[name]
    assert sum(map(len, find_equal_layers(model))) == count
    shadow = FakeModel(model, torch.device("cpu"))
    folded, whole = (shadow.export((x,), fold=fold) for fold in (True, False))
    assert folded.tensors == whole.tensors
    assert folded.operators == whole.operators
    assert (folded.inputs, folded.results, folded.result_structure) == (
        whole.inputs,
        whole.results,
        whole.result_structure,
    )
    assert all("forward" not in module.__dict__ for module in shadow.model.modules())


def test_equal_layers_leave_a_node_each() -> None:
    model = Tiny(layers=6).to("meta")
    with fold_equal_layers(model) as folded:
        assert folded
        nodes = torch.export.export(model, (words().to("meta"),), strict=False).graph.nodes
    kinds = [str(node.target) for node in nodes if node.op == "call_function"]
    assert kinds.count("pdrun.repeat_layer.default") == 5
    assert sum("scaled_dot_product_attention" in kind for kind in kinds) == 1


def test_what_shares_a_weight_or_has_hooks_inside_is_exported_by_itself() -> None:
    model = Tiny(layers=4)
    model.blocks[1].up.weight = model.blocks[2].up.weight
    model.blocks[3].up.register_forward_hook(lambda *args: None)
    assert find_equal_layers(model) == []
    model = Tiny(layers=4)
    model.blocks.append(Block(0.5))
    model.blocks[0].eval()
    assert find_equal_layers(model) == [["blocks.1", "blocks.2", "blocks.3"]]
