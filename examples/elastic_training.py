"""
Training that survives its nodes: it continues with fewer or more of them, from the last step that
all workers have saved.

    pdrun --local --nodes 2:4 --max-restarts 3 --hang-timeout 2m examples/elastic_training.py
    pdrun --local --nodes 2:4 examples/elastic_training.py --steps 100000 &
    kill -TERM PID_OF_AN_AGENT  # a node leaves: the others save and continue
    pdrun join 127.0.0.1:PORT   # another node joins (the line is printed)

What each call is for:

* `elastic.agreed_step()` returns the step to start from: every worker of an earlier generation had
  reported it as saved.
* `pdrun.progress(step)` reports that this worker is alive, and its step.
* All workers decide together, once per step, whether to stop. A SIGTERM reaches the workers at
  slightly different times. A worker that stopped alone would leave the others in a collective.
* `elastic.saved(step)` is called by every worker, after rank 0 has written its file.

Fits a line to points that each rank draws by the step's number, so that any number of workers uses
the same data.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

import pdrun
from pdrun import elastic

BATCH = 64
"""Points of a step, over all workers."""


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this worker's share of a step's points, for any number of workers."""
    noise = torch.Generator().manual_seed(step)
    x = torch.rand(BATCH, 1, generator=noise)
    y = 3.0 * x - 1.0 + 0.01 * torch.randn(BATCH, 1, generator=noise)
    return x[rank::world], y[rank::world]


def save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint atomically."""
    draft = path.with_suffix(".draft")
    torch.save(
        {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, draft
    )
    draft.replace(path)


def should_stop() -> bool:
    """Return whether any worker got a signal to stop: the same answer on all of them."""
    flag = torch.tensor([int(elastic.stopping())])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("elastic-checkpoints"))
    options = parser.parse_args()

    context = pdrun.init(collective="gloo", backend="cpu")
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options.folder.mkdir(exist_ok=True)

    last = elastic.agreed_step()
    if last >= 0:
        state = torch.load(options.folder / f"{last}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    if context.is_main:
        print(
            f"generation {context.generation}: {context.world_size} workers from step {last + 1}",
            flush=True,
        )

    for step in range(last + 1, options.steps):
        x, y = batch(step, context.rank, context.world_size)
        loss = ((model(x) - y) ** 2).sum() / BATCH
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        pdrun.progress(step)
        stop = should_stop()
        if stop or (step + 1) % options.save_every == 0:
            if context.is_main:
                save(options.folder / f"{step}.pt", step, model, optimizer)
            dist.barrier()
            elastic.saved(step)
        if stop:
            if context.is_main:
                print(f"stopping after step {step}", flush=True)
            return
    if context.is_main:
        print(f"y = {model.weight.item():.2f} x {model.bias.item():+.2f}", flush=True)


if __name__ == "__main__":
    main()
