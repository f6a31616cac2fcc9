"""Products over two and three axes by layouts of an operator: numbers, and the formulas' bytes."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pdrun.errors import UsageError
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import make_mesh
from pdrun.parallel.layouts.device_matrix import Layout
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.operators.strategy import OpLayout
from pdrun.parallel.parallelize import parallelize
from tests.lib import decoder_model as decoder
from tests.lib import tiers

pytestmark = pytest.mark.torch

H, E, OUT, ROWS = 32, 64, 16, 16


class Products(nn.Module):
    """Two products, by modules or by weights as [in, out]."""

    def __init__(self, by_modules: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        if by_modules:
            self.first, self.second = nn.Linear(H, E), nn.Linear(E, OUT)
        else:
            self.w1, self.w2 = nn.Parameter(torch.randn(H, E)), nn.Parameter(torch.randn(E, OUT))
        self.by_modules = by_modules
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_modules:
            return self.second(F.gelu(self.first(x)))
        return torch.relu(x @ self.w1) @ self.w2


def entries_of(names: tuple[str, ...], by_modules: bool) -> dict[str, Any]:
    """Return MindSpore's layouts; the second product exchanges x and y."""

    def product(x: str, y: str, *z: str) -> tuple[L, L]:
        given = L((*z, y), x) if z else L(None, (x, y))
        weight = L((x, *z), y)
        return given, L(*reversed(weight.dims)) if by_modules else weight

    x, y, *z = names
    keys = ("first", "second") if by_modules else ("matmul", "matmul_1")
    return {keys[0]: product(x, y, *z), keys[1]: product(y, x, *z)}


def compare(degrees: tuple[int, ...], by_modules: bool) -> str:
    """Train a step, and return what one process says to the gradients."""
    names = ("x", "y", "z")[: len(degrees)]
    batch = torch.randn(ROWS, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    run = parallelize(
        Products(by_modules),
        lambda params: torch.optim.SGD(params, 1e-4),
        lambda out, _: (out.square().sum(), len(out)),
        mesh=make_mesh(**dict(zip(names, degrees, strict=True))),
        strategy=Operators(entries_of(names, by_modules)),
        sample=batch,
    )
    run.step(batch)
    return str(run.verify([batch]))


@pytest.mark.parametrize(
    ("degrees", "by_modules"),
    [((2, 2), True), tiers.thorough((2, 4), False), ((2, 2, 2), True)],
    ids=str,
)
def test_products_have_the_numbers_of_one_process(
    worlds: Any, degrees: tuple[int, ...], by_modules: bool
) -> None:
    for report in worlds(prod(degrees)).run(compare, degrees, by_modules):
        assert "gradients within" in report


def sent(axes: MeshGroups) -> int:
    """Return the bytes of gathers and scatters that this rank has sent."""
    total = 0
    for (name, group), count in axes.counts.items():
        n = axes.grid.group_size(group)
        if name in ("all_gather", "reduce_scatter"):
            total += (n - 1) * count.nbytes // (1 if name == "all_gather" else n)
    return total


def count_between(degrees: tuple[int, ...]) -> int:
    """
    Return what a rank sends for three products that leave the second's input and output sharded,
    less what two products send: the bytes of one product in the middle.
    """
    totals = []
    for count in (2, 4):
        names = ("x", "y", "z")[: len(degrees)]
        axes = decoder.axes_of(Grid(names, degrees))
        model: nn.Module = Chain(count)
        x, y, *z = names
        strategy = {
            f"matmul{f'_{at}' if at else ''}": next(
                iter(entries_of((x, y, *z) if at % 2 == 0 else (y, x, *z), False).values())
            )
            for at in range(count)
        }
        rows = torch.randn(ROWS, H, dtype=torch.float64)
        sharded = Operators(strategy).cut(model, axes, (rows,), {})
        axes.reset_counts()
        sharded(rows).sum().backward()
        totals.append(sent(axes))
    return totals[1] - totals[0]


class Chain(nn.Module):
    """Products of H by H, without a bias."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(H, H) for _ in range(count))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


@pytest.mark.parametrize(
    "degrees", [(2, 2), tiers.thorough((4, 2)), tiers.thorough((2, 2, 2))], ids=str
)
def test_the_bytes_of_the_formulas(worlds: Any, degrees: tuple[int, ...]) -> None:
    """Two more products in a chain cost what the formulas say, forward and backward."""
    x, y, z = (*degrees, 1)[:3]

    def product(x: int, y: int) -> float:
        return 2 * (ROWS * H * (x - 1) + ROWS * H * (y - 1) + H * H * (z - 1)) / (x * y * z)

    wanted = 8 * (product(x, y) + product(y, x))
    assert worlds(prod(degrees)).run(count_between, degrees) == [wanted] * prod(degrees)


def test_a_run_by_a_device_matrix(worlds: Any) -> None:
    losses = worlds(4).run(train, True)
    assert losses == [pytest.approx(worlds(1).run(train, False)[0], rel=1e-12)] * 4


def train(is_sharded: bool) -> list[float]:
    grid = Layout((2, 2), ("x", "y"))
    entries = {
        "matmul": (grid("None", ("x", "y")), grid("x", "y")),
        "matmul_1": (grid("None", ("y", "x")), grid("y", "x")),
    }
    batch = torch.randn(ROWS, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    run = parallelize(
        Products(False),
        lambda params: torch.optim.SGD(params, 1e-4),
        lambda out, _: (out.square().sum(), len(out)),
        strategy=Operators(entries) if is_sharded else None,
        sample=batch,
    )
    return [run.step(batch).loss for _ in range(2)]


def test_another_result_is_refused() -> None:
    given, weight = entries_of(("x", "y"), False)["matmul"]
    entries = {"matmul": OpLayout(in_=(given, weight), out=L(None, ("x", "y")))}
    with pytest.raises(UsageError, match=r"the result of a product over x, y is"):
        Operators(entries).plan(
            Products(False), Grid(("x", "y"), (2, 2)), (torch.zeros(ROWS, H).double(),)
        )
