"""
The same layouts for other shapes: what a first plan chose, as wishes for the graph of another call.
"""

from __future__ import annotations

from pdrun.parallel.operators.graph.graph import Graph
from pdrun.parallel.operators.plan import Choice, Plan
from pdrun.parallel.operators.rules.rule import Split, splits_of, view_of
from pdrun.parallel.operators.strategy import Wishes


def wishes_like(first: Plan, graph: Graph) -> Wishes:
    """
    Return a first plan's layouts for another graph of the same model, by the names of operators and
    weights.

    Operators that are new, or whose way isn't possible with these sizes, are left open.
    """
    names = {operator.name: place for place, operator in enumerate(first.graph.operators)}
    weights = {first.graph.tensors[index].name: layout for index, layout in first.weights.items()}
    wishes = Wishes()
    for index, tensor in enumerate(graph.tensors):
        if tensor.kind == "param" and tensor.name in weights:
            wishes.weights[index] = weights[tensor.name]
    for place, operator in enumerate(graph.operators):
        before = names.get(operator.name)
        if before is None:
            continue
        choice = first.choices[before]
        old = first.graph.operators[before]
        splits = splits_of(view_of(graph, operator))
        if splits is None:  # the user had it replicated
            wishes.whole.add(place)
            continue
        found = {axis: _like(splits, split) for axis, split in choice.splits.items()}
        if all(split is not None for split in found.values()) and _divides(first, found):
            kept = {axis: split for axis, split in found.items() if split is not None}
            wishes.choices[place] = Choice(kept, choice.order, first.grid.names)
        if old.outputs[0] in first.placed:
            wishes.outs[place] = first.placed[old.outputs[0]]
    return wishes


def _like(splits: list[Split], wanted: Split) -> Split | None:
    return next(
        (split for split in splits if (split.ins, split.outs) == (wanted.ins, wanted.outs)), None
    )


def _divides(first: Plan, found: dict[str, Split | None]) -> bool:
    for split in found.values():
        parts = first.grid.group_size(tuple(axis for axis, other in found.items() if other == split))
        if split is not None and split.divides and split.divides % parts:
            return False
    return True
