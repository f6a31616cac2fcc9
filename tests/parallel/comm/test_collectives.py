"""
Collectives with gradients: every one against what it means for whole tensors, on real ranks, uneven
parts too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdrun.parallel.comm import autograd as c
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.watchdog import CollectiveWatchdog
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L, shard_range

pytestmark = pytest.mark.torch


def axes_of(grid: Grid) -> MeshGroups:
    rank = torch.distributed.get_rank()
    return MeshGroups(grid, rank, torch.device("cpu"), CollectiveWatchdog(30.0, rank, grid.size))


def _whole(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(
    names: tuple[str, ...], sizes: tuple[int, ...], over: tuple[str, ...], size: int
) -> dict[str, Any]:
    """Compare each collective over some axes with whole tensors of ``size`` along dim 1."""
    axis = axes_of(Grid(names, sizes))[over]
    n, me = axis.size, axis.index
    low, high = shard_range(size, n, me)
    whole, weight = _whole(3, size, 5), _whole(3, size, 5, seed=1)
    parts = [_whole(3, size, 5, seed=10 + place) for place in range(n)]
    same = torch.testing.assert_close

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.clone().requires_grad_()

    x = leaf(whole)  # replicated, each rank uses its columns
    (c.copy_to_axis(x, axis)[:, low:high] * weight[:, low:high]).sum().backward()
    same(x.grad, weight)

    x = leaf(parts[me])  # partial sums, then the same computation everywhere
    y = c.all_reduce(x, axis)
    (y * weight).sum().backward()
    same(y, torch.stack(parts).sum(0))
    same(x.grad, weight)

    x = leaf(whole[:, low:high])
    y = c.all_gather(x, axis, 1, size)
    (y * weight).sum().backward()
    same(y, whole)
    same(x.grad, weight[:, low:high])

    x = leaf(whole[:, low:high])  # gathered, then each rank adds its own term of the loss
    y = c.all_gather_sum_grad(x, axis, 1, size)
    (y * parts[me]).sum().backward()
    same(y, whole)
    same(x.grad, torch.stack(parts).sum(0)[:, low:high])

    x = leaf(whole)
    y = c.slice_to_shard(x, axis, 1)
    (y * weight[:, low:high]).sum().backward()
    same(y, whole[:, low:high])
    same(x.grad, weight)

    x = leaf(parts[me])
    y = c.reduce_scatter(x, axis, 1)
    (y * weight[:, low:high]).sum().backward()
    same(y, torch.stack(parts).sum(0)[:, low:high])
    same(x.grad, weight)

    x = leaf(whole[:, low:high])  # cut along dim 1, then along dim 2
    first, last = shard_range(5, n, me)
    y = c.all_to_all(x, axis, 2, 1, size)
    (y * weight[:, :, first:last]).sum().backward()
    same(y, whole[:, :, first:last])
    same(x.grad, weight[:, low:high])

    same(axis.shift(torch.tensor([float(me)])), torch.tensor([float((me - 1) % n)]))
    same(axis.all_reduce(torch.tensor([float(me)]), "max"), torch.tensor([n - 1.0]))
    return {str(key): (count.calls, count.nbytes) for key, count in axis.state.counts.items()}


@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize(
    ("names", "sizes", "over"),
    [
        (("tp",), (4,), ("tp",)),
        (("dp", "tp"), (2, 2), ("tp",)),
        (("dp", "tp"), (2, 2), ("dp",)),
        (("dp", "tp"), (2, 2), ("dp", "tp")),
        (("dp", "tp"), (2, 2), ("tp", "dp")),
        (("a", "b", "c"), (2, 1, 2), ("c", "b", "a")),
    ],
)
def test_collectives_mean_what_they_say(
    worlds: Any, names: Any, sizes: Any, over: Any, size: int
) -> None:
    worlds(4).run(check, names, sizes, over, size)


def test_collectives_are_counted(worlds: Any) -> None:
    found = worlds(4).run(check, ("tp",), (4,), ("tp",), 8)[0]
    assert (
        found["('all_reduce', ('tp',))"][0] == 1 + 1 + 1
    )  # fan_out's backward, add_up's forward, and the largest
    there, back = 3 * 2 * 5, 3 * 8 * 2  # rank 0 has two of eight rows, then two of five columns
    assert found["('all_to_all', ('tp',))"] == (2, (there + back) * 8)


def test_an_axis_of_one_device_costs_nothing(worlds: Any) -> None:
    assert worlds(1).run(check, ("dp", "tp"), (1, 1), ("tp",), 8) == [{}]


# ---- layouts ----------------------------------------------------------------


def test_the_rows_and_columns_of_a_layout() -> None:
    """Ranks 0, 2, 4, 6 share row block 0 of ("mp", ("sp", "dp")) on (dp, sp, mp) = (2, 2, 2)."""
    grid, layout = Grid(("dp", "sp", "mp"), (2, 2, 2)), L("mp", ("sp", "dp"))
    boxes = [layout.box(grid, (4, 8), rank) for rank in range(8)]
    assert [rank for rank in range(8) if boxes[rank][0] == (0, 2)] == [0, 2, 4, 6]
    assert [boxes[rank][1] for rank in (0, 2, 4, 6)] == [(0, 2), (4, 6), (2, 4), (6, 8)]
