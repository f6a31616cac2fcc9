"""
Operators that no rule splits: every rank computes them in full. A search names them, and refuses
those that hold a large share of the FLOPs.

A rule belongs to a kind of operators, so a share is that of all operators of a kind: an operator
that each of 32 layers has counts 32 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdrun.errors import UsageError
from pdrun.parallel.auto.flops import count_flops
from pdrun.parallel.auto.search.problem import SearchProblem
from pdrun.parallel.operators.graph.graph import Operator

MAX_FLOPS_SHARE = 0.1
"""Share of the FLOPs above which operators of a kind without a rule are an error."""


@dataclass(frozen=True)
class MissingRule:
    """
    A kind of operators that no rule splits.

    Attributes:
        first: the first operator of the kind.
        count: operators of the kind in the model.
        share: of the FLOPs of a forward pass.
        is_refused: whether the share is too large.
    """

    first: Operator
    count: int
    share: float
    is_refused: bool

    def describe(self) -> str:
        """Return the kind, where it is and its share, as text."""
        others = f" and {self.count - 1} more" if self.count > 1 else ""
        return f"{self.first.kind} ({self.first.name}{others}, {self.share:.1%} of the FLOPs)"

    def describe_fault(self) -> str:
        """Return why the share is too large, as text."""
        return f"no rule splits {self.describe()}; at most {MAX_FLOPS_SHARE:.0%} can stay whole"


def find_missing_rules(
    problem: SearchProblem, times: Sequence[int] | None = None
) -> list[MissingRule]:
    """
    Return the kinds of operators of a graph without a rule, in order of appearance.

    Constants (masks and positions) are left out: with a rule they would be computed in full too.

    Args:
        times: how often the model has each operator, if the graph has only some of its layers.
    """
    graph = problem.graph
    places = [
        place
        for place in problem.candidates.without_rule
        if place not in problem.candidates.constants
    ]
    if not places or problem.grid.size == 1:
        return []
    counts = times or [1] * len(graph.operators)
    flops = [
        count and count * count_flops(graph, operator)
        for count, operator in zip(counts, graph.operators, strict=True)
    ]
    total = sum(flops)
    kinds: dict[str, list[int]] = {}
    for place in places:
        kinds.setdefault(graph.operators[place].kind, []).append(place)
    found = []
    for members in kinds.values():
        held = sum(flops[place] for place in members)
        found.append(
            MissingRule(
                graph.operators[members[0]],
                sum(counts[place] for place in members),
                held / total if total else 0.0,
                held > MAX_FLOPS_SHARE * total,
            )
        )
    return found


def check_missing_rules(missing: Sequence[MissingRule], where: str) -> None:
    """
    Refuse operators without a rule that have a large share of the FLOPs.

    Args:
        where: the place of the error if the line of the model is unknown.

    Raises:
        UsageError: there is one; names its line in the model, and what can be done.
    """
    for one in missing:
        if one.is_refused:
            pattern = one.first.name if one.count == 1 else f"*{one.first.kind}*"
            hint = (
                f'Auto({{"{pattern}": pdrun.replicate()}}) accepts that every rank computes it in'
                " full; a mesh without tensor axes (tp=1) computes nothing twice"
            )
            raise UsageError(one.describe_fault(), where=one.first.source or where, hint=hint)


def describe_missing_rules(missing: Sequence[MissingRule]) -> str:
    """Return a line that names operators without a rule; empty if there are none."""
    if not missing:
        return ""
    names = ", ".join(one.describe() for one in missing)
    return f"computed in full on every rank, because no rule splits them: {names}"
