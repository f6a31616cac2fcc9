"""Operators without a rule are computed in full and named, and refused above 10 % of the FLOPs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from pdrun.errors import UsageError
from pdrun.parallel.auto.auto import Auto
from pdrun.parallel.auto.choose import SEARCHES, choose_plan
from pdrun.parallel.auto.degrees.planner import plan_of
from pdrun.parallel.auto.flops import count_flops
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.operators.explain import explain_plan
from pdrun.parallel.tensor.styles import replicate
from tests.parallel.auto.test_goldens import NODE, export_meta, make_problem

pytestmark = pytest.mark.torch
WIDTH = 32


@torch.library.custom_op("pdrun_tests::solve", mutates_args=())
def solve(x: Tensor) -> Tensor:
    """Is an operator that neither pdrun nor torch knows."""
    return x.clone()


@solve.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pdrun_tests::counted_solve", mutates_args=())
def counted_solve(x: Tensor) -> Tensor:
    """Is an operator whose FLOPs the user has registered."""
    return x.clone()


@counted_solve.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@register_flop_formula(torch.ops.pdrun_tests.counted_solve)  # type: ignore[untyped-decorator]
def _count_solve(shape: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    return 100 * int(shape[0])


class Strange(nn.Module):
    """Calls an operator after some products."""

    def __init__(self, call: Any, width: int = WIDTH) -> None:
        super().__init__()
        self.call = call
        self.fc = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return self.call(self.fc(x))


def flops_by_kind(model: nn.Module, *args: Tensor) -> dict[str, float]:
    """Return the FLOPs of the operators of a model."""
    graph = export_meta(lambda: model.to("meta"), *args)
    return {operator.kind: count_flops(graph, operator) for operator in graph.operators}


def test_flops_are_those_of_torch_or_the_elements() -> None:
    x = torch.zeros(8, WIDTH, device="meta")
    deconvolution = nn.ConvTranspose1d(4, 6, 3, bias=False)
    found = flops_by_kind(deconvolution, torch.zeros(2, 4, 10, device="meta"))
    assert found == {"conv_transpose1d": 2 * 2 * 10 * 4 * 6 * 3}
    found = flops_by_kind(Strange(lambda y: torch.linalg.multi_dot([y, y.mT, y])), x)
    assert found["linear"] == 2 * 8 * WIDTH * WIDTH
    assert found["linalg_multi_dot"] == 2 * 2 * 8 * 8 * WIDTH
    found = flops_by_kind(Strange(lambda y: counted_solve(solve(y)).diagonal()), x)
    assert found == {"linear": 16384, "solve": 8 * WIDTH, "counted_solve": 800, "diagonal": 0}


def solve_often(count: int) -> Callable[[Tensor], Tensor]:
    """Return a function that calls the operator without a rule."""

    def call(y: Tensor) -> Tensor:
        for _ in range(count):
            y = solve(y)
        return y

    return call


@pytest.mark.parametrize("search", SEARCHES)
def test_both_sides_of_the_border(search: str) -> None:
    """The product has 64 FLOPs per element: 7 of 71 are 9.9 %, 8 of 72 are 11.1 %."""

    def plan(count: int) -> str:
        x = torch.zeros(16, WIDTH, device="meta")
        graph = export_meta(lambda: Strange(solve_often(count)), x)
        return explain_plan(choose_plan(make_problem(graph, NODE, tp=2), search).plan)

    text = plan(7)
    assert text.count("no rule") == 1
    assert "no rule splits them: solve (solve and 6 more, 9.9% of the FLOPs)" in text
    with pytest.raises(UsageError) as caught:
        plan(8)
    message = str(caught.value)
    assert re.search(r"test_missing_rules\.py:\d+", message)
    assert "no rule splits solve (solve and 7 more, 11.1% of the FLOPs)" in message
    assert 'Auto({"*solve*": pdrun.replicate()})' in message
    assert "a mesh without tensor axes" in message


def test_what_the_error_proposes_is_accepted() -> None:
    graph = export_meta(lambda: Strange(solve_often(20)), torch.zeros(16, WIDTH, device="meta"))
    auto = Auto({"*solve*": replicate()}, topology=NODE)
    plan = auto.plan_of(graph, Grid(("tp",), (2,)), {})
    assert not any(
        sharding.splits
        for operator, sharding in zip(graph.operators, plan.shardings, strict=True)
        if operator.kind == "solve"
    )
    assert auto.plan_of(graph, Grid(("tp",), (1,)), {}).notes == []
    with pytest.raises(UsageError, match="no rule splits solve"):
        Auto(topology=NODE).plan_of(graph, Grid(("tp",), (2,)), {})


def plan_layers(count: int, layers: int = 6, **options: Any) -> str:
    """Return the text of `pdrun plan` for equal layers behind a large head."""
    with torch.device("meta"):
        model = nn.Sequential(
            *(Strange(solve_often(count)) for _ in range(layers)), nn.Linear(WIDTH, 8, bias=False)
        )
    batch = torch.zeros(16, WIDTH)
    return str(plan_of(model, batch, devices=2, topology="h100x8", **options))


def test_table_of_degrees_counts_every_layer() -> None:
    """
    A layer has 64 FLOPs per element of the product and 7 of the operator, the end 16. Six layers:
    42 of 442 are 9.5 %; of the three layers that are planned they would be 9.2 %.
    """
    text = plan_layers(7)
    assert re.search(
        r"no rule splits them: solve \(0\.solve and 41 more, 9\.5% of the FLOPs\)", text
    )
    text = plan_layers(8)
    assert "  - tp: with 16 rows per pass no rule splits solve (0.solve and 47 more, 10.7%" in text
    assert "no rule splits them" not in text
    with pytest.raises(UsageError, match=r"test_missing_rules.py:\d+.*no rule splits solve"):
        plan_layers(8, fixed={"tp": 2})
