"""The predicted seconds of a plan, as text for `explain`."""

from __future__ import annotations

import math

from pdrun.errors import ConfigError
from pdrun.parallel.auto.auto import detect_topology
from pdrun.parallel.auto.prices import PriceList, price_plan
from pdrun.parallel.auto.topology import Topology
from pdrun.parallel.operators.plan import OperatorPlan


def describe_prediction(plan: OperatorPlan, topology: Topology | None = None) -> str:
    """
    Return the predicted seconds of one pass over the operators of a plan, of any origin.

    Args:
        topology: default: that of this process's device.
    """
    try:
        topology = topology or detect_topology()
    except ConfigError as error:
        return f"no prediction: {error}"
    price = price_plan(PriceList(plan.graph, plan.grid, topology), plan)
    parts = [
        f"computation {price.compute_seconds * 1e3:,.2f}",
        f"collectives of tensor axes {price.move_seconds * 1e3:,.2f}",
        f"gradient sums per step {math.fsum(price.weights.values()) * 1e3:,.2f}",
    ]
    guess = ", a guess" if topology.is_guess else ""
    seconds = price.compute_seconds + price.move_seconds
    return (
        f"predicted on {topology.name}{guess}: {seconds * 1e3:,.2f} ms per pass over the sample"
        f" ({', '.join(parts)})"
    )
