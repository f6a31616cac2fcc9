"""Small models of many kinds, and what the ranks do with a searched plan of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.parallel.auto.auto import Auto
from pdrun.parallel.auto.choose import EXACT, RECURSIVE
from pdrun.parallel.comm.mesh import mesh
from pdrun.parallel.operators.compiler import find_engine
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.pipeline.pipeline import Pipeline
from pdrun.parallel.run import Run
from tests.lib import small_models
from tests.lib.causal_models import build_causal
from tests.parallel.auto.rank_runs import (
    TOPOLOGIES,
    count_by_axes,
    plan_by_axes,
    small_decoder,
)

ROWS, LENGTH, WIDTH, WORDS = 8, 8, 32, 56


class EncoderDecoder(nn.Module):
    """Two embeddings, torch's encoder and decoder, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.emb2 = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, **options) for _ in range(2)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, 4, 64, **options) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        memory, y = self.emb(x), self.emb2(x.flip(1))
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            y = layer(y, memory)
        return self.head(y)


class VisionTransformer(nn.Module):
    """Patches of a picture, tokens for the class, two layers of attention; two loose weights."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 4, WIDTH) * 0.1)
        self.places = nn.Parameter(torch.randn(1, 20, WIDTH) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), h], 1) + self.places
        for layer in self.layers:
            h = layer(h)
        return self.head(h[:, 0])


class ResidualBlock(nn.Module):
    """Two convolutions with group norms, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        h = F.relu(self.norm1(self.one(x)))
        return F.relu(x + self.norm2(self.two(h)))


class Residual(nn.Module):
    """A residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(16) for _ in range(2))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        h = F.max_pool2d(self.stem(x), 2)
        for block in self.blocks:
            h = block(h)
        return self.head(F.adaptive_avg_pool2d(h, 1).flatten(1))


class Recurrent(nn.Module):
    """Two LSTM layers over words."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.lstm(self.emb(x))[0])


class ExpertLayer(nn.Module):
    """Four experts by einsum; all compute, and the router weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 48) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 48, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        weight = self.router(x).softmax(-1)
        h = F.gelu(torch.einsum("bsd,edh->bseh", x, self.up))
        return x + torch.einsum("bseh,ehd,bse->bsd", h, self.down, weight)


class Experts(nn.Module):
    """Two layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(ExpertLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        h = self.emb(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def make_perceptron() -> nn.Module:
    """Return linear layers with activations."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU(WIDTH)) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def make_bert() -> nn.Module:
    """Return BERT with a head for words."""
    transformers = __import__("transformers")
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def take_words() -> Tensor:
    """Return tokens that every model knows."""
    return torch.randint(0, min(WORDS, small_models.WORDS), (ROWS, LENGTH))


def take_pictures() -> Tensor:
    """Return pictures."""
    return torch.randn(ROWS, 3, 16, 16)


@dataclass(frozen=True)
class PlannedModel:
    """
    A model, its batch, and whether it has layers that can be stages.

    Attributes:
        gives_logits: the model returns an object with logits.
    """

    make: Callable[[], Any]
    batch: Callable[[], Tensor]
    gives_logits: bool = False
    has_stages: bool = True


MODELS: dict[str, PlannedModel] = {
    "perceptron": PlannedModel(make_perceptron, lambda: torch.randn(ROWS, WIDTH)),
    "gpt": PlannedModel(lambda: small_models.Tiny(tied=True, layers=2), take_words),
    "decoder": PlannedModel(lambda: small_decoder(), take_words),
    "llama": PlannedModel(
        lambda: build_causal("llama", vocab_size=64).train(), take_words, gives_logits=True
    ),
    "bert": PlannedModel(make_bert, take_words, gives_logits=True),
    "encoder-decoder": PlannedModel(EncoderDecoder, take_words),
    "vision": PlannedModel(VisionTransformer, take_pictures),
    "residual": PlannedModel(Residual, take_pictures),
    "lstm": PlannedModel(Recurrent, take_words, has_stages=False),
    "experts": PlannedModel(Experts, take_words),
}


def weighted_squares(output: Any, batch: Tensor) -> tuple[Tensor, int]:
    """Return a loss in which every element of a row counts differently, and the rows."""
    output = getattr(output, "logits", output)
    weight = torch.linspace(0.5, 1.5, output[0].numel()).view(output[0].shape)
    return (output * output * weight).sum(), len(batch)


def make_batch(name: str) -> Tensor:
    """Return the batch of a model, the same on every rank."""
    torch.manual_seed(1)
    return MODELS[name].batch()


def make_planned_run(
    name: str, topology: str, degrees: dict[str, int], search: str, **options: Any
) -> Run:
    """Return a run whose operators a search has split."""
    torch.manual_seed(0)
    return parallelize(
        MODELS[name].make(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        weighted_squares,
        mesh=mesh(**degrees),
        strategy=Auto(search=search, topology=TOPOLOGIES[topology]),
        sample=make_batch(name),
        forward=lambda model, batch: model(batch),
        **options,
    )


def verify_model(
    name: str, topology: str, degrees: dict[str, int], stages: int = 1
) -> dict[str, Any]:
    """
    Verify the searched plan of a model against one process; without stages, count what a pass over
    the model sends over each axis too.
    """
    options: dict[str, Any] = {}
    if stages > 1:
        options["pipeline"] = Pipeline(microbatches=2)
        degrees = {"pp": stages, **degrees}
    search = EXACT if len(degrees) < 2 or "dp" in degrees else RECURSIVE  # seconds on two axes
    run = make_planned_run(name, topology, degrees, search, **options)
    batch = make_batch(name)
    run.verify([batch])
    engine = find_engine(run.model)
    assert engine is not None
    assert engine.first_plan is not None
    found: dict[str, Any] = {"operators": json.loads(run.plan.to_json())["operators"]}
    if stages == 1:
        part = batch[: len(batch) // degrees.get("dp", 1)]
        run.axes.reset_counts()
        weighted_squares(run.model(part), part)[0].backward()
        found["counted"] = count_by_axes(run)
        found["planned"] = plan_by_axes(engine.first_plan)
    return found
