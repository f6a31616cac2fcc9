"""
The pass that puts collectives beside products, on graphs made by hand; and what compiled code knows
of an axis.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters

from pdrun.parallel.comm import autograd as autograd
from pdrun.parallel.comm import custom_ops
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.watchdog import CollectiveWatchdog
from pdrun.parallel.compiler.overlap_pass import OVERLAP_PASS
from pdrun.parallel.layouts.grid import Grid

pytestmark = pytest.mark.torch
ATEN, OURS = torch.ops.aten, torch.ops.pdrun_axis
TWO = 2 << 16
"""The number of an axis of two ranks, at index 0."""


class Draft:
    """A graph of square matrices that is being written."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(8, 8)
        return node

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(8, 8)
        return node

    def ordered(self, *results: fx.Node) -> list[str]:
        """End the graph, and return its operators after the pass."""
        self.graph.output(results)
        OVERLAP_PASS(self.graph)
        self.graph.lint()
        return [
            node.target.__name__.split(".")[0]
            for node in self.graph.nodes
            if node.op == "call_function"
        ]


def test_products_for_weights_run_beside_a_collective() -> None:
    draft = Draft()
    dy, w, x = map(draft.input, ("dy", "w", "x"))
    early = draft(ATEN.mm.default, dy, x)
    dx = draft(ATEN.mm.default, dy, w)
    late = draft(ATEN.mm.default, x, dy)
    part = draft(OURS.reduce_scatter.default, dx, TWO, 0)
    back = draft(ATEN.mul.Tensor, part, 2.0)
    assert draft.ordered(early, late, back) == [
        "mm",
        "start_reduce_scatter",
        "mm",
        "mm",
        "wait",
        "mul",
    ]
    (wait,) = [node for node in draft.graph.nodes if node.target is custom_ops.WAIT_OP]
    started, after, axis = wait.args
    assert started.target is OURS.start_reduce_scatter.default and axis == TWO
    assert after == [dx, early, late], "what is sent stays until then, and the products come before"


def test_a_product_that_needs_what_is_on_its_way_waits() -> None:
    draft = Draft()
    dy, x = map(draft.input, ("dy", "x"))
    whole = draft(OURS.all_gather.default, dy, TWO, 0, None)
    weight = draft(ATEN.mm.default, whole, x)
    back = draft(ATEN.mul.Tensor, whole, 2.0)
    assert draft.ordered(weight, back) == ["start_all_gather", "wait", "mul", "mm"]


def test_no_product_passes_a_write() -> None:
    """A buffer that a product reads may be what is written."""
    draft = Draft()
    x, held = map(draft.input, ("x", "held"))
    total = draft(OURS.all_reduce.default, x, TWO, "sum")
    result = draft(ATEN.mm.default, total, held)
    new = draft(ATEN.mul.Tensor, held, 0.5)
    draft(ATEN.copy_.default, held, new)
    found = draft.ordered(result)
    assert found.index("mm") < found.index("copy_")


def test_a_graph_without_collectives_stays() -> None:
    draft = Draft()
    x, y = map(draft.input, "xy")
    first = draft(ATEN.mm.default, x, y)
    second = draft(ATEN.mul.Tensor, x, 2.0)
    assert draft.ordered(first, second) == ["mm", "mul"]


def axis(size: int, index: int) -> AxisGroup:
    """Return a place on an axis where nothing moves."""
    axes = MeshGroups(
        Grid(("tp",), (size,)), index, torch.device("cpu"), CollectiveWatchdog(10.0, index, size)
    )
    axes.state.is_dry_run = True
    ranks = tuple(range(size))
    return AxisGroup(axes.state, ("tp",), ranks, index, None, axes.device, axes.grid, index)


def test_numbers_tell_sizes_and_places_apart_and_are_taken_up_again() -> None:
    """
    torch keeps compiled code on disk under the graph's text: shapes of results must follow from
    that.
    """
    gc.collect()  # what other tests have left gives numbers back
    held = [axis(2, 0), axis(2, 1), axis(4, 0), axis(2, 0)]
    given = [one.axis_id for one in held]
    assert len(set(given)) == 4
    del held[0]
    gc.collect()
    assert axis(2, 0).axis_id == given[0]


CALLS = {
    "gather": lambda x, at: autograd.all_gather(x, at, 1, x.shape[1] * 2),
    "collect": lambda x, at: autograd.all_gather_sum_grad(x, at, 1),
    "scatter": lambda x, at: autograd.reduce_scatter(x, at, 1),
    "swap": lambda x, at: autograd.all_to_all(x, at, 2, 1, x.shape[1] * 2),
    "add_up": lambda x, at: autograd.all_reduce(x, at),
}


@pytest.mark.parametrize("name", CALLS)
def test_sequences_of_many_lengths_are_compiled_twice_at_most(name: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    at = axis(2, 0)
    compiled = torch.compile(lambda x: CALLS[name](x, at) * 2, backend="aot_eager")
    for length in range(4, 26, 2):
        x = torch.ones(3, length, 4, requires_grad=True)
        assert compiled(x).shape == CALLS[name](x, at).shape
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]
