"""
Which module belongs to which stage: by count, by cost, by the user's map, and what is refused.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.pipeline.split import split_model
from tests.lib.small_models import LENGTH, WIDTH, WORDS, Tiny, batch_of

pytestmark = pytest.mark.torch


def _sequence(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def test_layers_are_shared_out_evenly_and_the_rest_lies_around_them() -> None:
    found = split_model(Tiny(layers=3), 2)
    assert found.unit_stages == {
        "emb": 0,
        "blocks.0": 0,
        "blocks.1": 0,
        "blocks.2": 1,
        "norm": 1,
        "head": 1,
    }
    assert found.loose_weights == {"never": (0, 1)}
    assert found.modules_of(1) == ["blocks.2", "norm", "head"]
    assert sum(found.cost_shares) == pytest.approx(1)


def test_a_sequential_is_a_row_of_its_members() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4)
    )
    found = split_model(model, 3)
    assert found.unit_stages == {"0": 0, "2": 1, "4": 2}
    assert found.free_modules == ("1", "3")


def test_lists_inside_of_modules_and_of_lists() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(5, 4)
            self.layers = nn.ModuleList(_sequence(4, 4, 4) for _ in range(4))
            self.norm = nn.LayerNorm(4)

    model = nn.Module()
    model.model, model.lm_head = Inner(), nn.Linear(4, 5)
    assert split_model(model, 2).unit_stages == {
        "model.emb": 0,
        "model.layers.0": 0,
        "model.layers.1": 0,
        "model.layers.2": 1,
        "model.layers.3": 1,
        "model.norm": 1,
        "lm_head": 1,
    }
    two = nn.Module()
    two.stem, two.low, two.high = nn.Conv2d(1, 1, 1), _sequence(2, 2, 2), _sequence(2, 2, 2)
    assert split_model(two, 2).unit_stages == {
        "stem": 0,
        "low.0": 0,
        "low.1": 0,
        "high.0": 1,
        "high.1": 1,
    }


def test_the_least_largest_stage() -> None:
    found = split_model(_sequence(8, 64, 64, 8, 8, 8), 2, balance="parameters")
    assert found.unit_stages == {"0": 0, "1": 0, "2": 1, "3": 1, "4": 1}
    costs = {"0": 1.0, "[12]": 0.5, "4": 6.0}
    assert split_model(_sequence(*[2] * 6), 2, balance=costs).unit_stages == {
        "0": 0,
        "1": 0,
        "2": 0,
        "3": 0,
        "4": 1,
    }


def test_operations_are_counted() -> None:
    """An embedding costs nothing, the head as much as it multiplies."""
    found = split_model(Tiny(layers=3), 2, balance="flops", sample=batch_of(5, 0))
    rows, width = 5 * LENGTH, WIDTH
    assert found.costs["emb"] == 0
    assert found.costs["head"] == 2 * rows * width * WORDS
    products = 2 * rows * width * (3 * width + width + 50 + 50)
    attention = 2 * 2 * rows * LENGTH * width
    assert found.costs["blocks.1"] == products + attention
    assert found.modules_of(0) == ["emb", "blocks.0", "blocks.1"]
    with pytest.raises(UsageError, match="sample=batch"):
        split_model(Tiny(layers=3), 2, balance="flops")
    with pytest.raises(UsageError, match="does not run on fake tensors"):
        split_model(Looks(layers=3), 2, balance="flops", sample=batch_of(5, 0))


class Looks(Tiny):
    """Decides on a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if int(x.sum()) else x


def test_the_users_map() -> None:
    model = Tiny(layers=3)
    found = split_model(model, 2, {"blocks.0": 0, "blocks.[12]": 1, "head": 1})
    assert found.unit_stages == {
        "emb": 0,
        "blocks.0": 0,
        "blocks.1": 1,
        "blocks.2": 1,
        "norm": 1,
        "head": 1,
    }
    spelt = split_model(model, 2, {"*": 0, "head": 1, "never": 1})
    assert (spelt.unit_stages["head"], spelt.unit_stages["blocks.2"], spelt.loose_weights) == (
        1,
        0,
        {"never": (1,)},
    )
    assert split_model(model, 2, {"h*": 1, "*": 0}).unit_stages["head"] == 1
    inside = split_model(model, 2, {"blocks.2.up": 1, "blocks.2.down": 1, "norm": 1, "blocks.*": 0})
    assert [inside.unit_stages[f"blocks.2.{name}"] for name in ("qkv", "proj", "up", "down")] == [
        0,
        0,
        1,
        1,
    ]
    assert "blocks.1" in inside.unit_stages
    first = split_model(model, 2, {"emb": 0, "blocks.[01]": 0, "blocks.*": 1, "head": 1})
    assert first.unit_stages == {
        "emb": 0,
        "blocks.0": 0,
        "blocks.1": 0,
        "blocks.2": 1,
        "norm": 1,
        "head": 1,
    }
    inner = {
        "*.0": 0,
        "blocks.1.up": 1,
        "blocks.1": 0,
        "blocks.*": 1,
        "*.qkv": 0,
        "emb": 0,
        "head": 1,
    }
    assert split_model(model, 2, inner).unit_stages["blocks.2"] == 1, "of globs the first"
    assert [
        split_model(model, 2, inner).unit_stages[f"blocks.1.{name}"] for name in ("qkv", "up")
    ] == [0, 1]
    last = split_model(model, 2, {"blocks.*": 0, "blocks.2": 1, "*": 1, "emb": 0})
    assert last.unit_stages == {
        "emb": 0,
        "blocks.0": 0,
        "blocks.1": 0,
        "blocks.2": 1,
        "norm": 1,
        "head": 1,
    }
    assert (
        split_model(
            nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), 2, {"0": 0, "1": 1}
        ).unit_stages["1"]
        == 1
    )


def test_shared_weights() -> None:
    found = split_model(Tiny(layers=3), 3, shared=["emb.weight"])
    assert found.loose_weights["emb.weight"] == (0, 2)
    assert split_model(Tiny(layers=3), 3, shared={"emb.weight": [1]}).loose_weights[
        "emb.weight"
    ] == (0, 1)


def test_a_model_without_memory_is_cut_as_well() -> None:
    with torch.device("meta"):
        model = Tiny(layers=4)
    assert split_model(model, 4, balance="parameters").unit_stages["head"] == 3


@pytest.mark.parametrize(
    ("stages", "more", "told"),
    [
        (
            2,
            {"by": {"blocs.*": 0, "head": 1, "nrom": 1}},
            "'blocs.*', 'nrom' match nothing in the model; did you mean",
        ),
        (2, {"by": {"head": 2}}, "'head' has stage 2, and the stages are 0 to 1"),
        (2, {"by": {"head": 0}}, "stage 1 of 2 has no module"),
        (5, {}, "3 layers cannot be split into 5 stages"),
        (2, {"balance": "time"}, "balance='time'"),
        (2, {"balance": {"nothing": 1.0}}, "balance: 'nothing' matches nothing"),
        (2, {"by": {"head": 1}, "balance": "parameters"}, "balance= cannot be combined"),
        (
            2,
            {"by": {"zzz": 0}},
            "stages: 'zzz' matches nothing in the model; there are, for example, emb, ",
        ),
        (
            2,
            {"shared": ["emb.wieght"]},
            "shared: 'emb.wieght' matches nothing in the model; did you mean 'emb.weight'?",
        ),
        (2, {"shared": {"emb.weight": [3]}}, "shared with stage 3"),
    ],
)
def test_refusals_name_what_is_wrong(stages: int, more: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_model(Tiny(layers=3), stages, **more)
    assert told in str(caught.value)


def test_a_model_without_lists_needs_a_map() -> None:
    model = nn.Module()
    model.a, model.b = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(UsageError, match="no ModuleList or Sequential"):
        split_model(model, 3)
    assert split_model(model, 2).unit_stages == {"a": 0, "b": 1}
    assert split_model(model, 2, {"b": 1, "a": 0}).unit_stages == {"a": 0, "b": 1}


class LateNorm(nn.Module):
    """Modules in another order than they are called: in dicts, methods, loops and by key."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.parts = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.places = nn.Embedding(4, 4)
        self.parts["words"] = nn.Embedding(4, 4)
        self.never = nn.Linear(4, 4)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["words"](x) + self.places(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) * self.scales[0]
        for layer in self.parts.layers:
            h = layer(h)
        return self.norm(h) @ self.parts["words"].weight.T


def test_units_are_in_the_order_of_their_calls() -> None:
    found = split_model(LateNorm(), 2)
    assert list(found.unit_stages.items()) == [
        ("parts.words", 0),
        ("places", 0),
        ("never", 0),
        ("parts.layers.0", 0),
        ("parts.layers.1", 1),
        ("norm", 1),
    ]
    assert found.loose_weights == {"scales.0": (0, 1), "parts.words.weight": (0, 1)}


def test_an_embedding_of_two_halves_is_on_every_stage() -> None:
    class Half(nn.Module):
        def __init__(self, words: nn.Embedding) -> None:
            super().__init__()
            self.words, self.layers = words, nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    model, words = nn.Module(), nn.Embedding(5, 4)
    model.encoder, model.decoder = Half(words), Half(words)
    found = split_model(model, 2)
    assert list(found.unit_stages) == [
        f"{half}.layers.{i}" for half in ("encoder", "decoder") for i in (0, 1)
    ]
    assert found.holders_of("decoder.words.weight") == (0, 1)
    assert split_model(model, 2, {"encoder.*": 0, "decoder.*": 1}).stage_count == 2


def test_modules_beside_the_lists_of_layers_are_units() -> None:
    """Whatever lists they have inside: they are called in turn there."""
    model = nn.Module()
    model.down, model.up = (nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2))
    model.middle = nn.Module()
    model.middle.a = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert "middle" in split_model(model, 2).unit_stages
