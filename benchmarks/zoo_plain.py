"""The plain torch models of `model_zoo.py`: structures that libraries and tutorials share."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from zoo_models import (
    CLASSES,
    VOCABULARY,
    Architecture,
    class_loss,
    image_batch,
    picture_loss,
    token_loss,
    token_pairs,
)

WIDTH = 32
HEADS = 4


class PlainAttention(nn.Module):
    """Causal attention with q, k and v in one matrix, whose forward divides its width by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return attention over earlier positions."""
        rows, length, _width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(rows, length, -1)
        return self.out(mixed)  # type: ignore[no-any-return]


class PlainBlock(nn.Module):
    """Attention and a perceptron, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = (
            nn.LayerNorm(WIDTH),
            PlainAttention(),
            nn.LayerNorm(WIDTH),
        )
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add attention, then the perceptron."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class NanoGPT(nn.Module):
    """A decoder whose modules are in a ModuleDict, with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(32, WIDTH),
                "h": nn.ModuleList(PlainBlock() for _ in range(2)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.transformer["wte"].weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        parts: Any = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1], device=ids.device))
        for block in parts["h"]:
            x = block(x)
        return self.head(parts["ln_f"](x))  # type: ignore[no-any-return]


class NestedLists(nn.Module):
    """Layers in lists in a list, as in vision transformers; logits by the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList([PlainAttention(), PlainBlock().mlp]) for _ in range(2)
        )
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.emb(ids)
        for (attn, mlp), scale in zip(self.layers, self.scales, strict=True):  # type: ignore[misc]
            x = x + attn(x * scale)
            x = x + mlp(x)
        return x @ self.emb.weight.T + self.bias  # type: ignore[no-any-return]


class TorchEncoder(nn.Module):
    """torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.encoder(self.emb(ids)))  # type: ignore[no-any-return]


class TorchTransformer(nn.Module):
    """torch's encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.both = nn.Transformer(WIDTH, HEADS, 1, 1, 2 * WIDTH, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.emb(ids)
        return self.head(self.both(x, x))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Two recurrent layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm, self.gru = (kind(WIDTH, WIDTH, batch_first=True) for kind in (nn.LSTM, nn.GRU))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.gru(self.lstm(self.emb(ids))[0])[0])  # type: ignore[no-any-return]


class SkipNet(nn.Module):
    """A U-Net: what goes down is used again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 16, 16)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(a, b, 4, 2, 1) for a, b in ((16, 16), (32, 8), (16, 3))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a picture of the same size."""
        kept = []
        for layer in self.down:
            x = F.gelu(layer(x))
            kept.append(x)
        x = kept.pop()
        for place, layer in enumerate(self.up):
            x = layer(x if place == 0 else torch.cat([x, kept.pop()], 1))
        return x


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3072, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    )


def _blocks_styles(blocks: str) -> Any:
    from pdrun import Strategy, col, heads, row

    def styles(model: nn.Module) -> Any:
        return Strategy(
            {
                f"{blocks}.attn": heads("tp"),
                f"{blocks}.attn.qkv": col("tp", blocks=3),
                f"{blocks}.mlp.0": col("tp"),
                f"{blocks}.attn.out|{blocks}.mlp.2": row("tp"),
            }
        )

    return styles


def _encoder_styles(model: nn.Module) -> Any:
    from pdrun import Strategy, col, heads, row, vocab

    return Strategy(
        {
            "emb|head": vocab("tp"),
            "encoder.layers.*.self_attn": heads("tp"),
            "encoder.layers.*.linear1": col("tp"),
            "encoder.layers.*.linear2": row("tp"),
        }
    )


def _perceptron_styles(model: nn.Module) -> Any:
    from pdrun import Strategy, col, row

    return Strategy({"1": col("tp"), "3": row("tp")})


def _picture_pairs(rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    pictures, _ = image_batch(rows, step)
    return pictures, pictures.flip(1)


def plain_models() -> list[Architecture]:
    """Return plain models."""
    causal = frozenset(("causal",))

    def text(
        name: str, build: Any, styles: Any, traits: frozenset[str] = frozenset()
    ) -> Architecture:
        return Architecture(
            name, "torch", build, token_pairs, token_loss, styles=styles, traits=traits
        )

    return [
        text("plain_nanogpt", NanoGPT, _blocks_styles("transformer.h.*"), causal),
        text("plain_nested", NestedLists, None, causal),
        text("plain_encoder", TorchEncoder, _encoder_styles),
        text("plain_transformer", TorchTransformer, None),
        text("plain_recurrent", Recurrent, None),
        Architecture("plain_skips", "torch", SkipNet, _picture_pairs, picture_loss),
        Architecture(
            "plain_mlp", "torch", _perceptron, image_batch, class_loss, styles=_perceptron_styles
        ),
    ]
