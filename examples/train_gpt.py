"""
Train a small byte-level GPT on the sources of Python's standard library.

Plain torch: nothing of pdrun is imported. Any launcher that sets torchrun's variables can start it.

    python examples/train_gpt.py                                    # one process
    pdrun --nodes 2 --devices 2 --local examples/train_gpt.py       # two nodes of two workers
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py  # the same four workers

Every machine with Python has the text, so nothing is downloaded. A model that knows nothing has a
loss of ln(256) = 5.545 nats per byte.
"""

import argparse
import math
import os
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def rotate_pairs(x: Tensor) -> Tensor:
    """
    Rotary positions: turn each pair of features by an angle proportional to the position, so that
    distances matter.
    """
    length, half = x.shape[-2], x.shape[-1] // 2
    speed = 0.5 ** (torch.arange(half, device=x.device) * 8 / half)
    angle = torch.arange(length, device=x.device)[:, None] * speed
    a, b = x.chunk(2, dim=-1)
    turned = [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
    return torch.cat(turned, dim=-1).type_as(x)  # the angles are fp32, x may be bf16


class Block(nn.Module):
    """Attention over earlier bytes, then a perceptron; each adds to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(rotate_pairs(q), rotate_pairs(k), v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out: ``[batch, length] -> [batch, length, 256]``."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # the two layers that write to the residual stream start small
                small = (
                    1 / math.sqrt(2 * layers)
                    if name.endswith(("proj.weight", "down.weight"))
                    else 1.0
                )
                nn.init.normal_(weight, std=0.02 * small)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.blocks(self.bytes(x)))
        return h @ self.bytes.weight.T  # the embedding is also the output layer


def read_text(split: str) -> Tensor:
    """
    Return the bytes of every 20th source file (``validation``) or of all others (``train``), always
    in one order.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts)
    )
    chosen = [path for i, path in enumerate(files) if (i % 20 == 0) == (split == "validation")]
    return torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in chosen)), dtype=torch.uint8
    )


def batch_at(
    text: Tensor, starts: Tensor, context: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return ``[len(starts), context]`` inputs and targets, the targets one byte further on."""
    rows = torch.stack([text[i : i + context + 1] for i in starts.tolist()]).long().to(device)
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(
    model: nn.Module, args: argparse.Namespace, rank: int, world: int, device: torch.device
) -> float:
    """
    Return the mean loss over evenly spaced pieces of the validation text, shared out among the
    workers.
    """
    text = read_text("validation")
    starts = torch.linspace(0, len(text) - args.context - 1, args.validation).long()
    total = torch.zeros((), device=device)
    for piece in starts[rank::world].split(args.batch):
        total += loss_of(model, *batch_at(text, piece, args.context, device)) * len(piece)
    return float(sum_over_workers(total) / args.validation)


def sum_over_workers(values: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def connect() -> tuple[int, int, torch.device]:
    """Join the other workers, if there are any; return (rank, number of workers, device)."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return 0, 1, device
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over the first twentieth, then a cosine down to a tenth."""
    if progress < 0.05:
        return peak * (progress + 0.005) / 0.055
    return peak * (0.55 + 0.45 * math.cos(math.pi * min(1.0, (progress - 0.05) / 0.95)))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on Python's standard library."
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="stop training earlier, after this time"
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences a worker and step")
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2.5e-3, help="highest learning rate")
    parser.add_argument(
        "--validation", type=int, default=512, help="sequences in the final validation"
    )
    parser.add_argument("--log-every", type=int, default=50, help="steps between two lines")
    parser.add_argument("--out", type=Path, help="write the trained model to this file")
    return parser.parse_args()


def main() -> None:
    args = options()
    rank, world, device = connect()
    torch.manual_seed(1)
    gpt = GPT(args.width, args.layers, args.heads, args.context).to(device)
    model = DistributedDataParallel(gpt) if world > 1 else gpt
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    text, dice = read_text("train"), torch.Generator().manual_seed(1000 + rank)
    if rank == 0:
        size = sum(weight.numel() for weight in gpt.parameters())
        print(
            f"{size:,} parameters, {len(text):,} bytes of text, {world} worker(s) on {device.type}",
            flush=True,
        )

    begin = mark = time.monotonic()
    for step in range(1, args.steps + 1):
        spent = (time.monotonic() - begin) / args.seconds
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(max(step / args.steps, spent), args.lr)
        starts = torch.randint(len(text) - args.context - 1, (args.batch,), generator=dice)
        loss = loss_of(model, *batch_at(text, starts, args.context, device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        # One sum tells every worker the mean loss, and whether any of them has run out of time: all
        # stop at one step.
        told = torch.stack([loss.detach(), loss.new_tensor(float(spent >= 1))])
        mean, late = (sum_over_workers(told) / world).tolist()
        if not math.isfinite(mean):
            sys.exit(f"the loss is {mean} at step {step}")
        if rank == 0 and (step % args.log_every == 0 or step == args.steps or late):
            steps, now = (step - 1) % args.log_every + 1, time.monotonic()
            speed = steps * world * args.batch * args.context / (now - mark)
            rate = f"{speed:,.0f} tokens/s  {now - begin:.0f} s"
            print(f"step {step:4}/{args.steps}  loss {mean:.3f}  {rate}", flush=True)
            mark = now
        if late:
            break

    model.eval()
    final = validate(gpt, args, rank, world, device)
    if rank == 0:
        print(
            f"validation loss {final:.3f} (uniform {math.log(256):.3f}),"
            f" {time.monotonic() - begin:.0f} s"
        )
        if args.out:
            part = args.out.with_name(args.out.name + ".part")
            torch.save(gpt.state_dict(), part)
            part.replace(args.out)
    if dist.is_initialized():
        dist.destroy_process_group()
    if not math.isfinite(final):
        sys.exit("the validation loss is not finite")


if __name__ == "__main__":
    main()
