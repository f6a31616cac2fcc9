"""
Tensor degrees as two axes: 8 devices as 2 x 4.

One axis splits one dim of a tensor. Two of them can split rows over the outer and heads over the
inner one, where one dim has too few parts or the links differ.
"""

from __future__ import annotations

from dataclasses import replace

from pdrun.parallel.auto.degrees.pass_costs import PartCost, PassCost


def list_factors(degree: int) -> list[tuple[int, int]]:
    """Return the ways to write a degree as two factors above 1, outer and inner."""
    return [(degree // inner, inner) for inner in range(2, degree) if degree % inner == 0]


def factors_by_nodes(degree: int, node: int) -> tuple[int, int] | None:
    """Return the factors of a degree that spans nodes: over nodes, and inside; None: none is."""
    if degree % node or degree == node or node == 1:
        return None
    return degree // node, node


def ideal_cost(cost: PassCost, full: PassCost, degree: int) -> PassCost:
    """
    Return what no split of the tensor axes can undercut: nothing is sent, and computation and
    weights are divided evenly.

    Args:
        cost: of a pass with one tensor axis.
        full: of a pass without tensor axes.
        degree: of the tensor axes.
    """

    def best(part: PartCost, whole: PartCost) -> PartCost:
        return replace(
            part,
            forward=min(part.forward, whole.forward / degree),
            backward=min(part.backward, whole.backward / degree),
            moves=(0.0, 0.0),
            sums=0.0,
            elements=min(part.elements, whole.elements // degree),
        )

    parts = {name: best(part, full.parts[name]) for name, part in cost.parts.items()}
    return replace(cost, parts=parts)
