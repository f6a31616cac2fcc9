"""
A layer of experts on CPUs: against a loop over experts in one process, and what of it is not the
experts' arithmetic on several ranks. CPU time of a process, one thread, in alternation.

    python benchmarks/experts.py                                       # one process
    python -m pdrun --devices 2 --backend cpu benchmarks/experts.py    # two ranks

With --bf16 in bf16, 3 rounds, on ranks only forward: CPUs without its instructions need minutes.

The layer of one process: 16 experts of 256 x 512 (relu), 2,048 tokens, top 2, as a loop over
experts (`index_add`), and `pdrun.MoE`. On ranks: 8 experts of 1,024 x 2,048, 1,024 tokens per rank,
top 2. Its arithmetic is measured with the same rows and without anything around it.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import pdrun
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import make_mesh
from pdrun.parallel.comm.watchdog import CollectiveWatchdog
from pdrun.parallel.experts.grouped import ExpertRows
from pdrun.parallel.experts.moe import MoE

IS_BF16 = "--bf16" in sys.argv
DTYPE = torch.bfloat16 if IS_BF16 else torch.float32
ROUNDS = 3 if IS_BF16 else 9


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of this process for a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def pass_through(layer: Callable[[Tensor], Tensor], x: Tensor, backward: bool) -> None:
    """Go forward, and backward."""
    with torch.set_grad_enabled(backward):
        out = layer(x)
    if backward:
        out.backward(torch.ones_like(out))


def loop(moe: MoE, x: Tensor) -> Tensor:
    """Return the layer's output as a loop over experts."""
    scores = (x.float() @ moe.router.weight.float().T).softmax(-1)
    weights, index = scores.topk(moe.rule.top_k)
    weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
    out = torch.zeros_like(x)
    for number, (up, down) in enumerate(zip(moe.up.unbind(0), moe.down.unbind(0), strict=True)):
        row, place = torch.where(index == number)
        hidden = torch.relu(x[row] @ up)
        out = out.index_add(0, row, (hidden @ down) * weights[row, place, None])
    return out


def compare(name: str, works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median CPU time of each, measured in alternation."""
    found: dict[str, list[float]] = {key: [] for key in works}
    for work in works.values():
        work()
    for _ in range(ROUNDS):
        for key, work in works.items():
            found[key].append(cpu_seconds(work))
    middle = {key: statistics.median(each) for key, each in found.items()}
    times = ", ".join(f"{key} {value * 1e3:.1f} ms" for key, value in middle.items())
    if os.environ.get("RANK", "0") == "0":
        print(f"{name}: {times}", end="", flush=True)
    return middle


def measure_alone() -> None:
    """Compare with a loop in one process."""
    for backward in (False, True):
        _measure_type(DTYPE, backward)


def _measure_type(dtype: torch.dtype, backward: bool) -> None:
    torch.manual_seed(0)
    moe = MoE(256, 512, experts=16, top_k=2, activation="relu").to(dtype)
    x = torch.randn(2048, 256).to(dtype).requires_grad_()
    name = f"{dtype}, forward{' and backward' * backward}"
    times = compare(
        name,
        {
            "MoE": lambda: pass_through(moe, x, backward),
            "loop": lambda: pass_through(lambda x: loop(moe, x), x, backward),
        },
    )
    print(f": {times['MoE'] / times['loop']:.2f} of the loop", flush=True)


def measure_ranks() -> None:
    """Measure what is not arithmetic of experts, on this job's ranks."""
    context = pdrun.init()
    mesh = make_mesh(ep=context.world_size)
    device = torch.device("cpu")
    axes = MeshGroups(mesh.grid, context.rank, device, CollectiveWatchdog(600.0, context.rank))
    for backward in (False,) if IS_BF16 else (False, True):
        _measure_ranks(axes, DTYPE, backward)


def _measure_ranks(axes: MeshGroups, dtype: torch.dtype, backward: bool) -> None:
    context = pdrun.init()
    torch.manual_seed(0)
    holder = nn.Module()
    holder.moe = MoE(1024, 2048, experts=8, top_k=2, activation="relu").to(dtype)
    pdrun.Strategy({"moe": pdrun.experts("ep")}).apply(holder, axes, None)
    moe = holder.moe
    torch.manual_seed(1 + context.rank)
    x = torch.randn(1024, 1024).to(dtype).requires_grad_()
    seen: list[tuple[Tensor, ExpertRows]] = []
    compute = moe.compute_rows

    def remember(x: Tensor, rows: ExpertRows) -> Tensor:
        seen[:] = [(x.detach(), rows)]
        return compute(x, rows)

    moe.compute_rows = remember
    moe(x)
    moe.compute_rows = compute
    given, rows = seen[0]
    given.requires_grad_()
    name = f"{dtype}, {context.world_size} ranks, forward{' and backward' * backward}"
    times = compare(
        name,
        {
            "layer": lambda: pass_through(moe, x, backward),
            "arithmetic": lambda: pass_through(lambda x: compute(x, rows), given, backward),
        },
    )
    if context.rank == 0:
        share = 1 - times["arithmetic"] / times["layer"]
        print(f": {share:.1%} is not arithmetic of experts", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        measure_ranks()
    else:
        measure_alone()
