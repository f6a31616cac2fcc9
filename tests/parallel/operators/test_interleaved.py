"""Operators in parts by the axis "interleaved_parallel": the numbers of one process, in turns."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import pdrun
from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.auto.plan_entries import describe_operators, plan_from_entries
from pdrun.parallel.comm.mesh import make_mesh
from pdrun.parallel.layouts.device_matrix import Layout
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.explain import explain_plan
from pdrun.parallel.operators.interleaving import moves
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.operators.strategy import OpLayout
from pdrun.parallel.parallelize import parallelize
from tests.lib import operator_models as nets
from tests.lib import tiers

pytestmark = pytest.mark.torch

PARTS = "interleaved_parallel"


def by_columns(layout: Layout, ndim: int, dim: int = 0) -> tuple[Any, Any]:
    """Return the layouts of a product by columns whose input is in parts along a dim."""
    dims = [PARTS if at == dim else "None" for at in range(ndim)]
    return layout(*dims), layout("mp", "None")


def by_rows(layout: Layout, ndim: int, dim: int = 0) -> tuple[Any, Any]:
    """Return the layouts of a product by rows whose input is in parts along a dim."""
    dims: list[Any] = [PARTS if at == dim else "None" for at in range(ndim)]
    dims[-1] = "mp" if dims[-1] == "None" else ("mp", PARTS)
    return layout(*dims), layout("None", "mp" if dim < ndim - 1 else ("mp", PARTS))


TWO, FOUR = (Layout((2, parts), ("mp", PARTS)) for parts in (2, 4))
CHAIN = {"fc1": by_columns(TWO, 2), "fc2": by_rows(TWO, 2)}
BLOCKS = {"blocks.*.up": by_columns(TWO, 3), "blocks.*.down": by_rows(TWO, 3)}
DECODER = {
    "[qkv]": by_columns(TWO, 3),
    "o": by_rows(TWO, 3),
    "gate": by_columns(TWO, 3),
    "up": by_columns(TWO, 3),
    "down": by_rows(TWO, 3),
}
CASES: list[Any] = [
    ("perceptron", CHAIN, (4, 3, 2)),  # 3 rows have no equal parts: computed in one piece
    ("llama", DECODER, (4,)),
    ("dropped", BLOCKS, (4,)),
    ("tiny", BLOCKS | {"blocks.*.down": OpLayout(by_rows(TWO, 3), L(None, "tp", None))}, (4,)),
    tiers.thorough("perceptron", {"fc1": by_columns(FOUR, 2), "fc2": by_rows(FOUR, 2)}, (4,)),
    tiers.thorough("tiny", {"blocks.*.up": by_columns(TWO, 3, dim=1)}, (4,)),
    tiers.thorough(
        "feed", {"matmul_1": (TWO("None", ("mp", PARTS)), TWO(("mp", PARTS), "None"))}, (4,)
    ),
    tiers.thorough("perceptron", {"fc1": (TWO("mp", PARTS), TWO("None", PARTS))}, (4,)),
    tiers.thorough("conv", {"two": (TWO(PARTS, "mp", "None", "None"), None)}, (4,)),
]


@pytest.mark.parametrize(("name", "entries", "rows"), CASES, ids=str)
def test_parts_have_the_numbers_of_one_process(
    worlds: Any, name: str, entries: Any, rows: tuple[int, ...]
) -> None:
    for found in worlds(2).run(nets.compare, name, {"tp": 2}, entries, rows):
        assert PARTS in found["text"]


def test_parts_send_what_the_full_tensor_sends_in_twice_as_many_collectives(worlds: Any) -> None:
    plain = {"fc1.weight": L("tp", None), "fc2.weight": L(None, "tp")}
    once, twice = (
        worlds(2).run(nets.compare, "perceptron", {"tp": 2}, entries)[0]
        for entries in (plain, CHAIN)
    )
    calls, nbytes = once["counts"]["('all_reduce', ('tp',))"]
    assert twice["counts"]["('all_reduce', ('tp',))"] == (2 * calls, nbytes)
    assert "fc2.linear [4, 5]: all-reduce over tp in 2 parts (160 B forward)" in twice["text"]
    assert "fc1.linear: [-, -], [tp, -], [tp] -> [-, tp]  (as configured)  " in twice["text"]
    assert "relu: [-, tp] -> [-, tp]  (interleaved_parallel: 2 parts on dims 0)" in twice["text"]


def test_called_submodules_and_copies_of_the_model(worlds: Any) -> None:
    assert "blocks.2" in worlds(2).run(nets.hooked, {"tp": 2}, BLOCKS)[0]
    worlds(2).run(nets.copied, {"tp": 2}, BLOCKS)


class Events(TorchDispatchMode):
    """Notes products, and starts and waits of parts, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []
        for name in ("move_forward", "finish_forward", "move_backward", "finish_backward"):
            self._watch(name)

    def _watch(self, name: str) -> None:
        method = getattr(moves.MovedPart, name)

        def noted(part: moves.MovedPart, *args: Any) -> Any:
            self.found.append((name, id(part)))
            return method(part, *args)

        setattr(moves.MovedPart, name, noted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default or func is torch.ops.aten.addmm.default:
            self.found.append(("product", 0))
        return func(*args, **(kwargs or {}))

    def products_between(self, start: str, wait: str) -> list[int]:
        """Return the number of products between each start and its wait."""
        found = []
        for at, (name, part) in enumerate(self.found):
            if name == start:
                end = self.found.index((wait, part), at)
                found.append(sum(one == "product" for one, _ in self.found[at:end]))
        return found


class FourProducts(nn.Module):
    """Four products, of which two pairs make partial sums, with a norm between the pairs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c, self.d = (
            nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(4)
        )
        self.norm = nn.LayerNorm(8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.b(F.gelu(self.a(x)))
        return self.d(F.gelu(self.c(self.norm(x))))


def chain_entries(parts: int) -> dict[str, Any]:
    """Return the entries of a `FourProducts`."""
    layout = Layout((2, parts), ("mp", PARTS))
    return {name: by_columns(layout, 2) if name in "ac" else by_rows(layout, 2) for name in "abcd"}


def watch_order(parts: int) -> tuple[list[int], list[int]]:
    """Return the products between each start and its wait, forward and backward."""
    axes = nets.axes_of(Grid(("tp",), (2,)))
    x = torch.randn(8, 8, dtype=torch.float64).requires_grad_()
    model = Operators(chain_entries(parts)).cut(FourProducts(), axes, (x,), {})
    with Events() as events:
        model(x).sum().backward()
    return (
        events.products_between("move_forward", "finish_forward"),
        events.products_between("move_backward", "finish_backward"),
    )


@pytest.mark.parametrize("parts", [2, tiers.thorough(4)])
def test_products_of_other_parts_are_computed_during_a_collective(worlds: Any, parts: int) -> None:
    for forward, backward in worlds(2).run(watch_order, parts):
        # two all-reduces per part forward (of b and d), two backward (of the inputs of a and c);
        # that of the last part has nothing left to overlap with
        assert sum(count > 0 for count in forward) >= 2 * (parts - 1)
        assert sum(count > 0 for count in backward) >= 2 * (parts - 1)


def train(options: dict[str, Any], parts: int) -> tuple[str, float]:
    """Train a step; return what `verify` says, and the loss."""
    torch.manual_seed(2)
    batch = torch.randn(8, 8, dtype=torch.float64)
    options = {"mesh": make_mesh(tp=2), **options}
    run = parallelize(
        FourProducts(),
        lambda params: torch.optim.SGD(params, 0.1),
        lambda out, _: (out.square().sum(), len(out)),
        strategy=Operators(chain_entries(parts) if parts > 1 else {}),
        sample=batch[:4],
        **options,
    )
    return str(run.verify([batch])), run.step(batch).loss


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2, "copies": 2, "optimizer_level": 3},
        tiers.thorough({"recompute": ["a", "norm"]}),
        tiers.thorough({"recompute": {"operators": ["gelu"]}}),
        tiers.thorough({"recompute": {"modules": ["c"], "mp_comm_recompute": False}}),
    ],
    ids=str,
)
def test_parts_beside_other_features(worlds: Any, options: dict[str, Any]) -> None:
    for report, loss in worlds(2).run(train, options, 2):
        within = re.search(r"gradients within (\S+)", report)
        assert "the same bits" in report or (within and float(within[1]) < 1e-12), report
        assert loss == pytest.approx(train_alone(), rel=1e-12)


def train_alone() -> float:
    """Return the loss of one process."""
    torch.manual_seed(2)
    batch = torch.randn(8, 8, dtype=torch.float64)
    return float((FourProducts()(batch).square().sum() / 8).detach())


class Constrained(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(pdrun.constrain(x, TWO(PARTS, "None")), -1)


REFUSED: list[tuple[type[nn.Module], tuple[int, ...], dict[str, Any], str]] = [
    (
        FourProducts,
        (6, 8),
        {"a": by_columns(FOUR, 2)},
        "dim 0 of input 0 of a.linear is 6: it cannot be in",
    ),
    (
        FourProducts,
        (8, 8),
        {
            "a": (FOUR("None", ("mp", PARTS)), FOUR("None", ("mp", PARTS))),
            "b": by_columns(FOUR, 2, 1),
        },
        r"b: linear cannot have inputs \(dim 1 in parts, full\)",
    ),
    (
        FourProducts,
        (8, 8),
        {"norm": (TWO("None", PARTS),)},
        r"norm: layer_norm cannot have inputs \(dim 1 in parts",
    ),
    (
        FourProducts,
        (8, 8),
        {"a.weight": TWO(PARTS, "None")},
        "a.weight: 'interleaved_parallel' is for the",
    ),
    (
        FourProducts,
        (8, 8),
        {"a": (L(PARTS, None), None)},
        "a: 'interleaved_parallel' is for the inputs of",
    ),
    (
        FourProducts,
        (8, 8),
        {"a": (TWO(PARTS, "None"), FOUR("mp", PARTS))},
        "has 2 and 4 parts in one entry",
    ),
    (FourProducts, (8, 8), {"a": OpLayout(out=TWO(PARTS, "None"))}, "a: linear cannot have inputs"),
    (Constrained, (8, 8), {}, "pdrun.constrain at .*: 'interleaved_parallel' is for the inputs"),
]


@pytest.mark.parametrize(("kind", "shape", "entries", "message"), REFUSED, ids=str)
def test_what_cannot_be_in_parts_is_refused(
    kind: type[nn.Module], shape: tuple[int, ...], entries: dict[str, Any], message: str
) -> None:
    x = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(UsageError, match=message):
        Operators(entries).plan(kind(), Grid(("tp",), (2,)), (x,))


def test_parts_are_the_same_after_a_plan_file() -> None:
    grid, x = Grid(("tp",), (2,)), torch.zeros(8, 8, dtype=torch.float64)
    plan = Operators(chain_entries(2)).plan(FourProducts(), grid, (x,))
    entries = describe_operators(plan)
    assert entries["norm.layer_norm"] == {
        "in": [[None, None], [None], [None]],
        "parts": {"count": 2, "dims": [0, None, None]},
    }
    again = plan_from_entries(plan.graph, grid, entries, {}, "plan.json")
    assert again.interleaved == plan.interleaved
    with pytest.raises(ConfigError, match="parts must be a count above 1"):
        broken = entries | {"norm.layer_norm": entries["norm.layer_norm"] | {"parts": 2}}
        plan_from_entries(plan.graph, grid, broken, {}, "plan.json")


def test_a_dropout_between_is_in_parts_and_what_follows_is_not() -> None:
    plan = Operators(BLOCKS).plan(
        nets.net("dropped"), Grid(("tp",), (2,)), nets.inputs("dropped", 4)
    )
    lines = explain_plan(plan).splitlines()
    assert any("dropout" in line and PARTS in line for line in lines)
    assert not any(line.startswith("head") and PARTS in line for line in lines)
