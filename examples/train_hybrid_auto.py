"""
A decoder that is spread over devices in every way at the same time, with operators split by search.

    pdrun examples/train_hybrid_auto.py               # one process
    pdrun --devices 8 examples/train_hybrid_auto.py   # 2 stages x 2 data x 2 tensor ranks

With 8 devices: the recursive search splits the operators, layers are in two stages, optimizer state
is sharded over the data ranks, and every layer is recomputed in the backward pass. The numbers are
those of one process.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdrun

WORDS, WIDTH, HEADS, LENGTH, ROWS = 64, 32, 4, 16, 8
STEPS = 30


class Layer(nn.Module):
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        rows, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(rows, length, HEADS, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def token_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the sum over tokens, and their number."""
    return pdrun.cross_entropy(logits, batch[1], reduction="sum"), batch[1].numel()


def make_batch() -> tuple[Tensor, Tensor]:
    """Return sequences that count upwards."""
    starts = torch.randint(0, WORDS, (ROWS, 1))
    data = (starts + torch.arange(LENGTH + 1)) % WORDS
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def main() -> None:
    """Train, and compare the first step with one process."""
    context = pdrun.init()
    torch.manual_seed(0)
    batch = make_batch()
    options = {}
    if context.world_size > 1:
        options = {
            "mesh": pdrun.mesh(pp=2, dp=-1, tp=2),
            "pipeline": pdrun.Pipeline(microbatches=2),
            "strategy": pdrun.Auto(search="recursive_programming", gather=False, topology="h100x8"),
            "optimizer_level": 1,
            "recompute": "full",
        }
    run = pdrun.parallelize(
        Decoder(),
        lambda params: torch.optim.AdamW(params, lr=1e-2),
        token_loss,
        sample=batch,
        **options,
    )
    report = run.verify([batch])
    if context.is_main:
        print(report)
    for step in range(STEPS):
        loss = run.step(batch).loss
        if context.is_main and step % 10 == 0:
            print(f"step {step:<3} loss {loss:.6f}")


if __name__ == "__main__":
    main()
