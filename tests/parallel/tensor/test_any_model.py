"""Models of which nothing is known: what can be sharded alone is, and the rest stays full."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdrun.errors import UsageError
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.tensor import strategy_for
from tests.lib.decoder_model import compare

pytestmark = pytest.mark.torch

TP = Grid(("tp",), (2,))
WIDTH, VOCABULARY, ROWS, LENGTH = 16, 12, 3, 5


class Scaled(nn.Linear):
    """A linear module that computes something else, and stays full."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Mixed(nn.Module):
    """A convolution along the sequence, a recurrent module, a weight that is read, tied logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH + 4, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH + 1, 3, padding=1)
        self.deep = nn.Conv1d(WIDTH + 1, WIDTH + 1, 1, groups=WIDTH + 1)
        self.up = nn.Linear(WIDTH + 1, WIDTH)
        self.mixer = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.scaled = Scaled(WIDTH, WIDTH)
        self.read = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.narrow = nn.Linear(WIDTH, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.emb.weight
        self.bias = self.head.bias

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.positions.weight[: ids.shape[1]]
        x = self.deep(self.conv(x.transpose(1, 2)).relu()).transpose(1, 2)
        x = self.mixer(self.up(x))[0]
        x = self.norm(self.scaled(x) @ self.read.weight.T)
        return self.head(x) + self.narrow(x).sum()


def _loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def test_what_is_sharded() -> None:
    lines = list(strategy_for(Mixed()).plan(Mixed(), TP).lines())
    assert lines[:3] == [
        "vocabulary over tp: emb, head, bias",
        "channels over tp, gathered: conv",
        "columns over tp, gathered: up",
    ]
    assert "positions.weight" in lines[3]
    assert "read.weight" in lines[3]


def _mixed() -> None:
    ids = torch.randint(VOCABULARY, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    model = Mixed().double()
    compare(model, strategy_for(model), TP, (ids[0], ids[1]), loss=_loss)


def test_an_unknown_model_is_that_of_one_process(worlds: Any) -> None:
    """17 channels over 2 ranks are 9 and 8."""
    worlds(2).run(_mixed)


def test_a_known_type_in_a_wrapper() -> None:
    """Modules of peft's models have other names: the names of llama match nothing."""
    model = nn.Module()
    model.config = SimpleNamespace(model_type="llama")
    model.inner = nn.Linear(WIDTH, WIDTH)
    assert list(strategy_for(model).rules) == ["inner"]


class Decoded(nn.Module):
    """Reads the weight of a module that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)

    def decode(self, x: Tensor, table: nn.Module) -> Tensor:
        return x @ table.weight.T

    def forward(self, ids: Tensor) -> Tensor:
        return self.decode(self.mid(self.emb(ids)), self.emb)


def test_a_weight_that_is_read_from_a_variable() -> None:
    assert list(strategy_for(Decoded()).rules) == ["mid"]


def test_an_attention_of_a_plan_that_is_not_by_heads() -> None:
    """Its q has a gate, so that its width is that of fused q, k and v: it is computed in full."""
    attention = nn.Module()
    attention.num_heads, attention.head_dim = 4, 4
    attention.q_proj, attention.o_proj = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, WIDTH)
    model = nn.Module()
    model.self_attn, model.up = attention, nn.Linear(WIDTH, WIDTH)
    model._tp_plan = {"self_attn.q_proj": "colwise", "self_attn.o_proj": "rowwise", "up": "colwise"}
    assert list(strategy_for(model).plan(model, TP).lines()) == [
        "columns over tp, gathered: self_attn.q_proj, self_attn.o_proj",
        "columns over tp: up",
    ]


def test_a_model_without_anything_to_shard() -> None:
    with pytest.raises(UsageError, match=r"no linear module.*pdrun.Operators"):
        strategy_for(nn.Sequential(nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, 2)))
