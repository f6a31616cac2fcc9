"""
The GPT of train_gpt.py, made parallel by pdrun: the same numbers on one process and on many.

    python examples/train_gpt_parallel.py                # one process
    pdrun --devices 2 examples/train_gpt_parallel.py     # two workers, the same losses
    # weights, gradients and optimizer state sharded over the workers
    pdrun --devices 2 examples/train_gpt_parallel.py --level 3 --recompute full
    # continues from its last checkpoint
    pdrun --max-restarts 3 examples/train_gpt_parallel.py --checkpoints run

The text is the sources of Python's standard library. A model that knows nothing has a loss of
ln(256) = 5.545.
"""

import argparse
import time

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from train_gpt import GPT, learning_rate, read_text

import pdrun


class Pieces(Dataset):
    """Pieces of the text and the same one byte further on, evenly spaced."""

    def __init__(self, context: int, count: int) -> None:
        self.text, self.context = read_text("train"), context
        self.starts = torch.linspace(0, len(self.text) - context - 1, count).long()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.text[self.starts[index] :][: self.context + 1].long()
        return piece[:-1], piece[1:]


def loss_of(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[
        1
    ].numel()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on many devices.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32, help="sequences a step, over all workers")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--level", type=int, default=1, help="optimizer level, 0 to 3")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--recompute", choices=("full", "selective"))
    parser.add_argument("--precision", choices=("bf16", "fp16"))
    parser.add_argument("--checkpoints", help="folder to save to and to go on from")
    parser.add_argument(
        "--verify", action="store_true", help="prove first that the run equals one process"
    )
    parser.add_argument("--log-every", type=int, default=50)
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.manual_seed(1)
    context = pdrun.init()
    run = pdrun.parallelize(
        GPT(args.width, args.layers, args.heads, args.context),
        optimizer=lambda params: torch.optim.AdamW(
            params, args.lr, betas=(0.9, 0.98), weight_decay=0.01
        ),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate(step / args.steps, 1.0)
        ),
        loss=loss_of,
        optimizer_level=args.level,
        accumulate=args.accumulate,
        recompute=args.recompute,
        precision=args.precision,
        clip=1.0,
    )
    loader = pdrun.Loader(Pieces(args.context, args.steps * args.batch), args.batch, shuffle=True)
    if args.checkpoints and run.resume(args.checkpoints) and context.is_main:
        print(f"goes on after step {run.steps}", flush=True)
    if args.verify:
        found = run.verify(loader, steps=2)
        if context.is_main:
            print(found, flush=True)
    mark = time.monotonic()
    for batch in run.data(loader) if run.steps < args.steps else ():
        m = run.step(batch)
        if m.step % args.log_every == 0 and context.is_main:
            speed = args.log_every * m.tokens / (time.monotonic() - mark)
            print(
                f"step {m.step:4}/{args.steps}  loss {m.loss:.6f}  norm {m.grad_norm:.3f} "
                f" {speed:,.0f} tokens/s",
                flush=True,
            )
            mark = time.monotonic()
        if args.checkpoints and (m.step % 100 == 0 or m.step == args.steps):
            run.save(args.checkpoints, keep=2, wait=m.step == args.steps)


if __name__ == "__main__":
    main()
