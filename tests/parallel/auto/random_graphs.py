"""Random graphs and topologies for the search, and the price of every plan of a small graph."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.parallel.auto.prices import PriceList, price_plan
from pdrun.parallel.auto.search.problem import SearchProblem
from pdrun.parallel.auto.topology import ComputeRate, DeviceRates, LinkLevel, Topology
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.operators import rules as rules  # registers them
from pdrun.parallel.operators.graph.export import export_graph
from pdrun.parallel.operators.plan import OperatorPlan

WIDTHS = (8, 64, 512)
MAX_PLANS = 3000


class RandomNet(nn.Module):
    """Some operators, each on a random earlier result; a linear may share an earlier weight."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        self.layers = nn.ModuleList()
        self.program: list[tuple[str, int, int]] = []
        self.widths = [choose.choice(WIDTHS)]
        for _ in range(count):
            kind = choose.choice(["linear", "linear", "relu", "add", "mul", "norm"])
            source = choose.randrange(len(self.widths))
            width = self.widths[source]
            other = 0
            if kind == "linear":
                known = [
                    place
                    for place, layer in enumerate(self.layers)
                    if isinstance(layer, nn.Linear) and layer.in_features == width
                ]
                if known and choose.random() < 0.3:
                    other = choose.choice(known)
                else:
                    layer = nn.Linear(width, choose.choice(WIDTHS), bias=choose.random() < 0.3)
                    self.layers.append(layer)
                    other = len(self.layers) - 1
                width = self.layers[other].out_features  # type: ignore[assignment]
            elif kind == "norm":
                self.layers.append(nn.LayerNorm(width))
                other = len(self.layers) - 1
            elif kind in ("add", "mul"):
                same = [place for place, known in enumerate(self.widths) if known == width]
                other = choose.choice(same)
            self.program.append((kind, source, other))
            self.widths.append(width)

    def forward(self, x: Tensor) -> Tensor:
        """Run the program."""
        values = [x]
        for kind, source, other in self.program:
            if kind in ("linear", "norm"):
                values.append(self.layers[other](values[source]))
            elif kind == "relu":
                values.append(F.relu(values[source]))
            elif kind == "add":
                values.append(values[source] + values[other])
            else:
                values.append(values[source] * values[other])
        return values[-1]


def make_topology(
    flops: float,
    memory: float = 1e30,
    launch: float = 0.0,
    latency: float = 1e-9,
    bandwidth: float = 1e9,
    devices: int | None = None,
    outer: tuple[float, float] = (4e-5, 4e10),
) -> Topology:
    """Return a topology with constant rates."""
    kinds = {kind: ComputeRate(flops, ((1.0, 1.0),)) for kind in ("fp32", "bf16")}
    levels = [LinkLevel("node", latency, bandwidth, devices)]
    if devices is not None:
        levels.append(LinkLevel("network", *outer))
    return Topology("test", DeviceRates(2**36, 1.0, memory, launch, kinds), tuple(levels))


def random_problem(
    seed: int, grid: Grid | None = None, most: float = MAX_PLANS
) -> SearchProblem | None:
    """Return the problem of a random graph, on random axes or given; None with too many plans."""
    choose = random.Random(seed)
    with torch.device("meta"):
        model = RandomNet(seed, choose.randrange(2, 6))
        rows, length = choose.choice([4, 32, 256]), choose.choice([8, 32])
        x = torch.zeros(rows, length, model.widths[0])
    graph = export_graph(model, (x,))
    drawn = Grid(("tp",), (choose.choice([2, 3, 4]),))
    if choose.random() < 0.35:
        drawn = Grid(("x", "y"), (2, 2))
    grid = grid or drawn
    topology = make_topology(
        10 ** choose.uniform(12, 15),
        10 ** choose.uniform(11.5, 12.7),
        10 ** choose.uniform(-7, -5),
        10 ** choose.uniform(-6, -5),
        10 ** choose.uniform(9.5, 11.8),
        choose.choice([2, 8]),
        (10 ** choose.uniform(-5, -4.3), 10 ** choose.uniform(9, 10.8)),
    )
    prices = PriceList(graph, grid, topology)
    problem = SearchProblem(graph, grid, prices, gather=choose.random() < 0.5)
    sizes = [len(problem.candidates.of(place)) for place in range(len(graph.operators))]
    stored = [len(layouts_of(problem, index)) for index in problem.chained_weights]
    if math.prod(sizes) * math.prod(stored) > most:
        return None
    return problem


def layouts_of(problem: SearchProblem, index: int) -> list[object]:
    """Return the layouts in which a weight with several uses can be stored."""
    return list(dict.fromkeys(layout for layout, _ in problem.stored_sources(index)))


def all_plans(problem: SearchProblem) -> Iterator[OperatorPlan]:
    """Yield every plan of a problem."""
    shared = sorted(problem.chained_weights)
    sizes = [
        range(len(problem.candidates.of(place))) for place in range(len(problem.graph.operators))
    ]
    for stored in itertools.product(*(layouts_of(problem, index) for index in shared)):
        for choices in itertools.product(*sizes):
            yield problem.make_plan(choices, dict(zip(shared, stored, strict=True)))


def cheapest_price(problem: SearchProblem) -> tuple[float, int]:
    """Return the lowest price of all possible plans, and the number of plans."""
    best, count = math.inf, 0
    for plan in all_plans(problem):
        try:
            best = min(best, price_plan(problem.prices, plan).total)
        except ValueError:  # a partial sum that nothing makes
            continue
        count += 1
    return best, count
