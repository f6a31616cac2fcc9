"""
Train a small decoder on the bytes of docs/*.md in bf16 and in fp8, and print the losses.

    python benchmarks/fp8_text.py                    # on one GPU
    python benchmarks/fp8_text.py --backend cpu --width 64 --length 32 --steps 20

Every run has the same weights and the same batches. The last line has the mean loss of the last 20
steps, relative to that of bf16; beside it peak memory and what `run.memory` predicts, in GiB.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import replace
from pathlib import Path

import torch
from parallel_gpu import GIB, TINY, Decoder, total_loss
from torch import Tensor

import pdrun

DOCS = Path(__file__).resolve().parent.parent / "docs"
TAIL_STEPS = 20


def read_text() -> Tensor:
    """Return the bytes of all pages, in the order of their names."""
    pages = sorted(DOCS.glob("*.md"))
    return torch.frombuffer(
        bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8
    )


def train(text: Tensor, args: argparse.Namespace, precision: object) -> tuple[list[float], str]:
    """Return the loss of every step, and peak memory with its prediction."""
    size = replace(
        TINY,
        width=args.width,
        hidden=3 * args.width,
        heads=max(args.width // 64, 1),
        words=256,
        layers=args.layers,
        length=args.length,
    )
    device = torch.device(pdrun.init(**({"backend": args.backend} if args.backend else {})).device)
    torch.manual_seed(0)
    with device:
        model = Decoder(size)
    run = pdrun.parallelize(
        model,
        functools.partial(torch.optim.AdamW, lr=args.rate),
        total_loss,
        precision=precision,
        compile=not args.eager,
        clip=1.0,
    )
    dice = torch.Generator().manual_seed(0)
    losses = []
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    memory = ""
    for step in range(args.steps):
        starts = torch.randint(len(text) - args.length - 1, (args.rows, 1), generator=dice)
        rows = text[starts + torch.arange(args.length + 1)].long().to(device)
        batch = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if step == 0:
            memory = f"predicted {run.memory(batch).peak / GIB:.3f}"
        losses.append(run.step(batch).loss)
    if on_gpu:
        memory += f", peak {torch.cuda.max_memory_allocated() / GIB:.3f}"
    return [float(loss) for loss in losses], memory


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare losses in fp8 with losses in bf16.")
    parser.add_argument("--backend")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    args = parser.parse_args()
    text = read_text()
    print(f"torch {torch.__version__}, {len(text):,} bytes, {vars(args)}")
    kinds = {"bf16": "bf16", "fp8": pdrun.Fp8(least=0), "fp8row": pdrun.Fp8("row", least=0)}
    tails = {}
    for name, precision in kinds.items():
        losses, memory = train(text, args, precision)
        tails[name] = sum(losses[-TAIL_STEPS:]) / TAIL_STEPS
        shown = " ".join(f"{loss:.4f}" for loss in losses[:: max(args.steps // 10, 1)])
        print(f"{name:8} {shown}  last {tails[name]:.4f}  {memory}", flush=True)
    print(" ".join(f"{name} {tail / tails['bf16'] - 1:+.3%}" for name, tail in tails.items()))


if __name__ == "__main__":
    main()
