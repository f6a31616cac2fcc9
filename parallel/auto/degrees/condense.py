"""
Graphs for the outer search: three equal layers stand for all, and shapes follow the rows.

Of a run of equal layers the first, the second and the last are kept. The second one stands for
every layer. Two exports with 2 and 3 rows give the graph of any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.auto.builtin_topologies import BUILTIN_TOPOLOGIES
from pdrun.parallel.auto.degrees.memory import SavedTensor, list_saved_tensors
from pdrun.parallel.auto.prices import PriceList
from pdrun.parallel.auto.search.problem import SearchProblem
from pdrun.parallel.auto.search.repeat import MIN_REPETITIONS, Repetition, find_repetition
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.operators.graph.graph import (
    GraphTensor,
    Operator,
    OperatorGraph,
    TensorRef,
    replace_refs,
)

ROWS_OF_EXPORTS = (2, 3)
HEAD, LAYER, TAIL, COPY = "head", "layer", "tail", "copy"
"""Parts of a graph. ``COPY`` is a layer that another one stands for."""


@dataclass(frozen=True)
class CondensedGraph:
    """
    A graph with at most three of its equal layers.

    Attributes:
        parts: the part of each operator.
        layers: number of equal layers of the model; 0: it has none.
    """

    graph: OperatorGraph
    parts: tuple[str, ...]
    layers: int


def condense_graph(graph: OperatorGraph) -> CondensedGraph:
    """Return a graph without the layers between the second and the last one."""
    grid = Grid(("tp",), (1,))
    problem = SearchProblem(graph, grid, PriceList(graph, grid, BUILTIN_TOPOLOGIES["cpu"]))
    repetition = find_repetition(problem)
    if repetition is None or repetition.crossing_operators(problem) is None:
        return CondensedGraph(graph, (HEAD,) * len(graph.operators), 0)
    return CondensedGraph(
        _drop_layers(graph, repetition), _name_parts(graph, repetition), repetition.times
    )


def _name_parts(graph: OperatorGraph, run: Repetition) -> tuple[str, ...]:
    count = len(graph.operators)
    layers = [COPY] * run.period + [LAYER] * run.period
    layers += [COPY] * run.period * (min(run.times, MIN_REPETITIONS) - 2)
    return (*[HEAD] * run.begin, *layers, *[TAIL] * (count - run.end))


def _drop_layers(graph: OperatorGraph, run: Repetition) -> OperatorGraph:
    """Return the graph without the layers in the middle; the tail reads the last one kept."""
    dropped = (run.times - MIN_REPETITIONS) * run.period
    if dropped <= 0:
        return graph
    kept_end = run.end - dropped
    producers = graph.tensor_producers()

    def moved(index: int) -> int:
        maker = producers.get(index)
        if maker is None or not kept_end <= maker < run.end:
            return index
        slot = graph.operators[maker].outputs.index(index)
        return graph.operators[maker - dropped].outputs[slot]

    def take(reference: TensorRef) -> TensorRef:
        return TensorRef(moved(reference.index))

    tail = [
        replace(
            operator,
            args=replace_refs(operator.args, take),
            kwargs=replace_refs(operator.kwargs, take),
            inputs=tuple(moved(index) for index in operator.inputs),
        )
        for operator in graph.operators[run.end :]
    ]
    return replace(
        graph,
        operators=[*graph.operators[:kept_end], *tail],
        results=[replace_refs(value, take) for value in graph.results],
    )


class RowScaler:
    """
    Returns the condensed graph for any number of rows.

    Args:
        export: returns the graph of a number of rows.
        dtype: type in which the model computes, if it is not that of its weights.
    """

    def __init__(
        self, export: Callable[[int], OperatorGraph], dtype: torch.dtype | None = None
    ) -> None:
        few, more = (condense_graph(export(rows)) for rows in ROWS_OF_EXPORTS)
        if few.parts != more.parts:
            raise _rows_error()
        self._few, self._more = few, more
        self._dtype = dtype
        self.layers = few.layers
        self.parts = few.parts
        self._saved: list[list[SavedTensor]] = []

    @property
    def times(self) -> list[int]:
        """How often the model has each operator of the condensed graph."""
        known = {LAYER: self.layers, COPY: 0}
        return [known.get(part, 1) for part in self.parts]

    def graph_of(self, rows: int) -> OperatorGraph:
        """
        Return the graph of a number of rows.

        Raises:
            UsageError: the graph depends on the number of rows in another way.
        """
        return self._scale_graph(rows, self._dtype)

    def _scale_graph(self, rows: int, dtype: torch.dtype | None) -> OperatorGraph:
        few, more = self._few.graph, self._more.graph
        tensors = [
            _scale_tensor(one, other, rows, dtype)
            for one, other in zip(few.tensors, more.tensors, strict=True)
        ]
        operators = [
            _scale_operator(one, other, rows)
            for one, other in zip(few.operators, more.operators, strict=True)
        ]
        return replace(few, tensors=tensors, operators=operators)

    def saved_of(self, rows: int) -> list[SavedTensor]:
        """Return what autograd saves in a pass over a number of rows: linear in the rows."""
        low, high = ROWS_OF_EXPORTS
        if not self._saved:
            self._saved = [self._list_saved(count) for count in (low, high)]
        few, more = self._saved
        if len(few) != len(more):
            return self._list_saved(rows)
        return [
            replace(one, nbytes=one.nbytes + (other.nbytes - one.nbytes) * (rows - low))
            for one, other in zip(few, more, strict=True)
        ]

    def _list_saved(self, rows: int) -> list[SavedTensor]:
        """
        Return what autograd saves, with the bytes of the type in which the model computes.

        The pass is made with the types of the export: casts are in its operators.
        """
        graph = self._scale_graph(rows, None)
        saved = list_saved_tensors(graph)
        if self._dtype is None:
            return saved
        share = self._dtype.itemsize / torch.float32.itemsize
        return [
            replace(one, nbytes=int(one.nbytes * share))
            if one.root >= 0 and graph.tensors[one.root].dtype == torch.float32
            else one
            for one in saved
        ]


def _scale_tensor(
    few: GraphTensor, more: GraphTensor, rows: int, dtype: torch.dtype | None
) -> GraphTensor:
    if dtype is None or few.dtype != torch.float32:
        dtype = few.dtype
    return replace(few, shape=_scale_value(few.shape, more.shape, rows), dtype=dtype)


def _scale_operator(few: Operator, more: Operator, rows: int) -> Operator:
    if few.kind != more.kind:
        raise _rows_error()
    return replace(
        few,
        args=_scale_value(few.args, more.args, rows),
        kwargs=_scale_value(few.kwargs, more.kwargs, rows),
    )


def _scale_value(few: Any, more: Any, rows: int) -> Any:
    """Return a value for a number of rows: integers that differ are proportional to the rows."""
    if isinstance(few, (list, tuple)):
        if len(few) != len(more):
            raise _rows_error()
        return type(few)(_scale_value(a, b, rows) for a, b in zip(few, more, strict=True))
    if isinstance(few, dict):
        return {key: _scale_value(value, more[key], rows) for key, value in few.items()}
    if isinstance(few, int) and not isinstance(few, bool) and few != more:
        low, high = ROWS_OF_EXPORTS
        if few * high != more * low:
            raise _rows_error()
        return few // low * rows
    return few


def _rows_error() -> UsageError:
    return UsageError(
        "the graph of the model depends on the number of rows",
        where="pdrun.plan_of",
        hint='give mesh=pdrun.mesh(...) and strategy="auto": operators can be planned',
    )
