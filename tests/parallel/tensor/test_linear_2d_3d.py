"""
Linear modules over two and three axes: the numbers of one process, and the bytes of the closed
forms.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.errors import UsageError
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.tensor import Strategy
from pdrun.parallel.tensor.linear_2d_3d import linear2d, linear3d
from tests.lib import decoder_model as decoder
from tests.lib.tiers import thorough

pytestmark = pytest.mark.torch


class Perceptron(nn.Module):
    def __init__(self, into: int, hidden: int, out: int, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(into, hidden, bias), nn.Linear(hidden, out, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


def build(*sizes: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> Perceptron:
    torch.manual_seed(0)
    return Perceptron(*sizes, bias=bias).to(dtype)


def batch(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (
        (model(x) * torch.linspace(-1, 2, x.shape[0], dtype=x.dtype).view(-1, *[1] * (x.dim() - 1)))
        .square()
        .sum()
    )


def pair(names: tuple[str, ...], rows: int | None = None) -> Strategy:
    """The second module exchanges x and y."""
    x, y, *z = names
    if not z:
        return Strategy({"first": linear2d(x, y, cut=True), "second": linear2d(y, x, gather=True)})
    at = {} if rows is None else {"rows": rows}
    return Strategy(
        {
            "first": linear3d(x, y, *z, cut=True, **at),
            "second": linear3d(y, x, *z, gather=True, **at),
        }
    )


def same(
    grid: Grid, names: tuple[str, ...], sizes: tuple[int, ...], shape: tuple[int, ...], **how: Any
) -> None:
    for dtype in (torch.float64, torch.float32):
        model = build(*sizes, bias=how.get("bias", True), dtype=dtype)
        decoder.compare(model, pair(names, how.get("rows")), grid, batch(*shape, dtype=dtype), loss)


@pytest.mark.parametrize(
    ("grid", "names", "sizes", "shape", "how"),
    [
        (((2, 2), "xy"), ("x", "y"), (8, 12, 4), (4, 3, 8), {}),
        (((2, 2), "yx"), ("x", "y"), (8, 12, 4), (4, 8), {"bias": False}),
        (((4, 1), "xy"), ("x", "y"), (8, 16, 4), (4, 8), {}),
        (((1, 4), "xy"), ("x", "y"), (8, 16, 4), (4, 8), {}),
        thorough(((2, 4), "xy"), ("x", "y"), (16, 24, 8), (4, 3, 16), {}),
        (((2, 2), "xy"), ("x", "y"), (7, 9, 5), (3, 7), {}),
        (((2, 2, 2), "zxy"), ("x", "y", "z"), (8, 12, 4), (4, 3, 8), {}),
        (((2, 2, 2), "xyz"), ("x", "y", "z"), (7, 9, 5), (2, 4, 7), {"rows": 1}),
        thorough(((2, 2, 1), "xyz"), ("x", "y", "z"), (8, 12, 4), (4, 8), {"bias": False}),
        (((1, 2, 2), "xyz"), ("x", "y", "z"), (8, 12, 4), (4, 8), {}),
    ],
    ids=str,
)
def test_a_pair_equals_one_process(
    worlds: Any, grid: Any, names: Any, sizes: Any, shape: Any, how: Any
) -> None:
    """Both precisions; sizes that divide and sizes that do not."""
    devices = Grid(tuple(grid[1]), grid[0])
    worlds(devices.size).run(same, devices, names, sizes, shape, **how)


# ---- bytes ------------------------------------------------------------------


def sent(axes: MeshGroups) -> int:
    """
    Return how many bytes this rank has sent: all but its part of a gather or of a scatter, n - 1
    times.
    """
    total = 0
    for (name, names), count in axes.counts.items():
        n = axes.grid.group_size(names)
        assert name in ("all_gather", "reduce_scatter"), name
        total += (n - 1) * count.nbytes // (1 if name == "all_gather" else n)
    return total


def volume(
    names: tuple[str, ...], degrees: tuple[int, ...], sizes: tuple[int, ...], rows: int
) -> int:
    """Pass parts through a pair, without its ends, and return the bytes."""
    grid = Grid(names, degrees)
    model, axes = build(*sizes, bias=False), decoder.axes_of(grid)
    x, y, *z = names
    style = linear3d if z else linear2d
    Strategy({"first": style(x, y, *z), "second": style(y, x, *z)}).apply(model, axes)
    into = L(None, (x, y)) if not z else L((*z, y), x)
    part = batch(*into.local_shape(grid, (rows, sizes[0]), axes.rank)).requires_grad_()
    axes.reset_counts()
    model(part).sum().backward()
    return sent(axes)


@pytest.mark.parametrize(
    "degrees", [(2, 2), (2, 4), (4, 2), (4, 1), (2, 2, 2), (2, 1, 4), (1, 2, 2)], ids=str
)
def test_the_bytes_of_the_closed_forms(worlds: Any, degrees: tuple[int, ...]) -> None:
    h, e, out, rows = 32, 64, 16, 16
    x, y, z = (*degrees, 1)[:3]

    def layer(h: int, e: int, x: int, y: int) -> float:
        return 2 * (rows * e * (x - 1) + rows * h * (y - 1) + h * e * (z - 1)) / (x * y * z)

    wanted = 8 * (layer(h, e, x, y) + layer(e, out, y, x))
    found = worlds(x * y * z).run(
        volume, ("x", "y", "z")[: len(degrees)], degrees, (h, e, out), rows
    )
    assert found == [wanted] * len(found)


# ---- refusals ---------------------------------------------------------------


def test_wrong_styles_are_refused() -> None:
    with pytest.raises(UsageError, match="must be different tensor axes"):
        linear2d("x", "x")
    with pytest.raises(UsageError, match="rows must be a dim"):
        linear3d("x", "y", "z", rows=-1)
    grid = Grid(("x", "y"), (2, 2))
    with pytest.raises(UsageError, match="first: 3 cannot be split into 4 parts over y x x"):
        Strategy({"first": linear2d("x", "y")}).plan(build(8, 3, 4), grid)
    with pytest.raises(UsageError, match="is not a linear module"):
        Strategy({"0": linear2d("x", "y")}).plan(nn.Sequential(nn.ReLU()), grid)
    with pytest.raises(UsageError, match="no axis 'z'"):
        Strategy({"first": linear3d("x", "y", "z")}).plan(build(8, 8, 4), grid)


def wrong_rows() -> list[str]:
    axes, found = decoder.axes_of(Grid(("x", "y", "z"), (2, 2, 1))), []
    for shape, rows in (((3, 8), 0), ((4, 8), 1)):
        model = pair(("x", "y", "z"), rows).apply(build(8, 8, 4), axes)
        try:
            model(batch(*shape))
        except UsageError as error:
            found.append(str(error))
    return found


def test_rows_that_do_not_divide_are_refused(worlds: Any) -> None:
    first, second = worlds(4).run(wrong_rows)[0]
    assert "first: dim 0 of [3, 8] must be a multiple of 2, the size of z x y" in first
    assert "rows must be a dim before the last of [4, 8], got 1" in second
