"""
Train a language model on sequences that are sharded over the ranks, and verify that this changes
nothing.

    python examples/long_sequences.py
    pdrun --devices 4 examples/long_sequences.py

Both print the same losses. With four devices each rank has a quarter of each sequence.

The model is plain torch. Its table of positions is given to pdrun by name. It learns to repeat the
token 16 positions before.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdrun

WORDS, WIDTH, HEADS, LENGTH, BACK = 64, 64, 4, 512, 16


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(x)


class Model(nn.Module):
    """A language model with a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(
            self.blocks(self.words(tokens) + self.places(torch.arange(tokens.shape[1])))
        )


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, shifted before anything is sharded."""
    tokens = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens, F.pad(tokens[:, :-BACK], (BACK, 0), value=-100)


def loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(
        logits.flatten(0, 1), batch[1].flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (batch[1] != -100).sum()


def main() -> None:
    context = pdrun.init()
    torch.manual_seed(0)
    run = pdrun.parallelize(
        Model(),
        lambda params: torch.optim.AdamW(params, lr=3e-3),
        loss,
        mesh=pdrun.mesh(cp=-1),
        context=pdrun.ContextParallel(tables={"places.weight": 0}),
    )
    report = run.verify([batch(0)])
    if context.is_main:
        print(report)
    for step in range(61):
        m = run.step(batch(step))
        if context.is_main and step % 20 == 0:
            print(f"step {step:2}  loss {m.loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
