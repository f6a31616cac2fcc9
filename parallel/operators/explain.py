"""A plan as text: per operator its layout, the collectives around it, and their bytes."""

from __future__ import annotations

from pdrun.parallel.operators.plan import Plan


def explain(plan: Plan) -> str:
    """Return a plan as text."""
    return "\n".join(operator.name for operator in plan.graph.operators)
