"""
The GPT of train_gpt.py in pipeline stages: the plain model, its layers on several devices, the
numbers of one process.

    python examples/train_gpt_pipeline.py             # one process, the full model
    pdrun --devices 4 examples/train_gpt_pipeline.py  # four stages, the same losses
    # two stages, each on two parts of the batch
    pdrun --devices 4 examples/train_gpt_pipeline.py --stages 2 --schedule zero-bubble-v
    # the same, each stage's weights sharded in two
    pdrun --devices 4 examples/train_gpt_pipeline.py --stages 2 --level 3

Takes less than a minute on a CPU. The losses agree to about six digits for all stages and
schedules.
"""

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F
from train_gpt import GPT, read_text

import pdrun


def batches(steps: int, rows: int, context: int) -> list[tuple[Tensor, Tensor]]:
    """
    Return the batches of all steps, the same on every rank: ``[rows, context]`` bytes, and the
    bytes that follow.
    """
    text, dice = read_text("train"), torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - context - 1, (steps, rows), generator=dice).tolist()
    pieces = [torch.stack([text[at : at + context + 1] for at in row]).long() for row in starts]
    return [(piece[:, :-1], piece[:, 1:]) for piece in pieces]


def loss_of(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[
        1
    ].numel()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT in pipeline stages.")
    parser.add_argument("--stages", type=int, help="ranks along pp; default: all")
    parser.add_argument(
        "--schedule", default="1f1b", help="gpipe, 1f1b, interleaved, zero-bubble or zero-bubble-v"
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="sequences a step")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--level", type=int, default=0, help="optimizer level, 0 to 3")
    parser.add_argument("--gather", help="at level 3: step or pass")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.manual_seed(1)
    context = pdrun.init()
    stages = args.stages or context.world_size
    run = pdrun.parallelize(
        GPT(width=64, layers=args.layers, heads=4, context=64),
        optimizer=lambda params: torch.optim.AdamW(params, 1e-3),
        loss=loss_of,
        clip=1.0,
        mesh=pdrun.mesh(pp=stages, dp=-1),
        pipeline=pdrun.Pipeline(
            args.microbatches,
            schedule=args.schedule,
            shared=[
                "bytes.weight"
            ],  # the embedding of the first stage is the output layer of the last
        ),
        optimizer_level=args.level,
        gather=args.gather,
    )
    if context.is_main:
        print(run.explain(), flush=True)
    for batch in batches(args.steps, args.batch, 64):
        m = run.step(batch)
        if context.is_main and m.step % 5 == 0:
            print(f"step {m.step:3}  loss {m.loss:.5f}  norm {m.grad_norm:.4f}", flush=True)


if __name__ == "__main__":
    main()
