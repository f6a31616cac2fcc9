"""
Train a small decoder with experts. Losses are the same on any number of ranks.

    python examples/train_moe.py                              # one process
    pdrun --devices 2 --backend cpu examples/train_moe.py     # experts on two ranks
    pdrun --devices 4 examples/train_moe.py --ep 2            # and rows cut over dp, too
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdrun

WORDS, DIM, LENGTH = 64, 32, 16


class Block(nn.Module):
    """A running mean over the positions before, then experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.moe = pdrun.MoE(
            DIM, 64, experts=8, top_k=2, shared=1, balance=pdrun.Balance("bias", 1e-2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, positions, dim]`` to the same."""
        x = x + self.mix(x).cumsum(1) / LENGTH
        return x + self.moe(self.norm(x))


class Decoder(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """``[rows, positions]`` to logits."""
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def token_loss(logits: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    """Return the sum over the tokens that have a next one, and their number."""
    wanted = batch[:, 1:]
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten(), reduction="sum")
    return total, wanted.numel()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ep", type=int, default=0, help="ranks that share the experts; 0: all")
    options = parser.parse_args()
    context = pdrun.init()
    parts = options.ep or context.world_size
    torch.manual_seed(0)
    strategy = pdrun.Strategy({"layers.*.moe": pdrun.experts("ep")}) if parts > 1 else None
    run = pdrun.parallelize(
        Decoder(),
        lambda params: torch.optim.AdamW(params, 1e-2),
        token_loss,
        mesh=pdrun.mesh(dp=-1, ep=parts),
        strategy=strategy,
        optimizer_level=1,
        clip=1.0,
    )
    if context.rank == 0:
        print(run.explain())
    made = torch.Generator().manual_seed(1)
    text = torch.randint(0, WORDS, (8, LENGTH), generator=made)
    for step in range(1, options.steps + 1):
        metrics = run.step(text)
        if context.rank == 0:
            busiest = max(load.load_max for load in metrics.experts.values())
            print(f"step {step:3}/{options.steps}  loss {metrics.loss:.5f}  busiest {busiest:.2f}")


if __name__ == "__main__":
    main()
