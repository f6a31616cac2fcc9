"""
Measure how long a plan takes: a decoder like Llama 3 8B on 64 devices, without any of them.

    python benchmarks/auto_search.py                       # degrees, savers and operators
    python benchmarks/auto_search.py --axes tp=8           # operators on one axis
    python benchmarks/auto_search.py --axes x=2,y=4 --layers 4
    python benchmarks/auto_search.py --layers 8 --distinct # no two layers are equal
"""

from __future__ import annotations

import argparse
import time

import torch
from planning import Decoder

from pdrun.parallel.auto.choose import SEARCHES, choose_plan
from pdrun.parallel.auto.degrees.planner import plan_of
from pdrun.parallel.auto.prices import PriceList
from pdrun.parallel.auto.search.problem import SearchProblem
from pdrun.parallel.auto.topology_file import load_topology
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.operators import rules as rules  # registers them
from pdrun.parallel.operators.graph.export import export_graph


def main() -> None:
    """Plan, and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--axes", default="")
    parser.add_argument("--search", choices=SEARCHES, default=SEARCHES[0])
    parser.add_argument("--distinct", action="store_true", help="layers of different width")
    parser.add_argument("--no-fold", action="store_true")
    chosen = parser.parse_args()
    with torch.device("meta"):
        model = Decoder(chosen.layers)
        if chosen.distinct:
            for number, layer in enumerate(model.layers):
                wide = 14336 + 512 * number  # divisible by 64, as the equal ones
                layer.gate, layer.up = (torch.nn.Linear(4096, wide, bias=False) for _ in range(2))
                layer.down = torch.nn.Linear(wide, 4096, bias=False)
    start, busy = time.monotonic(), time.process_time()
    if chosen.axes:
        tokens = torch.zeros(1, 4096, dtype=torch.long, device="meta")
        graph = export_graph(model, (tokens,))
        degrees = dict(one.split("=") for one in chosen.axes.split(","))
        grid = Grid(tuple(degrees), tuple(map(int, degrees.values())))
        prices = PriceList(graph, grid, load_topology("h100x8"))
        problem = SearchProblem(graph, grid, prices, gather=False)
        found = choose_plan(problem, chosen.search, not chosen.no_fold)
        print(f"{found.seconds * 1e3:.3f} ms per pass, exact: {found.is_exact}")
    else:
        report = plan_of(
            model,
            (torch.zeros(256, 4096, dtype=torch.long),),
            devices=chosen.devices,
            topology="h100x8",
            memory="72GiB",
            precision="bf16",
            gather=False,
            compiled=True,
            search=chosen.search,
        )
        print(report.describe(3))
    spent = time.process_time() - busy
    print(f"{time.monotonic() - start:.1f} s, {spent:.1f} s of CPU, torch {torch.__version__}")


if __name__ == "__main__":
    main()
