"""
Measure how much network latency two copies of a step hide, compared with the same two micro-batches
in sequence.

    python benchmarks/copies.py [--devices 2] [--latency 1 2 5 10] [--rounds 5]

Sequences are sharded over the ranks, with eight all-to-alls per layer around attention. CPUs of one
machine have almost no network latency. So each collective of cp is delayed until it has lasted the
given time. The results are the share of that time in which a rank waited without work, and the time
of a step. The two variants take turns.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import pdrun

WORDS, HEADS = 256, 4


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        x = x + self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A small language model without positions."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.emb(x)))


def total_loss(out: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(out.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


class DelayedNetwork:
    """Delays every wait for a collective of a run's model axes until it has lasted ``seconds``."""

    def __init__(self, run: pdrun.Run) -> None:
        self.seconds, self.calls, self.waited = 0.0, 0, 0.0
        self._began: dict[int, float] = {}
        axis, watch = run.axes["cp"], run.axes.watchdog
        context = run.state.sequence_slicer.sequences(run.axes)
        for place in {id(one): one for one in (axis, context.ring, context.ulysses)}.values():
            place._count = self._counted(place._count)
        self._wait = watch.wait
        watch.wait = self.wait

    def _counted(self, count: Any) -> Any:
        def counted(name: str, x: Tensor) -> None:
            self._began[threading.get_ident()] = time.perf_counter()
            self.calls += 1
            count(name, x)

        return counted

    def wait(self, work: Any, label: str) -> None:
        """Wait for the collective, and then for the time that it is to last."""
        self._wait(work, label)
        began = self._began.pop(threading.get_ident(), None)
        if began is not None:
            left = max(0.0, began + self.seconds - time.perf_counter())
            self.waited += left
            time.sleep(left)


def make_run(args: argparse.Namespace, **more: Any) -> tuple[pdrun.Run, DelayedNetwork]:
    """Return a run and the object that slows its network."""
    torch.manual_seed(0)
    run = pdrun.parallelize(
        Model(args.width, args.layers),
        lambda params: torch.optim.AdamW(params, 1e-3),
        total_loss,
        exact=False,
        mesh=pdrun.mesh(cp=-1),
        context=pdrun.ContextParallel(ulysses=-1),
        **more,
    )
    return run, DelayedNetwork(run)


def time_steps(run: pdrun.Run, batch: Any, steps: int) -> float:
    """Return wall time per step, in ms."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        run.step(batch)
    return (time.perf_counter() - begin) / steps * 1e3


@dataclass
class LatencyResult:
    """
    What one latency, in ms, makes of each way: waiting in parts of the collectives' time, and ms a
    step.
    """

    latency: float
    calls: int
    waited: tuple[float, float]
    step: tuple[float, float]


def measure_latencies(args: argparse.Namespace) -> list[LatencyResult]:
    """Return the results for each latency."""
    torch.set_num_threads(1)
    pdrun.init()
    tokens = torch.randint(
        WORDS, (args.rows, args.length + 1), generator=torch.Generator().manual_seed(1)
    )
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    after, together = make_run(args, accumulate=2), make_run(args, copies=2)
    assert after[0].step(batch).loss == together[0].step(batch).loss
    found = []
    for latency in args.latency:
        times: list[tuple[float, float]] = []
        for _, slow in (after, together):
            slow.seconds, slow.calls, slow.waited = latency / 1e3, 0, 0.0
        for turn in range(args.rounds):
            order = (after, together) if turn % 2 else (together, after)
            one, two = (time_steps(run, batch, args.steps) for run, _ in order)
            times.append((one, two) if turn % 2 else (two, one))
        one, two = (statistics.median(column) for column in zip(*times, strict=True))
        parts = [slow.waited / (slow.calls * slow.seconds) for _, slow in (after, together)]
        calls = together[1].calls // (args.rounds * args.steps)
        found.append(LatencyResult(latency, calls, (parts[0], parts[1]), (one, two)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare copies=2 with accumulate=2 on a slow network."
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument(
        "--latency", type=float, nargs="+", default=[1, 2, 5, 10], help="ms a collective"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps a block")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    told = pdrun.launch(measure_latencies, args, devices=args.devices, backend="cpu")[0]
    print(
        f"torch {torch.__version__}, {args.devices} ranks, width {args.width}, {args.layers} layers"
    )
    print("              one after the other          copies=2")
    print("  collectives  waited   a step       waited   a step")
    for one in told:
        row = "   ".join(
            f"{part:6.0%} {ms:8.1f} ms" for part, ms in zip(one.waited, one.step, strict=True)
        )
        print(f"{one.calls:4} x {one.latency:2g} ms   {row}")


if __name__ == "__main__":
    main()
