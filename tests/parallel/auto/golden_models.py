"""Models whose best plan is known."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Chain(nn.Module):
    """Equal linear layers and the sum of squares."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return one number."""
        for layer in self.layers:
            x = layer(x)
        return (x * x).sum()


class TwoProducts(nn.Module):
    """Two products without weights."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """Return one number."""
        return ((x @ y) @ z).sum()


class GatedMlp(nn.Module):
    """A trained layer, and a gated perceptron behind it."""

    def __init__(self, width: int = 4096, wide: int = 14336) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        x = self.first(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ParallelBranches(nn.Module):
    """Two perceptrons side by side, whose results are added."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.a1, self.a2, self.b1, self.b2 = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        x = self.first(x)
        return self.norm(self.a2(F.relu(self.a1(x))) + self.b2(F.relu(self.b1(x))))


class Layer(nn.Module):
    """Attention with grouped heads, and a gated perceptron."""

    def __init__(self, width: int, heads: int, groups: int, wide: int) -> None:
        super().__init__()
        self.size, self.heads, self.groups = width // heads, heads, groups
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        rows, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(rows, length, -1, self.size).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.groups
        )
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """A decoder as Llama 3 8B is: 4096 wide, 32 heads in 8 groups, 128,256 words."""

    def __init__(
        self,
        layers: int,
        width: int = 4096,
        words: int = 128256,
        heads: int = 32,
        groups: int = 8,
        wide: int = 14336,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads, groups, wide) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def tokens_of(rows: int, length: int = 4096) -> Tensor:
    """Return tokens without values."""
    return torch.zeros(rows, length, dtype=torch.long, device="meta")
