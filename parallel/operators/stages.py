"""
A graph in pipeline stages: which stage computes which operator, and what travels from one to the
next.

Operators inside of a unit (a module that belongs to a stage) are computed by its stage. Those
between units follow their inputs, to the latest stage that one of them comes from. What depends on
nothing but the batch, weights and buffers (masks, positions, a transposed embedding) is computed by
every stage that needs it, and never travels.

The constraints, the plan and the layouts are those of the whole graph. What an operator of a later
stage needs travels through the stages between in the layout in which it was made, so that each rank
sends its part to the rank that has the same places along the tensor axes; terms of a sum are added
up before, or scattered where a part is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pdrun.errors import UsageError
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.graph import Graph, Operator, Ref
from pdrun.parallel.operators.plan import Plan
from pdrun.parallel.operators.redistribute import way

if TYPE_CHECKING:
    from pdrun.parallel.pipeline.split import Split

WHERE = "pdrun.Operators in stages"
ORDER = "Pipeline(stages={glob: stage}) in the order in which values flow"


@dataclass(frozen=True)
class Part:
    """
    What one stage computes of a plan; without a pipeline, everything.

    Attributes:
        stage: which.
        places: of its operators, in order.
        taken: tensors that the stage before sends, with the layouts in which they come.
        given: tensors that the next stage is sent.
        ends: whether the model's results are made here.
    """

    stage: int
    places: tuple[int, ...]
    taken: Mapping[int, L]
    given: Mapping[int, L]
    ends: bool = True

    def source(self, plan: Plan, index: int) -> L:
        """Return how a tensor lies where this stage has it from."""
        return self.taken[index] if index in self.taken else plan.source(index)


def locate(graph: Graph, cut: Split) -> None:
    """
    Note on a graph which stage computes each operator.

    Raises:
        UsageError: values would flow back to an earlier stage, dropouts would be counted in another
            order than in one
            process, or a stage has nothing to compute; names stage and operator.
    """
    graph.stages = cut.stages
    for index, tensor in enumerate(graph.tensors):
        unit = _unit(tensor.name, cut.units) if tensor.kind == "buffer" else None
        if unit is not None:
            graph.origins[index] = cut.units[unit]
    dropped = 0
    for place, operator in enumerate(graph.operators):
        stage = _stage(graph, operator, cut)
        if _draws(operator):
            stage = 0 if stage is None else stage
            if stage < dropped:
                what = f"{operator.name} of stage {stage} drops after a dropout of stage {dropped}"
                raise UsageError(
                    f"{what}: its mask would not be that of one process", where=WHERE, hint=ORDER
                )
            dropped = stage
        graph.operators[place] = replace(operator, stage=stage)
        if stage is not None:
            graph.origins.update(dict.fromkeys(operator.outputs, stage))
    for stage in range(cut.stages):
        if not any(operator.stage == stage for operator in graph.operators):
            names = ", ".join(cut.modules(stage))
            raise UsageError(
                f"stage {stage} computes nothing: forward calls none of {names}",
                where=WHERE,
                hint=ORDER,
            )


def _stage(graph: Graph, operator: Operator, cut: Split) -> int | None:
    unit = _unit(operator.module, cut.units)
    found = [(graph.origins[index], index) for index in operator.inputs if index in graph.origins]
    latest, index = max(found, default=(None, -1))
    if unit is None:
        return latest
    stage = cut.units[unit]
    if latest is not None and latest > stage:
        what = f"{operator.name} of stage {stage} takes {graph.tensors[index].name}, which stage {latest} computes"
        raise UsageError(what, where=operator.source or WHERE, hint=ORDER)
    return stage


def _unit(name: str, units: Mapping[str, int]) -> str | None:
    """Return the unit that a name is, or lies in."""
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name or None


def _draws(operator: Operator) -> bool:
    """Whether an operator draws a mask."""
    if operator.kind == "scaled_dot_product_attention":
        return bool(operator.arg(4, "dropout_p", 0.0))
    return (
        "dropout" in operator.kind and bool(operator.arg(1, "p")) and bool(operator.arg(2, "train"))
    )


# ---- what each stage computes, takes and gives ------------------------------


def parts(plan: Plan) -> tuple[Part, ...]:
    """Return what each stage computes; one part where there is no pipeline."""
    graph = plan.graph
    if not graph.stages:
        return (Part(0, tuple(range(len(graph.operators))), {}, {}),)
    makers = graph.makers()
    results = [value.index for value in graph.results if isinstance(value, Ref)]
    places: list[tuple[int, ...]] = []
    until: dict[int, int] = {}
    layouts: dict[int, L] = {}
    for stage in range(graph.stages):
        ends = stage == graph.stages - 1
        own = [place for place, operator in enumerate(graph.operators) if operator.stage == stage]
        places.append(_with_common(graph, makers, own, results if ends else ()))
        for index, wanted in _wanted(plan, places[-1], results if ends else ()):
            if graph.origins.get(index, stage) < stage:
                until[index] = stage
                if index not in layouts:
                    layouts[index] = _travelling(plan, index, wanted)
    found: list[Part] = []
    taken: dict[int, L] = {}
    for stage, some in enumerate(places):
        crossing = sorted(
            index for index, end in until.items() if graph.origins[index] <= stage < end
        )
        given = {index: layouts[index] for index in crossing}
        found.append(Part(stage, some, taken, given, stage == graph.stages - 1))
        taken = given
    return tuple(found)


def _with_common(
    graph: Graph, makers: Mapping[int, int], own: Iterable[int], results: Iterable[int]
) -> tuple[int, ...]:
    """Return some operators with those of every stage that they, or results, need."""
    found = set(own)
    todo = [index for place in found for index in graph.operators[place].inputs] + list(results)
    while todo:
        place = makers.get(todo.pop())
        if place is not None and place not in found and graph.operators[place].stage is None:
            found.add(place)
            todo += graph.operators[place].inputs
    return tuple(sorted(found))


def _wanted(plan: Plan, places: Iterable[int], results: Iterable[int]) -> Iterator[tuple[int, L]]:
    """Yield the tensors that operators and results take, with the layouts that they want."""
    for place in places:
        for at, index in enumerate(plan.graph.operators[place].inputs):
            yield index, plan.choices[place].layout_in(at, len(plan.graph.shape(index)))
    for index in results:
        yield index, plan.result(index)


def _travelling(plan: Plan, index: int, wanted: L) -> L:
    """
    Return the layout in which a tensor travels to one that wants it in a layout: as it lies, but
    for sums.
    """
    layout = plan.source(index)
    for move in way(layout, wanted):
        if not layout.sums:
            break
        layout = move.after
    return layout


# ---- who holds which weight -------------------------------------------------


def holders(plan: Plan, cut: Split, names: Mapping[str, list[str]]) -> Split:
    """
    Return a split in which every stage holds the weights that its operators use.

    A weight around the units that nobody gave to a stage is held by those that use it, if there are
    any.

    Args:
        names: all names of a weight, by its first.
    """
    loose: dict[str, Any] = dict(cut.loose)
    every = tuple(range(cut.stages))
    used: dict[str, set[int]] = {}
    for part in parts(plan):
        for place in part.places:
            for index in plan.graph.operators[place].inputs:
                if plan.graph.tensors[index].kind == "param":
                    used.setdefault(plan.graph.tensors[index].name, set()).add(part.stage)
    for first, stages in used.items():
        own = {stage for name in names[first] for stage in cut.holders(name)}
        if all(loose.get(name) == every for name in names[first]):
            loose |= dict.fromkeys(names[first], tuple(sorted(stages)))
        elif stages - own:
            loose[first] = tuple(sorted({*cut.holders(first), *(stages - own)}))
    return replace(cut, loose=loose)
