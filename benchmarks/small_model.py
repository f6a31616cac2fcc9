"""
Measure what pdrun's runtime costs where a step is short: a step at level 0, and making a run, of a
model of 92,000 parameters, compared with DDP on CPUs.

    python benchmarks/small_model.py [--devices 2] [--rounds 25] [--exact]

Both take turns, block by block in the same processes. The result is the median of the blocks'
ratios, of wall time and of CPU time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import pdrun

MODELS_PER_BLOCK = 3
Times = tuple[float, float]
"""Wall time and CPU time, in milliseconds."""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 38)]
    return nn.Sequential(*layers)


def make_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 1e-3, fused=True)


def total_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), batch[1].numel()


def make_run(model: nn.Module, exact: bool) -> pdrun.Run:
    return pdrun.parallelize(
        model, make_optimizer, total_loss, dataset_strategy="data_parallel", exact=exact
    )


def make_ddp(model: nn.Module) -> Callable[[Tensor, Tensor], float]:
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(list(ddp.parameters()))

    def step(x: Tensor, y: Tensor) -> float:
        loss = F.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def time_calls(function: Callable[[], object], times: int) -> Times:
    """Return the time per call."""
    gc.collect()
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(times):
        function()
    wall, cpu = time.perf_counter() - begin, time.process_time() - used
    return wall / times * 1e3, cpu / times * 1e3


def take_turns(
    ours: Callable[[], object], theirs: Callable[[], object], rounds: int, times: int
) -> tuple[float, float, float, float]:
    """Return (pdrun ms, DDP ms, ratio of wall time, ratio of CPU time): medians over rounds."""
    pairs = []
    for turn in range(rounds):
        order = (ours, theirs) if turn % 2 else (theirs, ours)
        one, two = (time_calls(function, times) for function in order)
        pairs.append((one, two) if turn % 2 else (two, one))
    return (
        statistics.median(a[0] for a, _ in pairs),
        statistics.median(b[0] for _, b in pairs),
        statistics.median(a[0] / b[0] for a, b in pairs),
        statistics.median(a[1] / b[1] for a, b in pairs),
    )


def measure(args: argparse.Namespace) -> dict[str, tuple[float, float, float, float]]:
    torch.set_num_threads(1)
    pdrun.init()
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(args.rows, 64), torch.randint(38, (args.rows,))
    run, step = make_run(make_model(), args.exact), make_ddp(make_model())
    for _ in range(20):
        run.step((x, y))
        step(x, y)
    found = {
        "a step": take_turns(
            lambda: run.step((x, y)).loss, lambda: step(x, y), args.rounds, args.steps
        )
    }
    models = iter([make_model() for _ in range(2 * args.rounds * MODELS_PER_BLOCK)])
    found["making a run"] = take_turns(
        lambda: make_run(next(models), args.exact),
        lambda: make_ddp(next(models)),
        args.rounds,
        MODELS_PER_BLOCK,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a small model's step with DDP's.")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=20, help="steps per block")
    parser.add_argument("--rows", type=int, default=16, help="rows per rank")
    parser.add_argument("--exact", action="store_true", help="the bits of one process")
    args = parser.parse_args()
    found = pdrun.launch(measure, args, devices=args.devices, backend="cpu")[0]
    parameters = sum(param.numel() for param in make_model().parameters())
    print(f"torch {torch.__version__}, {args.devices} ranks, {parameters:,} parameters")
    for name, (ours, theirs, ratio, cpu) in found.items():
        print(f"{name:13} {ours:8.2f} ms {theirs:8.2f} ms   wall {ratio:.3f}   CPU {cpu:.3f}")


if __name__ == "__main__":
    main()
