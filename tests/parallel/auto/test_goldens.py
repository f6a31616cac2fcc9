"""Cases whose best plan is known: from closed forms, and from other systems."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pdrun.parallel.auto.choose import EXACT, PROPAGATION, RECURSIVE, choose_plan
from pdrun.parallel.auto.prices import PriceList, price_plan
from pdrun.parallel.auto.search.exact import PlanSearchResult, search_exact
from pdrun.parallel.auto.search.problem import SearchProblem
from pdrun.parallel.auto.search.recursive import search_recursive
from pdrun.parallel.auto.search.templates import list_templates
from pdrun.parallel.auto.topology import ComputeRate, DeviceRates, LinkLevel, Topology
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.explain import list_moves
from pdrun.parallel.operators.graph.export import export_graph
from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.operators.plan import OperatorSharding
from pdrun.parallel.operators.redistribute import ALL_GATHER_SUM_GRAD
from tests.lib.tiers import thorough
from tests.parallel.auto import golden_models as models
from tests.parallel.auto.random_graphs import make_topology

pytestmark = pytest.mark.torch
NODE = make_topology(989e12 * 0.62, 4.8e12 * 0.7, 4e-6, 8e-6, 300e9, 64)
PCIE = make_topology(989e12 * 0.62, 4.8e12 * 0.7, 4e-6, 2e-5, 20e9)
SLOW = make_topology(989e12 * 0.62, 4.8e12 * 0.7, 4e-6, 2e-5, 3e9)


def export_meta(
    make: Callable[[], nn.Module], *args: Any, dtype: torch.dtype = torch.float32
) -> OperatorGraph:
    """Return the graph of a model without memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = make()
        return export_graph(model, args)
    finally:
        torch.set_default_dtype(before)


def make_problem(
    graph: OperatorGraph, topology: Topology, gather: bool = True, **axes: int
) -> SearchProblem:
    """Return the problem of a graph on some axes."""
    grid = Grid(tuple(axes), tuple(axes.values()))
    return SearchProblem(graph, grid, PriceList(graph, grid, topology), gather=gather)


def layouts_by_name(found: PlanSearchResult) -> dict[str, tuple[L, ...]]:
    """Return the layouts of the inputs of each operator."""
    graph = found.plan.graph
    return {
        operator.name: tuple(
            sharding.input_layout(slot, len(graph.shape_of(index)))
            for slot, index in enumerate(operator.inputs)
        )
        for operator, sharding in zip(graph.operators, found.plan.shardings, strict=True)
    }


@functools.cache
def decoder_graph(layers: int, rows: int, **options: Any) -> OperatorGraph:
    """Return the graph of a decoder in bf16."""
    return export_meta(
        lambda: models.Decoder(layers, **options), models.tokens_of(rows), dtype=torch.bfloat16
    )


def test_two_products_are_split_by_rows() -> None:
    shapes = ((128, 32), (32, 64), (64, 64))
    graph = export_meta(models.TwoProducts, *(torch.zeros(s, device="meta") for s in shapes))
    topology = make_topology(1e9, 3e12, 0.0, 1e-9, 1e12)
    layouts = layouts_by_name(search_exact(make_problem(graph, topology, d=16)))
    assert layouts["matmul"] == (L("d", None), L(None, None))
    assert layouts["matmul_1"] == (L("d", None), L(None, None))


CHAINS = [
    # layers, batch, width, axes, bytes: sums of weights, or activations between pairs
    (2, 1024, 128, {"tp": 4}, 196_617),
    (2, 128, 1024, {"tp": 4}, 786_433),
    thorough(12, 1024, 128, {"tp": 4}, 1_179_667),
    (12, 128, 1024, {"tp": 4}, 8_650_763),
    (2, 1024, 128, {"x": 4, "y": 8}, 26_880),
    thorough(2, 1024, 128, {"x": 8, "y": 4}, 58_339),
    thorough(12, 1024, 128, {"x": 4, "y": 8}, 172_717),
    thorough(12, 1024, 128, {"x": 8, "y": 4}, 354_909),
]


@pytest.mark.parametrize(("layers", "batch", "width", "axes", "nbytes"), CHAINS)
def test_communication_of_chains(
    layers: int, batch: int, width: int, axes: dict[str, int], nbytes: int
) -> None:
    """Computation is expensive, so that everything is split; a byte costs 1 on the outer axis."""
    graph = export_meta(
        lambda: models.Chain(layers, width), torch.zeros(batch, width, device="meta")
    )
    flops = 2.0 * layers * batch * width * width
    rate = ComputeRate(flops * 3 / 100, ((1.0, 1.0),))
    device = DeviceRates(2**36, 1.0, 1e30, 0.0, {"fp32": rate})
    inner = LinkLevel("inner", 1e-9, 1e11, axes.get("y", 1))
    outer = LinkLevel("outer", 1e-9, 1e9)
    topology = Topology("test", device, (inner, outer) if "y" in axes else (outer,))
    problem = make_problem(graph, topology, **axes)
    found = search_exact(problem)
    price = price_plan(problem.prices, found.plan)
    sent = price.move_seconds + math.fsum(price.weights.values())
    assert sent * 1e9 == pytest.approx(nbytes, abs=20)


@pytest.mark.thorough
def test_nothing_is_split_if_computation_is_free() -> None:
    graph = export_meta(lambda: models.Chain(3, 64), torch.zeros(32, 64, device="meta"))
    found = search_exact(make_problem(graph, make_topology(1e30, latency=1e-6), tp=4))
    assert found.seconds < 1e-15
    assert all(not layout.axes for ins in layouts_by_name(found).values() for layout in ins)


def test_gated_perceptron_is_split_by_columns_then_rows() -> None:
    graph = export_meta(models.GatedMlp, torch.zeros(1, 4096, 4096, device="meta"))
    layouts = layouts_by_name(search_exact(make_problem(graph, NODE, tp=4)))
    assert layouts["gate.linear"][1] == layouts["up.linear"][1] == L("tp", None)
    assert layouts["down.linear"] == (L(None, None, "tp"), L(None, "tp"))


def test_decoder_in_a_node_has_sequence_parts() -> None:
    graph = decoder_graph(3, 1)
    problem = make_problem(graph, NODE, gather=False, tp=8)
    found = search_exact(problem)
    layouts = layouts_by_name(found)
    for norm in ("layers.1.norm1.rms_norm", "layers.1.norm2.rms_norm"):
        assert layouts[norm][0] == L(None, "tp", None)
    for name in "qkv":
        assert layouts[f"layers.1.{name}.linear"] == (L(None, None, None), L("tp", None))
    for name in "gate", "up":
        assert layouts[f"layers.1.{name}.linear"] == (L(None, None, None), L("tp", None))
    for name in "o", "down":
        assert layouts[f"layers.1.{name}.linear"] == (L(None, None, "tp"), L(None, "tp"))
    assert layouts["head.linear"][1] == L("tp", None)
    for name, plan in list_templates(problem):
        assert found.seconds <= price_plan(problem.prices, plan).total * (1 + 1e-9), name


@pytest.mark.parametrize("topology", [PCIE, thorough(NODE)], ids=["pcie", "node"])
def test_many_rows_are_split_by_rows(topology: Topology) -> None:
    layouts = layouts_by_name(
        search_exact(make_problem(decoder_graph(3, 8), topology, gather=False, tp=8))
    )
    for name in ("q", "o", "up", "down"):
        ins = layouts[f"layers.1.{name}.linear"]
        assert ins == (L("tp", None, None), L(None, None))
    assert layouts["head.linear"][1] == L("tp", None)


def test_nothing_is_split_on_a_slow_network() -> None:
    problem = make_problem(decoder_graph(3, 1), SLOW, gather=False, tp=8)
    found = search_exact(problem)
    assert all(not layout.axes for ins in layouts_by_name(found).values() for layout in ins)


@pytest.mark.thorough
def test_heads_that_do_not_divide_stay_whole() -> None:
    """8 groups of key heads on an axis of 16: no candidate splits the heads."""
    problem = make_problem(decoder_graph(2, 1), NODE, gather=False, tp=16)
    layouts = layouts_by_name(search_exact(problem))
    ins = layouts["layers.1.scaled_dot_product_attention"]
    assert all(layout.dims[1] == () for layout in ins)


def test_tied_embedding_has_one_layout_for_both_uses() -> None:
    graph = decoder_graph(2, 1, tied=True)
    problem = make_problem(graph, NODE, gather=False, tp=8)
    found = search_exact(problem)
    layouts = layouts_by_name(found)
    assert layouts["emb.embedding"][0] == layouts["head.linear"][1] == L("tp", None)


@pytest.mark.thorough
def test_parallel_branches_are_summed_once() -> None:
    graph = export_meta(models.ParallelBranches, torch.zeros(1, 4096, 4096, device="meta"))
    layouts = layouts_by_name(search_exact(make_problem(graph, NODE, tp=4)))
    assert all(layout.sums == ("tp",) for layout in layouts["add"])


def test_folding_does_not_change_the_price() -> None:
    graph = decoder_graph(4, 1)
    problem = make_problem(graph, NODE, gather=False, tp=8)
    folded, full = (search_exact(problem, fold) for fold in (True, False))
    assert folded.repetition is not None
    assert folded.repetition.times == 4
    assert folded.seconds == pytest.approx(full.seconds, rel=1e-12)


@pytest.mark.parametrize("gather", [True, False])
def test_layers_can_be_the_end_of_a_model(gather: bool) -> None:
    """Nothing is behind the last of the equal layers, so the part behind them is empty."""
    for layers in ([nn.Linear(64, 64) for _ in range(12)], [nn.ReLU() for _ in range(12)]):
        model = nn.Sequential(*layers).to("meta")
        graph = export_graph(model, (torch.zeros(256, 64, device="meta"),))
        problem = make_problem(graph, NODE, gather=gather, tp=2)
        folded, flat = search_exact(problem), search_exact(problem, fold=False)
        assert folded.repetition is not None
        assert folded.seconds == pytest.approx(flat.seconds, rel=1e-9)


@pytest.mark.thorough
def test_a_further_layer_costs_the_same() -> None:
    seconds = [
        search_exact(make_problem(decoder_graph(count, 1), NODE, gather=False, tp=8)).seconds
        for count in (4, 5, 6)
    ]
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0], rel=1e-6)


@pytest.mark.thorough
def test_two_axes_are_better_than_one_of_the_same_size() -> None:
    graph = decoder_graph(2, 1)
    one = search_exact(make_problem(graph, NODE, gather=False, tp=64))
    both = choose_plan(make_problem(graph, NODE, gather=False, x=8, y=8), RECURSIVE)
    assert both.seconds < 0.6 * one.seconds


@pytest.mark.thorough
def test_scaled_times_give_the_same_plan() -> None:
    graph = decoder_graph(2, 1)
    plans = []
    for scale in (1.0, 4.0):
        topology = make_topology(
            989e12 * scale, 4.8e12 * scale, 4e-6 / scale, 8e-6 / scale, 300e9 * scale
        )
        plans.append(search_exact(make_problem(graph, topology, gather=False, tp=8)))
    assert plans[0].plan.shardings == plans[1].plan.shardings
    assert plans[0].seconds == pytest.approx(plans[1].seconds * 4, rel=1e-9)


@pytest.mark.thorough
def test_faster_links_never_cost_time() -> None:
    graph = decoder_graph(2, 1)
    seconds = [
        search_exact(
            make_problem(graph, make_topology(6e14, 3e12, 4e-6, 1e-5, rate), gather=False, tp=8)
        ).seconds
        for rate in (1e9, 1e10, 1e11, 3e11)
    ]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("search", [RECURSIVE, thorough(EXACT), thorough(PROPAGATION)])
def test_every_search_is_at_most_a_template(search: str) -> None:
    problem = make_problem(decoder_graph(2, 8), NODE, gather=False, tp=8)
    found = choose_plan(problem, search)
    exact = search_exact(problem)
    assert found.seconds >= exact.seconds * (1 - 1e-9)
    for name, plan in list_templates(problem):
        assert found.seconds <= price_plan(problem.prices, plan).total * (1 + 1e-9), name


@pytest.mark.thorough
def test_a_price_on_bytes_splits_weights() -> None:
    """Rows are split over a slow link; a higher price per byte splits more weights."""
    graph = decoder_graph(3, 8)
    grid = Grid(("tp",), (8,))
    stored = []
    for price in (0.0, 2e-11, 1e-9):
        prices = PriceList(graph, grid, PCIE, byte_price=price)
        plan = search_exact(SearchProblem(graph, grid, prices, gather=False)).plan
        stored.append(
            sum(
                math.prod(prices.local_shape(layout, graph.shape_of(index)))
                for index, layout in plan.weights.items()
            )
        )
    assert stored == sorted(stored, reverse=True)
    assert stored[2] < stored[0] / 2


class ScaledPrelu(nn.Module):
    """A product of two inputs, and a PReLU with a weight per channel."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.act = nn.PReLU(channels)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the activations."""
        return self.act(x * y)


def test_product_and_prelu_are_split_by_rows() -> None:
    """3 channels cannot be split into 16; the weight of the channels stays whole."""
    graph = export_meta(ScaledPrelu, *[torch.zeros(16, 3, 128, 32, device="meta")] * 2)
    topology = make_topology(1e12, 1e9, 0.0, 1e-9, 1e15)
    problem = make_problem(graph, topology, d=16)
    layouts = layouts_by_name(search_exact(problem))
    rows = L("d", None, None, None)
    assert layouts["mul"] == (rows, rows)
    (prelu,) = (ins for name, ins in layouts.items() if "prelu" in name)
    assert prelu == (rows, L(None))


WHOLE = 1e12
"""Cost of a round in which a product is not halved."""


class HalvingPrices(PriceList):
    """
    The symbolic costs of MindSpore's double recursion: what halving a product along rows, columns
    or terms costs, in elements. Each axis of two halves once more, and all devices are used. Moves
    and weights cost nothing.
    """

    def __init__(self, graph: OperatorGraph, grid: Grid, rows_factor: float) -> None:
        super().__init__(graph, grid, NODE)
        self.rows_factor = rows_factor

    def operator_seconds(self, position: int, sharding: OperatorSharding) -> tuple[float, float]:
        """Return the sum of the costs of all halvings of a product; other operators are free."""
        graph = self.graph
        operator = graph.operators[position]
        if operator.kind != "linear":
            return 0.0, 0.0
        (rows, terms), (columns, _) = (graph.shape_of(index) for index in operator.inputs)
        total = 0.0
        has_columns = has_terms = False
        for axis in self.grid.names:
            costs = {"rows": columns * terms / 2 * self.rows_factor}
            if not has_terms:
                costs["columns"] = rows * terms / 2
            if not has_columns:
                costs["terms"] = rows * columns / 2
            split = sharding.splits.get(axis)
            if split is None:
                total += WHOLE
                continue
            names = {(0, None): "rows", (None, 0): "columns", (1, 1): "terms"}
            name = names.get(split.in_states, "terms of sums")
            total += costs.get(name, math.inf)
            has_columns |= name == "columns"
            has_terms |= name == "terms"
            rows //= 1 + (name == "rows")
            columns //= 1 + (name == "columns")
            terms //= 1 + (name == "terms")
        return total, 0.0

    def weight_seconds(self, index: int, layout: L, axes: tuple[str, ...]) -> float:
        """Return 0: the cost of rows has the sum of the gradient."""
        return 0.0

    def move_seconds(self, move: Any, itemsize: int, has_grad: bool) -> tuple[float, float]:
        """Return 0: the costs of a product have the moves behind it."""
        return 0.0, 0.0


@pytest.mark.parametrize(
    ("factor", "rounds"),
    [
        (0.25, ("rows", "terms", "rows")),  # 50,176, then 32,768, then 25,088 elements
        (0.1, ("rows", "rows", "terms")),
    ],
)
def test_double_recursion_halves_as_published(factor: float, rounds: tuple[str, ...]) -> None:
    """256 x 784 to 512 on 8 devices: rows in 4, terms in 2: ((4, 2), (1, 2)) of MindSpore."""
    graph = export_meta(
        lambda: nn.Linear(784, 512, bias=False), torch.zeros(256, 784, device="meta")
    )
    grid = Grid(("a", "b", "c"), (2, 2, 2))
    problem = SearchProblem(graph, grid, HalvingPrices(graph, grid, factor), gather=False)
    found = search_recursive(problem)
    (sharding,) = found.plan.shardings
    states = {"rows": (0, None), "terms": (1, 1)}
    assert [sharding.splits[axis].in_states for axis in grid.names] == [
        states[name] for name in rounds
    ]
    layouts = [sharding.input_layout(slot, 2) for slot in (0, 1)]
    assert [tuple(grid.group_size(axes) for axes in one.dims) for one in layouts] == [
        (4, 2),
        (1, 2),
    ]


def test_users_of_a_tensor_share_its_moves() -> None:
    """q, k and v read one gathered tensor: one gather, and one sum of their gradients."""
    problem = make_problem(decoder_graph(3, 1), NODE, gather=False, tp=8)
    found = search_exact(problem)
    graph = found.plan.graph
    by_name = {operator.name: operator for operator in graph.operators}
    for norm, users in (("norm1", 3), ("norm2", 2)):
        (index,) = by_name[f"layers.1.{norm}.rms_norm"].outputs
        assert sum(index in operator.inputs for operator in graph.operators) == users
        moves = [one for one in list_moves(found.plan) if one.tensor == index]
        assert [one.move.kind for one in moves] == [ALL_GATHER_SUM_GRAD]
    assert found.seconds == pytest.approx(price_plan(problem.prices, found.plan).total, rel=1e-9)
