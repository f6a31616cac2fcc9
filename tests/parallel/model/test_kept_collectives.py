"""Recomputation repeats the collectives of tensor axes, or keeps their results."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.comm.axis_transport import KeptResults
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.watchdog import CollectiveWatchdog
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.model.recompute import apply_recompute, parse_recompute
from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch

WIDTH, WORDS = 16, 12


class Block(nn.Module):
    """Two products, the second of which sums over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x


class Net(nn.Module):
    """A stack of blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    total = F.cross_entropy(output.flatten(0, 1), batch.flatten(), reduction="sum")
    return total, batch.numel()


def train(recompute: Any, seq: bool = False) -> tuple[list[float], int]:
    """Return the losses and norms of two steps, and the collectives along tp of the last one."""
    styles: dict[str, Any] = {"blocks.*.up": pdrun.col("tp"), "blocks.*.down": pdrun.row("tp")}
    if seq:
        styles = {
            "emb|head": pdrun.vocab("tp", sequence=1),
            "blocks.*.up": pdrun.col("tp", sequence=1),
            "blocks.*.down": pdrun.row("tp", sequence=1),
            "blocks.*.norm": pdrun.seq("tp"),
        }
    run = parallelize(
        Net(),
        lambda p: torch.optim.SGD(p, 0.1),
        loss,
        mesh=pdrun.mesh(tp=2),
        strategy=pdrun.Strategy(styles),
        recompute=recompute,
        accumulate=2,
        norm=True,
    )
    found = []
    for step in range(2):
        run.axes.counts.clear()
        dice = torch.Generator().manual_seed(step)
        metrics = run.step(torch.randint(WORDS, (4, 6), generator=dice))
        found += [float(metrics.loss), float(metrics.grad_norm)]
    calls = [count.calls for (_, names), count in run.axes.counts.items() if names == ("tp",)]
    return found, sum(calls)


@pytest.mark.parametrize("seq", [False, True])
def test_results_of_collectives_are_kept(seq: bool, worlds: Worlds) -> None:
    plain, calls = worlds(2).run(train, None, seq)[0]
    again, more = worlds(2).run(train, "full", seq)[0]
    assert more > calls
    for policy in ("full", "selective"):
        kept, same = worlds(2).run(train, {"policy": policy, "mp_comm_recompute": False}, seq)[0]
        assert same == calls
        assert kept == pytest.approx(again)
        assert kept == pytest.approx(plain)


SLICED = {"recompute_slice_activation": True}


def test_inputs_are_kept_as_parts(worlds: Worlds) -> None:
    """Of each block's input a rank keeps its half; each recomputation gathers it."""
    again, calls = worlds(2).run(train, "full")[0]
    sliced, more = worlds(2).run(train, SLICED)[0]
    assert sliced == again
    assert more == calls + 3 * 2  # blocks, micro-batches
    both, fewer = worlds(2).run(train, SLICED | {"mp_comm_recompute": False})[0]
    assert both == pytest.approx(again)
    assert fewer == worlds(2).run(train, None)[0][1] + 3 * 2
    assert worlds(2).run(keeps_input, "full") == [True] * 2
    assert worlds(2).run(keeps_input, SLICED) == [False] * 2
    assert worlds(2).run(refuse_other_inputs) == [True] * 2


def keeps_input(recompute: Any) -> bool:
    """Return whether a block keeps its input until its backward pass."""
    axes = make_axes()
    block = Block()
    apply_recompute(nn.ModuleList([block]), recompute, axes)
    x = torch.ones(4, 6, WIDTH, requires_grad=True) * 2.0
    output = block(x)
    storage = weakref.ref(x.untyped_storage())
    del x
    is_kept = storage() is not None
    output.sum().backward()
    return is_kept


def make_axes() -> MeshGroups:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    watchdog = CollectiveWatchdog(30.0, rank, world)
    return MeshGroups(Grid(("tp",), (world,)), rank, torch.device("cpu"), watchdog)


def refuse_other_inputs() -> bool:
    axes = make_axes()
    block = Block()
    apply_recompute(nn.ModuleList([block]), SLICED, axes)
    with pytest.raises(UsageError, match="0 has other inputs on each rank along the tensor axes"):
        block(torch.ones(4, 6, WIDTH, requires_grad=True) * axes.rank)
    return True


def test_a_result_that_was_changed_is_not_used() -> None:
    kept = KeptResults()
    calls = []

    def collective() -> Tensor:
        calls.append(1)
        return torch.ones(2)

    with kept.recording():
        first, second = kept.run(collective), kept.run(collective)
    first.add_(1.0)
    for _ in range(2):  # a graph may be used twice
        with kept.replaying():
            assert kept.run(collective).tolist() == [1.0, 1.0]
            assert kept.run(collective).data_ptr() == second.data_ptr()
    assert len(calls) == 4


@pytest.mark.parametrize(
    "value",
    [
        {"module": "blocks.*"},
        {"policy": "some"},
        {"mp_comm_recompute": 1},
        {"recompute_slice_activation": 1},
        {"modules": 3},
        3,
        "some",
        [1],
    ],
)
def test_other_forms_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="recompute"):
        parse_recompute(value)
