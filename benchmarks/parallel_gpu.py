"""
A 1.35 B decoder on 2 or 4 GPUs: hand-written torch beside pdrun, on the same work in one command.

    python benchmarks/parallel_gpu.py --devices 4                     all rows; about a minute each
    python benchmarks/parallel_gpu.py --devices 2 --rows ddp,pdrun0   some of them
    python benchmarks/parallel_gpu.py --tiny --devices 2 --backend cpu

65,536 tokens a step in bf16, AdamW with fused kernels, eager. Each row runs in processes of its own. Peak is what
torch's allocator has handed out at most on rank 0; for pdrun the peak that `run.memory` predicts stands beside it.
MFU counts 6 operations a weight and token, and for attention 12 a layer, width, position and token, halved since it is
causal.
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import pdrun

GIB = 2**30
Step = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Size:
    """Sizes of the decoder and of a step."""

    width: int = 2048
    hidden: int = 5504
    layers: int = 24
    heads: int = 16
    words: int = 32000
    length: int = 2048
    tokens: int = 65536
    peak: float = 989e12
    """Operations a second and device in bf16, dense (H100 SXM)."""

    @property
    def weights(self) -> int:
        """Number of trained elements."""
        return self.layers * (self.width * (4 * self.width + 3 * self.hidden + 2)) + self.width * (2 * self.words + 1)

    @property
    def operations(self) -> float:
        """Operations a token, forward and backward."""
        return 6 * self.weights + 6 * self.layers * self.width * self.length


TINY = Size(width=64, hidden=160, layers=3, heads=4, words=128, length=32, tokens=512, peak=1e12)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """Attention with rotary positions, and a gated perceptron."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.proj = nn.Linear(size.width, size.width, bias=False)
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Words in, logits of the next word out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.emb = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, size.words, bias=False)
        half = size.width // size.heads // 2
        angle = torch.arange(size.length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos().to(torch.bfloat16), persistent=False)
        self.register_buffer("sin", angle.sin().to(torch.bfloat16), persistent=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h, self.cos, self.sin)
        return self.head(self.norm(h))


def plain_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def total_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    total = F.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten(), reduction="sum")
    return total, batch[1].numel()


def hand_written(row: str, model: nn.Module, device: torch.device) -> Step:
    """Return a step in torch: DDP, DDP with ZeRO-1 or FSDP2."""
    adam = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)
    autocast = row != "fsdp2"
    if autocast:
        ids = [device.index] if device.type == "cuda" else None
        wrapped: nn.Module = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        kinds = {"lr": 1e-4, "fused": True}
        zero = row == "zero1"
        optimizer = (
            ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **kinds)
            if zero
            else adam(wrapped.parameters())
        )
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        wrapped = fully_shard(model, mp_policy=policy)
        optimizer = adam(wrapped.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = plain_loss(wrapped(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def on_pdrun(row: str, model: nn.Module, options: dict[str, Any]) -> tuple[pdrun.Run, Step]:
    """Return a run at the level that the row's name ends with, and its step."""
    run = pdrun.parallelize(
        model, functools.partial(torch.optim.AdamW, lr=1e-4, fused=True), total_loss, optimizer_level=int(row[-1]),
        precision="bf16", dataset_strategy="data_parallel", exact=False, **options,
    )  # fmt: skip
    return run, lambda x, y: run.step((x, y))


def measure(row: str, size: Size, warm: int, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return tokens a second, peak and losses of one row; runs on every rank."""
    warnings.filterwarnings("ignore")
    context = pdrun.init()
    device = torch.device(context.device)
    torch.manual_seed(0)
    with device:
        model = Decoder(size)
    torch.manual_seed(1 + context.rank)
    rows = size.tokens // context.world_size // size.length
    x, y = torch.randint(size.words, (2, rows, size.length), device=device)
    predicted = 0
    if row.startswith("pdrun"):
        run, step = on_pdrun(row, model, options)
        predicted = run.memory((x, y)).peak
    else:
        step = hand_written(row, model, device)
    on_gpu = device.type == "cuda"
    losses = [step(x, y) for _ in range(warm)]
    wait(on_gpu)
    begin = time.perf_counter()
    losses += [step(x, y) for _ in range(steps)]
    wait(on_gpu)
    spent = (time.perf_counter() - begin) / steps
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    mine = torch.stack(
        [torch.as_tensor(getattr(loss, "loss", loss), device=device) for loss in (losses[0], losses[-1])]
    )
    dist.all_reduce(mine)
    first, last = (mine / context.world_size).tolist()
    return {"seconds": spent, "peak": peak, "predicted": predicted, "first": first, "last": last}


def wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare pdrun with hand-written torch on GPUs.")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rows", default="ddp,pdrun0,zero1,pdrun1,fsdp2,pdrun3")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--fusion", type=float, help="MiB a transfer, for pdrun")
    parser.add_argument("--tiny", action="store_true", help="a model for CPUs")
    args = parser.parse_args()
    size = TINY if args.tiny else Size()
    options = {"comm_fusion": args.fusion} if args.fusion else {}
    print(
        f"torch {torch.__version__}, {args.devices} devices, {size.weights / 1e9:.3f} B weights, {asdict(size)}",
        flush=True,
    )
    print(
        f"{'row':8} {'tokens/s':>10} {'MFU':>6} {'peak GiB':>9} {'predicted':>9} {'first loss':>10} {'last':>8}",
        flush=True,
    )
    for row in args.rows.split(","):
        told = pdrun.launch(
            measure, row, size, args.warm, args.steps, options, devices=args.devices, backend=args.backend
        )[0]
        speed = size.tokens / told["seconds"]
        used = speed * size.operations / size.peak / args.devices
        sizes = f"{told['peak'] / GIB:9.2f} {told['predicted'] / GIB:9.2f}"
        print(f"{row:8} {speed:10,.0f} {used:6.3f} {sizes} {told['first']:10.4f} {told['last']:8.4f}", flush=True)


if __name__ == "__main__":
    main()
