"""
A small Llama whose weights are sharded over devices: tensor parallel, with sequence parallel
between the sharded modules.

    python examples/train_llama_tensor.py                    # one process
    pdrun --devices 2 examples/train_llama_tensor.py --tp 2  # two devices share each weight
    # two pairs of devices, each with separate rows
    pdrun --devices 4 examples/train_llama_tensor.py --tp 2 --sequence --verify

All print the same losses. The model is plain torch. `strategy` has the sharding. The text is the
sources of Python's standard library, and a model that knows nothing has a loss of ln(256) = 5.545.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_gpt import rotate_pairs
from train_gpt_parallel import Pieces

import pdrun
from pdrun import Strategy, col, cross_entropy, heads, row, seq, vocab


class Attention(nn.Module):
    """
    Several queries share a key and a value. Its numbers of heads are attributes, which get a
    device's numbers.
    """

    def __init__(self, width: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, width // n_heads
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (
            nn.Linear(width, n_kv_heads * self.head_dim, bias=False) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.wq(x).view(rows, length, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(rows, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(rows, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotate_pairs(q), rotate_pairs(k), v, is_causal=True, enable_gqa=True
        )
        return self.wo(mixed.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    """A gated perceptron."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(width, hidden, bias=False),
        )
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then a perceptron; each adds to its input."""

    def __init__(self, width: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attn, self.mlp = (
            Attention(width, n_heads, n_kv_heads),
            Perceptron(width, width * 8 // 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Bytes in, logits of the next byte out; the head is the embedding."""

    def __init__(self, width: int, layers: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Block(width, n_heads, n_kv_heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.emb.weight
        nn.init.normal_(self.emb.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def strategy(sequence: bool) -> Strategy:
    """
    Return Megatron's sharding: four sums per layer, or as many gathers and scatters of sequence
    shards.
    """
    dim = 1 if sequence else None
    return Strategy(
        {
            "emb|head": vocab("tp", gather=False, sequence=dim),
            "layers.*.attn": heads("tp"),
            "layers.*.attn.w[qkv]|layers.*.mlp.gate|layers.*.mlp.up": col("tp", sequence=dim),
            "layers.*.attn.wo|layers.*.mlp.down": row("tp", sequence=dim),
            **({"norm|layers.*.norm?": seq("tp")} if sequence else {}),
        }
    )


def loss_of(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return cross_entropy(logits, batch[1], reduction="sum"), batch[
        1
    ].numel()  # of logits that are cut by words


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level Llama whose weights are cut over devices."
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step, over all devices")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="devices that share each weight")
    parser.add_argument(
        "--sequence", action="store_true", help="cut the sequence between the cut modules"
    )
    parser.add_argument(
        "--compile", action="store_true", help="have torch.compile make kernels of each layer"
    )
    parser.add_argument(
        "--verify", action="store_true", help="prove first that the run equals one process"
    )
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.manual_seed(1)
    context = pdrun.init()
    run = pdrun.parallelize(
        Llama(args.width, args.layers, args.heads, args.kv_heads),
        optimizer=lambda params: torch.optim.AdamW(params, 3e-3, betas=(0.9, 0.98)),
        loss=loss_of,
        mesh=pdrun.mesh(dp=-1, tp=args.tp),
        strategy=strategy(args.sequence),
        clip=1.0,
        compile=args.compile,
    )
    loader = pdrun.Loader(Pieces(args.context, args.steps * args.batch), args.batch, shuffle=True)
    if args.verify:
        found = run.verify(loader, steps=1)
        if context.is_main:
            print(found, flush=True)
    for batch in run.data(loader):
        m = run.step(batch)
        if m.step % 20 == 0 and context.is_main:
            print(
                f"step {m.step:4}/{args.steps}  loss {m.loss:.5f}  norm {m.grad_norm:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
